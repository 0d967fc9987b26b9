//! A name for exactly one model: workers of a cluster compare it before they exchange KV.
//!
//! It covers the configuration, every tensor's name, type and shape, and of every tensor's contents the head,
//! the middle and the tail. Hashing whole contents would take a second a gigabyte at each start; two models that
//! differ differ everywhere (training changes every weight, another quantisation changes every block), so a
//! sample of each tensor tells them apart.

use std::fmt;

use sha2::{Digest, Sha256};

use super::{ModelFiles, TensorView};
use crate::config::ModelConfig;

/// Sampled bytes at each of the three places of a tensor.
const SAMPLE_BYTES: usize = 4096;

/// SHA-256 of what makes a model this one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The fingerprint of the model in `files`. Where the files lie, and over how many they are spread, does not matter.
pub fn fingerprint(files: &ModelFiles, config: &ModelConfig) -> Fingerprint {
    let mut hash = Sha256::new();
    let config = serde_json::to_vec(config).expect("a configuration has only string keys and finite numbers");
    field(&mut hash, &config);
    for tensor in files.tensors() {
        add_tensor(&mut hash, &tensor);
    }
    Fingerprint(hash.finalize().into())
}

fn add_tensor(hash: &mut Sha256, tensor: &TensorView<'_>) {
    field(hash, tensor.name.as_bytes());
    field(hash, tensor.ty.name().as_bytes());
    tensor.shape.iter().for_each(|&dim| hash.update((dim as u64).to_le_bytes()));
    let bytes = tensor.bytes;
    if bytes.len() <= 3 * SAMPLE_BYTES {
        return field(hash, bytes);
    }
    let middle = bytes.len() / 2;
    hash.update((bytes.len() as u64).to_le_bytes());
    for start in [0, middle, bytes.len() - SAMPLE_BYTES] {
        hash.update(&bytes[start..start + SAMPLE_BYTES]);
    }
}

/// Adds bytes with their length before them, so that no two lists of fields read alike.
fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
