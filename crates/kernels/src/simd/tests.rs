//! Every lane operation against the portable one, on values that include the awkward ones.

use proptest::prelude::*;

use super::*;

type Ops = (Vec<[f32; LANES]>, Vec<[i8; LANES]>);

struct AllOps {
    a: [f32; LANES],
    b: [f32; LANES],
    c: [f32; LANES],
    halves: [u16; LANES],
    bytes: [u8; 4 * LANES],
    quad: [i8; 4],
}

impl Kernel for AllOps {
    type Out = Ops;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Ops {
        let (a, b, c) = (s.load(&self.a), s.load(&self.b), s.load(&self.c));
        let w = s.load_bytes(&self.bytes);
        let int = s.splat_i32(-77);
        let negated = s.sub(s.splat(0.0), s.max(a, s.splat(-127.0)));
        let small = s.sub(s.splat(0.0), s.max(negated, s.splat(-127.0)));
        let dots = [
            w,
            s.low_nibble(w),
            s.high_nibble(w),
            s.bits_to_4(w, 0, 1),
            s.bits_to_4(w, 7, 1),
            s.bits_to_4(w, 2, 2),
            s.bits_to_4(w, 6, 2),
            s.or(s.low_nibble(w), s.bits_to_4(w, 4, 2)),
        ]
        .map(|w| s.to_f32(s.dot4(int, w, &self.quad)));
        let floats = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, c),
            s.max(a, b),
            s.abs(a),
            s.round(a),
            s.pow2(s.round(small)),
            s.select_lt(a, b, c, a),
            s.load_f16(&self.halves),
            s.load_bf16(&self.halves),
            s.splat(self.a[0]),
            s.splat(s.sum_lanes(a)),
        ];
        let mut out = vec![[0.0; LANES]; floats.len() + dots.len()];
        for (to, x) in out.iter_mut().zip(floats.into_iter().chain(dots)) {
            s.store(x, to);
        }
        let mut bytes = [0; LANES];
        let sum = s.store_i8(small, &mut bytes);
        out.push([s.max_lane(small), sum as f32].repeat(LANES / 2).try_into().unwrap());
        (out, vec![bytes])
    }
}

/// Bit patterns, with all NaN the same: payloads are not part of the contract.
fn bits(ops: &Ops) -> Vec<u32> {
    let canonical = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    ops.0.iter().flatten().map(canonical).chain(ops.1.iter().flatten().map(|&x| x as u32)).collect()
}

fn float() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -200.0_f32..200.0,
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => prop_oneof![Just(0.0), Just(-0.0), Just(0.5), Just(-1.5), Just(f32::NEG_INFINITY)],
    ]
}

proptest! {
    #[test]
    fn lanes_agree_with_the_portable_ones(
        a in prop::array::uniform16(float()),
        b in prop::array::uniform16(float()),
        c in prop::array::uniform16(float()),
        halves in prop::array::uniform16(any::<u16>()),
        bytes in prop::collection::vec(any::<u8>(), 64),
        quad in any::<[i8; 4]>(),
    ) {
        let bytes: [u8; 64] = bytes.try_into().unwrap();
        let ops = || AllOps { a, b, c, halves, bytes, quad };
        let expected = bits(&ops().run(Portable));
        for isa in Isa::available() {
            if let Some(vector) = Backend::new(isa).unwrap().vector() {
                prop_assert_eq!(&bits(&vector.run(ops())), &expected, "{}", isa);
            }
        }
    }
}
