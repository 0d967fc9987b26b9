//! What can be wrong with a GGUF file.

use std::{
    io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::tensor::GgmlType;

/// A file that cannot be used, and why.
#[derive(Debug, Error)]
#[error("{}: {fault}", path.display())]
pub struct GgufError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Box<Fault>,
}

/// What is wrong with a file.
#[derive(Debug, Error)]
pub enum Fault {
    /// The file cannot be opened, mapped or listed.
    #[error("cannot be read: {0}")]
    Io(#[source] io::Error),
    /// Git has the file, but Git LFS has not fetched its contents.
    #[error("this is a Git LFS pointer, not the file itself: fetch the contents with `git lfs pull`")]
    LfsPointer,
    /// The first four bytes are not `GGUF`.
    #[error("magic: starts with {0:?} where GGUF files have \"GGUF\"; older ggml files need converting")]
    Magic(String),
    /// Written on a big-endian machine.
    #[error("version: the byte order is big-endian; convert the file to little-endian")]
    BigEndian,
    /// A version of the format that this reader does not know.
    #[error("version: GGUF version {0} is not supported; versions 2 and 3 are")]
    Version(u32),
    /// The file ends before something that must follow.
    #[error("{field}: needs {want} bytes but only {have} are left; is the download complete?")]
    Truncated {
        /// What was being read.
        field: String,
        /// Bytes it needs at the least.
        want: u64,
        /// Bytes that are left.
        have: u64,
    },
    /// One field has a value that it must not have.
    #[error("{field}: {problem}")]
    Field {
        /// The key, or the tensor with the property.
        field: String,
        /// What is wrong with it.
        problem: Problem,
    },
    /// Files of a split set are missing.
    #[error(
        "one of {count} files of a split model, of which these are missing: {}; put them beside it",
        missing.join(", ")
    )]
    MissingShards {
        /// Files in the set.
        count: u64,
        /// Names of the missing ones.
        missing: Vec<String>,
    },
    /// A file of a split set that is not named as the set needs it.
    #[error(
        "split.count is {count}, so the name must end in -00001-of-{count:05}.gguf (with the file's own \
         number, from 1): rename the files of the set"
    )]
    SplitName {
        /// Files in the set.
        count: u64,
    },
}

/// What is wrong with one field.
#[derive(Debug, Error, PartialEq)]
pub enum Problem {
    /// A required key is absent.
    #[error("is missing")]
    Missing,
    /// A name of no bytes.
    #[error("the name is empty")]
    EmptyName,
    /// A name with a NUL byte.
    #[error("the name holds a NUL byte")]
    NulInName,
    /// Not UTF-8 where text is needed.
    #[error("is not valid UTF-8")]
    NotUtf8,
    /// A name longer than the format allows.
    #[error("the name is {len} bytes long, the limit is {max}")]
    NameTooLong {
        /// Its length.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The same name twice.
    #[error("appears twice")]
    Duplicate,
    /// A metadata value of an unknown type.
    #[error("unknown value type {0}")]
    UnknownValueType(u32),
    /// Arrays of arrays of arrays.
    #[error("arrays are nested deeper than {0}")]
    TooDeep(usize),
    /// A value of another type than the key has.
    #[error("has type {found}, expected {want}")]
    WrongType {
        /// What the key must hold.
        want: &'static str,
        /// What it holds.
        found: String,
    },
    /// A number that cannot be.
    #[error("is {value}, expected {want}")]
    OutOfRange {
        /// The value, printed.
        value: String,
        /// What would be right.
        want: String,
    },
    /// The number of dimensions is not 1 to 4.
    #[error("has {0} dimensions, expected 1 to 4")]
    DimCount(u32),
    /// A dimension of length 0.
    #[error("dimension {0} is 0")]
    ZeroDim(usize),
    /// Dimensions whose product is no 64-bit number.
    #[error("dimensions {0:?} overflow 64 bits")]
    TooLarge(Vec<u64>),
    /// A type number that no version of ggml assigned.
    #[error("unknown tensor type number {0}")]
    UnknownTensorType(u32),
    /// Rows that are not whole blocks of the quantised type.
    #[error("rows of {len} values are not whole blocks of {} ({ty})", ty.block_len())]
    PartialBlock {
        /// Row length.
        len: u64,
        /// The type.
        ty: GgmlType,
    },
    /// A tensor that does not start at a multiple of the alignment.
    #[error("offset {offset} is not a multiple of the alignment {alignment}")]
    Unaligned {
        /// Where it starts.
        offset: u64,
        /// `general.alignment`.
        alignment: u64,
    },
    /// A tensor that ends after the file.
    #[error("{bytes} bytes at offset {offset} of a data part of {have} bytes; is the download complete?")]
    PastEnd {
        /// Where it starts.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Length of the data part.
        have: u64,
    },
    /// Two tensors share bytes.
    #[error("overlaps tensor {0:?}")]
    Overlap(String),
    /// Two arrays of the tokenizer that must have one length.
    #[error("has {len} entries where tokenizer.ggml.tokens has {want}")]
    Length {
        /// Its length.
        len: usize,
        /// The right length.
        want: usize,
    },
}

impl GgufError {
    pub(crate) fn new(path: &Path, fault: Fault) -> Self {
        Self { path: path.to_path_buf(), fault: Box::new(fault) }
    }

    pub(crate) fn field(path: &Path, field: impl Into<String>, problem: Problem) -> Self {
        Self::new(path, Fault::field(field, problem))
    }
}

impl Fault {
    pub(crate) fn field(field: impl Into<String>, problem: Problem) -> Self {
        Self::Field { field: field.into(), problem }
    }
}

impl Problem {
    pub(crate) fn wrong_type(want: &'static str, found: &str) -> Self {
        Self::WrongType { want, found: found.to_owned() }
    }

    pub(crate) fn range(value: impl ToString, want: impl Into<String>) -> Self {
        Self::OutOfRange { value: value.to_string(), want: want.into() }
    }
}
