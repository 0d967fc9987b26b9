//! Numeric operations over plain slices, the same bits from every implementation.
//!
//! Each operation exists as plain loops ([`Isa::Reference`], which document the contract) and as one kernel
//! written against sixteen abstract lanes that is compiled for portable code, AVX2 and AVX-512. Lanes are
//! always independent outputs and every sum has one fixed order, so neither lane width, nor thread count, nor
//! batch size can change a bit. A library GEMM was not used because it picks its order by shape.
//!
//! This crate knows no model, no file and no network: callers hand in slices and shapes. Shapes are the
//! caller's promise, so a wrong one is a panic that names it (`# Panics` in each function); bytes that come
//! from files are checked and answered with typed errors ([`PackError`], [`StoredError`]).
#![allow(
    unsafe_code,
    reason = "SIMD intrinsics and disjoint writes from several threads; each block says why"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "register tiles index several arrays by the same token or query"
)]

#[cfg(target_endian = "big")]
compile_error!("weights and KV are used as the little-endian bytes that files and peers hold");

mod act;
mod aligned;
mod attention;
mod element;
mod exec;
mod expf;
mod fork;
mod isa;
mod kv;
mod matmul;
mod merge;
mod norm;
mod pack;
mod panel;
mod quant;
mod rope;
mod simd;
mod stored;
#[cfg(test)]
mod testing;

pub use act::{GluKind, add_assign, glu, silu_mul};
pub use aligned::check_memory;
pub use attention::{AttnInput, AttnSeq, attention, record_len};
pub use exec::{Exec, ExecError};
pub use expf::{exp, exp2};
pub use isa::Isa;
pub use kv::{KvArena, KvGeometry, KvSlot, kv_store};
pub use matmul::matmul;
pub use merge::{
    Merge, correct_partials, finish_corrected, merge_partials, partial_stats, tree_add, tree_sum,
};
pub use norm::{HeadNorm, rms_norm, rms_norm_heads};
pub use pack::{MatrixView, PackError, PackedMatrix};
pub use rope::{Rope, RopeError, RopeStyle, RopeTable, rope_apply};
pub use stored::{StoredError, StoredType, dequantize_row};
