//! Number formats of weight files, and their exact expansion to f32.
//!
//! The block formats are those of GGUF. A quantised value is `scale · (code − offset) (+ min)`, where a code is
//! an unsigned integer of 4 to 8 bits, `offset` belongs to the format, and scale and min belong to a group of
//! 16 or 32 neighbouring values. [`read_group`] brings every format into that one shape; expansion and
//! repacking both start from it. Formats with tables instead of scales (the IQ family) are not supported.

use half::{bf16, f16};

/// Values that are unpacked together: the block of the simple formats, an eighth of a super-block.
pub(crate) const GROUP: usize = 32;

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// 32 signed bytes and one f16 scale.
    Q8_0,
    /// 32 four-bit codes and one f16 scale; values centred on code 8.
    Q4_0,
    /// 32 four-bit codes, f16 scale and minimum.
    Q4_1,
    /// 32 five-bit codes and one f16 scale; values centred on code 16.
    Q5_0,
    /// 32 five-bit codes, f16 scale and minimum.
    Q5_1,
    /// Super-block of 256 four-bit codes: 8 groups with six-bit scales and minima.
    Q4K,
    /// Super-block of 256 five-bit codes: 8 groups with six-bit scales and minima.
    Q5K,
    /// Super-block of 256 six-bit codes: 16 groups with eight-bit scales.
    Q6K,
}

/// Stored bytes that do not fit the numbers they should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    /// The row length is not whole blocks.
    #[error("a row of {k} values is not whole blocks of {name}, which hold {block_len} each", name = ty.name(), block_len = ty.block_len())]
    PartialBlock {
        /// The format.
        ty: StoredType,
        /// Values in a row.
        k: usize,
    },
    /// The number of bytes is wrong.
    #[error("{name} data has {have} bytes where its shape needs {want}", name = ty.name())]
    Length {
        /// The format.
        ty: StoredType,
        /// Bytes given.
        have: usize,
        /// Bytes needed.
        want: usize,
    },
}

impl StoredType {
    /// All formats.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Values in a block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `k` values, or none if that is not whole blocks or does not fit memory.
    pub const fn row_bytes(self, k: usize) -> Option<usize> {
        if k.is_multiple_of(self.block_len()) {
            (k / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Whether values are codes with scales, so that columns can only be cut at multiples of 32.
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// The usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// The code that stands for zero (before a minimum is added).
    pub(crate) const fn offset(self) -> u8 {
        match self {
            Self::Q4_0 => 8,
            Self::Q5_0 => 16,
            Self::Q6K => 32,
            Self::Q8_0 => 128,
            _ => 0,
        }
    }

    /// Whether groups have a minimum.
    pub(crate) const fn has_min(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K)
    }

    pub(crate) fn check(self, k: usize, n_rows: usize, have: usize) -> Result<usize, StoredError> {
        let row_bytes = self.row_bytes(k).ok_or(StoredError::PartialBlock { ty: self, k })?;
        let want = row_bytes.saturating_mul(n_rows);
        if have == want { Ok(row_bytes) } else { Err(StoredError::Length { ty: self, have, want }) }
    }
}

impl std::fmt::Display for StoredType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Expands one stored row to f32; also the embedding look-up. Exact: a code times its scale is rounded once,
/// and so is adding the minimum.
pub fn dequantize_row(ty: StoredType, bytes: &[u8], out: &mut [f32]) -> Result<(), StoredError> {
    ty.check(out.len(), 1, bytes.len())?;
    expand(ty, bytes, 0, out);
    Ok(())
}

/// Expands values `first..first + out.len()` of a checked row.
pub(crate) fn expand(ty: StoredType, row: &[u8], first: usize, out: &mut [f32]) {
    match ty {
        StoredType::F32 => {
            for (x, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0.iter().skip(first)) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
        StoredType::F16 | StoredType::BF16 => {
            for (x, &bytes) in out.iter_mut().zip(row.as_chunks::<2>().0.iter().skip(first)) {
                let bits = u16::from_le_bytes(bytes);
                *x = if ty == StoredType::F16 {
                    f16::from_bits(bits).to_f32()
                } else {
                    bf16::from_bits(bits).to_f32()
                };
            }
        }
        _ => {
            for (i, values) in out.chunks_mut(GROUP).enumerate() {
                let group = read_group(ty, row, first / GROUP + i);
                for (j, x) in values.iter_mut().enumerate() {
                    *x = group.value(ty, j);
                }
            }
        }
    }
}

/// 32 neighbouring values of a quantised row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) codes: [u8; GROUP],
    /// Scale of each half; equal but for Q6_K.
    pub(crate) scales: [f32; 2],
    pub(crate) min: f32,
}

impl Group {
    fn value(&self, ty: StoredType, i: usize) -> f32 {
        let scaled = self.scales[i / 16] * (f32::from(self.codes[i]) - f32::from(ty.offset()));
        if ty.has_min() { scaled + self.min } else { scaled }
    }
}

/// Reads group `index` (of 32 values) of a row whose length was checked.
pub(crate) fn read_group(ty: StoredType, row: &[u8], index: usize) -> Group {
    let per_block = ty.block_len() / GROUP;
    let block = &row[index / per_block * ty.block_bytes()..][..ty.block_bytes()];
    match ty {
        StoredType::Q4K | StoredType::Q5K => read_k45(ty, block, index % per_block),
        StoredType::Q6K => read_q6k(block, index % per_block),
        _ => read_simple(ty, block),
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The formats of 32: scale, perhaps a minimum, perhaps 32 fifth bits, then the codes; low nibbles hold the
/// first half of the values, high nibbles the second.
fn read_simple(ty: StoredType, block: &[u8]) -> Group {
    let scale = half_at(block, 0);
    let min = if ty.has_min() { half_at(block, 2) } else { 0.0 };
    let rest = &block[if ty.has_min() { 4 } else { 2 }..];
    let codes = match ty {
        StoredType::Q8_0 => std::array::from_fn(|i| rest[i] ^ 0x80),
        StoredType::Q5_0 | StoredType::Q5_1 => {
            let fifth = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
            std::array::from_fn(|i| nibble(&rest[4..], i) | ((fifth >> i) as u8 & 1) << 4)
        }
        _ => std::array::from_fn(|i| nibble(rest, i)),
    };
    Group { codes, scales: [scale; 2], min }
}

fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 }
}

/// Q4_K and Q5_K: f16 scale and scale of minima, twelve bytes of packed six-bit scales and minima, for Q5_K
/// 32 bytes of fifth bits (bit g is group g's), then nibbles; two groups share 32 bytes.
fn read_k45(ty: StoredType, block: &[u8], group: usize) -> Group {
    let (scale, min) = six_bit_pair(&block[4..16], group);
    let (fifth, nibbles) = match ty {
        StoredType::Q5K => (Some(&block[16..48]), &block[48..]),
        _ => (None, &block[16..]),
    };
    let nibbles = &nibbles[group / 2 * 32..][..32];
    let codes = std::array::from_fn(|i| {
        let low = (nibbles[i] >> (group % 2 * 4)) & 15;
        low | fifth.map_or(0, |bits| ((bits[i] >> group) & 1) << 4)
    });
    let scale = half_at(block, 0) * f32::from(scale);
    let min = -(half_at(block, 2) * f32::from(min));
    Group { codes, scales: [scale; 2], min }
}

/// Six-bit scale and minimum of group `group`. The first four groups have them in the low six bits of bytes
/// 0..4 and 4..8; the others have four bits in bytes 8..12 and two in the high bits of the first eight.
fn six_bit_pair(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let low = packed[group + 4];
    (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
}

/// Q6_K: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 scale. Within each half
/// of 128 values, the quarter of 32 picks the nibble and the bit pair.
fn read_q6k(block: &[u8], group: usize) -> Group {
    let (half, quarter) = (group / 4, group % 4);
    let low = &block[half * 64 + quarter % 2 * 32..][..32];
    let high = &block[128 + half * 32..][..32];
    let codes =
        std::array::from_fn(|i| (low[i] >> (quarter / 2 * 4)) & 15 | ((high[i] >> (quarter * 2)) & 3) << 4);
    let d = half_at(block, 208);
    let scales = std::array::from_fn(|i| d * f32::from(block[192 + group * 2 + i] as i8));
    Group { codes, scales, min: 0.0 }
}

#[cfg(test)]
mod tests;
