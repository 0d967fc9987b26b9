//! Puts small GGUF files together.
//!
//! For fixtures: tests here, in the model crate and in the text crate need files with one thing in them out of
//! the ordinary. It writes what it is told, wrong values too, and holds everything in memory.

use crate::tensor::GgmlType;

const ALIGNMENT: usize = 32;

/// A file under construction.
#[derive(Clone, Debug, Default)]
pub struct GgufBuilder {
    n_entries: u64,
    entries: Vec<u8>,
    n_tensors: u64,
    directory: Vec<u8>,
    data: Vec<u8>,
}

impl GgufBuilder {
    /// A file of version 3 whose `general.architecture` is `architecture`.
    pub fn new(architecture: &str) -> Self {
        Self::default().string("general.architecture", architecture.as_bytes())
    }

    /// Adds an unsigned 32-bit value.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    /// Adds a 32-bit float.
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    /// Adds a truth value.
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.entry(key, 7, &[value.into()])
    }

    /// Adds a string.
    pub fn string(self, key: &str, value: &[u8]) -> Self {
        self.entry(key, 8, &sized(value))
    }

    /// Adds an array of strings.
    pub fn strings(self, key: &str, values: &[&[u8]]) -> Self {
        let mut encoded = array_start(8, values.len());
        values.iter().for_each(|value| encoded.extend(sized(value)));
        self.entry(key, 9, &encoded)
    }

    /// Adds an array of signed 32-bit values.
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let mut encoded = array_start(5, values.len());
        values.iter().for_each(|value| encoded.extend(value.to_le_bytes()));
        self.entry(key, 9, &encoded)
    }

    /// Adds an array of 32-bit floats.
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let mut encoded = array_start(6, values.len());
        values.iter().for_each(|value| encoded.extend(value.to_le_bytes()));
        self.entry(key, 9, &encoded)
    }

    /// Adds an encoded value of the type with number `ty`.
    pub fn entry(mut self, key: &str, ty: u32, encoded: &[u8]) -> Self {
        self.n_entries += 1;
        self.entries.extend(sized(key.as_bytes()));
        self.entries.extend(ty.to_le_bytes());
        self.entries.extend(encoded);
        self
    }

    /// Adds a tensor of the given stored bytes; `shape` is outermost first.
    pub fn tensor(mut self, name: &str, ty: GgmlType, shape: &[usize], bytes: &[u8]) -> Self {
        self.n_tensors += 1;
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.directory.extend(sized(name.as_bytes()));
        self.directory.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&dim| self.directory.extend((dim as u64).to_le_bytes()));
        self.directory.extend(ty.number().to_le_bytes());
        self.directory.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self
    }

    /// The file.
    pub fn build(self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(self.n_tensors.to_le_bytes());
        file.extend(self.n_entries.to_le_bytes());
        file.extend(self.entries);
        file.extend(self.directory);
        if self.n_tensors > 0 {
            file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        }
        file.extend(self.data);
        file
    }
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    let mut encoded = (bytes.len() as u64).to_le_bytes().to_vec();
    encoded.extend(bytes);
    encoded
}

fn array_start(elem: u32, len: usize) -> Vec<u8> {
    let mut encoded = elem.to_le_bytes().to_vec();
    encoded.extend((len as u64).to_le_bytes());
    encoded
}
