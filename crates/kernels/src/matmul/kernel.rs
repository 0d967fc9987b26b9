//! The register tiles of [`super::matmul`]: one panel of sixteen outputs times up to twelve tokens.
//!
//! Within 32 columns the byte quads are the outer loop and the tokens the inner one: each quad of weights is
//! unpacked once for all tokens, and the tokens' accumulators are independent chains.

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use longreach_types::N_SHARDS;

use super::{Job, Piece};
use crate::{
    element::Element,
    panel::{Format, Numbers, Record},
    quant::{ActBlock, QUADS, TileSet},
    simd::{Kernel, LANES, Simd},
    stored::GROUP,
};

/// A piece of a quantised run.
pub(super) struct QuantTask<'a, F> {
    task: Task<'a>,
    _format: PhantomData<F>,
}

/// A piece of a float run.
pub(super) struct FloatTask<'a, N> {
    task: Task<'a>,
    _number: PhantomData<N>,
}

/// A piece of the result that no other task holds, and the job it is part of.
pub(super) struct Task<'a> {
    job: &'a Job<'a>,
    piece: Piece<'a>,
}

impl<'a> Task<'a> {
    /// # Safety
    /// No other task may hold any part of the piece.
    pub(super) unsafe fn new(job: &'a Job<'a>, piece: Piece<'a>) -> Self {
        Self { job, piece }
    }
}

impl<'a, F> QuantTask<'a, F> {
    pub(super) fn new(task: Task<'a>) -> Self {
        Self { task, _format: PhantomData }
    }
}

impl<'a, N> FloatTask<'a, N> {
    pub(super) fn new(task: Task<'a>) -> Self {
        Self { task, _number: PhantomData }
    }
}

impl<F: Format> Kernel for QuantTask<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Some(acts) = &self.task.job.acts else { return };
        quant_tiles::<S, F, 12>(s, &self.task, &acts.t12);
        quant_tiles::<S, F, 4>(s, &self.task, &acts.t4);
        quant_tiles::<S, F, 2>(s, &self.task, &acts.t2);
        quant_tiles::<S, F, 1>(s, &self.task, &acts.t1);
    }
}

impl<N: Element> Kernel for FloatTask<'_, N> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Some(columns) = &self.task.job.columns else { return };
        float_tiles::<S, N, 12>(s, &self.task, &columns.t12);
        float_tiles::<S, N, 4>(s, &self.task, &columns.t4);
        float_tiles::<S, N, 2>(s, &self.task, &columns.t2);
        float_tiles::<S, N, 1>(s, &self.task, &columns.t1);
    }
}

#[inline(always)]
fn quant_tiles<S: Simd, F: Format, const T: usize>(s: S, task: &Task<'_>, set: &TileSet<T, ActBlock<T>>) {
    if T > S::MAX_TOKENS {
        return;
    }
    for (token, blocks) in set.tiles(&task.piece.tokens) {
        for panel in task.piece.panels.clone() {
            let records = task.piece.run.quantised::<F>(panel);
            let sums = segments_sum(s, task.job.w.segment_ends(), GROUP, |steps| {
                quant_tile::<S, F, T>(s, &records[steps.clone()], &blocks[steps])
            });
            // SAFETY: the task holds the panel for these tokens.
            unsafe { write_tile(s, task, panel, token, sums) };
        }
    }
}

#[inline(always)]
fn float_tiles<S: Simd, N: Element, const T: usize>(s: S, task: &Task<'_>, set: &TileSet<T, [f32; T]>) {
    if T > S::MAX_TOKENS {
        return;
    }
    for (token, columns) in set.tiles(&task.piece.tokens) {
        for panel in task.piece.panels.clone() {
            let weights = task.piece.run.floats::<N::Bits>(panel);
            let sums = segments_sum(s, task.job.w.segment_ends(), 1, |steps| {
                float_tile::<S, N, T>(s, &weights[steps.clone()], &columns[steps])
            });
            // SAFETY: the task holds the panel for these tokens.
            unsafe { write_tile(s, task, panel, token, sums) };
        }
    }
}

#[inline(always)]
fn float_tile<S: Simd, N: Element, const T: usize>(
    s: S,
    weights: &[[N::Bits; LANES]],
    columns: &[[f32; T]],
) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    for (w, x) in weights.iter().zip(columns) {
        let w = N::load(s, w);
        for t in 0..T {
            acc[t] = s.fma(s.splat(x[t]), w, acc[t]);
        }
    }
    acc
}

/// # Safety
/// The task must hold the panel for these tokens.
#[inline(always)]
unsafe fn write_tile<S: Simd, const T: usize>(
    s: S,
    task: &Task<'_>,
    panel: usize,
    token: usize,
    sums: [S::F; T],
) {
    let mut lanes = [0.0; LANES];
    for (t, sum) in sums.into_iter().enumerate() {
        s.store(sum, &mut lanes);
        // SAFETY: this function's contract.
        unsafe { task.job.write(task.piece.run, panel, token + t, &lanes) };
    }
}

/// Sums each segment with `tile`, then adds the sums in the fixed tree.
#[inline(always)]
fn segments_sum<S: Simd, const T: usize>(
    s: S,
    segment_ends: &[usize],
    step_len: usize,
    tile: impl Fn(Range<usize>) -> [S::F; T],
) -> [S::F; T] {
    let mut sums = [const { MaybeUninit::<[S::F; T]>::uninit() }; N_SHARDS];
    let (mut n, mut start) = (0, 0);
    for &end in segment_ends {
        let end = end / step_len;
        sums[n].write(tile(start..end));
        (n, start) = (n + 1, end);
    }
    // SAFETY: the first `n` are written, and a packed matrix has at least one segment.
    let sums = unsafe { sums[..n].assume_init_mut() };
    let mut add = |to: usize, from: usize| {
        for t in 0..T {
            sums[to][t] = s.add(sums[to][t], sums[from][t]);
        }
    };
    if n.is_power_of_two() {
        let mut stride = 1;
        while stride < n {
            (0..n).step_by(2 * stride).for_each(|i| add(i, i + stride));
            stride *= 2;
        }
    } else {
        (1..n).for_each(|i| add(0, i));
    }
    sums[0]
}

#[inline(always)]
fn quant_tile<S: Simd, F: Format, const T: usize>(
    s: S,
    records: &[Record<F>],
    blocks: &[ActBlock<T>],
) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    for (record, block) in records.iter().zip(blocks) {
        let (numbers, codes) = (record.scales.as_ref(), &record.codes);
        let scale = numbers[0].load(s);
        if F::SPLIT {
            add_part::<S, F, T>(s, (scale, codes), block, 0..QUADS / 2, &mut acc);
            let scale = numbers[1].load(s);
            add_part::<S, F, T>(s, (scale, codes), block, QUADS / 2..QUADS, &mut acc);
        } else {
            add_part::<S, F, T>(s, (scale, codes), block, 0..QUADS, &mut acc);
        }
        if F::TYPE.has_min() {
            let min = numbers[1].load(s);
            for t in 0..T {
                acc[t] = s.fma(min, s.splat(block.d_sum[t]), acc[t]);
            }
        }
    }
    acc
}

/// Adds the product of the quads that share a scale.
#[inline(always)]
fn add_part<S: Simd, F: Format, const T: usize>(
    s: S,
    (scale, codes): (S::F, &F::Codes),
    block: &ActBlock<T>,
    quads: Range<usize>,
    acc: &mut [S::F; T],
) {
    use crate::panel::Codes;
    let offset = i32::from(F::TYPE.offset());
    let mut dot = [s.splat_i32(0); T];
    if offset != 0 {
        for t in 0..T {
            let [a, b] = block.neg_sums[t];
            let neg_sum = if quads.len() == QUADS {
                a + b
            } else if quads.start == 0 {
                a
            } else {
                b
            };
            dot[t] = s.splat_i32(neg_sum * offset);
        }
    }
    for quad in quads {
        let w = codes.quad(s, quad);
        for t in 0..T {
            dot[t] = s.dot4(dot[t], w, &block.q[t][quad]);
        }
    }
    for t in 0..T {
        acc[t] = s.fma(s.mul(scale, s.splat(block.d[t])), s.to_f32(dot[t]), acc[t]);
    }
}
