//! Sixteen lanes as one AVX-512 register.

use std::arch::x86_64::*;

use super::{
    Kernel, LANES, Simd,
    avx2::{max_lane_256, sum_lanes_256, sum_of_bytes},
};

/// Proof that this processor has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        (has_all && super::Avx2::detect().is_some()).then_some(Self(()))
    }

    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn with_features<K: Kernel>(proof: Avx512, kernel: K) -> K::Out {
            kernel.run(proof)
        }
        // SAFETY: `self` proves the features.
        unsafe { with_features(self, kernel) }
    }
}

/// Calls intrinsics on behalf of an [`Avx512`].
macro_rules! intrinsics {
    ($body:expr) => {
        // SAFETY: the method's `self` proves that the processor has these instructions, and every pointer
        // comes from a reference to as many bytes as are read or written.
        unsafe { $body }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const MAX_TOKENS: usize = 12;
    const MAX_QUERIES: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        intrinsics!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        intrinsics!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        intrinsics!(_mm512_storeu_ps(to.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        intrinsics!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        intrinsics!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        intrinsics!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        intrinsics!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        intrinsics!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        intrinsics!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F {
        intrinsics!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        intrinsics!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        intrinsics!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn sum_lanes(self, a: Self::F) -> f32 {
        intrinsics!({
            let high = _mm512_extractf32x8_ps::<1>(a);
            sum_lanes_256(_mm256_add_ps(_mm512_castps512_ps256(a), high))
        })
    }
    #[inline(always)]
    fn prefetch<T>(self, at: &T) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(at).cast()));
    }
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        intrinsics!({
            let high = _mm512_extractf32x8_ps::<1>(a);
            max_lane_256(_mm256_max_ps(_mm512_castps512_ps256(a), high))
        })
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) -> i32 {
        intrinsics!({
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
            sum_of_bytes(bytes)
        })
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::B {
        intrinsics!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn low_nibble(self, x: Self::B) -> Self::B {
        intrinsics!(_mm512_and_si512(x, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high_nibble(self, x: Self::B) -> Self::B {
        intrinsics!(_mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn bits_to_4(self, x: Self::B, from: u32, n: u32) -> Self::B {
        intrinsics!({
            let moved = if from >= 4 {
                _mm512_srl_epi16(x, _mm_cvtsi32_si128(from as i32 - 4))
            } else {
                _mm512_sll_epi16(x, _mm_cvtsi32_si128(4 - from as i32))
            };
            _mm512_and_si512(moved, _mm512_set1_epi8((((1 << n) - 1) << 4) as i8))
        })
    }
    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        intrinsics!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn dot4(self, acc: Self::I, w: Self::B, x: &[i8; 4]) -> Self::I {
        intrinsics!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(i32::from_ne_bytes(x.map(|x| x as u8)))))
    }
}
