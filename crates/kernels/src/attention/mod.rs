//! Attention over paged KV blocks, as partial results that merge across ranks.
//!
//! Input: queries `[n_rows][n_q_heads][k_dim]` (with a row stride), blocks as in `kv.rs`. Output: for each
//! (row, head) a record `acc[v_dim], l, max_exp2` (`merge.rs`) over the keys of *this* rank.
//!
//! **Order.** Block `j` of the rank's table holds logical block `layout.logical_block(j, dcp_rank)` and belongs
//! to local shard `j mod n_local_shards`. Each shard takes its blocks in ascending order from the identity;
//! the shards' records then merge by halves. A block is always processed as B keys:
//! ```text
//! dot_k = fma(q[d], K[d][k], dot_k)   from +0.0, ascending d             lanes are keys
//! x_k   = dot_k · (scale · log2 e)    −∞ if key k is masked or absent
//! e'    = max(e, ceil(max x_k)),  r = 2^(e − e')
//! p_k   = exp2(x_k − e')              exactly 0 for masked keys
//! l     = l · r + Σ p_k               Σ over the block by halves: k + n/2, k + n/4, …; n the power of two ≥ max(B, 16)
//! acc   = fma(p_k, V[k][d], acc · r)  ascending k, visible keys only     lanes are dimensions
//! ```
//! A block without visible keys changes nothing, so it is skipped. Lanes of masked keys are discarded, and their
//! values are not read: their bytes may be anything.
//!
//! Row `i` of a sequence sees the keys at positions `≤ first_pos + i`, and `> first_pos + i − window`: by
//! absolute position, so that decode, chunked prefill and verification are one kernel.
//!
//! **Tasks.** A task is a tile of rows times the query heads of one KV head, so that a block is converted and
//! cached once for all of them; when there are fewer tasks than threads want, the shards of a tile become
//! tasks of their own.
//!
//! **Ladder.** Same machine as in `matmul`; 30 layers, 9 query and 3 KV heads of 64, f16, B = 32, one thread.
//!
//! | version | 512 rows from position 0 | 1 row at 8,000 |
//! |---|---|---|
//! | four queries a group, lanes folded by scalar code | 212 ms | 23.0 ms (8 GB/s) |
//! | six queries, folds in registers, next block fetched into the first-level cache | 175 ms | 22.9 ms |
//! | … into the second-level cache | 175 ms | 11.2 ms (17 GB/s) |
//! | four value vectors a query, no bounds checks in the two inner loops | 144 ms (31 GMAC/s) | 9.2 ms (20 GB/s) |
//!
//! Two threads: 72 ms and 5.8 ms (32 GB/s). At 4,000 keys a row prefill reaches 38 of 58 GMAC/s a thread; the
//! rest is the softmax.

mod kernel;
mod reference;
mod tile;

use std::ops::Range;

use longreach_types::{BlockId, DcpLayout};

use crate::{
    exec::{Disjoint, Exec},
    kv::KvArena,
    merge::{halving_pairs, merge_record},
    simd::{Kernel, Simd, Vector},
};
use tile::{Tile, tiles};

/// One sequence's rows in a batch.
#[derive(Clone, Debug)]
pub struct AttnSeq<'a> {
    /// The sequence's blocks on this DCP rank, ascending. May reach beyond what the rows see.
    pub blocks: &'a [BlockId],
    /// Its rows in the batch.
    pub rows: Range<usize>,
    /// Absolute position of its first row.
    pub first_pos: usize,
}

/// One layer's attention of a batch.
#[derive(Clone, Copy, Debug)]
pub struct AttnInput<'a> {
    /// The KV cache; the batch's own keys and values are already in it.
    pub arena: &'a KvArena,
    /// Which layer.
    pub layer: usize,
    /// Queries: row `r` has its heads from `r · q_stride` on.
    pub q: &'a [f32],
    /// Distance between query rows, in numbers.
    pub q_stride: usize,
    /// Query heads a row.
    pub n_q_heads: usize,
    /// For each query head the index of its KV head among those of the arena.
    pub kv_index: &'a [u32],
    /// Softmax scale.
    pub scale: f32,
    /// Keys a row sees at most, itself included; none for all.
    pub window: Option<usize>,
    /// How positions lie over ranks.
    pub layout: DcpLayout,
    /// Which rank this is.
    pub dcp_rank: usize,
    /// The sequences; their rows are disjoint.
    pub seqs: &'a [AttnSeq<'a>],
}

/// Numbers of a record.
pub const fn record_len(v_dim: usize) -> usize {
    v_dim + 2
}

/// Computes the record of every (row, head) into `out`, `[n_rows][n_q_heads][v_dim + 2]`.
///
/// # Panics
/// If shapes do not fit each other, or a table has fewer blocks than its rows see.
pub fn attention(exec: &Exec, input: &AttnInput<'_>, out: &mut [f32]) {
    check(input, out);
    if input.n_q_heads == 0 || out.is_empty() {
        return;
    }
    let Some(vector) = exec.vector() else {
        return reference::attention(input, out);
    };
    let tiles = tiles(input);
    let n_shards = input.layout.n_local_shards();
    let job = Job { input, vector, out: Disjoint::new(out) };
    if exec.n_threads() > 1 && tiles.len() < 4 * exec.n_threads() && n_shards > 1 {
        return job.run_by_shards(exec, &tiles, n_shards);
    }
    exec.parallel(tiles.len(), |i| {
        let tile = &tiles[i];
        let mut states = vec![0.0; n_shards * tile.state_len(input)];
        job.attend(tile, 0..n_shards, &mut states);
        // SAFETY: tiles are disjoint sets of (row, head).
        unsafe { job.merge_shards(tile, n_shards, &mut states) };
    });
}

fn check(input: &AttnInput<'_>, out: &[f32]) {
    let geometry = input.arena.geometry();
    assert_eq!(input.kv_index.len(), input.n_q_heads, "kv_index is not one entry a query head");
    assert!(
        input.kv_index.iter().all(|&i| (i as usize) < geometry.n_kv_heads),
        "kv_index beyond the KV heads"
    );
    assert_eq!(input.layout.block_size(), geometry.block_size, "layout and arena differ in block size");
    let width = input.n_q_heads * geometry.k_dim;
    assert!(width <= input.q_stride, "{width} numbers of queries exceed the row stride {}", input.q_stride);
    let n_rows = input.seqs.iter().map(|seq| seq.rows.end).max().unwrap_or(0);
    assert!(
        n_rows * input.n_q_heads * record_len(geometry.v_dim) <= out.len(),
        "out is shorter than {n_rows} rows"
    );
    assert!(
        n_rows == 0 || (n_rows - 1) * input.q_stride + width <= input.q.len(),
        "q is shorter than {n_rows} rows"
    );
    let mut ends: Vec<_> = input.seqs.iter().map(|seq| (seq.rows.start, seq.rows.end)).collect();
    ends.sort_unstable();
    assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0), "rows of sequences overlap");
    for seq in input.seqs.iter().filter(|seq| !seq.rows.is_empty()) {
        let n_blocks = input.layout.n_blocks(seq.first_pos + seq.rows.len());
        let needed = input.layout.local_n_blocks(n_blocks, input.dcp_rank);
        assert!(needed <= seq.blocks.len(), "a table of {} blocks where {needed} are seen", seq.blocks.len());
    }
}

impl AttnInput<'_> {
    /// Absolute positions that the row at `pos` sees.
    fn visible(&self, pos: usize) -> Range<usize> {
        (pos + 1).saturating_sub(self.window.unwrap_or(usize::MAX))..pos + 1
    }

    /// Local indices of the blocks that hold any of these positions on this rank.
    fn local_blocks(&self, positions: Range<usize>) -> Range<usize> {
        let count = |n_blocks| self.layout.local_n_blocks(n_blocks, self.dcp_rank);
        count(self.layout.block(positions.start))..count(self.layout.n_blocks(positions.end))
    }

    /// First absolute position of local block `j`.
    fn block_start(&self, j: usize) -> usize {
        self.layout.logical_block(j, self.dcp_rank) * self.layout.block_size()
    }

    /// Stored keys and values of one KV head in one block.
    fn head_bytes(&self, block: BlockId, kv_head: usize) -> (&[u8], &[u8]) {
        let geometry = self.arena.geometry();
        let bytes = &self.arena.block(self.layer, block)[kv_head * geometry.head_bytes()..];
        bytes[..geometry.head_bytes()].split_at(geometry.k_bytes())
    }
}

/// What the tasks of one call share.
struct Job<'a> {
    input: &'a AttnInput<'a>,
    vector: Vector,
    out: Disjoint<'a, f32>,
}

impl Job<'_> {
    /// Computes the records of `shards` of a tile, `[shards][queries][record]`.
    fn attend(&self, tile: &Tile, shards: Range<usize>, states: &mut [f32]) {
        kernel::AttendTile { vector: self.vector, input: self.input, tile, shards, states }.run();
    }

    /// Some shards of every tile as a task, then every tile's merge.
    fn run_by_shards(&self, exec: &Exec, tiles: &[Tile], n_shards: usize) {
        let per_tile = (4 * exec.n_threads()).div_ceil(tiles.len()).min(n_shards);
        let per_task = n_shards.div_ceil(per_tile);
        let lens = tiles.iter().map(|tile| n_shards * tile.state_len(self.input));
        let starts: Vec<usize> =
            lens.scan(0, |next, len| Some(std::mem::replace(next, *next + len))).collect();
        let total = tiles.iter().map(|tile| n_shards * tile.state_len(self.input)).sum();
        let mut states = vec![0.0; total];
        let all = Disjoint::new(&mut states);
        exec.parallel(tiles.len() * per_tile, |i| {
            let (tile, part) = (&tiles[i / per_tile], i % per_tile);
            let len = tile.state_len(self.input);
            let shards = (part * per_task).min(n_shards)..((part + 1) * per_task).min(n_shards);
            // SAFETY: each task has its own shards of its own tile.
            let states = unsafe { all.slice(starts[i / per_tile] + shards.start * len, shards.len() * len) };
            self.attend(tile, shards, states);
        });
        for (tile, &start) in tiles.iter().zip(&starts) {
            let len = n_shards * tile.state_len(self.input);
            // SAFETY: the tasks above have ended, and tiles are disjoint.
            unsafe { self.merge_shards(tile, n_shards, all.slice(start, len)) };
        }
    }

    /// Merges the shards of a tile and writes its records to the output.
    ///
    /// # Safety
    /// No other task may write the tile's (row, head) pairs.
    unsafe fn merge_shards(&self, tile: &Tile, n_shards: usize, states: &mut [f32]) {
        let record = record_len(self.input.arena.geometry().v_dim);
        self.vector.run(MergeShards { states, len: tile.state_len(self.input), record, n_shards });
        for (query, state) in tile.queries(self.input).zip(states.chunks_exact(record)) {
            let at = (query.row * self.input.n_q_heads + query.head) * record;
            // SAFETY: this function's contract.
            unsafe { self.out.slice(at, record) }.copy_from_slice(state);
        }
    }
}

/// Merges the records of all shards into those of the first.
struct MergeShards<'a> {
    /// `[n_shards][len]`.
    states: &'a mut [f32],
    len: usize,
    record: usize,
    n_shards: usize,
}

impl Kernel for MergeShards<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { states, len, record, n_shards } = self;
        for (to, from) in halving_pairs(n_shards) {
            let (head, tail) = states.split_at_mut(from * len);
            let pairs = head[to * len..][..len].chunks_exact_mut(record).zip(tail.chunks_exact(record));
            for (a, b) in pairs {
                merge_record(a, b);
            }
        }
    }
}

#[cfg(test)]
mod tests;
