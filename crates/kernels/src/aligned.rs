//! Zeroed memory on cache-line boundaries.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line, and of an AVX-512 register.
pub(crate) const LINE: usize = 64;

/// A fixed number of bytes, the first of them on a cache line. Starts as zeroes the system maps lazily.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBytes {
    pub(crate) fn zeroed(len: usize) -> Self {
        let bytes = vec![0_u8; len + LINE - 1];
        let start = bytes.as_ptr().addr().wrapping_neg() % LINE;
        Self { bytes, start, len }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_start_on_a_line_and_are_zero() {
        for len in [0, 1, 63, 64, 1000] {
            let bytes = AlignedBytes::zeroed(len);
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % LINE), (len, 0));
            assert!(bytes.iter().all(|&b| b == 0));
        }
    }
}
