//! Why model files cannot be opened.

use std::{io, path::PathBuf};

use longreach_gguf::GgufError;
use thiserror::Error;

/// Files that cannot be opened as a model. Every message names the file, and the field where one is at fault.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A GGUF file is at fault.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A safetensors file is at fault.
    #[error("{}: {fault}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        fault: SafetensorsFault,
    },
    /// The index of a sharded model is at fault.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        problem: IndexProblem,
    },
    /// A JSON file does not parse.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A number format that this engine does not compute with.
    #[error(
        "{}: tensor {tensor:?} has type {found}, which is not supported; supported are F32, F16, BF16, Q8_0, \
         Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
        path.display()
    )]
    TensorType {
        /// The file.
        path: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// Its type.
        found: &'static str,
    },
    /// A directory that is no model.
    #[error(
        "{}: no model here: expected config.json with model.safetensors or model.safetensors.index.json, or one \
         GGUF model; {found}",
        path.display()
    )]
    NoModel {
        /// The directory.
        path: PathBuf,
        /// What is there instead.
        found: String,
    },
    /// A safetensors file without the directory that explains it.
    #[error("{}: a safetensors file has no configuration in it; give the directory with its config.json", path.display())]
    BareSafetensors {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with a safetensors file.
#[derive(Debug, Error)]
pub enum SafetensorsFault {
    /// Git has the file, but Git LFS has not fetched its contents.
    #[error("this is a Git LFS pointer, not the file itself: fetch the contents with `git lfs pull`")]
    LfsPointer,
    /// The file ends before something that must follow.
    #[error("{field}: needs {want} bytes but only {have} are there; is the download complete?")]
    Truncated {
        /// What was being read.
        field: &'static str,
        /// Bytes it needs.
        want: u64,
        /// Bytes that are there.
        have: u64,
    },
    /// The header is longer than the format's own limit.
    #[error("header length: {len} bytes, the format's limit is {max}; split the model into several files")]
    HeaderLength {
        /// Its length.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The header is not the JSON it should be.
    #[error("header: {0}")]
    Header(#[source] serde_json::Error),
    /// A number format that weights are not stored in here.
    #[error("tensor {tensor:?}: dtype {dtype:?} is not supported; supported are F32, F16, BF16")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its format.
        dtype: String,
    },
    /// The place of a tensor is not as long as its shape needs.
    #[error("tensor {tensor:?}: data_offsets {start}..{end} do not hold shape {shape:?} of {dtype}")]
    Extent {
        /// The tensor.
        tensor: String,
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
        /// Its shape.
        shape: Vec<u64>,
        /// Its format.
        dtype: &'static str,
    },
    /// A tensor does not begin where the one before it ends.
    #[error("tensor {tensor:?}: data_offsets begin at {start}, expected {want} (a gap or an overlap)")]
    Place {
        /// The tensor.
        tensor: String,
        /// First byte.
        start: u64,
        /// Where the tensor before it ends.
        want: u64,
    },
    /// The data is not as long as the tensors together.
    #[error("data: {have} bytes are there, the tensors need {want}{}", if have < want { "; is the download complete?" } else { "" })]
    DataLength {
        /// Bytes that are there.
        have: u64,
        /// Bytes of all tensors.
        want: u64,
    },
}

/// What is wrong with an index file.
#[derive(Debug, Error)]
pub enum IndexProblem {
    /// No tensors.
    #[error("weight_map is empty")]
    Empty,
    /// A file name that could lead out of the model directory.
    #[error("weight_map sends tensor {tensor:?} to {file:?}, which is not a plain file name")]
    FileName {
        /// The tensor.
        tensor: String,
        /// The name.
        file: String,
    },
    /// Files that the index names are absent.
    #[error(
        "{} of the {n_files} files it names are missing: {}; download them, or if the model is whole without \
         them, the index is stale: write it again",
        missing.len(),
        missing.join(", ")
    )]
    MissingFiles {
        /// Files that the index names.
        n_files: usize,
        /// Those that are absent.
        missing: Vec<String>,
    },
    /// A tensor is not in the file that the index names for it.
    #[error(
        "weight_map says that tensor {tensor:?} is in {file}, but that file does not hold it; is the index stale?"
    )]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
}
