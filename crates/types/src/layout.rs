//! Which rank owns which position: the arithmetic of decode context parallelism.
//!
//! Blocks of `block_size` (B) consecutive positions go to the `dcp_size` (D) ranks in turn:
//! `block(p) = p / B`, `owner(p) = block(p) mod D`, index on the owner `= block(p) / D`.

use std::ops::Range;

/// C, the number of canonical parts in whose order attention and cross-rank sums are merged.
pub const N_SHARDS: usize = 8;

/// The split of one sequence's positions over the D ranks of a decode group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DcpLayout {
    block_size: usize,
    dcp_size: usize,
}

/// A layout that cannot exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// Blocks of no positions.
    ZeroBlockSize,
    /// A group of no ranks.
    ZeroDcpSize,
}

impl std::fmt::Display for LayoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ZeroBlockSize => "block_size is 0; it must be at least 1",
            Self::ZeroDcpSize => "dcp_size is 0; it must be at least 1",
        })
    }
}

impl std::error::Error for LayoutError {}

impl DcpLayout {
    /// A layout of blocks of `block_size` positions over `dcp_size` ranks.
    pub const fn new(block_size: usize, dcp_size: usize) -> Result<Self, LayoutError> {
        if block_size == 0 {
            return Err(LayoutError::ZeroBlockSize);
        }
        if dcp_size == 0 {
            return Err(LayoutError::ZeroDcpSize);
        }
        Ok(Self { block_size, dcp_size })
    }

    /// B, positions a block.
    pub const fn block_size(self) -> usize {
        self.block_size
    }

    /// D, ranks over which positions are split.
    pub const fn dcp_size(self) -> usize {
        self.dcp_size
    }

    /// The logical block that holds position `pos`.
    pub const fn block(self, pos: usize) -> usize {
        pos / self.block_size
    }

    /// Blocks needed for `len` positions, over all ranks.
    pub const fn n_blocks(self, len: usize) -> usize {
        len.div_ceil(self.block_size)
    }

    /// The DCP rank that owns logical block `block`.
    pub const fn block_owner(self, block: usize) -> usize {
        block % self.dcp_size
    }

    /// The DCP rank that owns position `pos`.
    pub const fn owner(self, pos: usize) -> usize {
        self.block_owner(self.block(pos))
    }

    /// Index of logical block `block` in its owner's block table.
    pub const fn local_block(self, block: usize) -> usize {
        block / self.dcp_size
    }

    /// The logical block at `local` in the table of `rank`.
    pub const fn logical_block(self, local: usize, rank: usize) -> usize {
        local * self.dcp_size + rank
    }

    /// Blocks of the first `n_blocks` logical ones that rank `rank` owns.
    pub const fn local_n_blocks(self, n_blocks: usize, rank: usize) -> usize {
        (n_blocks + self.dcp_size - 1 - rank) / self.dcp_size
    }

    /// How many of the first `len` positions rank `rank` owns.
    ///
    /// `full·B + clamp(len − (full·D + rank)·B, 0, B)` with `full = len / (B·D)`.
    pub const fn local_len(self, len: usize, rank: usize) -> usize {
        let full = len / (self.block_size * self.dcp_size);
        let rest = len.saturating_sub((full * self.dcp_size + rank) * self.block_size);
        full * self.block_size + if rest < self.block_size { rest } else { self.block_size }
    }

    /// The positions of logical block `block`, cut at `len`.
    pub fn block_positions(self, block: usize, len: usize) -> Range<usize> {
        let start = block * self.block_size;
        start.min(len)..(start + self.block_size).min(len)
    }

    /// Virtual shards (of [`N_SHARDS`]) that live on one rank: `C / D` where D divides C. Otherwise a rank
    /// is one shard, and results across rank counts agree within tolerance instead of to the bit.
    pub const fn n_local_shards(self) -> usize {
        if self.is_canonical() { N_SHARDS / self.dcp_size } else { 1 }
    }

    /// Whether D divides C, so that every rank count of this kind gives the same bits.
    pub const fn is_canonical(self) -> bool {
        N_SHARDS.is_multiple_of(self.dcp_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lens(len: usize, dcp_size: usize, block_size: usize) -> Vec<usize> {
        let layout = DcpLayout::new(block_size, dcp_size).unwrap();
        (0..dcp_size).map(|rank| layout.local_len(len, rank)).collect()
    }

    #[test]
    fn local_len_gives_the_published_vectors() {
        assert_eq!(lens(1, 8, 1), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lens(16, 8, 16), [16, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lens(17, 8, 16), [16, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lens(100, 8, 64), [64, 36, 0, 0, 0, 0, 0, 0]);
        assert_eq!(lens(513, 8, 64), [65, 64, 64, 64, 64, 64, 64, 64]);
        assert_eq!(lens(200_000, 8, 64), [25_024, 25_024, 25_024, 25_024, 25_024, 24_960, 24_960, 24_960]);
        assert_eq!(lens(25, 4, 1), [7, 6, 6, 6]);
        assert_eq!([8, 9, 10].map(|len| lens(len, 2, 1)[1]), [4, 4, 5]);
    }

    #[test]
    fn every_position_has_one_owner_and_one_slot() {
        for (block_size, dcp_size) in [(1, 1), (1, 4), (3, 2), (4, 3), (32, 8)] {
            let layout = DcpLayout::new(block_size, dcp_size).unwrap();
            let mut counts = vec![0; dcp_size];
            for pos in 0..500 {
                let (block, rank) = (layout.block(pos), layout.owner(pos));
                assert_eq!(layout.logical_block(layout.local_block(block), rank), block);
                counts[rank] += 1;
                let by_rank: Vec<_> = (0..dcp_size).map(|rank| layout.local_len(pos + 1, rank)).collect();
                assert_eq!(by_rank, counts, "B={block_size} D={dcp_size} len={}", pos + 1);
                for (rank, len) in by_rank.iter().enumerate() {
                    let n_blocks = layout.local_n_blocks(layout.n_blocks(pos + 1), rank);
                    assert_eq!(n_blocks, len.div_ceil(block_size));
                }
            }
        }
    }
}
