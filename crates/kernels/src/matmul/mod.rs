//! `y[t][o] = Σ_k w[o][k] · x[t][k] (+ bias[o])`, in one order.
//!
//! **Float weights** (f32; f16 and bf16 are converted exactly): from `acc = +0.0`,
//! `acc = fma(x[k], w[k], acc)` for ascending `k`.
//!
//! **Quantised weights.** Activations are quantised in blocks of 32 (`quant.rs`: bytes `q`, scale `d`). For
//! ascending groups of 32 columns, and for Q6_K for each half of a group, with `codes` the unsigned weight
//! codes:
//! ```text
//! idot = Σ (code − offset) · q                          exact, in i32
//! acc  = fma(scale · d, f32(idot), acc)                 scale · d is rounded to f32
//! acc  = fma(min, d · f32(Σ q), acc)                    formats with a minimum; d · Σq is rounded to f32
//! ```
//! `idot` is computed as `Σ code · q − offset · Σ q` with unsigned bytes times signed ones, which is the form
//! `vpdpbusd` takes; no sum exceeds 32 · 255 · 128, so nothing saturates.
//!
//! **Segments** are each summed from zero, then added pairwise: `(s0 + s1) + (s2 + s3)`, and so on, when their
//! number is a power of two, in sequence otherwise. The bias is added last.
//!
//! **Tasks** are panels that fit the second-level cache, times the tokens of a large batch in parts. Tile by
//! tile a task's weights pass over a tile's activations, which stay in the first-level cache.
//!
//! **Ladder.** AMD EPYC (Zen 4), 2 cores of a shared virtual machine, AVX-512, Q4_1, `--example step_time` and single
//! matrices; best of several runs. One thread peaks at 234 GMAC/s (`vpdpbusd`) and reads 29 GB/s.
//!
//! | version | 1 token, 3072 × 576, cold | 512 tokens, same | 30 layers, 2 threads: prefill / decode |
//! |---|---|---|---|
//! | scales and codes of a panel as two streams, 12 tokens a tile, panels outside | 12 GB/s | 119 GMAC/s | 1,220 / 142 tok/s |
//! | … in huge pages, activations quantised without scalar loops | 12 GB/s | 119 GMAC/s | 1,127 / 158 tok/s |
//! | one record per 32 columns, one stream | 33 GB/s | 122 GMAC/s | – |
//! | tiles outside, panels inside | 31 GB/s | 133 GMAC/s | 1,227 / 280 tok/s |
//! | attention with weights in registers, KV fetched ahead (`attention`) | | | 1,330 / 296 tok/s |
//! | large batches cut by tokens | | 133 GMAC/s | 1,523 / 294 tok/s |
//! | fork and join of our own (`fork`) | | | 1,521 / 305 tok/s |
//!
//! All but the last row with the whole step inside a rayon pool; from outside it the row before is 1,326 / 208.
//!
//! The same on AVX2: 774 / 255 tok/s. Float weights reach 52 GMAC/s (f32 peak 58) and 29 GB/s.

mod kernel;
mod reference;

use std::ops::Range;

use kernel::{FloatTask, QuantTask, Task};

use crate::{
    element,
    exec::{Disjoint, Exec},
    pack::{PackedMatrix, Run},
    panel::with_format,
    quant::{Acts, Batch, Columns},
    simd::LANES,
    stored::StoredType,
};

/// What every task of one matmul shares.
struct Job<'a> {
    w: &'a PackedMatrix,
    acts: Option<Acts>,
    columns: Option<Columns>,
    bias: Option<&'a [f32]>,
    y: Disjoint<'a, f32>,
    n_tokens: usize,
}

/// Multiplies a batch `x` of `[n_tokens][k]` into `y` of `[n_tokens][n_out]`.
///
/// # Panics
/// If the lengths of `x`, `y` or `bias` do not fit `w`.
pub fn matmul(exec: &Exec, w: &PackedMatrix, x: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    if w.n_out() == 0 {
        return assert!(y.is_empty(), "y has {} values for a matrix of no outputs", y.len());
    }
    let n_tokens = y.len() / w.n_out();
    assert_eq!(y.len(), n_tokens * w.n_out(), "y is not whole rows of {}", w.n_out());
    assert_eq!(x.len(), n_tokens * w.k(), "x is not {n_tokens} rows of {}", w.k());
    assert!(bias.is_none_or(|bias| bias.len() == w.n_out()), "bias is not {} values", w.n_out());
    let Some(vector) = exec.vector() else {
        return reference::matmul(w, x, bias, y);
    };
    let batch = Batch { x, k: w.k(), n_tokens };
    let any = |quantised| w.runs().iter().any(|run| run.ty.is_quantised() == quantised);
    let job = Job {
        w,
        acts: any(true).then(|| Acts::quantise(exec, vector, batch)),
        columns: any(false).then(|| Columns::transpose(vector, batch)),
        bias,
        y: Disjoint::new(y),
        n_tokens,
    };
    let pieces = pieces(w.runs(), n_tokens, exec.n_threads());
    exec.parallel(pieces.len(), |i| {
        // SAFETY: pieces are disjoint parts of `y`.
        let task = unsafe { Task::new(&job, pieces[i].clone()) };
        with_format!(
            pieces[i].run.ty,
            F => vector.run(QuantTask::<F>::new(task)),
            float => match float {
                StoredType::F16 => vector.run(FloatTask::<element::F16>::new(task)),
                StoredType::BF16 => vector.run(FloatTask::<element::Bf16>::new(task)),
                _ => vector.run(FloatTask::<element::F32>::new(task)),
            }
        );
    });
}

/// Weights a task has at most, so that they stay in the second-level cache while its tokens pass over them.
const TASK_BYTES: usize = 256 << 10;
/// Bounds between the tokens of tasks are multiples of the widest tile, and so of every tile.
const TOKEN_ALIGN: usize = 12;

/// Some outputs for some tokens: one task's part of the result.
#[derive(Clone)]
struct Piece<'a> {
    run: &'a Run,
    panels: Range<usize>,
    tokens: Range<usize>,
}

/// Cuts the result into pieces, several a thread so that threads finish together. A large batch is cut by
/// tokens, which costs nothing as tiles are independent; a small one by panels.
fn pieces(runs: &[Run], n_tokens: usize, n_threads: usize) -> Vec<Piece<'_>> {
    let n_panels: usize = runs.iter().map(Run::n_panels).sum();
    let wanted = if n_threads == 1 { 1 } else { 8 * n_threads };
    let is_large = n_tokens / TOKEN_ALIGN >= wanted;
    let fair = if is_large { n_panels } else { (2 * n_panels).div_ceil(wanted) };
    let panels_of = |run: &Run| fair.min(TASK_BYTES / run.panel_bytes().max(1)).max(1);
    let n_parts: usize = runs.iter().map(|run| run.n_panels().div_ceil(panels_of(run))).sum();
    let token_parts = if is_large { wanted.div_ceil(n_parts.max(1)) } else { 1 };
    let token_step = n_tokens.div_ceil(token_parts).next_multiple_of(TOKEN_ALIGN);
    let mut pieces = Vec::new();
    for run in runs {
        for panel in (0..run.n_panels()).step_by(panels_of(run)) {
            let panels = panel..run.n_panels().min(panel + panels_of(run));
            let starts = (0..n_tokens).step_by(token_step.max(1));
            pieces.extend(starts.map(|token| Piece {
                run,
                panels: panels.clone(),
                tokens: token..n_tokens.min(token + token_step),
            }));
        }
    }
    pieces
}

impl Job<'_> {
    /// Writes the sums of one panel for one token.
    ///
    /// # Safety
    /// The calling task must hold the panel.
    #[inline(always)]
    unsafe fn write(&self, run: &Run, panel: usize, token: usize, sums: &[f32; LANES]) {
        let first = run.first_out + panel * LANES;
        let n = LANES.min(run.n_out - panel * LANES);
        debug_assert!(token < self.n_tokens);
        // SAFETY: the task alone writes this panel's columns.
        let y = unsafe { self.y.slice(token * self.w.n_out() + first, n) };
        match (self.bias, y.as_mut_array::<LANES>()) {
            // The usual case, without a call to copy sixteen numbers.
            (None, Some(y)) => *y = *sums,
            (None, None) => y.copy_from_slice(&sums[..n]),
            (Some(bias), _) => {
                for ((y, sum), bias) in y.iter_mut().zip(sums).zip(&bias[first..]) {
                    *y = sum + bias;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
