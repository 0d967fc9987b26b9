//! The vector form of [`super::attention`]: blocks outside, groups of up to six queries inside.
//!
//! Queries that share a KV head share each load of a key or value vector. A block that many queries read is
//! converted to f32 once; one that few read is converted as it is loaded. The three steps of a group (scores,
//! weights, values) are kernels of their own: inlined into one they would be compiled for every combination
//! of format and group, and a call costs nothing beside what it computes.

use std::ops::Range;

use longreach_types::KvDtype;

use super::{AttnInput, record_len, tile::Tile};
use crate::{
    element::{Bf16, Element, F16, F32},
    expf::{exp2_lanes, pow2_exact},
    merge::halving_pairs,
    simd::{Kernel, LANES, Simd, Vector},
};

/// Queries from which on converting a block beforehand is cheaper.
const CONVERT_FROM: usize = 12;
/// Queries that are computed together, at most.
const GROUP: usize = 6;

/// Computes the records of some shards of a tile.
pub(super) struct AttendTile<'a> {
    pub(super) vector: Vector,
    pub(super) input: &'a AttnInput<'a>,
    pub(super) tile: &'a Tile,
    pub(super) shards: Range<usize>,
    /// `[shards][queries][v_dim + 2]`, zeroed.
    pub(super) states: &'a mut [f32],
}

/// One query of the tile: its vector and the positions it sees.
struct Query<'a> {
    q: &'a [f32],
    visible: Range<usize>,
}

/// One KV head of one block.
#[derive(Clone, Copy)]
struct Block<'a, N: Element> {
    k: &'a [N::Bits],
    v: &'a [N::Bits],
    size: usize,
    v_dim: usize,
    /// First absolute position.
    start: usize,
    /// Keys and values of the block that is next, to be fetched while this one is computed: a table's blocks
    /// lie anywhere, so the processor cannot guess.
    next: (&'a [N::Bits], &'a [N::Bits]),
}

/// Memory and constants a task reuses over its blocks.
struct Scratch {
    vector: Vector,
    /// `scale · log2 e`.
    factor: f32,
    /// `[GROUP][padded]` scores, then weights.
    weights: Vec<f32>,
    /// The power of two that block sums are padded to.
    padded: usize,
}

impl AttendTile<'_> {
    pub(super) fn run(self) {
        match self.input.arena.geometry().dtype {
            KvDtype::F16 => self.attend::<F16>(),
            KvDtype::Bf16 => self.attend::<Bf16>(),
            KvDtype::F32 => self.attend::<F32>(),
        }
    }

    fn attend<N: Element>(self) {
        let Self { vector, input, tile, shards, states } = self;
        let geometry = input.arena.geometry();
        let record = record_len(geometry.v_dim);
        let queries = queries(input, tile);
        for state in states.chunks_exact_mut(record) {
            state[record - 1] = f32::NEG_INFINITY;
        }
        let (Some(first), Some(last)) = (queries.first(), queries.last()) else { return };
        let padded = geometry.block_size.next_power_of_two().max(LANES);
        let weights = vec![f32::NEG_INFINITY; GROUP * padded];
        let factor = input.scale * std::f32::consts::LOG2_E;
        let mut scratch = Scratch { vector, factor, weights, padded };
        let mut converted = (geometry.dtype != KvDtype::F32 && queries.len() >= CONVERT_FROM)
            .then(|| Converted { k: Vec::new(), v: Vec::new() });
        let n_shards = input.layout.n_local_shards();
        let own = |j: &usize| shards.contains(&(j % n_shards));
        let mut blocks = input.local_blocks(first.visible.start..last.visible.end).filter(own).peekable();
        let bytes = |j: usize| {
            let (k, v) = input.head_bytes(input.seqs[tile.seq].blocks[j], tile.kv_head);
            (bytemuck::cast_slice(k), bytemuck::cast_slice(v))
        };
        while let Some(j) = blocks.next() {
            let (k, v) = bytes(j);
            let next = bytes(*blocks.peek().unwrap_or(&j));
            let (size, v_dim) = (geometry.block_size, geometry.v_dim);
            let block = Block::<N> { k, v, size, v_dim, start: input.block_start(j), next };
            let len = queries.len() * record;
            let states = &mut states[(j % n_shards - shards.start) * len..][..len];
            match &mut converted {
                Some(converted) => add_block(&converted.of(vector, &block), &queries, states, &mut scratch),
                None => add_block(&block, &queries, states, &mut scratch),
            }
        }
    }
}

fn queries<'a>(input: &AttnInput<'a>, tile: &Tile) -> Vec<Query<'a>> {
    let k_dim = input.arena.geometry().k_dim;
    tile.queries(input)
        .map(|query| Query {
            q: &input.q[query.row * input.q_stride + query.head * k_dim..][..k_dim],
            visible: input.visible(query.pos),
        })
        .collect()
}

/// Room for a block as f32.
struct Converted {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Converted {
    fn of<'a, N: Element>(&'a mut self, vector: Vector, block: &Block<'_, N>) -> Block<'a, F32> {
        self.k.resize(block.k.len(), 0.0);
        self.v.resize(block.v.len(), 0.0);
        vector.run(Convert::<N> { from: block.k, to: &mut self.k });
        vector.run(Convert::<N> { from: block.v, to: &mut self.v });
        let (k, v) = (&self.k[..], &self.v[..]);
        Block { k, v, size: block.size, v_dim: block.v_dim, start: block.start, next: (k, v) }
    }
}

impl<N: Element> Block<'_, N> {
    /// The keys of the block that a query sees.
    fn keys(&self, visible: &Range<usize>) -> Range<usize> {
        let end = self.start + self.size;
        visible.start.clamp(self.start, end) - self.start..visible.end.clamp(self.start, end) - self.start
    }
}

/// Adds a block to every query's record, group by group.
fn add_block<N: Element>(
    block: &Block<'_, N>,
    queries: &[Query<'_>],
    states: &mut [f32],
    scratch: &mut Scratch,
) {
    let record = record_len(block.v_dim);
    let group = scratch.vector.max_queries();
    for (queries, states) in queries.chunks(group).zip(states.chunks_mut(group * record)) {
        match queries {
            [a, b, c, d, e, f] => add_to_group(block, [a, b, c, d, e, f], states, scratch),
            [a, b, c, d, rest @ ..] => {
                let (states, rest_states) = states.split_at_mut(4 * record);
                add_to_group(block, [a, b, c, d], states, scratch);
                if let [e] = rest {
                    add_to_group(block, [e], rest_states, scratch);
                }
            }
            [a, b, c] => add_to_group(block, [a, b, c], states, scratch),
            [a, b] => add_to_group(block, [a, b], states, scratch),
            [a] => add_to_group(block, [a], states, scratch),
            [] => {}
        }
    }
}

fn add_to_group<N: Element, const Q: usize>(
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
    let queries = queries.map(|query| query.q);
    scratch.vector.run(Scores { block, queries, weights: &mut scratch.weights, padded });
    let factor = scratch.factor;
    let soften = Soften { weights: &mut scratch.weights, padded, keys: &keys, factor, states, record };
    let rescale = scratch.vector.run(soften);
    let weights = &scratch.weights;
    if keys.iter().all(|range| *range == keys[0]) {
        let keys = keys[0].clone();
        scratch.vector.run(Values { block, weights, padded, keys, rescale, states });
        return;
    }
    for (q, keys) in keys.into_iter().enumerate() {
        let weights = &scratch.weights[q * padded..][..padded];
        let states = &mut states[q * record..][..record];
        scratch.vector.run(Values { block, weights, padded, keys, rescale: [rescale[q]], states });
    }
}

struct Convert<'a, N: Element> {
    from: &'a [N::Bits],
    to: &'a mut [f32],
}

impl<N: Element> Kernel for Convert<'_, N> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (chunks, tail) = self.from.as_chunks::<LANES>();
        let (to_chunks, to_tail) = self.to.as_chunks_mut::<LANES>();
        for (to, from) in to_chunks.iter_mut().zip(chunks) {
            s.store(N::load(s, from), to);
        }
        for (to, from) in to_tail.iter_mut().zip(tail) {
            *to = N::get(*from);
        }
    }
}

/// Dot products of `Q` queries with all keys of the block, into `weights` (`[Q][padded]`).
struct Scores<'a, N: Element, const Q: usize> {
    block: &'a Block<'a, N>,
    queries: [&'a [f32]; Q],
    weights: &'a mut [f32],
    padded: usize,
}

impl<N: Element, const Q: usize> Kernel for Scores<'_, N, Q> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if Q > S::MAX_QUERIES {
            return;
        }
        let size = self.block.size;
        let n_chunks = size / LANES;
        for chunk in (0..n_chunks / 2).map(|i| i * 2) {
            self.chunks::<S, 2>(s, chunk);
        }
        if n_chunks % 2 == 1 {
            self.chunks::<S, 1>(s, n_chunks - 1);
        }
        for key in n_chunks * LANES..size {
            for (q, query) in self.queries.iter().enumerate() {
                let dots = query.iter().zip(self.block.k[key..].iter().step_by(size));
                let dot = dots.fold(0.0, |dot, (q, k)| q.mul_add(N::get(*k), dot));
                self.weights[q * self.padded + key] = dot;
            }
        }
    }
}

impl<N: Element, const Q: usize> Scores<'_, N, Q> {
    #[inline(always)]
    fn chunks<S: Simd, const C: usize>(&mut self, s: S, chunk: usize) {
        let mut dots = [[s.splat(0.0); C]; Q];
        let k_dim = self.block.k.len() / self.block.size;
        let queries = self.queries.map(|query| &query[..k_dim]);
        let rows = self.block.k.chunks_exact(self.block.size);
        let next_rows = self.block.next.0.chunks_exact(self.block.size);
        for ((d, row), next) in rows.enumerate().zip(next_rows) {
            s.prefetch(&next[chunk * LANES]);
            let (keys, _) = row[chunk * LANES..][..C * LANES].as_chunks::<LANES>();
            for c in 0..C {
                let k = N::load(s, &keys[c]);
                for q in 0..Q {
                    // SAFETY: there are `k_dim` rows, and each query was cut to that length.
                    let x = unsafe { *queries[q].get_unchecked(d) };
                    dots[q][c] = s.fma(s.splat(x), k, dots[q][c]);
                }
            }
        }
        for q in 0..Q {
            let to = &mut self.weights[q * self.padded + chunk * LANES..][..C * LANES];
            let (to, _) = to.as_chunks_mut::<LANES>();
            for c in 0..C {
                s.store(dots[q][c], &mut to[c]);
            }
        }
    }
}

/// Turns dot products into weights and updates `l` and `max_exp2` of `Q` records. Returns for each the factor
/// for what was accumulated before.
struct Soften<'a, const Q: usize> {
    /// `[Q][padded]`.
    weights: &'a mut [f32],
    padded: usize,
    keys: &'a [Range<usize>; Q],
    factor: f32,
    /// `[Q][record]`.
    states: &'a mut [f32],
    record: usize,
}

impl<const Q: usize> Kernel for Soften<'_, Q> {
    type Out = [f32; Q];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; Q] {
        let mut rescale = [1.0; Q];
        if Q > S::MAX_QUERIES {
            return rescale;
        }
        for q in 0..Q {
            let keys = &self.keys[q];
            if keys.is_empty() {
                continue;
            }
            let (chunks, _) = self.weights[q * self.padded..][..self.padded].as_chunks_mut::<LANES>();
            let (_, stats) = self.states[q * self.record..][..self.record].split_at_mut(self.record - 2);
            // The usual block of 32 becomes straight code.
            rescale[q] = match chunks.as_mut_array::<2>() {
                Some(pair) => soften(s, pair, keys, self.factor, stats),
                None => soften(s, chunks, keys, self.factor, stats),
            };
        }
        rescale
    }
}

/// One query's part of [`Soften`].
#[inline(always)]
fn soften<S: Simd>(
    s: S,
    chunks: &mut [[f32; LANES]],
    keys: &Range<usize>,
    factor: f32,
    stats: &mut [f32],
) -> f32 {
    for x in chunks.iter_mut() {
        s.store(s.mul(s.load(x), s.splat(factor)), x);
    }
    if keys.len() < chunks.as_flattened().len() {
        mask(chunks.as_flattened_mut(), keys);
    }
    let mut highest = s.load(&chunks[0]);
    for x in &chunks[1..] {
        highest = s.max(highest, s.load(x));
    }
    // Adding zero makes a negative zero positive.
    let highest = s.max_lane(highest).ceil() + 0.0;
    let e = if stats[1] > highest { stats[1] } else { highest };
    if e == f32::NEG_INFINITY {
        chunks.as_flattened_mut().fill(0.0);
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

#[cold]
fn mask(scores: &mut [f32], keys: &Range<usize>) {
    scores[..keys.start].fill(f32::NEG_INFINITY);
    scores[keys.end..].fill(f32::NEG_INFINITY);
}

/// The sum by halves of a power of two of vectors, then of their lanes.
#[inline(always)]
fn block_sum<S: Simd>(s: S, weights: &[[f32; LANES]]) -> f32 {
    match weights {
        [a] => s.sum_lanes(s.load(a)),
        [a, b] => s.sum_lanes(s.add(s.load(a), s.load(b))),
        _ => {
            let mut sums = weights.to_vec();
            for (to, from) in halving_pairs(sums.len()) {
                let sum = s.add(s.load(&sums[to]), s.load(&sums[from]));
                s.store(sum, &mut sums[to]);
            }
            s.sum_lanes(s.load(&sums[0]))
        }
    }
}

/// Rescales the `acc` of `Q` records and adds the weighted values of `keys`.
struct Values<'a, N: Element, const Q: usize> {
    block: &'a Block<'a, N>,
    /// `[Q][padded]`.
    weights: &'a [f32],
    padded: usize,
    keys: Range<usize>,
    rescale: [f32; Q],
    /// `[Q][v_dim + 2]`.
    states: &'a mut [f32],
}

impl<N: Element, const Q: usize> Kernel for Values<'_, N, Q> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if Q > S::MAX_QUERIES {
            return;
        }
        let v_dim = self.block.v_dim;
        let wide = if S::MAX_QUERIES > 2 { 4 } else { 2 };
        let mut d = 0;
        while d + wide * LANES <= v_dim {
            if S::MAX_QUERIES > 2 {
                self.slab::<S, 4>(s, d);
            } else {
                self.slab::<S, 2>(s, d);
            }
            d += wide * LANES;
        }
        while d + LANES <= v_dim {
            self.slab::<S, 1>(s, d);
            d += LANES;
        }
        for d in d..v_dim {
            self.one_dim(d);
        }
    }
}

impl<N: Element, const Q: usize> Values<'_, N, Q> {
    /// `C` vectors of dimensions from `d` on.
    #[inline(always)]
    fn slab<S: Simd, const C: usize>(&mut self, s: S, d: usize) {
        let v_dim = self.block.v_dim;
        let record = record_len(v_dim);
        let mut acc = [[s.splat(0.0); C]; Q];
        for q in 0..Q {
            let (from, _) = self.states[q * record + d..][..C * LANES].as_chunks::<LANES>();
            for c in 0..C {
                acc[q][c] = s.mul(s.load(&from[c]), s.splat(self.rescale[q]));
            }
        }
        let mut weights = [&self.weights[..0]; Q];
        for q in 0..Q {
            weights[q] = &self.weights[q * self.padded..][..self.keys.end];
        }
        for key in self.keys.clone() {
            let (row, _) = self.block.v[key * v_dim + d..][..C * LANES].as_chunks::<LANES>();
            for c in 0..C {
                if c % 2 == 0 {
                    s.prefetch(&self.block.next.1[key * v_dim + d + c * LANES]);
                }
                let v = N::load(s, &row[c]);
                for q in 0..Q {
                    // SAFETY: `key` is below `keys.end`, to which each row of weights was cut.
                    let weight = unsafe { *weights[q].get_unchecked(key) };
                    acc[q][c] = s.fma(s.splat(weight), v, acc[q][c]);
                }
            }
        }
        for q in 0..Q {
            let (to, _) = self.states[q * record + d..][..C * LANES].as_chunks_mut::<LANES>();
            for c in 0..C {
                s.store(acc[q][c], &mut to[c]);
            }
        }
    }

    #[inline(always)]
    fn one_dim(&mut self, d: usize) {
        let v_dim = self.block.v_dim;
        for q in 0..Q {
            let acc = &mut self.states[q * record_len(v_dim) + d];
            *acc *= self.rescale[q];
            for key in self.keys.clone() {
                let v = N::get(self.block.v[key * v_dim + d]);
                *acc = self.weights[q * self.padded + key].mul_add(v, *acc);
            }
        }
    }
}
