//! GGUF files: the header (metadata and tensor directory) of one file or of a split set, memory-mapped.
//!
//! Model loading needs the tensors and the router needs the tokenizer, and the router must not depend on the
//! model crate: so the reader stands here, below both. It is our own because a reader that trusts the lengths
//! in a file can be made to ask for gigabytes by a file of sixty bytes; here every length is compared with the
//! bytes that are left before anything is reserved, and every refusal names the file and the field.
//!
//! The crate does not know what a tensor or a key means. Which architectures, tensor types and keys a model
//! needs is decided by whoever loads it.

mod builder;
mod cursor;
mod error;
mod header;
mod map;
mod metadata;
mod set;
mod tensor;
mod tokenizer;
mod value;

pub use builder::GgufBuilder;
pub use error::{Fault, GgufError, Problem};
pub use header::Header;
pub use map::{MappedFile, is_lfs_pointer};
pub use metadata::Metadata;
pub use set::{Gguf, split_name};
pub use tensor::{GgmlType, TensorInfo};
pub use tokenizer::{GgufTokenizer, TokenType};
pub use value::{Array, Value, ValueType};
