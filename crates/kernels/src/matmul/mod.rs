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
//! Tasks are runs of panels that fit the second-level cache; every task walks the whole batch tile by tile, so
//! weights come from memory once a batch, and a tile's activations stay in the first-level cache.

mod kernel;
mod reference;

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
    let tasks = split(w.runs(), exec.n_threads());
    exec.parallel(tasks.len(), |i| {
        let (run, panels) = &tasks[i];
        // SAFETY: tasks hold different panels, hence different columns of `y`.
        let task = unsafe { Task::new(&job, run, panels.clone()) };
        with_format!(
            run.ty,
            F => vector.run(QuantTask::<F>::new(task)),
            float => match float {
                StoredType::F16 => vector.run(FloatTask::<element::F16>::new(task)),
                StoredType::BF16 => vector.run(FloatTask::<element::Bf16>::new(task)),
                _ => vector.run(FloatTask::<element::F32>::new(task)),
            }
        );
    });
}

/// Weights a task has at most, so that they stay in the second-level cache while its batch passes over them.
const TASK_BYTES: usize = 256 << 10;

/// Cuts the panels of all runs into tasks, about four a thread so that threads finish together.
fn split(runs: &[Run], n_threads: usize) -> Vec<(&Run, std::ops::Range<usize>)> {
    let n_panels: usize = runs.iter().map(Run::n_panels).sum();
    let fair = if n_threads == 1 { n_panels } else { n_panels.div_ceil(n_threads * 4) };
    let of_run = |run: &Run| {
        let cached = TASK_BYTES / run.panel_bytes().max(1);
        let per_task = fair.min(cached).max(1);
        (0..run.n_panels()).step_by(per_task).map(move |p| p..(p + per_task))
    };
    runs.iter()
        .flat_map(|run| of_run(run).map(move |panels| (run, panels.start..panels.end.min(run.n_panels()))))
        .collect()
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
