//! What the tests share: random inputs, and an expansion of stored weights in f64 that shares no code with the
//! crate's own.

use half::f16;

use crate::stored::StoredType;

/// A small generator (splitmix64), so that a test needs only a seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// Random stored weights: every code and packed scale is hit, f16 scales are moderate.
pub(crate) fn random_stored(ty: StoredType, n: usize, rng: &mut Rng) -> Vec<u8> {
    match ty {
        StoredType::F32 => rng.units(n).iter().flat_map(|x| x.to_le_bytes()).collect(),
        StoredType::F16 => rng.units(n).iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        StoredType::BF16 => {
            rng.units(n).iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
        }
        _ => {
            let mut bytes: Vec<u8> = (0..ty.row_bytes(n).unwrap()).map(|_| rng.bits() as u8).collect();
            let scale_at: &[usize] = match ty {
                StoredType::Q6K => &[208],
                StoredType::Q8_0 | StoredType::Q4_0 | StoredType::Q5_0 => &[0],
                _ => &[0, 2],
            };
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                for &at in scale_at {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(rng.unit() * 0.05).to_le_bytes());
                }
            }
            bytes
        }
    }
}

fn half_of(bytes: &[u8]) -> f64 {
    f64::from(f16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
}

/// Expands stored weights value by value.
pub(crate) fn expand_f64(ty: StoredType, bytes: &[u8]) -> Vec<f64> {
    let blocks = bytes.chunks_exact(ty.block_bytes());
    let nibble = |qs: &[u8], i: usize| if i < 16 { qs[i] % 16 } else { qs[i - 16] / 16 };
    let bit = |qh: &[u8], i: usize| (qh[i / 8] >> (i % 8)) % 2;
    blocks
        .flat_map(|b| -> Vec<f64> {
            let d = if ty.block_len() > 1 { half_of(b) } else { 0.0 };
            match ty {
                StoredType::F32 => vec![f64::from(f32::from_le_bytes(b.try_into().unwrap()))],
                StoredType::F16 => vec![half_of(b)],
                StoredType::BF16 => {
                    vec![f64::from(f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16))]
                }
                StoredType::Q8_0 => b[2..].iter().map(|&q| d * f64::from(q as i8)).collect(),
                StoredType::Q4_0 => (0..32).map(|i| d * (f64::from(nibble(&b[2..], i)) - 8.0)).collect(),
                StoredType::Q4_1 => {
                    (0..32).map(|i| d * f64::from(nibble(&b[4..], i)) + half_of(&b[2..])).collect()
                }
                StoredType::Q5_0 => (0..32)
                    .map(|i| d * (f64::from(nibble(&b[6..], i) + 16 * bit(&b[2..6], i)) - 16.0))
                    .collect(),
                StoredType::Q5_1 => (0..32)
                    .map(|i| d * f64::from(nibble(&b[8..], i) + 16 * bit(&b[4..8], i)) + half_of(&b[2..]))
                    .collect(),
                StoredType::Q4K => (0..256).map(|i| k_value(b, &b[16..], &[], i)).collect(),
                StoredType::Q5K => (0..256).map(|i| k_value(b, &b[48..], &b[16..48], i)).collect(),
                StoredType::Q6K => (0..256).map(|i| q6_value(b, i)).collect(),
            }
        })
        .collect()
}

/// Value `i` of a Q4_K or Q5_K super-block, with the six-bit fields read from one little-endian number.
fn k_value(block: &[u8], nibbles: &[u8], fifth: &[u8], i: usize) -> f64 {
    let group = i / 32;
    let packed = &block[4..16];
    let (scale, min) = if group < 4 {
        (packed[group] % 64, packed[group + 4] % 64)
    } else {
        let high_of = |byte: u8| byte / 64 * 16;
        (packed[group + 4] % 16 + high_of(packed[group - 4]), packed[group + 4] / 16 + high_of(packed[group]))
    };
    let byte = nibbles[i / 64 * 32 + i % 32];
    let mut code = if i % 64 < 32 { byte % 16 } else { byte / 16 };
    if !fifth.is_empty() && fifth[i % 32] & (1 << group) != 0 {
        code += 16;
    }
    half_of(block) * f64::from(scale) * f64::from(code) - half_of(&block[2..]) * f64::from(min)
}

/// Value `i` of a Q6_K super-block.
fn q6_value(block: &[u8], i: usize) -> f64 {
    let (half, l) = (i / 128, i % 128);
    let low = block[half * 64 + l % 64];
    let low = if l < 64 { low % 16 } else { low / 16 };
    let high = (block[128 + half * 32 + l % 32] >> (l / 32 * 2)) % 4;
    let scale = f64::from(block[192 + i / 16] as i8);
    half_of(&block[208..]) * scale * (f64::from(low + 16 * high) - 32.0)
}
