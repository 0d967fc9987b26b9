//! The exponential: one polynomial for scalar and vector code, for softmax and activations alike.
//!
//! `2^x` is `p(x - n) · 2^n` with `n` the nearest integer (ties to even) and `p` of degree six, evaluated by
//! fused multiply-adds from the highest power down; its error is 2e-9, below the rounding of the last step.
//! `e^x` reduces its argument by `n · ln 2` in two parts first, so that large arguments keep their accuracy,
//! and then uses the same polynomial. The library's `exp` differs between platforms and has no vector form.
//!
//! Results below 2^-126 are exactly zero (no denormals, -inf included), those from about 2^127.5 are infinity,
//! and NaN stays NaN.

use crate::simd::Simd;

/// Coefficients of `2^f` on -0.5..=0.5, highest power first; a Chebyshev fit with error 2e-9.
const POLY: [f32; 7] =
    [1.546_144_5e-4, 1.340_042_8e-3, 9.618_057e-3, 5.550_327e-2, 2.402_265e-1, 6.931_472e-1, 1.0];
const MAX_EXP2: f32 = 128.0;
const MIN_EXP2: f32 = -126.0;
const MAX_EXP: f32 = 89.0;
const MIN_EXP: f32 = -87.3;
/// ln 2 in two parts; the first has 15 significant bits, so that its product with any `n` is exact.
const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;

/// `2^x`.
pub fn exp2(x: f32) -> f32 {
    let clamped = if MAX_EXP2 < x { MAX_EXP2 } else { x };
    let n = clamped.round_ties_even();
    let y = poly(clamped - n) * pow2_int(n);
    if x < MIN_EXP2 { 0.0 } else { y }
}

/// `e^x`.
pub fn exp(x: f32) -> f32 {
    let clamped = if MAX_EXP < x { MAX_EXP } else { x };
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let rest = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let y = poly(rest * std::f32::consts::LOG2_E) * pow2_int(n);
    if x < MIN_EXP { 0.0 } else { y }
}

/// `2^delta` for an integral `delta`, exact down to the last denormal, then 0; -inf gives 0.
pub(crate) fn pow2_exact(delta: f32) -> f32 {
    let n = delta as i32;
    match n {
        128.. => f32::INFINITY,
        -126..=127 => f32::from_bits(((n + 127) as u32) << 23),
        -149..=-127 => f32::from_bits(1 << (n + 149)),
        _ => 0.0,
    }
}

/// [`exp2`] in sixteen lanes.
#[inline(always)]
pub(crate) fn exp2_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let max = s.splat(MAX_EXP2);
    let clamped = s.select_lt(max, x, max, x);
    let n = s.round(clamped);
    let y = s.mul(poly_lanes(s, s.sub(clamped, n)), s.pow2(n));
    s.select_lt(x, s.splat(MIN_EXP2), s.splat(0.0), y)
}

/// [`exp`] in sixteen lanes.
#[inline(always)]
pub(crate) fn exp_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let max = s.splat(MAX_EXP);
    let log2_e = s.splat(std::f32::consts::LOG2_E);
    let clamped = s.select_lt(max, x, max, x);
    let n = s.round(s.mul(clamped, log2_e));
    let rest = s.fma(n, s.splat(-LN2_LOW), s.fma(n, s.splat(-LN2_HIGH), clamped));
    let y = s.mul(poly_lanes(s, s.mul(rest, log2_e)), s.pow2(n));
    s.select_lt(x, s.splat(MIN_EXP), s.splat(0.0), y)
}

fn pow2_int(n: f32) -> f32 {
    f32::from_bits((n as i32).wrapping_add(127).wrapping_shl(23) as u32)
}

fn poly(f: f32) -> f32 {
    POLY[1..].iter().fold(POLY[0], |p, &c| p.mul_add(f, c))
}

#[inline(always)]
fn poly_lanes<S: Simd>(s: S, f: S::F) -> S::F {
    let mut p = s.splat(POLY[0]);
    for c in &POLY[1..] {
        p = s.fma(p, f, s.splat(*c));
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        isa::Isa,
        simd::{Backend, Kernel, LANES},
    };

    struct Both([f32; LANES]);

    impl Kernel for Both {
        type Out = [[f32; LANES]; 2];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Out {
            let mut out = [[0.0; LANES]; 2];
            s.store(exp_lanes(s, s.load(&self.0)), &mut out[0]);
            s.store(exp2_lanes(s, s.load(&self.0)), &mut out[1]);
            out
        }
    }

    fn samples() -> impl Iterator<Item = f32> {
        (0..400_000).map(|i| (i as f32 - 200_000.0) * 6.5e-4)
    }

    #[test]
    fn exp_relative_error_is_below_1e_6() {
        for x in samples() {
            let (e, b) = (f64::from(x).exp(), f64::from(x).exp2());
            if (-87.0..88.0).contains(&x) {
                assert!((f64::from(exp(x)) / e - 1.0).abs() < 5e-7, "exp({x})");
            }
            if (-126.0..127.0).contains(&x) {
                assert!((f64::from(exp2(x)) / b - 1.0).abs() < 5e-7, "exp2({x})");
            }
        }
    }

    #[test]
    fn exp_ends_are_clean() {
        for f in [exp, exp2] {
            assert_eq!(f(f32::NEG_INFINITY).to_bits(), 0);
            assert_eq!(f(-1e30).to_bits(), 0);
            assert_eq!(f(f32::INFINITY), f32::INFINITY);
            assert_eq!(f(1e30), f32::INFINITY);
            assert_eq!(f(0.0), 1.0);
            assert!(f(f32::NAN).is_nan());
        }
        for n in -126..=127 {
            assert_eq!(exp2(n as f32), 2.0_f32.powi(n));
        }
    }

    #[test]
    fn exp_lanes_have_the_bits_of_the_scalar() {
        let ends = [f32::NEG_INFINITY, -1e30, -126.5, -87.31, -0.0, 0.0, 88.9, 127.7, 1e30, f32::INFINITY];
        let values: Vec<f32> = samples().step_by(7).chain(ends).collect();
        for isa in Isa::available() {
            let Some(vector) = Backend::new(isa).unwrap().vector() else { continue };
            for chunk in values.chunks_exact(LANES) {
                let [e, b] = vector.run(Both(chunk.try_into().unwrap()));
                for (i, &x) in chunk.iter().enumerate() {
                    assert_eq!(e[i].to_bits(), exp(x).to_bits(), "exp({x}) {isa}");
                    assert_eq!(b[i].to_bits(), exp2(x).to_bits(), "exp2({x}) {isa}");
                }
            }
        }
    }

    #[test]
    fn pow2_exact_reaches_the_denormals() {
        assert_eq!(pow2_exact(0.0), 1.0);
        assert_eq!(pow2_exact(-149.0).to_bits(), 1);
        assert_eq!(pow2_exact(-127.0), 2.0_f32.powi(-126) / 2.0);
        assert_eq!(pow2_exact(-150.0).to_bits(), 0);
        assert_eq!(pow2_exact(f32::NEG_INFINITY).to_bits(), 0);
    }
}
