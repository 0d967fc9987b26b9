//! The CPU backend: bit-exact kernels over vectors, and collectives that only move data.
//!
//! Sums across ranks are gathered in rank order and added here by the kernels, in the canonical tree.

use std::{borrow::Cow, ops::Range};

use longreach_collective::{CommError, Communicator};
use longreach_kernels::{
    AttnInput, AttnSeq, Exec, KvArena, KvGeometry, KvSlot, MatrixView, Merge, PackedMatrix, Rope, RopeTable,
    add_assign, attention, correct_partials, dequantize_row, finish_corrected, kv_store, matmul,
    merge_partials, partial_stats, record_len, rms_norm, rope_apply, silu_mul, tree_add, tree_sum,
};
use longreach_types::{BlockId, DcpLayout, TokenId, WeightForm};

use crate::backend::{AttentionShape, Backend, BatchLayout, KvShape, MergeShape, QkvColumns, StoredMatrix};

/// Runs one rank on CPU threads.
pub struct CpuBackend {
    exec: Exec,
}

/// Activations in memory, row-major.
#[derive(Clone, Debug, Default)]
pub struct CpuTensor {
    data: Vec<f32>,
    n_rows: usize,
}

/// The KV of one rank in memory.
pub struct CpuKv {
    /// The bytes.
    pub arena: KvArena,
    layout: DcpLayout,
    dcp_rank: usize,
}

impl CpuBackend {
    /// A backend that runs on `exec`.
    pub fn new(exec: Exec) -> Self {
        Self { exec }
    }
}

impl CpuTensor {
    /// A tensor of `n_rows` equal rows.
    pub fn new(data: Vec<f32>, n_rows: usize) -> Self {
        Self { data, n_rows }
    }

    fn n_cols(&self) -> usize {
        self.data.len().checked_div(self.n_rows).unwrap_or(0)
    }

    fn resize(&mut self, n_rows: usize, n_cols: usize) -> &mut [f32] {
        self.n_rows = n_rows;
        self.data.resize(n_rows * n_cols, 0.0);
        &mut self.data
    }
}

/// Regroups `[n_rows][n_cols]` into one part per column range, each `[n_rows][range]`.
fn split_columns(data: &[f32], n_cols: usize, ranges: &[Range<usize>]) -> Vec<f32> {
    let mut parts = Vec::with_capacity(data.len());
    for range in ranges {
        data.chunks_exact(n_cols.max(1)).for_each(|row| parts.extend_from_slice(&row[range.clone()]));
    }
    parts
}

/// The opposite of [`split_columns`]: parts `[n_rows][widths[i]]` side by side.
fn join_columns(parts: &[f32], n_rows: usize, widths: &[usize], out: &mut [f32]) {
    let n_cols: usize = widths.iter().sum();
    let (mut part_start, mut col) = (0, 0);
    for &width in widths {
        for row in 0..n_rows {
            let from = part_start + row * width;
            out[row * n_cols + col..][..width].copy_from_slice(&parts[from..from + width]);
        }
        part_start += n_rows * width;
        col += width;
    }
}

fn merge_of(shape: &MergeShape) -> Merge<'static> {
    Merge { n_parts: shape.shares.len(), v_dim: shape.head_dim, sinks: &[] }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;
    type Rope = RopeTable;
    type Kv = CpuKv;
    type Comm = Box<dyn Communicator<[f32]>>;

    fn pack(
        &self,
        sources: &[(StoredMatrix<'_>, Range<usize>)],
        segments: &[Range<usize>],
        form: WeightForm,
    ) -> Result<PackedMatrix, String> {
        let views: Vec<_> = sources
            .iter()
            .map(|(source, rows)| {
                let StoredMatrix { ty, n_rows, k, bytes } = *source;
                (MatrixView { ty, n_rows, k, bytes }, rows.clone())
            })
            .collect();
        PackedMatrix::pack(&self.exec, &views, segments, form).map_err(|error| error.to_string())
    }

    fn matrix_bytes(&self, matrix: &PackedMatrix) -> usize {
        matrix.bytes()
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }

    fn rope(&self, cos: Vec<f32>, sin: Vec<f32>, rot_dim: usize) -> RopeTable {
        RopeTable::new(cos, sin, rot_dim / 2).expect("the tables were made together")
    }

    fn kv(&self, shape: &KvShape) -> CpuKv {
        let block_size = shape.layout.block_size();
        let geometry = KvGeometry::uniform(shape.n_kv_heads, shape.head_dim, block_size, shape.dtype);
        let arena = KvArena::new(geometry, shape.n_layers, shape.n_blocks);
        CpuKv { arena, layout: shape.layout, dcp_rank: shape.dcp_rank }
    }

    fn export_kv(&self, kv: &CpuKv, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>) {
        let bytes = kv.arena.block(layer, block);
        let head_bytes = bytes.len() / kv.arena.geometry().n_kv_heads.max(1);
        out.extend_from_slice(&bytes[heads.start * head_bytes..heads.end * head_bytes]);
    }

    fn import_kv(&self, kv: &mut CpuKv, layer: usize, block: BlockId, heads: Range<usize>, bytes: &[u8]) {
        let n_kv_heads = kv.arena.geometry().n_kv_heads;
        let cell = kv.arena.block_mut(layer, block);
        let head_bytes = cell.len() / n_kv_heads.max(1);
        cell[heads.start * head_bytes..heads.end * head_bytes].copy_from_slice(bytes);
    }

    fn embed(&self, table: StoredMatrix<'_>, tokens: &[TokenId], out: &mut CpuTensor) {
        let row_bytes = table.bytes.len() / table.n_rows;
        let rows = out.resize(tokens.len(), table.k).chunks_exact_mut(table.k);
        for (token, row) in tokens.iter().zip(rows) {
            let bytes = &table.bytes[token.0 as usize * row_bytes..][..row_bytes];
            dequantize_row(table.ty, bytes, row).expect("a row of the table has the table's width");
        }
    }

    fn matmul(&self, matrix: &PackedMatrix, x: &CpuTensor, bias: Option<&Vec<f32>>, out: &mut CpuTensor) {
        let out = out.resize(x.n_rows, matrix.n_out());
        matmul(&self.exec, matrix, &x.data, bias.map(Vec::as_slice), out);
    }

    fn rms_norm(&self, x: &CpuTensor, weight: &Vec<f32>, eps: f32, out: &mut CpuTensor) {
        let out = out.resize(x.n_rows, x.n_cols());
        rms_norm(&self.exec, &x.data, weight, eps, out);
    }

    fn rotate(&self, table: &RopeTable, columns: &QkvColumns, batch: &BatchLayout, qkv: &mut CpuTensor) {
        let rope = Rope {
            table,
            style: columns.rope,
            positions: &batch.positions,
            row_stride: columns.n_cols(),
            n_heads: columns.n_q_heads + columns.n_kv_heads,
            head_dim: columns.head_dim,
        };
        rope_apply(&self.exec, &rope, &mut qkv.data);
    }

    fn store_kv(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        columns: &QkvColumns,
        batch: &BatchLayout,
        qkv: &CpuTensor,
    ) {
        let kv_width = columns.n_kv_heads * columns.head_dim;
        if kv_width == 0 {
            return;
        }
        let k_start = columns.n_q_heads * columns.head_dim;
        for (row, slot) in qkv.data.chunks_exact(columns.n_cols()).zip(&batch.slots) {
            let Some((block, offset)) = *slot else { continue };
            let (k, v) = row[k_start..].split_at(kv_width);
            kv_store(&mut kv.arena, KvSlot { layer, block, offset }, k, v);
        }
    }

    fn attend(
        &self,
        kv: &CpuKv,
        shape: &AttentionShape,
        batch: &BatchLayout,
        q: &CpuTensor,
        partials: &mut CpuTensor,
    ) {
        let seqs: Vec<_> = batch
            .seqs
            .iter()
            .map(|seq| AttnSeq { blocks: &seq.blocks, rows: seq.rows.clone(), first_pos: seq.first_pos })
            .collect();
        let out = partials.resize(q.n_rows, shape.n_q_heads * record_len(shape.head_dim));
        let input = AttnInput {
            arena: &kv.arena,
            layer: shape.layer,
            q: &q.data,
            q_stride: q.n_cols(),
            n_q_heads: shape.n_q_heads,
            kv_index: &shape.kv_index,
            scale: shape.scale,
            window: shape.window,
            layout: kv.layout,
            dcp_rank: kv.dcp_rank,
            seqs: &seqs,
        };
        attention(&self.exec, &input, out);
    }

    fn silu_mul(&self, gate_up: &CpuTensor, out: &mut CpuTensor) {
        let n = gate_up.n_cols() / 2;
        let out = out.resize(gate_up.n_rows, n);
        silu_mul(&self.exec, &gate_up.data, n, out);
    }

    fn add(&self, x: &mut CpuTensor, y: &CpuTensor) {
        add_assign(&self.exec, &mut x.data, &y.data);
    }

    fn add_bias(&self, x: &mut CpuTensor, bias: &Vec<f32>) {
        for row in x.data.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
    }

    fn select_rows(&self, x: &CpuTensor, rows: &[usize], out: &mut CpuTensor) {
        let n_cols = x.n_cols();
        let out = out.resize(rows.len(), n_cols).chunks_exact_mut(n_cols);
        rows.iter().zip(out).for_each(|(&row, out)| out.copy_from_slice(&x.data[row * n_cols..][..n_cols]));
    }

    fn read<'a>(&self, x: &'a CpuTensor) -> Cow<'a, [f32]> {
        Cow::Borrowed(&x.data)
    }

    fn all_reduce(&self, comm: &mut Self::Comm, x: &mut CpuTensor) -> Result<(), CommError> {
        let mut parts = vec![0.0; x.data.len() * comm.n_ranks()];
        comm.all_gather(&x.data, &mut parts)?;
        tree_add(&parts, comm.n_ranks(), &mut x.data);
        Ok(())
    }

    fn gather_columns(
        &self,
        comm: &mut Self::Comm,
        x: &CpuTensor,
        columns: &[usize],
        out: &mut CpuTensor,
    ) -> Result<(), CommError> {
        let (n_rows, own) = (x.n_rows, columns[comm.rank()]);
        let send = split_columns(&x.data, x.n_cols(), std::slice::from_ref(&(0..own)));
        let counts: Vec<_> = columns.iter().map(|width| n_rows * width).collect();
        let mut parts = vec![0.0; counts.iter().sum()];
        comm.all_gather_v(&send, &mut parts, &counts)?;
        let out = out.resize(n_rows, columns.iter().sum());
        join_columns(&parts, n_rows, columns, out);
        Ok(())
    }

    fn merge_a2a(
        &self,
        comm: &mut Self::Comm,
        shape: &MergeShape,
        partials: &CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<(), CommError> {
        let parts = exchange(comm, shape, record_len(shape.head_dim), &partials.data)?;
        let own = shape.shares[shape.dcp_rank].len();
        merge_partials(&self.exec, &merge_of(shape), &parts, out.resize(shape.n_rows, own * shape.head_dim));
        Ok(())
    }

    fn merge_ag_rs(
        &self,
        comm: &mut Self::Comm,
        shape: &MergeShape,
        partials: &CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<(), CommError> {
        let (merge, n_heads) = (merge_of(shape), shape.n_heads());
        let n_records = shape.n_rows * n_heads;
        let mut stats = vec![0.0; n_records * 2];
        partial_stats(&partials.data, shape.head_dim, &mut stats);
        let mut all_stats = vec![0.0; stats.len() * merge.n_parts];
        comm.all_gather(&stats, &mut all_stats)?;
        let mut corrected = vec![0.0; n_records * shape.head_dim];
        correct_partials(&merge, shape.dcp_rank, &partials.data, &all_stats, &mut corrected);
        let parts = exchange(comm, shape, shape.head_dim, &corrected)?;
        let share = &shape.shares[shape.dcp_rank];
        let width = share.len() * shape.head_dim;
        let out = out.resize(shape.n_rows, width);
        tree_sum(&parts, merge.n_parts, out);
        for (row, acc) in out.chunks_exact_mut(width.max(1)).enumerate() {
            finish_corrected(&merge, row * n_heads + share.start, &all_stats, acc);
        }
        Ok(())
    }

    fn finish(&self, shape: &MergeShape, partials: &CpuTensor, out: &mut CpuTensor) {
        let out = out.resize(shape.n_rows, shape.n_heads() * shape.head_dim);
        merge_partials(&self.exec, &merge_of(shape), &partials.data, out);
    }

    fn gather_word(&self, comm: &mut Self::Comm, word: u64) -> Result<Vec<u64>, CommError> {
        let mut words = vec![0; comm.n_ranks() * 8];
        comm.all_gather_bytes(&word.to_le_bytes(), &mut words)?;
        Ok(words.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }
}

/// Sends each rank its share of heads, `width` numbers a head; returns this rank's share from every rank,
/// `[n_ranks][n_rows][own heads][width]`.
fn exchange(
    comm: &mut Box<dyn Communicator<[f32]>>,
    shape: &MergeShape,
    width: usize,
    data: &[f32],
) -> Result<Vec<f32>, CommError> {
    let columns: Vec<_> = shape.shares.iter().map(|share| share.start * width..share.end * width).collect();
    let send = split_columns(data, shape.n_heads() * width, &columns);
    let send_counts: Vec<_> = columns.iter().map(|range| shape.n_rows * range.len()).collect();
    let own = shape.n_rows * columns[shape.dcp_rank].len();
    let recv_counts = vec![own; shape.shares.len()];
    let mut recv = vec![0.0; own * shape.shares.len()];
    comm.all_to_all(&send, &send_counts, &mut recv, &recv_counts)?;
    Ok(recv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_split_and_joined_are_the_same() {
        let data: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let parts = split_columns(&data, 4, &[0..1, 1..1, 1..4]);
        assert_eq!(parts, [0., 4., 8., 1., 2., 3., 5., 6., 7., 9., 10., 11.]);
        let mut joined = vec![0.0; 12];
        join_columns(&parts, 3, &[1, 0, 3], &mut joined);
        assert_eq!(joined, data);
    }
}
