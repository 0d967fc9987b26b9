//! Weights, repacked at load for the order of the sums.
//!
//! Outputs lie in panels of sixteen so that lanes are outputs and the summed index is walked in order; a
//! row-major matrix would need a horizontal sum, whose order depends on the lane width. One packed matrix may
//! hold row ranges of several stored ones (fused QKV, gate and up) of different formats, and only the columns
//! a rank owns.

use std::ops::Range;

use longreach_types::{N_SHARDS, WeightForm};

use crate::{
    aligned::{AlignedBytes, LINE},
    exec::{Disjoint, Exec},
    panel::{Format, Record, with_format},
    simd::LANES,
    stored::{GROUP, StoredError, StoredType, expand, read_group},
};

/// A stored matrix: `n_rows` outputs of `k` weights, row-major.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    /// How the weights are stored.
    pub ty: StoredType,
    /// Number of rows (outputs).
    pub n_rows: usize,
    /// Weights in a row.
    pub k: usize,
    /// The bytes, as the file has them.
    pub bytes: &'a [u8],
}

/// Why matrices could not be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A source's bytes do not fit its shape.
    #[error("source {source_idx} is malformed")]
    Stored {
        /// Which source.
        source_idx: usize,
        /// What does not fit.
        #[source]
        source: StoredError,
    },
    /// A row range reaches beyond its source.
    #[error("rows {rows:?} reach beyond the {n_rows} rows of source {source_idx}")]
    Rows {
        /// Which source.
        source_idx: usize,
        /// The rows asked for.
        rows: Range<usize>,
        /// The rows there are.
        n_rows: usize,
    },
    /// The segments are none, too many, not adjacent, or reach beyond a source's columns.
    #[error("segments {segments:?} must be 1 to {max} adjacent ascending ranges within the {k} columns of source {source_idx}", max = N_SHARDS)]
    Segments {
        /// The segments asked for.
        segments: Vec<Range<usize>>,
        /// The source they do not fit.
        source_idx: usize,
        /// Its columns.
        k: usize,
    },
    /// A segment bound cuts a group of 32 quantised weights.
    #[error(
        "segment bound {bound} cuts a group of 32 {ty} weights of source {source_idx}; bounds must be multiples of 32"
    )]
    Bound {
        /// The bound.
        bound: usize,
        /// Which source.
        source_idx: usize,
        /// Its format.
        ty: StoredType,
    },
}

/// A weight matrix in panels, ready for [`crate::matmul`].
#[derive(Debug)]
pub struct PackedMatrix {
    n_out: usize,
    k: usize,
    /// Local column where each segment ends.
    segment_ends: Vec<usize>,
    runs: Vec<Run>,
}

/// Consecutive outputs of one format.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) ty: StoredType,
    pub(crate) first_out: usize,
    pub(crate) n_out: usize,
    k: usize,
    panel_bytes: usize,
    panels: AlignedBytes,
}

/// One row of a source, with the columns wanted starting at `first`.
#[derive(Clone, Copy)]
struct SourceRow<'a> {
    ty: StoredType,
    bytes: &'a [u8],
    first: usize,
}

impl PackedMatrix {
    /// Packs the given row ranges, one below the other in the order given, and of their columns those in
    /// `segments`.
    ///
    /// With one segment a row's sum runs over it in order: a column-parallel matrix. With several, each
    /// segment is summed from zero and the sums are added in a tree: a rank's slice of a row-parallel matrix,
    /// whose segments are adjacent. Segments may be empty and count as `+0.0`.
    pub fn pack(
        exec: &Exec,
        sources: &[(MatrixView<'_>, Range<usize>)],
        segments: &[Range<usize>],
        form: WeightForm,
    ) -> Result<Self, PackError> {
        let columns = check(sources, segments)?;
        let mut runs: Vec<Run> = Vec::new();
        let mut pending: Vec<SourceRow<'_>> = Vec::new();
        let mut n_out = 0;
        for (i, (view, rows)) in sources.iter().enumerate() {
            let row_bytes = view.bytes.len() / view.n_rows.max(1);
            pending.extend(rows.clone().map(|row| SourceRow {
                ty: view.ty,
                bytes: &view.bytes[row * row_bytes..(row + 1) * row_bytes],
                first: columns.start,
            }));
            let ty = |view: &MatrixView<'_>| if form == WeightForm::F32 { StoredType::F32 } else { view.ty };
            if sources.get(i + 1).is_none_or(|(next, _)| ty(next) != ty(view)) {
                let run = Run::pack(exec, ty(view), n_out, columns.len(), &pending);
                n_out += pending.len();
                pending.clear();
                runs.push(run);
            }
        }
        let segment_ends = segments.iter().map(|segment| segment.end - columns.start).collect();
        Ok(Self { n_out, k: columns.len(), segment_ends, runs })
    }

    /// Outputs.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Columns, over all segments: the length of an input row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of packed weights.
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|run| run.panels.len()).sum()
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub(crate) fn segment_ends(&self) -> &[usize] {
        &self.segment_ends
    }
}

/// The columns that the segments cover, if everything fits.
fn check(
    sources: &[(MatrixView<'_>, Range<usize>)],
    segments: &[Range<usize>],
) -> Result<Range<usize>, PackError> {
    let adjacent = segments.windows(2).all(|pair| pair[0].end == pair[1].start);
    let ascending = segments.iter().all(|segment| segment.start <= segment.end);
    let well_formed = adjacent && ascending && (1..=N_SHARDS).contains(&segments.len());
    for (source_idx, (view, rows)) in sources.iter().enumerate() {
        view.ty
            .check(view.k, view.n_rows, view.bytes.len())
            .map_err(|source| PackError::Stored { source_idx, source })?;
        if rows.start > rows.end || rows.end > view.n_rows {
            return Err(PackError::Rows { source_idx, rows: rows.clone(), n_rows: view.n_rows });
        }
        if !well_formed || segments.last().is_some_and(|last| last.end > view.k) {
            return Err(PackError::Segments { segments: segments.to_vec(), source_idx, k: view.k });
        }
        let mut bounds = segments.iter().flat_map(|segment| [segment.start, segment.end]);
        if let Some(bound) = bounds.find(|bound| view.ty.is_quantised() && !bound.is_multiple_of(GROUP)) {
            return Err(PackError::Bound { bound, source_idx, ty: view.ty });
        }
    }
    match (segments.first(), segments.last()) {
        (Some(first), Some(last)) if well_formed => Ok(first.start..last.end),
        _ => Err(PackError::Segments { segments: segments.to_vec(), source_idx: 0, k: 0 }),
    }
}

impl Run {
    fn pack(exec: &Exec, ty: StoredType, first_out: usize, k: usize, rows: &[SourceRow<'_>]) -> Self {
        let panel_bytes = with_format!(
            ty,
            F => k / GROUP * size_of::<Record<F>>(),
            float => k * LANES * float.block_bytes()
        )
        .next_multiple_of(LINE);
        let n_panels = rows.len().div_ceil(LANES);
        let mut panels = exec.memory().zeroed(n_panels * panel_bytes);
        let out = Disjoint::new(&mut panels);
        exec.parallel(n_panels, |i| {
            // SAFETY: each task has its own panel.
            let panel = unsafe { out.slice(i * panel_bytes, panel_bytes) };
            let rows = &rows[i * LANES..rows.len().min((i + 1) * LANES)];
            with_format!(
                ty,
                F => pack_quantised::<F>(panel, k / GROUP, rows),
                float => pack_float(panel, float, k, rows)
            );
        });
        Self { ty, first_out, n_out: rows.len(), k, panel_bytes, panels }
    }

    pub(crate) fn n_panels(&self) -> usize {
        self.n_out.div_ceil(LANES)
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Records of a quantised panel, one per 32 columns.
    #[inline(always)]
    pub(crate) fn quantised<F: Format>(&self, panel: usize) -> &[Record<F>] {
        let bytes = self.k / GROUP * size_of::<Record<F>>();
        bytemuck::cast_slice(&self.panels[panel * self.panel_bytes..][..bytes])
    }

    /// Weights of a float panel, sixteen a column.
    #[inline(always)]
    pub(crate) fn floats<N: bytemuck::Pod>(&self, panel: usize) -> &[[N; LANES]] {
        let bytes = &self.panels[panel * self.panel_bytes..][..self.k * LANES * size_of::<N>()];
        bytemuck::cast_slice(bytes)
    }
}

fn pack_quantised<F: Format>(panel: &mut [u8], n_groups: usize, rows: &[SourceRow<'_>]) {
    let records: &mut [Record<F>] = bytemuck::cast_slice_mut(&mut panel[..n_groups * size_of::<Record<F>>()]);
    for (lane, row) in rows.iter().enumerate() {
        for (i, record) in records.iter_mut().enumerate() {
            record.put(lane, &read_group(row.ty, row.bytes, row.first / GROUP + i));
        }
    }
}

/// Float panels keep their storage format, or are expanded to f32.
fn pack_float(panel: &mut [u8], ty: StoredType, k: usize, rows: &[SourceRow<'_>]) {
    let width = ty.block_bytes();
    let mut values = vec![0.0_f32; if ty == StoredType::F32 { k } else { 0 }];
    for (lane, row) in rows.iter().enumerate() {
        let bytes: &[u8] = if ty == StoredType::F32 {
            expand(row.ty, row.bytes, row.first, &mut values);
            bytemuck::cast_slice(&values)
        } else {
            &row.bytes[row.first * width..][..k * width]
        };
        for (column, number) in bytes.chunks_exact(width).enumerate() {
            panel[(column * LANES + lane) * width..][..width].copy_from_slice(number);
        }
    }
}

#[cfg(test)]
mod tests;
