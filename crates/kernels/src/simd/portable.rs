//! Sixteen lanes as arrays, for any processor.

use half::{bf16, f16};

use super::{LANES, Simd};

/// Lanes as arrays of sixteen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 4 * LANES];
    const MAX_TOKENS: usize = 2;
    const MAX_QUERIES: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        *x
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        *to = x;
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        x.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        x.map(|bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits((n as i32).wrapping_add(127).wrapping_shl(23) as u32))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        a.map(|a| a as f32)
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    fn sum_lanes(self, mut a: Self::F) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }
    #[inline(always)]
    fn prefetch<T>(self, _at: &T) {}
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |max, a| if a > max { a } else { max })
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) -> i32 {
        *to = a.map(|a| a.round_ties_even() as i8);
        to.iter().map(|&q| i32::from(q)).sum()
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::B {
        *x
    }
    #[inline(always)]
    fn low_nibble(self, x: Self::B) -> Self::B {
        x.map(|x| x & 15)
    }
    #[inline(always)]
    fn high_nibble(self, x: Self::B) -> Self::B {
        x.map(|x| x >> 4)
    }
    #[inline(always)]
    fn bits_to_4(self, x: Self::B, from: u32, n: u32) -> Self::B {
        x.map(|x| ((x >> from) & ((1 << n) - 1)) << 4)
    }
    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn dot4(self, acc: Self::I, w: Self::B, x: &[i8; 4]) -> Self::I {
        std::array::from_fn(|i| {
            let dot: i32 = (0..4).map(|j| i32::from(w[4 * i + j]) * i32::from(x[j])).sum();
            acc[i] + dot
        })
    }
}
