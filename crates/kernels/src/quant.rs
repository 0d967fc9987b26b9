//! Activations as signed bytes, quantised once per matmul in blocks of 32.
//!
//! For a block `x` with `amax = max |x|`: `d = amax / 127`, `q = round_half_even(x · (1 / d))`; below the
//! smallest normal `d` the block is all zero. A block that holds an infinity or a NaN gets `d = NaN`, so that
//! a broken activation shows in the result on every implementation alike.
//!
//! The bytes lie tile by tile: the blocks of up to twelve tokens that a kernel has in flight are neighbours,
//! in the order it reads them.

use std::ops::Range;

use crate::{
    exec::{Disjoint, Exec},
    simd::{Kernel, LANES, Simd, Vector},
    stored::GROUP,
};

/// Quads of bytes in a block: what one byte dot product takes.
pub(crate) const QUADS: usize = GROUP / 4;

/// One block of each of `T` tokens.
#[derive(Clone, Copy)]
pub(crate) struct ActBlock<const T: usize> {
    pub(crate) q: [[[i8; 4]; QUADS]; T],
    pub(crate) d: [f32; T],
    /// `d` times the sum of the block's bytes.
    pub(crate) d_sum: [f32; T],
    /// The negated sums of the block's two halves.
    pub(crate) neg_sums: [[i32; 2]; T],
}

impl<const T: usize> ActBlock<T> {
    const ZERO: Self = Self { q: [[[0; 4]; QUADS]; T], d: [0.0; T], d_sum: [0.0; T], neg_sums: [[0; 2]; T] };
}

/// Consecutive tiles of `T` tokens; each has `n_steps` blocks (or, for float weights, columns).
pub(crate) struct TileSet<const T: usize, B> {
    pub(crate) first_token: usize,
    pub(crate) n_tiles: usize,
    pub(crate) n_steps: usize,
    pub(crate) steps: Vec<B>,
}

impl<const T: usize, B> TileSet<T, B> {
    /// The tiles that start within `tokens`, each with its first token.
    #[inline(always)]
    pub(crate) fn tiles(&self, tokens: &Range<usize>) -> impl Iterator<Item = (usize, &[B])> {
        let index = |token: usize| token.saturating_sub(self.first_token).div_ceil(T).min(self.n_tiles);
        (index(tokens.start)..index(tokens.end))
            .map(|i| (self.first_token + i * T, &self.steps[i * self.n_steps..(i + 1) * self.n_steps]))
    }
}

/// How many tiles of 12, 4, 2 and 1 tokens a batch is cut into, widest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileCounts {
    pub(crate) n_12: usize,
    pub(crate) n_4: usize,
    pub(crate) n_2: usize,
    pub(crate) n_1: usize,
}

impl TileCounts {
    pub(crate) fn new(n_tokens: usize, vector: Vector) -> Self {
        let mut rest = n_tokens;
        let mut count = |width| {
            let n = if width <= vector.max_tokens() { rest / width } else { 0 };
            rest -= n * width;
            n
        };
        Self { n_12: count(12), n_4: count(4), n_2: count(2), n_1: count(1) }
    }
}

/// A batch of activations, cut into tiles.
pub(crate) struct Tiled<B12, B4, B2, B1> {
    pub(crate) t12: TileSet<12, B12>,
    pub(crate) t4: TileSet<4, B4>,
    pub(crate) t2: TileSet<2, B2>,
    pub(crate) t1: TileSet<1, B1>,
}

/// Quantised activations.
pub(crate) type Acts = Tiled<ActBlock<12>, ActBlock<4>, ActBlock<2>, ActBlock<1>>;
/// Activations for float weights: each step is one column of a tile.
pub(crate) type Columns = Tiled<[f32; 12], [f32; 4], [f32; 2], [f32; 1]>;

/// A batch to be tiled: `[n_tokens][k]`.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) k: usize,
    pub(crate) n_tokens: usize,
}

impl Acts {
    /// Quantises `batch`, whose `k` is a multiple of 32.
    pub(crate) fn quantise(exec: &Exec, vector: Vector, batch: Batch<'_>) -> Self {
        let counts = TileCounts::new(batch.n_tokens, vector);
        let (f4, f2, f1) = starts(counts);
        Self {
            t12: quantise_tiles(exec, vector, batch, (0, counts.n_12)),
            t4: quantise_tiles(exec, vector, batch, (f4, counts.n_4)),
            t2: quantise_tiles(exec, vector, batch, (f2, counts.n_2)),
            t1: quantise_tiles(exec, vector, batch, (f1, counts.n_1)),
        }
    }
}

impl Columns {
    /// Transposes `batch` tile by tile.
    pub(crate) fn transpose(vector: Vector, batch: Batch<'_>) -> Self {
        let counts = TileCounts::new(batch.n_tokens, vector);
        let (f4, f2, f1) = starts(counts);
        Self {
            t12: transpose_tiles(batch, (0, counts.n_12)),
            t4: transpose_tiles(batch, (f4, counts.n_4)),
            t2: transpose_tiles(batch, (f2, counts.n_2)),
            t1: transpose_tiles(batch, (f1, counts.n_1)),
        }
    }
}

fn starts(counts: TileCounts) -> (usize, usize, usize) {
    let f4 = counts.n_12 * 12;
    let f2 = f4 + counts.n_4 * 4;
    (f4, f2, f2 + counts.n_2 * 2)
}

fn transpose_tiles<const T: usize>(
    batch: Batch<'_>,
    (first_token, n_tiles): (usize, usize),
) -> TileSet<T, [f32; T]> {
    let mut steps = vec![[0.0; T]; n_tiles * batch.k];
    for (i, tile) in steps.chunks_mut(batch.k.max(1)).enumerate() {
        for t in 0..T {
            let row = &batch.x[(first_token + i * T + t) * batch.k..][..batch.k];
            for (column, &x) in tile.iter_mut().zip(row) {
                column[t] = x;
            }
        }
    }
    TileSet { first_token, n_tiles, n_steps: batch.k, steps }
}

fn quantise_tiles<const T: usize>(
    exec: &Exec,
    vector: Vector,
    batch: Batch<'_>,
    (first_token, n_tiles): (usize, usize),
) -> TileSet<T, ActBlock<T>> {
    let n_steps = batch.k / GROUP;
    let mut steps = vec![ActBlock::<T>::ZERO; n_tiles * n_steps];
    let out = Disjoint::new(&mut steps);
    exec.parallel(n_tiles, |i| {
        // SAFETY: each task has its own tile.
        let blocks = unsafe { out.slice(i * n_steps, n_steps) };
        let rows = &batch.x[(first_token + i * T) * batch.k..][..T * batch.k];
        vector.run(QuantiseTile { rows, blocks });
    });
    TileSet { first_token, n_tiles, n_steps, steps }
}

struct QuantiseTile<'a, const T: usize> {
    rows: &'a [f32],
    blocks: &'a mut [ActBlock<T>],
}

impl<const T: usize> Kernel for QuantiseTile<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let groups = self.rows.as_chunks::<GROUP>().0;
        let n_steps = self.blocks.len();
        for (step, block) in self.blocks.iter_mut().enumerate() {
            for t in 0..T {
                let (bytes, _) = block.q[t].as_flattened_mut().as_chunks_mut::<LANES>();
                let (d, sums) = quantise_lanes(s, &groups[t * n_steps + step], bytes);
                block.d[t] = d;
                block.d_sum[t] = d * (sums[0] + sums[1]) as f32;
                block.neg_sums[t] = [-sums[0], -sums[1]];
            }
        }
    }
}

/// The scale of a block whose largest magnitude is `amax`, and the factor that makes bytes of its values.
#[inline(always)]
fn scale_of(amax: f32) -> (f32, f32) {
    let d = amax / 127.0;
    if amax == f32::INFINITY {
        (f32::NAN, 0.0)
    } else if d < f32::MIN_POSITIVE {
        (0.0, 0.0)
    } else {
        (d, 1.0 / d)
    }
}

/// The reference: scale and bytes of one block.
pub(crate) fn quantise_block(x: &[f32; GROUP]) -> (f32, [i8; GROUP]) {
    let magnitude = |x: f32| if x.abs() < f32::INFINITY { x.abs() } else { f32::INFINITY };
    let amax = x.iter().fold(0.0, |amax: f32, &x| amax.max(magnitude(x)));
    let (d, inverse) = scale_of(amax);
    if inverse == 0.0 {
        return (d, [0; GROUP]);
    }
    (d, x.map(|x| (x * inverse).round_ties_even() as i8))
}

/// Scale and sums of the halves of one block, whose bytes are written to `bytes` (zero so far).
#[inline(always)]
fn quantise_lanes<S: Simd>(s: S, x: &[f32; GROUP], bytes: &mut [[i8; LANES]]) -> (f32, [i32; 2]) {
    let (chunks, _) = x.as_chunks::<LANES>();
    let (low, high) = (s.load(&chunks[0]), s.load(&chunks[1]));
    let infinity = s.splat(f32::INFINITY);
    let (a, b) = (s.abs(low), s.abs(high));
    let a = s.select_lt(a, infinity, a, infinity);
    let b = s.select_lt(b, infinity, b, infinity);
    let (d, inverse) = scale_of(s.max_lane(s.max(a, b)));
    if inverse == 0.0 {
        return (d, [0; 2]);
    }
    let inverse = s.splat(inverse);
    let sum_low = s.store_i8(s.mul(low, inverse), &mut bytes[0]);
    let sum_high = s.store_i8(s.mul(high, inverse), &mut bytes[1]);
    (d, [sum_low, sum_high])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    fn check(x: &[f32], n_tokens: usize) {
        let k = x.len() / n_tokens;
        for isa in Isa::available() {
            let exec = Exec::new(isa, 2).unwrap();
            let Some(vector) = exec.vector() else { continue };
            let acts = Acts::quantise(&exec, vector, Batch { x, k, n_tokens });
            let mut seen = 0;
            check_tiles(x, k, &acts.t12, &mut seen);
            check_tiles(x, k, &acts.t4, &mut seen);
            check_tiles(x, k, &acts.t2, &mut seen);
            check_tiles(x, k, &acts.t1, &mut seen);
            assert_eq!(seen, n_tokens);
        }
    }

    fn check_tiles<const T: usize>(x: &[f32], k: usize, set: &TileSet<T, ActBlock<T>>, seen: &mut usize) {
        for (first, blocks) in set.tiles(&(0..usize::MAX)) {
            assert_eq!(first, *seen);
            *seen += T;
            for (step, block) in blocks.iter().enumerate() {
                for t in 0..T {
                    let group = &x[(first + t) * k + step * GROUP..][..GROUP];
                    let (d, q) = quantise_block(group.try_into().unwrap());
                    assert_eq!(block.q[t].as_flattened(), q);
                    assert_eq!(block.d[t].to_bits(), d.to_bits());
                    let sums =
                        [&q[..16], &q[16..]].map(|half| half.iter().map(|&q| i32::from(q)).sum::<i32>());
                    assert_eq!(block.neg_sums[t], sums.map(|sum| -sum));
                    assert_eq!(block.d_sum[t].to_bits(), (d * (sums[0] + sums[1]) as f32).to_bits());
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn tiles_hold_the_reference_quantisation(
            n_tokens in 1_usize..40,
            n_steps in 1_usize..4,
            seed in prop::collection::vec(prop_oneof![8 => -3.0_f32..3.0, 1 => any::<u32>().prop_map(f32::from_bits)], 64),
        ) {
            let x: Vec<f32> =
                (0..n_tokens * n_steps * GROUP).map(|i| seed[(i * 7 + i / 64) % seed.len()]).collect();
            check(&x, n_tokens);
        }
    }

    #[test]
    fn zero_tiny_and_broken_blocks_are_defined() {
        assert_eq!(quantise_block(&[0.0; GROUP]), (0.0, [0; GROUP]));
        assert_eq!(quantise_block(&[1e-38; GROUP]), (0.0, [0; GROUP]));
        let mut x = [1.0; GROUP];
        x[9] = f32::NAN;
        let (d, q) = quantise_block(&x);
        assert!(d.is_nan() && q == [0; GROUP]);
        x[9] = -2.0;
        let (d, q) = quantise_block(&x);
        assert_eq!((d, q[9], q[0]), (2.0 / 127.0, -127, 64));
        check(&x, 1);
    }
}
