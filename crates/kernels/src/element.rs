//! The float storage formats as types, so that kernels are compiled once for each.

use half::{bf16, f16};

use crate::simd::{LANES, Simd};

/// A float format. Conversion to f32 is exact.
pub(crate) trait Element: Send + Sync {
    /// The stored bits.
    type Bits: bytemuck::Pod;
    /// Sixteen numbers.
    fn load<S: Simd>(s: S, x: &[Self::Bits; LANES]) -> S::F;
    /// One number.
    fn get(bits: Self::Bits) -> f32;
}

/// IEEE single precision.
pub(crate) struct F32;
/// IEEE half precision.
pub(crate) struct F16;
/// bfloat16.
pub(crate) struct Bf16;

impl Element for F32 {
    type Bits = f32;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f32; LANES]) -> S::F {
        s.load(x)
    }
    #[inline(always)]
    fn get(bits: f32) -> f32 {
        bits
    }
}

impl Element for F16 {
    type Bits = u16;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[u16; LANES]) -> S::F {
        s.load_f16(x)
    }
    #[inline(always)]
    fn get(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
}

impl Element for Bf16 {
    type Bits = u16;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[u16; LANES]) -> S::F {
        s.load_bf16(x)
    }
    #[inline(always)]
    fn get(bits: u16) -> f32 {
        bf16::from_bits(bits).to_f32()
    }
}
