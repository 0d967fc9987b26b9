//! Rotary position embedding, from tables that the model computes in f64.
//!
//! For a pair `(x0, x1)` at angle `(c, s)`: `x0' = fma(x0, c, −(x1 · s))`, `x1' = fma(x1, c, x0 · s)`. Tables and
//! not sines per step, because scaling rules (llama3, yarn, …) belong to the model and f32 angles lose
//! accuracy at long positions.

use crate::{
    exec::Exec,
    simd::{Kernel, LANES, Simd},
};

/// Which numbers of a head form pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Neighbours: `(0, 1), (2, 3), …`
    Interleaved,
    /// The two halves: `(0, h), (1, h + 1), …` with `h = rot_dim / 2`.
    Half,
}

/// Cosines and sines, `[n_pos][rot_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    n_pairs: usize,
}

/// A table that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{n_cos} cosines and {n_sin} sines are not whole rows of {n_pairs} pairs, the same number of each")]
pub struct RopeError {
    /// Cosines given.
    pub n_cos: usize,
    /// Sines given.
    pub n_sin: usize,
    /// Pairs a position.
    pub n_pairs: usize,
}

impl RopeTable {
    /// A table of `rot_dim / 2 = n_pairs` angles a position.
    pub fn new(cos: Vec<f32>, sin: Vec<f32>, n_pairs: usize) -> Result<Self, RopeError> {
        let (n_cos, n_sin) = (cos.len(), sin.len());
        if n_pairs == 0 || n_cos != n_sin || !n_cos.is_multiple_of(n_pairs) {
            return Err(RopeError { n_cos, n_sin, n_pairs });
        }
        Ok(Self { cos, sin, n_pairs })
    }

    /// Positions in the table.
    pub fn n_pos(&self) -> usize {
        self.cos.len() / self.n_pairs
    }

    /// Numbers of a head that are rotated.
    pub fn rot_dim(&self) -> usize {
        2 * self.n_pairs
    }

    fn row(&self, pos: u32) -> Angles<'_> {
        let at = pos as usize * self.n_pairs;
        Angles { cos: &self.cos[at..at + self.n_pairs], sin: &self.sin[at..at + self.n_pairs] }
    }
}

/// Heads to rotate inside (possibly fused) rows.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// The angles.
    pub table: &'a RopeTable,
    /// Which numbers form pairs.
    pub style: RopeStyle,
    /// Position of each row.
    pub positions: &'a [u32],
    /// Distance between rows, in numbers.
    pub row_stride: usize,
    /// Heads that are rotated in each row, from its start.
    pub n_heads: usize,
    /// Distance between heads; the first `rot_dim` numbers of a head are rotated, the others left alone.
    pub head_dim: usize,
}

#[derive(Clone, Copy)]
struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

/// Rotates in place. `x` starts at the first head of the first row; the last row may end after its heads.
///
/// # Panics
/// If a position is not in the table, `rot_dim` exceeds `head_dim`, or the rows do not fit `x`.
pub fn rope_apply(exec: &Exec, rope: &Rope<'_>, x: &mut [f32]) {
    let width = rope.n_heads * rope.head_dim;
    let n_rows = rope.positions.len();
    if n_rows == 0 || width == 0 {
        return;
    }
    assert!(rope.table.rot_dim() <= rope.head_dim, "rot_dim exceeds head_dim {}", rope.head_dim);
    assert!(width <= rope.row_stride, "{width} numbers of heads exceed the row stride {}", rope.row_stride);
    assert!((n_rows - 1) * rope.row_stride + width <= x.len(), "x is shorter than {n_rows} rows");
    let end = x.len().min(n_rows * rope.row_stride);
    let grain = (1 << 13) / width + 1;
    exec.parallel_rows(&mut x[..end], rope.row_stride, grain, |first, rows| {
        for (i, row) in rows.chunks_mut(rope.row_stride).enumerate() {
            let angles = rope.table.row(rope.positions[first + i]);
            for head in row[..width].chunks_exact_mut(rope.head_dim) {
                let head = &mut head[..rope.table.rot_dim()];
                match exec.vector() {
                    Some(vector) => vector.run(Rotate { style: rope.style, head, angles }),
                    None => rotate(rope.style, head, angles),
                }
            }
        }
    });
}

/// The contract as plain loops.
#[inline(always)]
fn rotate(style: RopeStyle, head: &mut [f32], angles: Angles<'_>) {
    for (i, (&c, &s)) in angles.cos.iter().zip(angles.sin).enumerate() {
        let (a, b) = match style {
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            RopeStyle::Half => (i, i + angles.cos.len()),
        };
        (head[a], head[b]) = rotate_pair(head[a], head[b], c, s);
    }
}

#[inline(always)]
fn rotate_pair(x0: f32, x1: f32, c: f32, s: f32) -> (f32, f32) {
    (x0.mul_add(c, -(x1 * s)), x1.mul_add(c, x0 * s))
}

struct Rotate<'a> {
    style: RopeStyle,
    head: &'a mut [f32],
    angles: Angles<'a>,
}

impl Kernel for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.style == RopeStyle::Interleaved {
            return rotate(self.style, self.head, self.angles);
        }
        let (low, high) = self.head.split_at_mut(self.angles.cos.len());
        let (low, low_tail) = low.as_chunks_mut::<LANES>();
        let (high, high_tail) = high.as_chunks_mut::<LANES>();
        let (cos, cos_tail) = self.angles.cos.as_chunks::<LANES>();
        let (sin, sin_tail) = self.angles.sin.as_chunks::<LANES>();
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (x0, x1, c, sn) = (s.load(low), s.load(high), s.load(cos), s.load(sin));
            let negated = s.mul(x1, s.sub(s.splat(-0.0), sn));
            s.store(s.fma(x0, c, negated), low);
            s.store(s.fma(x1, c, s.mul(x0, sn)), high);
        }
        for (((x0, x1), c), sn) in low_tail.iter_mut().zip(high_tail).zip(cos_tail).zip(sin_tail) {
            (*x0, *x1) = rotate_pair(*x0, *x1, *c, *sn);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn rope_rotates_by_its_angle_on_every_isa(
            n_pairs in 1_usize..40,
            n_heads in 1_usize..4,
            extra in 0_usize..5,
            positions in prop::collection::vec(0_u32..9, 1..6),
            half in any::<bool>(),
        ) {
            let angle = |pos: usize, i: usize| pos as f64 * 0.7 / (1.0 + i as f64);
            let angles = (0..9).flat_map(|pos| (0..n_pairs).map(move |i| angle(pos, i)));
            let cos = angles.clone().map(|a| a.cos() as f32).collect();
            let sin = angles.map(|a| a.sin() as f32).collect();
            let table = RopeTable::new(cos, sin, n_pairs).unwrap();
            let head_dim = 2 * n_pairs + extra;
            let row_stride = n_heads * head_dim + 2;
            let style = if half { RopeStyle::Half } else { RopeStyle::Interleaved };
            let rope = Rope { table: &table, style, positions: &positions, row_stride, n_heads, head_dim };
            let x: Vec<f32> = (0..positions.len() * row_stride).map(|i| (i % 13) as f32 - 6.0).collect();
            let mut expected = x.clone();
            rope_apply(&Exec::new(Isa::Reference, 1).unwrap(), &rope, &mut expected);
            for (r, (row, out)) in x.chunks(row_stride).zip(expected.chunks(row_stride)).enumerate() {
                for j in 0..row_stride {
                    let (head, d) = (j / head_dim, j % head_dim);
                    if head == n_heads || d >= 2 * n_pairs {
                        prop_assert_eq!(row[j], out[j]);
                        continue;
                    }
                    let pair = if half { d % n_pairs } else { d / 2 };
                    let is_first = if half { d < n_pairs } else { d % 2 == 0 };
                    let step = if half { n_pairs } else { 1 };
                    let partner = if is_first { -f64::from(row[j + step]) } else { f64::from(row[j - step]) };
                    let a = angle(positions[r] as usize, pair);
                    let exact = f64::from(row[j]) * a.cos() + partner * a.sin();
                    prop_assert!((f64::from(out[j]) - exact).abs() < 2e-6);
                }
            }
            for isa in Isa::available() {
                let mut y = x.clone();
                rope_apply(&Exec::new(isa, 2).unwrap(), &rope, &mut y);
                prop_assert_eq!(&y, &expected, "{}", isa);
            }
        }
    }

    #[test]
    fn uneven_tables_are_refused() {
        assert!(RopeTable::new(vec![0.0; 6], vec![0.0; 6], 4).is_err());
        assert!(RopeTable::new(vec![0.0; 8], vec![0.0; 4], 4).is_err());
        assert!(RopeTable::new(vec![], vec![], 0).is_err());
    }
}
