//! Why a model is refused after its files were opened.

use std::path::{Path, PathBuf};

use longreach_gguf::GgufError;
use thiserror::Error;

use super::Architecture;

/// A configuration that cannot be used. Every message names the file and the key or tensor.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A GGUF key is missing or of a wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A required key is absent.
    #[error("{}: {key} is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A key has a value that it must not have.
    #[error("{}: {key} is {value}, expected {want}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value, as the file prints it.
        value: String,
        /// What would be right.
        want: String,
    },
    /// A model that this engine does not compute.
    #[error(
        "{}: architecture {found:?} is not supported; supported are {}",
        path.display(),
        Architecture::SUPPORTED
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// The architecture it names.
        found: String,
    },
    /// A way to stretch positions that this engine does not compute.
    #[error(
        "{}: RoPE scaling {found:?} is not supported; supported are none (default), linear, llama3, yarn",
        path.display()
    )]
    RopeScaling {
        /// The file.
        path: PathBuf,
        /// The type it names.
        found: String,
    },
    /// A feature that this engine does not compute, by its key.
    #[error("{}: {key} ({value}) is not supported: {why}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What there is instead.
        why: &'static str,
    },
    /// A tensor that the configuration asks for is in no file.
    #[error("{}: tensor {name} is missing, {why}", path.display())]
    MissingTensor {
        /// The model.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Which key asks for it.
        why: String,
    },
    /// A tensor that no part of the model would read: the result would silently be wrong.
    #[error("{}: tensor {name} has no place in a {architecture} model of {n_layers} layers", path.display())]
    UnexpectedTensor {
        /// The model.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What the model says it is.
        architecture: Architecture,
        /// Layers that the model says it has.
        n_layers: usize,
    },
    /// A tensor whose shape is not what the configuration says.
    #[error("{}: tensor {name} has shape {found:?}, but {why} make it {want:?}", path.display())]
    Shape {
        /// The model.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape by the configuration.
        want: Vec<usize>,
        /// The keys and their values.
        why: String,
    },
    /// The configuration ties the head to the embedding, and the files hold another head.
    #[error(
        "{}: tie_word_embeddings is true, but lm_head.weight is there and differs from \
         model.embed_tokens.weight; set tie_word_embeddings to what the model was trained with",
        path.display()
    )]
    HeadNotTied {
        /// The model.
        path: PathBuf,
    },
    /// A frequency factor that is zero, negative or no number.
    #[error("{}: tensor {name} holds {value} at {index}, expected finite factors above 0", path.display())]
    FreqFactor {
        /// The model.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Where in it.
        index: usize,
        /// The factor.
        value: f32,
    },
}

impl ConfigError {
    pub(super) fn missing(path: &Path, key: impl Into<String>) -> Self {
        Self::Missing { path: path.to_path_buf(), key: key.into() }
    }

    pub(super) fn value(
        path: &Path,
        key: impl Into<String>,
        value: impl Into<String>,
        want: impl Into<String>,
    ) -> Self {
        Self::Value { path: path.to_path_buf(), key: key.into(), value: value.into(), want: want.into() }
    }
}
