//! Which layers and blocks of a hand-off have arrived on one rank.
//!
//! A grid, layer × block, of checksums. Chunks may come in any order and may repeat: the same bytes again are
//! harmless, other bytes for the same cell are an error, and an insertion that fails changes nothing. A counter
//! of received bytes was not used, since it cannot tell a repeat from progress.
//!
//! Blocks count from the start of the rank's share of the hand-off, see [`local_share`]. Coverage verifies no
//! payload: the caller computes each cell's checksum from the bytes it received.

use std::ops::Range;

use longreach_types::DcpLayout;

/// Table indices on `rank` of the logical blocks `blocks`: the rank's share of a hand-off. Cell `i` of its
/// [`Coverage`] is table index `share.start + i`. The share may be empty.
pub fn local_share(layout: DcpLayout, blocks: Range<usize>, rank: usize) -> Range<usize> {
    let start = layout.local_n_blocks(blocks.start, rank);
    start..layout.local_n_blocks(blocks.end, rank).max(start)
}

/// What has arrived, and its checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    n_layers: usize,
    n_blocks: usize,
    /// Bit `layer · n_blocks + block`.
    seen: Vec<u64>,
    crcs: Vec<u32>,
    n_seen: usize,
    digest: CoverageDigest,
}

/// A digest of a set of cells that does not depend on the order in which they came; sender and receiver compare
/// theirs at commit. Guards against a lost or crossed range, not against forgery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CoverageDigest(pub u64);

/// What an insertion brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// At least one cell that was not there.
    New,
    /// Only cells that were there already, with the same bytes; nothing at all is a repeat, too.
    Repeat,
}

/// Why an insertion was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoverageError {
    /// The bytes differ from those received before.
    #[error("layer {layer}, block {block} came with checksum {got:08x} after {have:08x}; abort the hand-off")]
    Conflict {
        /// Layer of the first cell that differs.
        layer: usize,
        /// Its block, counted from the start of the share.
        block: usize,
        /// The checksum recorded first.
        have: u32,
        /// The one that came now.
        got: u32,
    },
    /// Cells outside of what was reserved.
    #[error(
        "layers ..{layers_end}, blocks ..{blocks_end} are outside of the {n_layers} layers and {n_blocks} blocks reserved"
    )]
    OutOfRange {
        /// End of the layers that came.
        layers_end: usize,
        /// End of the blocks that came.
        blocks_end: usize,
        /// Layers reserved.
        n_layers: usize,
        /// Blocks reserved.
        n_blocks: usize,
    },
    /// The checksums are not one a cell.
    #[error("{got} checksums for {expected} cells")]
    WrongCount {
        /// Cells in the range.
        expected: usize,
        /// Checksums given.
        got: usize,
    },
}

impl CoverageDigest {
    /// Adds one cell.
    pub const fn add(&mut self, layer: usize, block: usize, crc: u32) {
        let cell = ((layer as u64) << 32) | block as u64;
        // A sum of well-mixed words: commutative, and unlike XOR it counts a cell that is added twice.
        self.0 = self.0.wrapping_add(mix(mix(cell) ^ crc as u64));
    }
}

/// The finaliser of SplitMix64: every bit of the input moves every bit of the output.
const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Coverage {
    /// Nothing of `n_layers` × `n_blocks` has arrived.
    pub fn new(n_layers: usize, n_blocks: usize) -> Self {
        let n_cells = n_layers * n_blocks;
        Self {
            n_layers,
            n_blocks,
            seen: vec![0; n_cells.div_ceil(64)],
            crcs: vec![0; n_cells],
            n_seen: 0,
            digest: CoverageDigest::default(),
        }
    }

    /// Records the cells `layers` × `blocks` with their checksums, layer by layer.
    pub fn insert(
        &mut self,
        layers: Range<usize>,
        blocks: Range<usize>,
        crcs: &[u32],
    ) -> Result<Inserted, CoverageError> {
        self.check_range(&layers, &blocks, crcs.len())?;
        let cells = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block)));
        for ((layer, block), &got) in cells.clone().zip(crcs) {
            if let Some(have) = self.crc(layer, block)
                && have != got
            {
                return Err(CoverageError::Conflict { layer, block, have, got });
            }
        }
        let n_before = self.n_seen;
        for ((layer, block), &crc) in cells.zip(crcs) {
            self.record(layer, block, crc);
        }
        Ok(if self.n_seen > n_before { Inserted::New } else { Inserted::Repeat })
    }

    /// Whether every cell has arrived. An empty share is complete from the start.
    pub const fn is_complete(&self) -> bool {
        self.n_seen == self.crcs.len()
    }

    /// Cells that have arrived.
    pub const fn n_seen(&self) -> usize {
        self.n_seen
    }

    /// Cells that have not arrived.
    pub const fn n_missing(&self) -> usize {
        self.crcs.len() - self.n_seen
    }

    /// Digest of the cells that have arrived.
    pub const fn digest(&self) -> CoverageDigest {
        self.digest
    }

    /// Checksum of a cell, if it has arrived. The cell must be in range.
    fn crc(&self, layer: usize, block: usize) -> Option<u32> {
        let cell = layer * self.n_blocks + block;
        (self.seen[cell / 64] >> (cell % 64) & 1 == 1).then(|| self.crcs[cell])
    }

    fn record(&mut self, layer: usize, block: usize, crc: u32) {
        if self.crc(layer, block).is_none() {
            let cell = layer * self.n_blocks + block;
            self.seen[cell / 64] |= 1 << (cell % 64);
            self.crcs[cell] = crc;
            self.n_seen += 1;
            self.digest.add(layer, block, crc);
        }
    }

    fn check_range(
        &self,
        layers: &Range<usize>,
        blocks: &Range<usize>,
        n_crcs: usize,
    ) -> Result<(), CoverageError> {
        let (n_layers, n_blocks) = (self.n_layers, self.n_blocks);
        if layers.end > n_layers || blocks.end > n_blocks {
            let (layers_end, blocks_end) = (layers.end, blocks.end);
            return Err(CoverageError::OutOfRange { layers_end, blocks_end, n_layers, n_blocks });
        }
        // Both factors are in range, so the product cannot overflow.
        let expected = layers.len() * blocks.len();
        if n_crcs == expected { Ok(()) } else { Err(CoverageError::WrongCount { expected, got: n_crcs }) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const N_LAYERS: usize = 3;
    const N_BLOCKS: usize = 5;

    /// The bytes the sender has for a cell, as their checksum.
    fn crc_of(layer: usize, block: usize) -> u32 {
        (layer * 31 + block * 7 + 1) as u32
    }

    fn crcs(layers: &Range<usize>, blocks: &Range<usize>) -> Vec<u32> {
        layers.clone().flat_map(|layer| blocks.clone().map(move |block| crc_of(layer, block))).collect()
    }

    fn range(max: usize) -> impl Strategy<Value = Range<usize>> {
        (0..=max, 0..=max).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    proptest! {
        /// Any order, any overlap: complete exactly when the union is everything, and the digest is that of
        /// the set.
        #[test]
        fn any_order_of_chunks_gives_the_same_result(
            chunks in prop::collection::vec((range(N_LAYERS), range(N_BLOCKS)), 0..30),
            spoiled in any::<prop::sample::Index>(),
        ) {
            let mut coverage = Coverage::new(N_LAYERS, N_BLOCKS);
            let mut model = std::collections::BTreeSet::new();
            for (layers, blocks) in &chunks {
                let n_before = model.len();
                model.extend(layers.clone().flat_map(|layer| blocks.clone().map(move |block| (layer, block))));
                let expected = if model.len() > n_before { Inserted::New } else { Inserted::Repeat };
                let got = coverage.insert(layers.clone(), blocks.clone(), &crcs(layers, blocks));
                prop_assert_eq!(got, Ok(expected));
                prop_assert_eq!(coverage.n_missing(), N_LAYERS * N_BLOCKS - model.len());
                prop_assert_eq!(coverage.is_complete(), model.len() == N_LAYERS * N_BLOCKS);
            }
            let mut digest = CoverageDigest::default();
            model.iter().for_each(|&(layer, block)| digest.add(layer, block, crc_of(layer, block)));
            prop_assert_eq!(coverage.digest(), digest);

            // Other bytes for a cell that is there are refused, and change nothing of a whole chunk.
            if !model.is_empty() {
                let &(layer, block) = model.iter().nth(spoiled.index(model.len())).unwrap();
                let before = coverage.clone();
                let mut bad = crcs(&(0..N_LAYERS), &(0..N_BLOCKS));
                bad[layer * N_BLOCKS + block] ^= 1;
                let (have, got) = (crc_of(layer, block), crc_of(layer, block) ^ 1);
                prop_assert_eq!(
                    coverage.insert(0..N_LAYERS, 0..N_BLOCKS, &bad),
                    Err(CoverageError::Conflict { layer, block, have, got })
                );
                prop_assert_eq!(coverage, before);
            }
        }

        /// The shares of all ranks are the range, each block once.
        #[test]
        fn shares_partition_the_range(dcp_size in 1..9_usize, blocks in range(40)) {
            let layout = DcpLayout::new(16, dcp_size).unwrap();
            let mut all: Vec<_> = (0..dcp_size)
                .flat_map(|rank| {
                    local_share(layout, blocks.clone(), rank).map(move |local| layout.logical_block(local, rank))
                })
                .collect();
            all.sort_unstable();
            prop_assert_eq!(all, blocks.collect::<Vec<_>>());
        }
    }

    #[test]
    fn ranges_from_outside_are_refused_whatever_they_are() {
        let mut coverage = Coverage::new(N_LAYERS, N_BLOCKS);
        let outside = [(0..N_LAYERS + 1, 0..1), (0..1, 0..usize::MAX), (usize::MAX - 1..usize::MAX, 0..1)];
        for (layers, blocks) in outside {
            let error = coverage.insert(layers, blocks, &[1]).unwrap_err();
            assert!(matches!(error, CoverageError::OutOfRange { .. }), "{error}");
        }
        assert_eq!(coverage.insert(0..2, 0..2, &[1]), Err(CoverageError::WrongCount { expected: 4, got: 1 }));
        #[expect(clippy::reversed_empty_ranges, reason = "what a peer may send")]
        let reversed = coverage.insert(2..1, 4..2, &[]);
        assert_eq!(reversed, Ok(Inserted::Repeat));
        assert_eq!(coverage, Coverage::new(N_LAYERS, N_BLOCKS));
    }
}
