//! Model files: where they come from, and one view of the tensors in them whatever their format.
//!
//! [`resolve`] turns what a person asked for into a path, [`ModelFiles::open`] maps what lies there, and the
//! forward pass asks for tensors by the names that Hugging Face gives them. GGUF names are translated when the
//! file is opened, so that nothing behind this module knows two vocabularies. Tensors stay as they are stored;
//! repacking them for the kernels is the shard loader's business.

mod directory;
mod error;
mod fingerprint;
mod gguf;
mod resolve;
mod safetensors;
mod unique;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use longreach_gguf::{MappedFile, Metadata};
use longreach_kernels::StoredType;

pub use error::{IndexProblem, OpenError, SafetensorsFault};
pub use fingerprint::{Fingerprint, fingerprint};
pub(crate) use gguf::architecture as gguf_architecture;
pub use resolve::{HubError, ResolveError, Resolved, Resolver, WheelError, resolve};

/// The mapped files of one model.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    source: ConfigSource,
    tensors: BTreeMap<String, StoredTensor>,
    files: Vec<MappedFile>,
}

/// Where a model's configuration stands.
#[derive(Debug)]
pub enum ConfigSource {
    /// In the files `config.json` and, if there is one, `generation_config.json`.
    Json {
        /// Path of `config.json`.
        path: PathBuf,
        /// Its contents.
        config: serde_json::Value,
        /// Contents of `generation_config.json`.
        generation: Option<serde_json::Value>,
    },
    /// In the metadata of a GGUF file.
    Gguf(Metadata),
}

/// One tensor, as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its canonical name.
    pub name: &'a str,
    /// Its number format.
    pub ty: StoredType,
    /// Lengths, outermost first: `[rows, columns]` for a matrix whose rows are contiguous.
    pub shape: &'a [usize],
    /// Its bytes: as many as format and shape need.
    pub bytes: &'a [u8],
}

/// Where a tensor lies.
#[derive(Debug)]
struct StoredTensor {
    ty: StoredType,
    shape: Vec<usize>,
    file: usize,
    start: usize,
    len: usize,
}

impl ModelFiles {
    /// Opens the model at `path`: a GGUF file (any one of a split set), or a directory that holds either
    /// `config.json` with safetensors files or one GGUF model.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let meta =
            std::fs::metadata(path).map_err(|source| OpenError::Io { path: path.to_path_buf(), source })?;
        if meta.is_dir() { directory::open(path) } else { Self::open_file(path) }
    }

    fn open_file(path: &Path) -> Result<Self, OpenError> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => Err(OpenError::BareSafetensors { path: path.to_path_buf() }),
            _ => gguf::open(path),
        }
    }

    /// Where the model lies: the path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration as it stands in the files; [`crate::config::ModelConfig::from_files`] reads it.
    pub fn config_source(&self) -> &ConfigSource {
        &self.source
    }

    /// The tensor of a canonical name, such as `model.layers.3.self_attn.q_proj.weight`.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get_key_value(name).map(|(name, tensor)| self.view(name, tensor))
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, tensor)| self.view(name, tensor))
    }

    /// Number of tensors.
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Bytes of all tensors, as stored.
    pub fn weight_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.len as u64).sum()
    }

    /// The files that are mapped.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }

    fn view<'a>(&'a self, name: &'a str, tensor: &'a StoredTensor) -> TensorView<'a> {
        let bytes = &self.files[tensor.file].bytes()[tensor.start..tensor.start + tensor.len];
        TensorView { name, ty: tensor.ty, shape: &tensor.shape, bytes }
    }
}
