//! A model in one file, or split over several.
//!
//! Split sets have three facts about a file that can disagree: the number in its name (from 1), `split.no`
//! (from 0) and `split.count`. Any file of the set opens the set; all three facts are compared for every file,
//! because a set put together from two downloads otherwise loads and answers rubbish.

use std::path::{Path, PathBuf};

use crate::{
    error::{Fault, GgufError, Problem},
    header::Header,
    map::MappedFile,
    metadata::Metadata,
    tensor::{TensorInfo, check_disjoint},
};

/// More files than any real set; bounds how many names a bad count can make us look for.
const MAX_SHARDS: u64 = 10_000;

/// A GGUF model: metadata and tensors of one file or of a whole split set.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    files: Vec<MappedFile>,
}

impl Gguf {
    /// Opens the file at `path` and, when it is one of a split set, the rest of the set.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let (file, header) = open_file(path)?;
        match header.metadata.uint("split.count")? {
            None | Some(0 | 1) => {
                Ok(Self { metadata: header.metadata, tensors: header.tensors, files: vec![file] })
            }
            Some(count) => open_set(path, count),
        }
    }

    /// The metadata; of a split set, that of its first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The stored bytes of a tensor of this model.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.shard].bytes()[tensor.start..tensor.start + tensor.len]
    }

    /// Metadata, tensors and files, for whoever keeps them in a form of its own.
    pub fn into_parts(self) -> (Metadata, Vec<TensorInfo>, Vec<MappedFile>) {
        (self.metadata, self.tensors, self.files)
    }

    /// The files, in order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }
}

/// Prefix, number (from 1) and count of a name like `model-00002-of-00005.gguf`.
pub fn split_name(path: &Path) -> Option<(&str, u64, u64)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse::<u64>().ok()).flatten()
    };
    Some((prefix, parse(number)?, parse(count)?))
}

fn open_file(path: &Path) -> Result<(MappedFile, Header), GgufError> {
    let file = MappedFile::open(path).map_err(|error| GgufError::new(path, Fault::Io(error)))?;
    let header = Header::parse(path, file.bytes())?;
    Ok((file, header))
}

fn open_set(path: &Path, count: u64) -> Result<Gguf, GgufError> {
    let paths = shard_paths(path, count)?;
    let missing: Vec<String> = paths
        .iter()
        .filter(|path| !path.is_file())
        .filter_map(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
        .collect();
    if !missing.is_empty() {
        return Err(GgufError::new(path, Fault::MissingShards { count, missing }));
    }
    let mut set: Option<Gguf> = None;
    for (shard, path) in paths.iter().enumerate() {
        let (file, mut header) = open_file(path)?;
        check_shard(&header.metadata, shard as u64, count)?;
        header.tensors.iter_mut().for_each(|tensor| tensor.shard = shard);
        match &mut set {
            None => {
                set = Some(Gguf { metadata: header.metadata, tensors: header.tensors, files: vec![file] })
            }
            Some(set) => {
                set.tensors.append(&mut header.tensors);
                set.files.push(file);
            }
        }
    }
    let set = set.expect("a split set has two files at least");
    check_disjoint(&set.tensors).map_err(|fault| GgufError::new(path, fault))?;
    check_total(&set)?;
    Ok(set)
}

fn shard_paths(path: &Path, count: u64) -> Result<Vec<PathBuf>, GgufError> {
    if count > MAX_SHARDS {
        let problem = Problem::range(count, format!("at most {MAX_SHARDS}"));
        return Err(GgufError::field(path, "split.count", problem));
    }
    match split_name(path) {
        Some((prefix, _, named)) if named == count => Ok((1..=count)
            .map(|number| path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf")))
            .collect()),
        Some((_, _, named)) => {
            let problem = Problem::range(count, format!("{named} as in the file name"));
            Err(GgufError::field(path, "split.count", problem))
        }
        None => Err(GgufError::new(path, Fault::SplitName { count })),
    }
}

fn check_shard(metadata: &Metadata, shard: u64, count: u64) -> Result<(), GgufError> {
    for (key, want) in [("split.no", shard), ("split.count", count)] {
        match metadata.uint(key)? {
            Some(value) if value == want => {}
            Some(value) => {
                return Err(metadata.error(key, Problem::range(value, format!("{want} for this file"))));
            }
            None => return Err(metadata.missing(key)),
        }
    }
    Ok(())
}

/// `split.tensors.count` counts the tensors of all files.
fn check_total(set: &Gguf) -> Result<(), GgufError> {
    let key = "split.tensors.count";
    match set.metadata.uint(key)? {
        Some(total) if total != set.tensors.len() as u64 => {
            let want = format!("{}, the number of tensors in all files", set.tensors.len());
            Err(set.metadata.error(key, Problem::range(total, want)))
        }
        _ => Ok(()),
    }
}
