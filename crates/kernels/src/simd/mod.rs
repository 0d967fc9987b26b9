//! Sixteen lanes, written once and compiled for each instruction set.
//!
//! A kernel is a struct with a generic `run`; [`Vector::run`] calls it inside a function that has the
//! instruction set enabled, where everything inlines. The lanes are sixteen on every machine (one AVX-512
//! register, two AVX2 registers, an array), so that a kernel has one text and one order. Runtime detection
//! happens once: a value of [`Avx2`] or [`Avx512`] can only be had from a processor that has the features.
//!
//! `std::simd` is not stable, and letting the compiler vectorise plain loops reaches neither the byte dot
//! product nor a fixed register tile.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

use crate::isa::Isa;

/// Lanes of a vector; also the outputs of a weight panel.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 lanes, sixteen i32 lanes and sixteen lanes of four bytes. Every operation is the IEEE one,
/// rounded once, the same bits on every implementation (NaN payloads excepted).
pub(crate) trait Simd: Copy + Send + Sync {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen i32.
    type I: Copy;
    /// Sixteen times four unsigned bytes.
    type B: Copy;
    /// Tokens a matmul tile has at most: what the registers hold (12, 4 or 2).
    const MAX_TOKENS: usize;
    /// Queries an attention group has at most (6 or 2).
    const MAX_QUERIES: usize;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; LANES]);
    /// Exact conversion of half-precision bits.
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    /// Exact conversion of bfloat16 bits.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Absolute value.
    fn abs(self, a: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `2^n` for integral `n` in -126..=128 (where 128 gives infinity).
    fn pow2(self, n: Self::F) -> Self::F;
    /// `if a < b { x } else { y }`.
    fn select_lt(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;

    fn to_f32(self, a: Self::I) -> Self::F;
    fn splat_i32(self, x: i32) -> Self::I;
    /// The sum of the lanes by halves: `i` with `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
    fn sum_lanes(self, a: Self::F) -> f32;
    /// Asks for the line of memory at `at`, which is read soon. Into the second-level cache: twice as fast as
    /// into the first, which has fewer misses in flight.
    fn prefetch<T>(self, at: &T);
    /// The largest lane; no lane may be NaN.
    fn max_lane(self, a: Self::F) -> f32;
    /// Stores the nearest integers (ties to even) of numbers within -127..=127 as bytes. Returns their sum.
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) -> i32;

    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::B;
    /// The low four bits of each byte.
    fn low_nibble(self, x: Self::B) -> Self::B;
    /// The high four bits of each byte.
    fn high_nibble(self, x: Self::B) -> Self::B;
    /// `n` bits (1 or 2) of each byte from bit `from` on, moved to bit 4. Fast when `from` is a constant.
    fn bits_to_4(self, x: Self::B, from: u32, n: u32) -> Self::B;
    fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// Adds to each lane the exact dot product of its four unsigned bytes with four signed ones.
    fn dot4(self, acc: Self::I, w: Self::B, x: &[i8; 4]) -> Self::I;
}

/// Work that is generic over the lanes. `run` must be `#[inline(always)]`, as must be all it calls.
pub(crate) trait Kernel {
    type Out;
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// An implementation proven to run here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Backend {
    Reference,
    Vector(Vector),
}

/// A vector implementation proven to run here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Vector {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Backend {
    /// The implementation of `isa`, if this processor can run it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Reference => Some(Self::Reference),
            Isa::Portable => Some(Self::Vector(Vector::Portable(Portable))),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(|proof| Self::Vector(Vector::Avx2(proof))),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().map(|proof| Self::Vector(Vector::Avx512(proof))),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => None,
        }
    }

    pub(crate) fn vector(self) -> Option<Vector> {
        match self {
            Self::Reference => None,
            Self::Vector(vector) => Some(vector),
        }
    }
}

impl Vector {
    /// Runs `kernel` with the instruction set enabled.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Self::Portable(proof) => kernel.run(proof),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(proof) => proof.run(kernel),
        }
    }

    /// [`Simd::MAX_TOKENS`].
    pub(crate) fn max_tokens(self) -> usize {
        match self {
            Self::Portable(_) => Portable::MAX_TOKENS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::MAX_TOKENS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::MAX_TOKENS,
        }
    }

    /// [`Simd::MAX_QUERIES`].
    pub(crate) fn max_queries(self) -> usize {
        match self {
            Self::Portable(_) => Portable::MAX_QUERIES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::MAX_QUERIES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::MAX_QUERIES,
        }
    }
}

#[cfg(test)]
mod tests;
