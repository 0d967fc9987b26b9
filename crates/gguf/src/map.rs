//! Read-only memory maps of model files.
//!
//! Mapped rather than read, so that a model of many gigabytes opens at once, is paged in as it is used, and is
//! shared between the processes of one machine.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use memmap2::Mmap;

/// How a Git LFS pointer file begins.
const LFS_PREFIX: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A file mapped into memory for reading.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the whole of the regular file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let map = if meta.len() == 0 { None } else { Some(map(&file)?) };
        Ok(Self { path: path.to_path_buf(), map })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The contents.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}

#[allow(unsafe_code, reason = "a memory map is the one unsafe thing that reading weights needs")]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and private, and `Mmap` unmaps it when dropped, after every borrow of it.
    // What remains is that another process may truncate or rewrite the file meanwhile: then reads see changed
    // bytes or end the process with SIGBUS. No program that maps a file can exclude that; model files are
    // written under another name and renamed into place, by us and by the hub's clients, so it does not
    // happen by accident, and every format check reads bytes, never types with invalid values.
    unsafe { Mmap::map(file) }
}

/// Whether `bytes` are the stand-in that Git leaves when Git LFS has not fetched the real file.
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(LFS_PREFIX)
}
