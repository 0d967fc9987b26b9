//! Root-mean-square norm, summed in sixteen fixed lanes.
//!
//! Lane `i` adds the squares of elements `i, i + 16, i + 32, …` by `fma`, ascending; the lanes are folded by
//! halves (`i` with `i + 8`, then `+ 4`, `+ 2`, `+ 1`). Then `scale = 1 / sqrt(sum / n + eps)` by IEEE division
//! and square root, and `out = (x · scale) · weight`.

use crate::{
    exec::Exec,
    simd::{Kernel, LANES, Simd, Vector},
};

/// Norms each row of `x` (rows of `weight.len()`) into `out`.
///
/// # Panics
/// If `x` is not whole rows, or `out` has another length.
pub fn rms_norm(exec: &Exec, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    assert_eq!(x.len(), out.len(), "x and out differ in length");
    assert!(x.is_empty() || n > 0 && x.len().is_multiple_of(n), "x is not whole rows of {n}");
    let grain = (1 << 14) / n.max(1) + 1;
    exec.parallel_rows(out, n, grain, |first, out| {
        let x = &x[first * n..][..out.len()];
        norm_rows(exec.vector(), &mut Rows { x: Some(x), out, row_stride: n, n_heads: 1 }, weight, eps);
    });
}

/// Heads inside fused rows, for [`rms_norm_heads`].
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Distance between rows, in numbers.
    pub row_stride: usize,
    /// Heads that are normed in each row, from its start.
    pub n_heads: usize,
    /// One weight for each number of a head.
    pub weight: &'a [f32],
    /// Added under the square root.
    pub eps: f32,
}

/// Norms the first `n_heads` heads of each row in place. `x` starts at the first head of the first row, and
/// the last row may end after its heads.
///
/// # Panics
/// If a row's heads do not fit its stride.
pub fn rms_norm_heads(exec: &Exec, norm: &HeadNorm<'_>, x: &mut [f32]) {
    let width = norm.n_heads * norm.weight.len();
    assert!(width <= norm.row_stride, "{width} numbers of heads exceed the row stride {}", norm.row_stride);
    if width == 0 {
        return;
    }
    let grain = (1 << 14) / width + 1;
    exec.parallel_rows(x, norm.row_stride, grain, |_, out| {
        let mut rows = Rows { x: None, out, row_stride: norm.row_stride, n_heads: norm.n_heads };
        norm_rows(exec.vector(), &mut rows, norm.weight, norm.eps);
    });
}

/// Rows to norm: from `x`, or in place.
struct Rows<'a> {
    x: Option<&'a [f32]>,
    out: &'a mut [f32],
    row_stride: usize,
    n_heads: usize,
}

fn norm_rows(vector: Option<Vector>, rows: &mut Rows<'_>, weight: &[f32], eps: f32) {
    let n = weight.len();
    for start in (0..rows.out.len()).step_by(rows.row_stride) {
        for head in 0..rows.n_heads {
            let at = start + head * n;
            let out = &mut rows.out[at..at + n];
            if let Some(x) = rows.x {
                out.copy_from_slice(&x[at..at + n]);
            }
            match vector {
                Some(vector) => vector.run(NormRow { x: out, weight, eps }),
                None => reference(out, weight, eps),
            }
        }
    }
}

/// The contract as plain loops.
fn reference(x: &mut [f32], weight: &[f32], eps: f32) {
    let mut lanes = [0.0_f32; LANES];
    for (i, &x) in x.iter().enumerate() {
        lanes[i % LANES] = x.mul_add(x, lanes[i % LANES]);
    }
    let scale = scale(&mut lanes, x.len(), eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

fn scale(lanes: &mut [f32; LANES], n: usize, eps: f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    1.0 / (lanes[0] / n as f32 + eps).sqrt()
}

struct NormRow<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for NormRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.x.len();
        let (chunks, tail) = self.x.as_chunks_mut::<LANES>();
        let mut sum = s.splat(0.0);
        for x in chunks.iter() {
            let x = s.load(x);
            sum = s.fma(x, x, sum);
        }
        let mut lanes = [0.0; LANES];
        s.store(sum, &mut lanes);
        for (lane, &x) in lanes.iter_mut().zip(tail.iter()) {
            *lane = x.mul_add(x, *lane);
        }
        let scale = scale(&mut lanes, n, self.eps);
        let (weights, weight_tail) = self.weight.as_chunks::<LANES>();
        for (x, w) in chunks.iter_mut().zip(weights) {
            s.store(s.mul(s.mul(s.load(x), s.splat(scale)), s.load(w)), x);
        }
        for (x, w) in tail.iter_mut().zip(weight_tail) {
            *x = *x * scale * w;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn rms_norm_has_one_result_and_is_accurate(n in 1_usize..100, n_rows in 1_usize..6, seed in 0_u32..1000) {
            let x: Vec<f32> = (0..n * n_rows).map(|i| ((i as u32 * 37 + seed) % 101) as f32 * 0.07 - 3.0).collect();
            let weight: Vec<f32> = (0..n).map(|i| 0.5 + (i % 7) as f32 * 0.2).collect();
            let mut expected = vec![0.0; x.len()];
            rms_norm(&Exec::new(Isa::Reference, 1).unwrap(), &x, &weight, 1e-5, &mut expected);
            for (row, out) in x.chunks(n).zip(expected.chunks(n)) {
                let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                for ((&x, &w), &y) in row.iter().zip(&weight).zip(out) {
                    let exact = f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w);
                    prop_assert!((f64::from(y) - exact).abs() <= 1e-6 * exact.abs() + 1e-12);
                }
            }
            for isa in Isa::available() {
                let exec = Exec::new(isa, 2).unwrap();
                let mut out = vec![0.0; x.len()];
                rms_norm(&exec, &x, &weight, 1e-5, &mut out);
                prop_assert_eq!(&out, &expected, "{}", isa);
                let norm = HeadNorm { row_stride: n + 3, n_heads: 1, weight: &weight, eps: 1e-5 };
                let mut strided = vec![7.0; n_rows * (n + 3)];
                for (to, row) in strided.chunks_mut(n + 3).zip(x.chunks(n)) {
                    to[..n].copy_from_slice(row);
                }
                rms_norm_heads(&exec, &norm, &mut strided[..n_rows * (n + 3) - 3]);
                for (row, out) in strided.chunks(n + 3).zip(expected.chunks(n)) {
                    prop_assert_eq!(&row[..n], out);
                    prop_assert_eq!(&row[n..], &[7.0; 3]);
                }
            }
        }
    }
}
