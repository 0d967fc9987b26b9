//! The vector form of [`super::attention`]: blocks outside, groups of up to four queries inside.
//!
//! Queries that share a KV head share each load of a key or value vector. A block that many queries read is
//! converted to f32 once; one that few read is converted as it is loaded.

use std::ops::Range;

use longreach_types::KvDtype;

use super::{AttnInput, record_len, tile::Tile};
use crate::{
    element::{Bf16, Element, F16, F32},
    expf::{exp2_lanes, pow2_exact},
    simd::{Kernel, LANES, Simd},
};

/// Queries from which on converting a block beforehand is cheaper.
const CONVERT_FROM: usize = 12;
/// Queries that are computed together, at most.
const GROUP: usize = 4;

/// Computes the records of some shards of a tile.
pub(super) struct AttendTile<'a> {
    pub(super) input: &'a AttnInput<'a>,
    pub(super) tile: &'a Tile,
    pub(super) shards: Range<usize>,
    /// `[shards][queries][v_dim + 2]`.
    pub(super) states: &'a mut [f32],
}

/// One query of the tile: its vector and the positions it sees.
struct Query<'a> {
    q: &'a [f32],
    visible: Range<usize>,
}

/// One KV head of one block, and how to weigh it.
struct Block<'a, N: Element> {
    k: &'a [N::Bits],
    v: &'a [N::Bits],
    size: usize,
    v_dim: usize,
    /// First absolute position.
    start: usize,
    /// `scale · log2 e`.
    factor: f32,
}

/// Memory a task reuses over its blocks.
struct Scratch {
    /// `[GROUP][padded]` scores, then weights.
    weights: Vec<f32>,
    /// The power of two that block sums are padded to.
    padded: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Kernel for AttendTile<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.input.arena.geometry().dtype {
            KvDtype::F16 => attend::<S, F16>(s, self),
            KvDtype::Bf16 => attend::<S, Bf16>(s, self),
            KvDtype::F32 => attend::<S, F32>(s, self),
        }
    }
}

#[inline(always)]
fn attend<S: Simd, N: Element>(s: S, task: AttendTile<'_>) {
    let AttendTile { input, tile, shards, states } = task;
    let geometry = input.arena.geometry();
    let record = record_len(geometry.v_dim);
    let queries: Vec<Query<'_>> = tile
        .queries(input)
        .map(|query| Query {
            q: &input.q[query.row * input.q_stride + query.head * geometry.k_dim..][..geometry.k_dim],
            visible: input.visible(query.pos),
        })
        .collect();
    for state in states.chunks_exact_mut(record) {
        state.fill(0.0);
        state[record - 1] = f32::NEG_INFINITY;
    }
    let (Some(first), Some(last)) = (queries.first(), queries.last()) else { return };
    let padded = geometry.block_size.next_power_of_two().max(LANES);
    let weights = vec![f32::NEG_INFINITY; GROUP * padded];
    let mut scratch = Scratch { weights, padded, k: Vec::new(), v: Vec::new() };
    let converts = geometry.dtype != KvDtype::F32 && queries.len() >= CONVERT_FROM;
    let n_shards = input.layout.n_local_shards();
    for j in input.local_blocks(first.visible.start..last.visible.end) {
        let shard = j % n_shards;
        if !shards.contains(&shard) {
            continue;
        }
        let (k, v) = input.head_bytes(input.seqs[tile.seq].blocks[j], tile.kv_head);
        let block = Block::<N> {
            k: bytemuck::cast_slice(k),
            v: bytemuck::cast_slice(v),
            size: geometry.block_size,
            v_dim: geometry.v_dim,
            start: input.block_start(j),
            factor: input.scale * std::f32::consts::LOG2_E,
        };
        let len = queries.len() * record;
        let states = &mut states[(shard - shards.start) * len..][..len];
        if converts {
            let (mut k, mut v) = (std::mem::take(&mut scratch.k), std::mem::take(&mut scratch.v));
            let converted = block.convert(s, &mut k, &mut v);
            all_queries(s, &converted, &queries, states, &mut scratch);
            (scratch.k, scratch.v) = (k, v);
        } else {
            all_queries(s, &block, &queries, states, &mut scratch);
        }
    }
}

impl<N: Element> Block<'_, N> {
    /// The same block as f32.
    #[inline(always)]
    fn convert<'a, S: Simd>(&self, s: S, k: &'a mut Vec<f32>, v: &'a mut Vec<f32>) -> Block<'a, F32> {
        convert::<S, N>(s, self.k, k);
        convert::<S, N>(s, self.v, v);
        Block { k, v, size: self.size, v_dim: self.v_dim, start: self.start, factor: self.factor }
    }

    /// The keys of the block that a query sees.
    #[inline(always)]
    fn keys(&self, visible: &Range<usize>) -> Range<usize> {
        let end = self.start + self.size;
        visible.start.clamp(self.start, end) - self.start..visible.end.clamp(self.start, end) - self.start
    }
}

#[inline(always)]
fn convert<S: Simd, N: Element>(s: S, from: &[N::Bits], to: &mut Vec<f32>) {
    to.resize(from.len(), 0.0);
    let (chunks, tail) = from.as_chunks::<LANES>();
    let (to_chunks, to_tail) = to.as_chunks_mut::<LANES>();
    for (to, from) in to_chunks.iter_mut().zip(chunks) {
        s.store(N::load(s, from), to);
    }
    for (to, from) in to_tail.iter_mut().zip(tail) {
        *to = N::get(*from);
    }
}

/// Adds a block to every query's record, in groups.
#[inline(always)]
fn all_queries<S: Simd, N: Element>(
    s: S,
    block: &Block<'_, N>,
    queries: &[Query<'_>],
    states: &mut [f32],
    scratch: &mut Scratch,
) {
    let record = record_len(block.v_dim);
    let group = if S::WIDE { GROUP } else { 2 };
    for (queries, states) in queries.chunks(group).zip(states.chunks_mut(group * record)) {
        match queries {
            [a, b, c, d] => add_block::<S, N, 4>(s, block, [a, b, c, d], states, scratch),
            [a, b, c] => add_block::<S, N, 3>(s, block, [a, b, c], states, scratch),
            [a, b] => add_block::<S, N, 2>(s, block, [a, b], states, scratch),
            [a] => add_block::<S, N, 1>(s, block, [a], states, scratch),
            _ => {}
        }
    }
}

#[inline(always)]
fn add_block<S: Simd, N: Element, const Q: usize>(
    s: S,
    block: &Block<'_, N>,
    queries: [&Query<'_>; Q],
    states: &mut [f32],
    scratch: &mut Scratch,
) {
    let record = record_len(block.v_dim);
    let padded = scratch.padded;
    let keys = queries.map(|query| block.keys(&query.visible));
    if keys.iter().all(Range::is_empty) {
        return;
    }
    scores::<S, N, Q>(s, block, queries.map(|query| query.q), &mut scratch.weights, padded);
    let mut rescale = [1.0; Q];
    for q in 0..Q {
        let weights = &mut scratch.weights[q * padded..][..padded];
        let stats = &mut states[q * record + block.v_dim..][..2];
        rescale[q] = soften(s, weights, keys[q].clone(), block, stats);
    }
    if keys.iter().all(|range| *range == keys[0]) {
        values::<S, N, Q>(s, block, &scratch.weights, padded, keys[0].clone(), rescale, states);
        return;
    }
    for q in 0..Q {
        let weights = &scratch.weights[q * padded..][..padded];
        let state = &mut states[q * record..][..record];
        values::<S, N, 1>(s, block, weights, padded, keys[q].clone(), [rescale[q]], state);
    }
}

/// Dot products of `Q` queries with all keys of the block, into `weights` (`[Q][padded]`).
#[inline(always)]
fn scores<S: Simd, N: Element, const Q: usize>(
    s: S,
    block: &Block<'_, N>,
    queries: [&[f32]; Q],
    weights: &mut [f32],
    padded: usize,
) {
    let n_chunks = block.size / LANES;
    for chunk in (0..n_chunks / 2).map(|i| i * 2) {
        score_chunks::<S, N, Q, 2>(s, block, queries, chunk, weights, padded);
    }
    if n_chunks % 2 == 1 {
        score_chunks::<S, N, Q, 1>(s, block, queries, n_chunks - 1, weights, padded);
    }
    for key in n_chunks * LANES..block.size {
        for (q, query) in queries.iter().enumerate() {
            let dots = query.iter().zip(block.k[key..].iter().step_by(block.size));
            weights[q * padded + key] = dots.fold(0.0, |dot, (q, k)| q.mul_add(N::get(*k), dot));
        }
    }
}

#[inline(always)]
fn score_chunks<S: Simd, N: Element, const Q: usize, const C: usize>(
    s: S,
    block: &Block<'_, N>,
    queries: [&[f32]; Q],
    chunk: usize,
    weights: &mut [f32],
    padded: usize,
) {
    let mut dots = [[s.splat(0.0); C]; Q];
    for (d, row) in block.k.chunks_exact(block.size).enumerate() {
        let (keys, _) = row[chunk * LANES..][..C * LANES].as_chunks::<LANES>();
        for c in 0..C {
            let k = N::load(s, &keys[c]);
            for q in 0..Q {
                dots[q][c] = s.fma(s.splat(queries[q][d]), k, dots[q][c]);
            }
        }
    }
    for q in 0..Q {
        let (to, _) = weights[q * padded + chunk * LANES..][..C * LANES].as_chunks_mut::<LANES>();
        for c in 0..C {
            s.store(dots[q][c], &mut to[c]);
        }
    }
}

/// Turns one query's dot products into weights and updates its `l` and `max_exp2`. Returns the factor for
/// what was accumulated before.
#[inline(always)]
fn soften<S: Simd, N: Element>(
    s: S,
    weights: &mut [f32],
    keys: Range<usize>,
    block: &Block<'_, N>,
    stats: &mut [f32],
) -> f32 {
    if keys.is_empty() {
        return 1.0;
    }
    let (chunks, _) = weights.as_chunks_mut::<LANES>();
    for x in chunks.iter_mut() {
        s.store(s.mul(s.load(x), s.splat(block.factor)), x);
    }
    weights[..keys.start].fill(f32::NEG_INFINITY);
    weights[keys.end..].fill(f32::NEG_INFINITY);
    let (chunks, _) = weights.as_chunks_mut::<LANES>();
    let mut highest = s.load(&chunks[0]);
    for x in &chunks[1..] {
        highest = s.max(highest, s.load(x));
    }
    let highest = fold(s, highest, |a, b| if a > b { a } else { b });
    // Adding zero makes a negative zero positive.
    let highest = highest.ceil() + 0.0;
    let e = if stats[1] > highest { stats[1] } else { highest };
    if e == f32::NEG_INFINITY {
        weights.fill(0.0);
        return 1.0;
    }
    for x in chunks.iter_mut() {
        s.store(exp2_lanes(s, s.sub(s.load(x), s.splat(e))), x);
    }
    let rescale = pow2_exact(stats[1] - e);
    stats[0] = stats[0] * rescale + block_sum(s, chunks);
    stats[1] = e;
    rescale
}

/// The sum by halves of a power of two of vectors, then of their lanes.
#[inline(always)]
fn block_sum<S: Simd>(s: S, weights: &[[f32; LANES]]) -> f32 {
    let sum = match weights {
        [a] => s.load(a),
        [a, b] => s.add(s.load(a), s.load(b)),
        _ => {
            let mut sums = weights.to_vec();
            let mut half = sums.len() / 2;
            while half > 0 {
                for i in 0..half {
                    let sum = s.add(s.load(&sums[i]), s.load(&sums[i + half]));
                    s.store(sum, &mut sums[i]);
                }
                half /= 2;
            }
            s.load(&sums[0])
        }
    };
    fold(s, sum, |a, b| a + b)
}

/// Folds sixteen lanes by halves.
#[inline(always)]
fn fold<S: Simd>(s: S, x: S::F, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(x, &mut lanes);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// Rescales the `acc` of `Q` records and adds the weighted values of `keys`.
#[allow(
    clippy::too_many_arguments,
    reason = "an inlined inner loop; a struct would only rename its registers"
)]
#[inline(always)]
fn values<S: Simd, N: Element, const Q: usize>(
    s: S,
    block: &Block<'_, N>,
    weights: &[f32],
    padded: usize,
    keys: Range<usize>,
    rescale: [f32; Q],
    states: &mut [f32],
) {
    let record = record_len(block.v_dim);
    let wide = if S::WIDE { 4 } else { 2 };
    let mut d = 0;
    while d + LANES <= block.v_dim {
        if d + wide * LANES > block.v_dim {
            value_slab::<S, N, Q, 1>(s, block, weights, padded, keys.clone(), d, rescale, states);
            d += LANES;
        } else if S::WIDE {
            value_slab::<S, N, Q, 4>(s, block, weights, padded, keys.clone(), d, rescale, states);
            d += 4 * LANES;
        } else {
            value_slab::<S, N, Q, 2>(s, block, weights, padded, keys.clone(), d, rescale, states);
            d += 2 * LANES;
        }
    }
    for d in d..block.v_dim {
        for q in 0..Q {
            let acc = &mut states[q * record + d];
            *acc *= rescale[q];
            for key in keys.clone() {
                *acc = weights[q * padded + key].mul_add(N::get(block.v[key * block.v_dim + d]), *acc);
            }
        }
    }
}

/// `C` vectors of dimensions from `d` on, for `Q` queries.
#[allow(
    clippy::too_many_arguments,
    reason = "an inlined inner loop; a struct would only rename its registers"
)]
#[inline(always)]
fn value_slab<S: Simd, N: Element, const Q: usize, const C: usize>(
    s: S,
    block: &Block<'_, N>,
    weights: &[f32],
    padded: usize,
    keys: Range<usize>,
    d: usize,
    rescale: [f32; Q],
    states: &mut [f32],
) {
    let record = record_len(block.v_dim);
    let mut acc = [[s.splat(0.0); C]; Q];
    for q in 0..Q {
        let (from, _) = states[q * record + d..][..C * LANES].as_chunks::<LANES>();
        for c in 0..C {
            acc[q][c] = s.mul(s.load(&from[c]), s.splat(rescale[q]));
        }
    }
    for key in keys {
        let (row, _) = block.v[key * block.v_dim + d..][..C * LANES].as_chunks::<LANES>();
        for c in 0..C {
            let v = N::load(s, &row[c]);
            for q in 0..Q {
                acc[q][c] = s.fma(s.splat(weights[q * padded + key]), v, acc[q][c]);
            }
        }
    }
    for q in 0..Q {
        let (to, _) = states[q * record + d..][..C * LANES].as_chunks_mut::<LANES>();
        for c in 0..C {
            s.store(acc[q][c], &mut to[c]);
        }
    }
}
