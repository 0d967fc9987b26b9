//! Sixteen lanes as two AVX2 registers.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof that this processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }

    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with_features<K: Kernel>(proof: Avx2, kernel: K) -> K::Out {
            kernel.run(proof)
        }
        // SAFETY: `self` proves the features.
        unsafe { with_features(self, kernel) }
    }
}

/// Calls intrinsics on behalf of an [`Avx2`].
macro_rules! intrinsics {
    ($body:expr) => {
        // SAFETY: the method's `self` proves that the processor has these instructions, and every pointer
        // comes from a reference to as many bytes as are read or written.
        unsafe { $body }
    };
}

impl Simd for Avx2 {
    type F = (__m256, __m256);
    type I = (__m256i, __m256i);
    type B = (__m256i, __m256i);
    const MAX_TOKENS: usize = 4;
    const MAX_QUERIES: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        intrinsics!((_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        intrinsics!((_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))))
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        intrinsics!({
            _mm256_storeu_ps(to.as_mut_ptr(), x.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), x.1);
        });
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        intrinsics!({
            let low = _mm_loadu_si128(x.as_ptr().cast());
            let high = _mm_loadu_si128(x.as_ptr().add(8).cast());
            (_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        })
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        intrinsics!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(8).cast()));
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!((_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!((_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!((_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!((_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        intrinsics!((_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        intrinsics!((_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        intrinsics!({
            let sign = _mm256_set1_ps(-0.0);
            (_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
        })
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        intrinsics!((_mm256_round_ps::<MODE>(a.0), _mm256_round_ps::<MODE>(a.1)))
    }
    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        #[inline(always)]
        unsafe fn half(n: __m256) -> __m256 {
            intrinsics!({
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        }
        intrinsics!((half(n.0), half(n.1)))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F {
        intrinsics!((
            _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        ))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        intrinsics!((_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1)))
    }
    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        intrinsics!((_mm256_set1_epi32(x), _mm256_set1_epi32(x)))
    }
    #[inline(always)]
    fn sum_lanes(self, a: Self::F) -> f32 {
        intrinsics!(sum_lanes_256(_mm256_add_ps(a.0, a.1)))
    }
    #[inline(always)]
    fn prefetch<T>(self, at: &T) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(at).cast()));
    }
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        intrinsics!(max_lane_256(_mm256_max_ps(a.0, a.1)))
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) -> i32 {
        intrinsics!({
            // Packing works within 128-bit halves; the permutation puts the words back in order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.0), _mm256_cvtps_epi32(a.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
            sum_of_bytes(bytes)
        })
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 4 * LANES]) -> Self::B {
        intrinsics!((_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())))
    }
    #[inline(always)]
    fn low_nibble(self, x: Self::B) -> Self::B {
        intrinsics!({
            let mask = _mm256_set1_epi8(15);
            (_mm256_and_si256(x.0, mask), _mm256_and_si256(x.1, mask))
        })
    }
    #[inline(always)]
    fn high_nibble(self, x: Self::B) -> Self::B {
        intrinsics!({
            let mask = _mm256_set1_epi8(15);
            (
                _mm256_and_si256(_mm256_srli_epi16::<4>(x.0), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(x.1), mask),
            )
        })
    }
    #[inline(always)]
    fn bits_to_4(self, x: Self::B, from: u32, n: u32) -> Self::B {
        #[inline(always)]
        unsafe fn half(x: __m256i, from: u32, n: u32) -> __m256i {
            intrinsics!({
                let moved = if from >= 4 {
                    _mm256_srl_epi16(x, _mm_cvtsi32_si128(from as i32 - 4))
                } else {
                    _mm256_sll_epi16(x, _mm_cvtsi32_si128(4 - from as i32))
                };
                _mm256_and_si256(moved, _mm256_set1_epi8((((1 << n) - 1) << 4) as i8))
            })
        }
        intrinsics!((half(x.0, from, n), half(x.1, from, n)))
    }
    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        intrinsics!((_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1)))
    }
    /// Widens to 16 bits: `vpmaddubsw` would saturate at 255 · 127 · 2.
    #[inline(always)]
    fn dot4(self, acc: Self::I, w: Self::B, x: &[i8; 4]) -> Self::I {
        #[inline(always)]
        unsafe fn half(acc: __m256i, w: __m256i, even: __m256i, odd: __m256i) -> __m256i {
            intrinsics!({
                let w_even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
                let w_odd = _mm256_srli_epi16::<8>(w);
                let sum = _mm256_add_epi32(acc, _mm256_madd_epi16(w_even, even));
                _mm256_add_epi32(sum, _mm256_madd_epi16(w_odd, odd))
            })
        }
        intrinsics!({
            let x = _mm256_set1_epi32(i32::from_ne_bytes(x.map(|x| x as u8)));
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
            let odd = _mm256_srai_epi16::<8>(x);
            (half(acc.0, w.0, even, odd), half(acc.1, w.1, even, odd))
        })
    }
}

/// The sum of eight lanes by halves.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(super) unsafe fn sum_lanes_256(a: __m256) -> f32 {
    intrinsics!({
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    })
}

/// The largest of eight lanes.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(super) unsafe fn max_lane_256(a: __m256) -> f32 {
    intrinsics!({
        let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
    })
}

/// The sum of sixteen signed bytes.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(super) unsafe fn sum_of_bytes(bytes: __m128i) -> i32 {
    intrinsics!({
        // Made unsigned by adding 128 to each, which is taken off the sum again.
        let unsigned = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        let halves = _mm_sad_epu8(unsigned, _mm_setzero_si128());
        _mm_cvtsi128_si32(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves))) - 128 * LANES as i32
    })
}
