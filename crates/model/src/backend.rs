//! What the forward pass asks of a device.
//!
//! The model code names operations and shapes only; where tensors live and how a sum is ordered is the backend's
//! business. The CPU backend keeps the one-order contract to the bit. A CUDA backend implements the same trait over
//! device buffers, with NCCL behind [`Backend::Comm`].
//!
//! Tensors are f32, row-major `[rows][cols]`, and are reused from step to step: an operation that writes one resizes
//! it first.

use std::ops::Range;

use longreach_collective::CommError;
use longreach_kernels::{RopeStyle, StoredType};
use longreach_types::{BlockId, DcpLayout, KvDtype, StepPlan, TokenId, WeightForm};

/// One weight matrix as a file stores it, row-major.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix<'a> {
    /// Number format.
    pub ty: StoredType,
    /// Rows (outputs).
    pub n_rows: usize,
    /// Columns (the summed index).
    pub k: usize,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// The rows of a batch as one rank sees them.
#[derive(Clone, Debug, Default)]
pub struct BatchLayout {
    /// Token of each row.
    pub tokens: Vec<TokenId>,
    /// Absolute position of each row.
    pub positions: Vec<u32>,
    /// Where each row's KV is written on this rank; `None` where another rank owns the position.
    pub slots: Vec<Option<(BlockId, usize)>>,
    /// Per sequence: its rows and this rank's blocks.
    pub seqs: Vec<BatchSeq>,
    /// Rows that need logits.
    pub logit_rows: Vec<usize>,
}

/// One sequence of a [`BatchLayout`].
#[derive(Clone, Debug)]
pub struct BatchSeq {
    /// Its rows in the batch.
    pub rows: Range<usize>,
    /// Absolute position of its first row.
    pub first_pos: usize,
    /// This rank's blocks, ascending.
    pub blocks: Vec<BlockId>,
}

impl BatchLayout {
    /// The part of `plan` that DCP rank `dcp_rank` needs.
    ///
    /// # Errors
    /// The position whose block is missing from the plan's table.
    pub fn new(plan: &StepPlan, layout: DcpLayout, dcp_rank: usize) -> Result<Self, usize> {
        let mut batch = Self { logit_rows: plan.logit_rows(), ..Self::default() };
        for row in plan.rows() {
            batch.tokens.push(row.token);
            batch.positions.push(row.pos as u32);
            let slot = if layout.owner(row.pos) == dcp_rank {
                let table = plan.seqs[row.seq_idx].tables.get(dcp_rank);
                let block = table.and_then(|table| table.get(layout.local_block(layout.block(row.pos))));
                Some((*block.ok_or(row.pos)?, row.pos % layout.block_size()))
            } else {
                None
            };
            batch.slots.push(slot);
        }
        for (rows, seq) in plan.row_ranges().zip(&plan.seqs) {
            let n_local = layout.local_n_blocks(layout.n_blocks(seq.seq_len()), dcp_rank);
            let table = seq.tables.get(dcp_rank).filter(|table| table.len() >= n_local);
            let blocks = table.ok_or(seq.seq_len())?[..n_local].to_vec();
            batch.seqs.push(BatchSeq { rows, first_pos: seq.context_len, blocks });
        }
        Ok(batch)
    }
}

/// The KV cache a rank keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub n_layers: usize,
    /// KV heads of this rank.
    pub n_kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Number format.
    pub dtype: KvDtype,
    /// Blocks in the pool.
    pub n_blocks: usize,
    /// Positions and ranks.
    pub layout: DcpLayout,
    /// This rank's place in `layout`.
    pub dcp_rank: usize,
}

impl KvShape {
    /// Bytes of one block of one layer for `n_kv_heads` heads: K, then V, head by head.
    pub const fn cell_bytes(&self, n_kv_heads: usize) -> usize {
        n_kv_heads * 2 * self.head_dim * self.layout.block_size() * self.dtype.bytes()
    }
}

/// Columns of a fused `q | k | v` row.
#[derive(Clone, Debug)]
pub struct QkvColumns {
    /// Query heads in the row.
    pub n_q_heads: usize,
    /// KV heads in the row.
    pub n_kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// How pairs of a head are rotated.
    pub rope: RopeStyle,
    /// How much of a head is rotated.
    pub rot_dim: usize,
}

impl QkvColumns {
    /// Columns of a row.
    pub fn n_cols(&self) -> usize {
        (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}

/// Attention of one layer.
#[derive(Clone, Debug)]
pub struct AttentionShape {
    /// Which layer.
    pub layer: usize,
    /// Query heads.
    pub n_q_heads: usize,
    /// For each query head, its KV head among those of this rank.
    pub kv_index: Vec<u32>,
    /// Size of a head.
    pub head_dim: usize,
    /// Multiplies scores.
    pub scale: f32,
    /// Keys a row sees at most, itself included.
    pub window: Option<usize>,
}

/// The merge of partial attention over the ranks of a head group.
#[derive(Clone, Debug)]
pub struct MergeShape {
    /// Heads that each rank keeps, in rank order, counted within the group.
    pub shares: Vec<Range<usize>>,
    /// This rank among them.
    pub dcp_rank: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Rows.
    pub n_rows: usize,
}

impl MergeShape {
    /// Heads of the group.
    pub fn n_heads(&self) -> usize {
        self.shares.last().map_or(0, |share| share.end)
    }
}

/// A device that can run the forward pass of one rank.
pub trait Backend: Send + Sync + 'static {
    /// f32 activations.
    type Tensor: Default + Send;
    /// Packed weights.
    type Matrix: Send + Sync;
    /// A vector of f32: a norm's weight or a bias.
    type Vector: Send + Sync;
    /// Cosines and sines by position.
    type Rope: Send + Sync;
    /// Keys and values of all layers.
    type Kv: Send;
    /// A group of ranks that exchange tensors.
    type Comm: Send;

    /// Packs row ranges of `sources` into one matrix over the adjacent column ranges `segments`.
    fn pack(
        &self,
        sources: &[(StoredMatrix<'_>, Range<usize>)],
        segments: &[Range<usize>],
        form: WeightForm,
    ) -> Result<Self::Matrix, String>;
    /// Bytes that a packed matrix takes.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    /// Uploads a vector.
    fn vector(&self, values: Vec<f32>) -> Self::Vector;
    /// Uploads rotation tables, `[n_pos][rot_dim / 2]` each.
    fn rope(&self, cos: Vec<f32>, sin: Vec<f32>, rot_dim: usize) -> Self::Rope;
    /// Allocates a KV cache.
    fn kv(&self, shape: &KvShape) -> Self::Kv;

    /// Appends the bytes of one block of one layer, KV heads `heads` of those this rank stores.
    fn export_kv(&self, kv: &Self::Kv, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>);
    /// Overwrites KV heads `heads`, of those this rank stores, in one block of one layer, with bytes that
    /// [`Backend::export_kv`] gave for as many heads.
    fn import_kv(&self, kv: &mut Self::Kv, layer: usize, block: BlockId, heads: Range<usize>, bytes: &[u8]);

    /// `out[row] = table[tokens[row]]`, expanded to f32.
    fn embed(&self, table: StoredMatrix<'_>, tokens: &[TokenId], out: &mut Self::Tensor);
    /// `out = x · matrixᵀ (+ bias)`.
    fn matmul(
        &self,
        matrix: &Self::Matrix,
        x: &Self::Tensor,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    );
    /// Root-mean-square norm of each row.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32, out: &mut Self::Tensor);
    /// Rotates the query and key heads of fused rows.
    fn rotate(&self, table: &Self::Rope, columns: &QkvColumns, batch: &BatchLayout, qkv: &mut Self::Tensor);
    /// Writes keys and values of the rows that this rank owns.
    fn store_kv(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        columns: &QkvColumns,
        batch: &BatchLayout,
        qkv: &Self::Tensor,
    );
    /// Partial attention records of every row and head over this rank's blocks. Queries are the leading columns of
    /// `q`'s rows.
    fn attend(
        &self,
        kv: &Self::Kv,
        shape: &AttentionShape,
        batch: &BatchLayout,
        q: &Self::Tensor,
        partials: &mut Self::Tensor,
    );
    /// `out = silu(gate) · up` of rows `gate | up`.
    fn silu_mul(&self, gate_up: &Self::Tensor, out: &mut Self::Tensor);
    /// `x += y`.
    fn add(&self, x: &mut Self::Tensor, y: &Self::Tensor);
    /// `x[row] += bias`.
    fn add_bias(&self, x: &mut Self::Tensor, bias: &Self::Vector);
    /// Picks rows.
    fn select_rows(&self, x: &Self::Tensor, rows: &[usize], out: &mut Self::Tensor);
    /// The values of a tensor, row-major.
    fn read<'a>(&self, x: &'a Self::Tensor) -> std::borrow::Cow<'a, [f32]>;

    /// Replaces `x` by its sum over ranks, in canonical order.
    fn all_reduce(&self, comm: &mut Self::Comm, x: &mut Self::Tensor) -> Result<(), CommError>;
    /// Concatenates the leading `columns[rank]` columns of each rank's rows.
    fn gather_columns(
        &self,
        comm: &mut Self::Comm,
        x: &Self::Tensor,
        columns: &[usize],
        out: &mut Self::Tensor,
    ) -> Result<(), CommError>;
    /// Merges partials by one all-to-all over heads.
    fn merge_a2a(
        &self,
        comm: &mut Self::Comm,
        shape: &MergeShape,
        partials: &Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), CommError>;
    /// Merges partials by all-gather of their log-sum-exp, local correction and reduce-scatter over heads.
    fn merge_ag_rs(
        &self,
        comm: &mut Self::Comm,
        shape: &MergeShape,
        partials: &Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), CommError>;
    /// Normalises partials where there is nobody to merge with.
    fn finish(&self, shape: &MergeShape, partials: &Self::Tensor, out: &mut Self::Tensor);
    /// All-gathers one word a rank, in rank order.
    fn gather_word(&self, comm: &mut Self::Comm, word: u64) -> Result<Vec<u64>, CommError>;
}
