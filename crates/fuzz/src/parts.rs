//! Inputs that stand for several files or messages.
//!
//! Parts are separated by a line of their own instead of lengths, because a mutation rarely keeps a length right.

use std::{fs, path::PathBuf, sync::OnceLock};

use tempfile::TempDir;

/// Stands between two parts.
pub(crate) const SEPARATOR: &[u8] = b"\n%%%%\n";

/// The parts of `bytes`, at least one.
pub(crate) fn split(bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(SEPARATOR.len()).position(|window| window == SEPARATOR) {
        parts.push(&rest[..at]);
        rest = &rest[at + SEPARATOR.len()..];
    }
    parts.push(rest);
    parts
}

/// `parts` as one input.
pub(crate) fn join<P: AsRef<[u8]>>(parts: &[P]) -> Vec<u8> {
    parts.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(SEPARATOR)
}

/// A folder of this process that holds exactly `files`.
///
/// Loaders take paths, and what they check of a file's place is part of what is tested. One folder for each use, so
/// that targets may run at the same time.
pub(crate) struct Folder(OnceLock<TempDir>);

impl Folder {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Writes `files` and gives the folder. A file of an earlier input that is not among them is taken away.
    pub(crate) fn fill(&self, files: &[(&str, Option<&[u8]>)]) -> PathBuf {
        let dir = self.0.get_or_init(|| tempfile::tempdir().expect("a temporary folder can be made")).path();
        for (name, content) in files {
            let path = dir.join(name);
            match content {
                Some(content) => fs::write(path, content).expect("a temporary file can be written"),
                None => {
                    // It may not be there.
                    let _absent = fs::remove_file(path);
                }
            }
        }
        dir.to_owned()
    }
}
