//! Element-wise operations of the feed-forward layers.
//!
//! Gated units all have the form `g / (1 + exp(−z)) · u`, by IEEE division and the crate's own exponential.

use crate::{
    exec::Exec,
    expf::{exp, exp_lanes},
    simd::{Kernel, LANES, Simd},
};

/// `2 · sqrt(2 / π)`: the tanh form of GELU as a sigmoid, `(1 + tanh(y)) / 2 = 1 / (1 + exp(−2y))`.
const GELU_LINEAR: f32 = 1.595_769_2;
/// The cubic coefficient 0.044715, times [`GELU_LINEAR`].
const GELU_CUBIC: f32 = 0.071_354_814;

/// A gated activation of a gate `g` and an input `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluKind {
    /// `silu(g) · u`, `silu(g) = g / (1 + exp(−g))`.
    Silu,
    /// `gelu(g) · u`, GELU in its tanh form.
    GeluTanh,
    /// `g' · sigmoid(alpha · g') · (u' + 1)` with `g' = min(g, limit)` and `u'` within ±limit.
    ClampedSilu {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Bound of both inputs.
        limit: f32,
    },
}

/// `x += y`.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(exec: &Exec, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "x and y differ in length");
    exec.parallel_rows(x, 1, 1 << 15, |first, x| {
        for (x, y) in x.iter_mut().zip(&y[first..]) {
            *x += y;
        }
    });
}

/// [`glu`] of kind [`GluKind::Silu`].
///
/// # Panics
/// As [`glu`].
pub fn silu_mul(exec: &Exec, gate_up: &[f32], n: usize, out: &mut [f32]) {
    glu(exec, GluKind::Silu, gate_up, n, out);
}

/// Gated activation of fused rows: `gate_up` is `[n_rows][gate n | up n]`, `out` is `[n_rows][n]`.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn glu(exec: &Exec, kind: GluKind, gate_up: &[f32], n: usize, out: &mut [f32]) {
    if n == 0 {
        return;
    }
    assert!(out.len().is_multiple_of(n), "out is not whole rows of {n}");
    assert_eq!(gate_up.len(), 2 * out.len(), "gate_up is not twice as long as out");
    exec.parallel_rows(out, n, (1 << 11) / n + 1, |first, out| {
        for (out, row) in out.chunks_exact_mut(n).zip(gate_up[first * 2 * n..].chunks_exact(2 * n)) {
            let (gate, up) = row.split_at(n);
            match exec.vector() {
                Some(vector) => vector.run(GluRow { kind, gate, up, out }),
                None => out.iter_mut().zip(gate).zip(up).for_each(|((y, &g), &u)| *y = glu_one(kind, g, u)),
            }
        }
    });
}

/// The contract for one element.
#[inline(always)]
fn glu_one(kind: GluKind, g: f32, u: f32) -> f32 {
    let (g, z, u) = match kind {
        GluKind::Silu => (g, g, u),
        GluKind::GeluTanh => (g, g * (g * g).mul_add(GELU_CUBIC, GELU_LINEAR), u),
        GluKind::ClampedSilu { alpha, limit } => {
            let g = if g < limit { g } else { limit };
            let u = if u < limit { u } else { limit };
            let u = if u > -limit { u } else { -limit };
            (g, g * alpha, u + 1.0)
        }
    };
    g / (1.0 + exp(-z)) * u
}

struct GluRow<'a> {
    kind: GluKind,
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for GluRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((out, gate), up) in outs.iter_mut().zip(gates).zip(ups) {
            s.store(glu_lanes(s, self.kind, s.load(gate), s.load(up)), out);
        }
        for ((out, &gate), &up) in out_tail.iter_mut().zip(gate_tail).zip(up_tail) {
            *out = glu_one(self.kind, gate, up);
        }
    }
}

#[inline(always)]
fn glu_lanes<S: Simd>(s: S, kind: GluKind, g: S::F, u: S::F) -> S::F {
    let (g, z, u) = match kind {
        GluKind::Silu => (g, g, u),
        GluKind::GeluTanh => {
            let slope = s.fma(s.mul(g, g), s.splat(GELU_CUBIC), s.splat(GELU_LINEAR));
            (g, s.mul(g, slope), u)
        }
        GluKind::ClampedSilu { alpha, limit } => {
            let (high, low) = (s.splat(limit), s.splat(-limit));
            let g = s.select_lt(g, high, g, high);
            let u = s.select_lt(u, high, u, high);
            (g, s.mul(g, s.splat(alpha)), s.add(s.max(u, low), s.splat(1.0)))
        }
    };
    let e = exp_lanes(s, s.sub(s.splat(-0.0), z));
    s.mul(s.div(g, s.add(s.splat(1.0), e)), u)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    const KINDS: [GluKind; 3] =
        [GluKind::Silu, GluKind::GeluTanh, GluKind::ClampedSilu { alpha: 1.702, limit: 7.0 }];

    fn exact(kind: GluKind, g: f64, u: f64) -> f64 {
        match kind {
            GluKind::Silu => g / (1.0 + (-g).exp()) * u,
            GluKind::GeluTanh => {
                let y = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                0.5 * g * (1.0 + y.tanh()) * u
            }
            GluKind::ClampedSilu { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let g = g.min(limit);
                g / (1.0 + (-alpha * g).exp()) * (u.clamp(-limit, limit) + 1.0)
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn gated_units_have_one_result_and_are_accurate(
            n in 1_usize..70,
            values in prop::collection::vec(-20.0_f32..20.0, 140),
        ) {
            let gate_up: Vec<f32> = (0..6 * n).map(|i| values[i * 11 % values.len()]).collect();
            for kind in KINDS {
                let mut expected = vec![0.0; 3 * n];
                glu(&Exec::new(Isa::Reference, 1).unwrap(), kind, &gate_up, n, &mut expected);
                for (row, out) in gate_up.chunks(2 * n).zip(expected.chunks(n)) {
                    for i in 0..n {
                        let want = exact(kind, f64::from(row[i]), f64::from(row[n + i]));
                        let tolerance = 2e-5 * want.abs() + 1e-6;
                        prop_assert!((f64::from(out[i]) - want).abs() < tolerance, "{:?} {}", kind, row[i]);
                    }
                }
                for isa in Isa::available() {
                    let mut out = vec![0.0; 3 * n];
                    glu(&Exec::new(isa, 2).unwrap(), kind, &gate_up, n, &mut out);
                    prop_assert_eq!(&out, &expected, "{} {:?}", isa, kind);
                }
            }
        }
    }

    #[test]
    fn add_assign_adds() {
        let exec = Exec::new(Isa::best(), 2).unwrap();
        let mut x: Vec<f32> = (0..100_000).map(|i| i as f32).collect();
        add_assign(&exec, &mut x, &vec![0.5; 100_000]);
        assert!(x.iter().enumerate().all(|(i, &x)| x == i as f32 + 0.5));
    }
}
