//! Zeroed memory on cache-line boundaries, in huge pages where the system has them.
//!
//! Decode reads every weight once a step, and with pages of 4 KiB the walk through page tables costs half of
//! the memory bandwidth (measured on a virtual machine: 17 against 29 GB/s a thread). A weight matrix is
//! smaller than a huge page, so matrices are cut from common chunks of a [`Pool`]; a chunk goes back to the
//! system when the last of its pieces is dropped. Pieces are not reused one by one: weights live as long as
//! their model.

use std::{
    io,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

use memmap2::MmapMut;

/// Bytes of a cache line, and of an AVX-512 register.
pub(crate) const LINE: usize = 64;
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Address space of a pool's chunk. It becomes memory page by page, as it is written.
const CHUNK: usize = 64 << 20;

/// A fixed number of bytes, the first of them on a cache line. Starts as zeroes.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    chunk: Arc<Chunk>,
    /// Offset in the chunk. No other value has any of the bytes from here to `start + len`.
    start: usize,
    len: usize,
}

/// Where pieces that live together are cut from.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    current: Mutex<Option<(Arc<Chunk>, usize)>>,
}

/// One piece of address space.
#[derive(Debug)]
struct Chunk {
    base: *mut u8,
    len: usize,
    _memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Map { _map: MmapMut },
    Heap { _bytes: Vec<u8> },
}

// SAFETY: the chunk owns its memory, and bytes are only reached through `AlignedBytes`, each of which has its
// own range of them.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl AlignedBytes {
    /// Memory of its own.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self { chunk: Arc::new(Chunk::new(len)), start: 0, len }
    }
}

impl Pool {
    /// The next `len` bytes of the current chunk, or of a new one.
    pub(crate) fn zeroed(&self, len: usize) -> AlignedBytes {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let room = current.take().filter(|(chunk, used)| len <= chunk.len - used);
        let (chunk, start) = room.unwrap_or_else(|| (Arc::new(Chunk::new(len.max(CHUNK))), 0));
        let used = (start + len).next_multiple_of(LINE).min(chunk.len);
        *current = Some((Arc::clone(&chunk), used));
        AlignedBytes { chunk, start, len }
    }
}

/// Whether the system would give so much zeroed memory, or what it says. It may still not have it when it is used.
pub fn check_memory(n_bytes: usize) -> io::Result<()> {
    let map = MmapMut::map_anon(n_bytes.saturating_add(HUGE));
    map.map(drop)
}

impl Chunk {
    fn new(len: usize) -> Self {
        if len >= HUGE
            && let Ok(mut map) = MmapMut::map_anon(len.saturating_add(HUGE))
        {
            #[cfg(target_os = "linux")]
            // Without huge pages everything works as well, only slower.
            let _ = map.advise(memmap2::Advice::HugePage);
            let base = aligned(map.as_mut_ptr(), HUGE);
            return Self { base, len, _memory: Memory::Map { _map: map } };
        }
        let mut bytes = vec![0_u8; len + LINE];
        let base = aligned(bytes.as_mut_ptr(), LINE);
        Self { base, len, _memory: Memory::Heap { _bytes: bytes } }
    }
}

/// The first multiple of `align` from `start` on; the allocation behind `start` has room for it.
fn aligned(start: *mut u8, align: usize) -> *mut u8 {
    start.wrapping_add(start.addr().wrapping_neg() % align)
}

impl Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is within the chunk, initialised to zeroes, and this value's alone.
        unsafe { std::slice::from_raw_parts(self.chunk.base.add(self.start), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.base.add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_start_on_a_line_and_do_not_overlap() {
        let pool = Pool::default();
        let lens = [0, 1, 63, 64, 1000, HUGE + 5, CHUNK - 1, CHUNK + 1, 7];
        let mut pieces: Vec<AlignedBytes> = lens.iter().map(|&len| pool.zeroed(len)).collect();
        pieces.extend(lens.iter().map(|&len| AlignedBytes::zeroed(len)));
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!((piece.len(), piece.as_ptr().addr() % LINE), (lens[i % lens.len()], 0));
            if let [first, .., last] = &mut piece[..] {
                assert_eq!((*first, *last), (0, 0));
                (*first, *last) = (i as u8 + 1, i as u8 + 1);
            }
        }
        for (i, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.len() > 1) {
            assert_eq!((piece[0], piece[piece.len() - 1]), (i as u8 + 1, i as u8 + 1));
        }
    }
}
