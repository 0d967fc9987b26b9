//! Quantised weights in memory: what sixteen outputs need for 32 columns lies together.
//!
//! A panel is sixteen outputs. For each 32 columns it has a record of scales and codes, each an array over lanes, so that a kernel loads them as they are. Codes are kept in as few bits as the file's:
//! four-bit codes share a byte across the two halves of the 32 columns, fifth and sixth bits lie in lines of
//! their own. Scales stay f16 where the file has them so, because batch-1 decode reads every byte once.

use bytemuck::Pod;
use half::f16;

use crate::{
    simd::{LANES, Simd},
    stored::{Group, StoredType},
};

/// One byte quad for each of sixteen lanes.
pub(crate) type Line = [u8; 4 * LANES];

/// The codes of sixteen outputs and 32 columns.
pub(crate) trait Codes: Pod {
    /// The codes of columns `4 quad .. 4 quad + 4`, a quad a lane. Fast when `quad` is a constant.
    fn quad<S: Simd>(&self, s: S, quad: usize) -> S::B;
    /// The code of one lane and column.
    fn get(&self, lane: usize, column: usize) -> u8;
    /// Sets a code that is zero so far.
    fn put(&mut self, lane: usize, column: usize, code: u8);
}

/// Four bits: a byte of line `v` holds quad `v` low and quad `v + 4` high.
impl Codes for [Line; 4] {
    #[inline(always)]
    fn quad<S: Simd>(&self, s: S, quad: usize) -> S::B {
        let line = s.load_bytes(&self[quad % 4]);
        if quad < 4 { s.low_nibble(line) } else { s.high_nibble(line) }
    }
    fn get(&self, lane: usize, column: usize) -> u8 {
        let byte = self[column / 4 % 4][lane * 4 + column % 4];
        if column < 16 { byte & 15 } else { byte >> 4 }
    }
    fn put(&mut self, lane: usize, column: usize, code: u8) {
        self[column / 4 % 4][lane * 4 + column % 4] |= (code & 15) << (column / 16 * 4);
    }
}

/// Five bits: four lines of nibbles, and a line whose bit `q` is the fifth bit of quad `q`.
impl Codes for [Line; 5] {
    #[inline(always)]
    fn quad<S: Simd>(&self, s: S, quad: usize) -> S::B {
        let (nibbles, fifth) = split(self);
        let high = s.bits_to_4(s.load_bytes(&fifth[0]), quad as u32, 1);
        s.or(nibbles.quad(s, quad), high)
    }
    fn get(&self, lane: usize, column: usize) -> u8 {
        let (nibbles, fifth) = split(self);
        let high = (fifth[0][lane * 4 + column % 4] >> (column / 4)) & 1;
        nibbles.get(lane, column) | high << 4
    }
    fn put(&mut self, lane: usize, column: usize, code: u8) {
        self[4][lane * 4 + column % 4] |= (code >> 4 & 1) << (column / 4);
        self[column / 4 % 4][lane * 4 + column % 4] |= (code & 15) << (column / 16 * 4);
    }
}

/// Six bits: four lines of nibbles, and two lines of bit pairs, four quads each.
impl Codes for [Line; 6] {
    #[inline(always)]
    fn quad<S: Simd>(&self, s: S, quad: usize) -> S::B {
        let (nibbles, pairs) = split(self);
        let high = s.bits_to_4(s.load_bytes(&pairs[quad / 4]), quad as u32 % 4 * 2, 2);
        s.or(nibbles.quad(s, quad), high)
    }
    fn get(&self, lane: usize, column: usize) -> u8 {
        let (nibbles, pairs) = split(self);
        let high = (pairs[column / 16][lane * 4 + column % 4] >> (column / 4 % 4 * 2)) & 3;
        nibbles.get(lane, column) | high << 4
    }
    fn put(&mut self, lane: usize, column: usize, code: u8) {
        self[4 + column / 16][lane * 4 + column % 4] |= (code >> 4 & 3) << (column / 4 % 4 * 2);
        self[column / 4 % 4][lane * 4 + column % 4] |= (code & 15) << (column / 16 * 4);
    }
}

/// Eight bits: one line a quad.
impl Codes for [Line; 8] {
    #[inline(always)]
    fn quad<S: Simd>(&self, s: S, quad: usize) -> S::B {
        s.load_bytes(&self[quad])
    }
    fn get(&self, lane: usize, column: usize) -> u8 {
        self[column / 4][lane * 4 + column % 4]
    }
    fn put(&mut self, lane: usize, column: usize, code: u8) {
        self[column / 4][lane * 4 + column % 4] = code;
    }
}

/// The nibble lines, and the lines of further bits.
#[inline(always)]
fn split(lines: &[Line]) -> (&[Line; 4], &[Line]) {
    lines.split_first_chunk().expect("formats of five and six bits have more than four lines")
}

/// One number for each of sixteen lanes.
pub(crate) trait Numbers: Pod {
    fn load<S: Simd>(&self, s: S) -> S::F;
    fn get(&self, lane: usize) -> f32;
    fn put(&mut self, lane: usize, x: f32);
}

/// f16 bits. Only numbers that came from f16 are put here, so nothing is rounded.
impl Numbers for [u16; LANES] {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::F {
        s.load_f16(self)
    }
    fn get(&self, lane: usize) -> f32 {
        f16::from_bits(self[lane]).to_f32()
    }
    fn put(&mut self, lane: usize, x: f32) {
        self[lane] = f16::from_f32(x).to_bits();
    }
}

impl Numbers for [f32; LANES] {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S) -> S::F {
        s.load(self)
    }
    fn get(&self, lane: usize) -> f32 {
        self[lane]
    }
    fn put(&mut self, lane: usize, x: f32) {
        self[lane] = x;
    }
}

/// Sixteen outputs and 32 columns: scales, then codes. Records of a panel follow each other, so that a panel
/// is one stream; with scales and codes in two, the processor's prefetching lost track and decode ran at a
/// third of the memory bandwidth.
#[repr(C)]
pub(crate) struct Record<F: Format> {
    pub(crate) scales: F::Scales,
    pub(crate) codes: F::Codes,
}

impl<F: Format> Clone for Record<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for Record<F> {}

// SAFETY: both fields are arrays of plain numbers, for which zero is valid.
unsafe impl<F: Format> bytemuck::Zeroable for Record<F> {}
// SAFETY: both fields are plain numbers, and there is no padding: that is checked when a format is compiled.
unsafe impl<F: Format> Pod for Record<F> {}

impl<F: Format> Record<F> {
    const NO_PADDING: () = assert!(size_of::<Self>() == size_of::<F::Scales>() + size_of::<F::Codes>());

    /// Writes one lane.
    pub(crate) fn put(&mut self, lane: usize, group: &Group) {
        let () = Self::NO_PADDING;
        let scales = self.scales.as_mut();
        scales[0].put(lane, group.scales[0]);
        if F::SPLIT {
            scales[1].put(lane, group.scales[1]);
        } else if F::TYPE.has_min() {
            scales[1].put(lane, group.min);
        }
        for (column, &code) in group.codes.iter().enumerate() {
            self.codes.put(lane, column, code);
        }
    }

    /// Reads one lane back.
    pub(crate) fn get(&self, lane: usize) -> Group {
        let scales = self.scales.as_ref();
        let first = scales[0].get(lane);
        Group {
            codes: std::array::from_fn(|column| self.codes.get(lane, column)),
            scales: [first, if F::SPLIT { scales[1].get(lane) } else { first }],
            min: if F::TYPE.has_min() { scales[1].get(lane) } else { 0.0 },
        }
    }
}

/// A quantised format as a type.
pub(crate) trait Format: Send + Sync + 'static {
    const TYPE: StoredType;
    /// Whether the two halves of 32 columns have scales of their own.
    const SPLIT: bool = false;
    type Codes: Codes;
    type Numbers: Numbers;
    /// Scale, then minimum or the second half's scale.
    type Scales: Pod + AsRef<[Self::Numbers]> + AsMut<[Self::Numbers]>;
}

macro_rules! formats {
    ($($name:ident: $lines:literal lines, $n_scales:literal x $number:ty $(, split $split:literal)?;)*) => {$(
        pub(crate) struct $name;
        impl Format for $name {
            const TYPE: StoredType = StoredType::$name;
            $(const SPLIT: bool = $split;)?
            type Codes = [Line; $lines];
            type Numbers = [$number; LANES];
            type Scales = [[$number; LANES]; $n_scales];
        }
    )*};
}

formats! {
    Q8_0: 8 lines, 1 x u16;
    Q4_0: 4 lines, 1 x u16;
    Q4_1: 4 lines, 2 x u16;
    Q5_0: 5 lines, 1 x u16;
    Q5_1: 5 lines, 2 x u16;
    Q4K: 4 lines, 2 x f32;
    Q5K: 5 lines, 2 x f32;
    Q6K: 6 lines, 2 x f32, split true;
}

/// Evaluates `$quantised` with `$format` standing for the [`Format`] of `$ty`, or else `$float`.
macro_rules! with_format {
    ($ty:expr, $format:ident => $quantised:expr, $other:ident => $float:expr) => {
        match $ty {
            $crate::stored::StoredType::Q8_0 => {
                type $format = $crate::panel::Q8_0;
                $quantised
            }
            $crate::stored::StoredType::Q4_0 => {
                type $format = $crate::panel::Q4_0;
                $quantised
            }
            $crate::stored::StoredType::Q4_1 => {
                type $format = $crate::panel::Q4_1;
                $quantised
            }
            $crate::stored::StoredType::Q5_0 => {
                type $format = $crate::panel::Q5_0;
                $quantised
            }
            $crate::stored::StoredType::Q5_1 => {
                type $format = $crate::panel::Q5_1;
                $quantised
            }
            $crate::stored::StoredType::Q4K => {
                type $format = $crate::panel::Q4K;
                $quantised
            }
            $crate::stored::StoredType::Q5K => {
                type $format = $crate::panel::Q5K;
                $quantised
            }
            $crate::stored::StoredType::Q6K => {
                type $format = $crate::panel::Q6K;
                $quantised
            }
            $other => $float,
        }
    };
}
pub(crate) use with_format;
