//! One rank's share of a model: which rows and columns of each weight it holds, packed for its backend.
//!
//! Query heads, feed-forward columns and vocabulary entries are cut at the canonical bounds of the numeric contract,
//! so that N ranks hold the segments that one rank would sum in the same order.

use std::{ops::Range, sync::Arc};

use longreach_types::{
    DcpLayout, GroupShape, HeadSplit, KvDtype, MergeForm, N_SHARDS, QueryForm, WeightForm, canonical_bounds,
};
use rayon::prelude::*;

use crate::{
    backend::{AttentionShape, Backend, KvShape, MergeShape, QkvColumns, StoredMatrix},
    config::{ConfigError, ModelConfig, rope},
    files::ModelFiles,
};

/// Alignment of segment bounds: the width of a quantisation group.
const SEGMENT_ALIGN: usize = 32;

/// Name of the embedding, which is also the head of a tied model.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// What to hold, and how.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The group.
    pub shape: GroupShape,
    /// This rank of it.
    pub rank: usize,
    /// How weights are held.
    pub weights: WeightForm,
    /// How a rank comes by its group's queries.
    pub query_form: QueryForm,
    /// How partials become one.
    pub merge_form: MergeForm,
    /// Number format of the KV cache.
    pub kv_dtype: KvDtype,
    /// B, positions a KV block.
    pub block_size: usize,
    /// Blocks of this rank's pool.
    pub n_blocks: usize,
    /// The longest sequence; cuts the model's own context.
    pub max_seq_len: Option<usize>,
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The configuration is wrong or not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor is not there.
    #[error("tensor {0} is missing from the model's files")]
    Missing(String),
    /// A tensor is there and cannot be used.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its canonical name.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

/// One transformer layer's weights.
pub struct Layer<B: Backend> {
    pub(crate) attn_norm: B::Vector,
    pub(crate) qkv: B::Matrix,
    pub(crate) qkv_bias: Option<B::Vector>,
    pub(crate) o: B::Matrix,
    pub(crate) o_bias: Option<B::Vector>,
    pub(crate) ffn_norm: B::Vector,
    pub(crate) gate_up: B::Matrix,
    pub(crate) down: B::Matrix,
}

/// One rank's share of a model.
pub struct ModelShard<B: Backend> {
    /// The device.
    pub backend: B,
    /// The model, its context cut to what this deployment allows.
    pub config: ModelConfig,
    /// The group.
    pub shape: GroupShape,
    /// Heads of this rank.
    pub heads: HeadSplit,
    /// KV of this rank.
    pub kv_shape: KvShape,
    pub(crate) query_form: QueryForm,
    pub(crate) merge_form: MergeForm,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) final_norm: B::Vector,
    pub(crate) head: B::Matrix,
    pub(crate) rope: B::Rope,
    pub(crate) qkv_columns: QkvColumns,
    pub(crate) query_columns: Vec<usize>,
    pub(crate) attention: Vec<AttentionShape>,
    pub(crate) merge_shape: MergeShape,
    pub(crate) vocab_columns: Vec<usize>,
    files: Arc<ModelFiles>,
}

/// Heads that a canonical segment is made of: the fewest whose width is a multiple of a quantisation group.
pub fn segment_heads(config: &ModelConfig) -> usize {
    let n = (1..=SEGMENT_ALIGN).find(|n| (n * config.head_dim).is_multiple_of(SEGMENT_ALIGN)).unwrap_or(1);
    if config.n_q_heads.is_multiple_of(n) { n } else { 1 }
}

/// Heads of rank `rank` of a group of shape `shape`.
pub fn head_split(config: &ModelConfig, shape: GroupShape, rank: usize) -> HeadSplit {
    shape.head_split(rank, config.n_q_heads, config.n_kv_heads, segment_heads(config))
}

impl<B: Backend> ModelShard<B> {
    /// Packs this rank's share, layers in parallel. `progress` is called with layers done and in all.
    pub fn load(
        backend: B,
        files: &Arc<ModelFiles>,
        options: &LoadOptions,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, LoadError> {
        let mut config = ModelConfig::from_files(files)?;
        config.max_position = config.max_position.min(options.max_seq_len.unwrap_or(usize::MAX));
        let heads = head_split(&config, options.shape, options.rank);
        let loader = Loader { backend: &backend, files, config: &config, options, heads: &heads };
        let done = std::sync::atomic::AtomicUsize::new(0);
        let layers = (0..config.n_layers)
            .into_par_iter()
            .map(|idx| {
                let layer = loader.layer(idx)?;
                progress(1 + done.fetch_add(1, std::sync::atomic::Ordering::Relaxed), config.n_layers);
                Ok(layer)
            })
            .collect::<Result<Vec<_>, LoadError>>()?;
        let final_norm = loader.vector("model.norm.weight", 0..config.hidden)?;
        let head = loader.head()?;
        let (cos, sin) = rope::tables(&config.rope, config.max_position);
        let rope = backend.rope(cos, sin, config.rope.rot_dim);
        let (shape, query_form) = (options.shape, options.query_form);
        let q_heads = query_heads(&heads, query_form);
        Ok(Self {
            qkv_columns: QkvColumns {
                n_q_heads: q_heads.len(),
                n_kv_heads: heads.kv.len(),
                head_dim: config.head_dim,
                rope: config.rope.style,
                rot_dim: config.rope.rot_dim,
            },
            query_columns: group_shares(&config, options)
                .iter()
                .map(|share| share.len() * config.head_dim)
                .collect(),
            attention: (0..config.n_layers).map(|layer| attention(&config, &heads, layer)).collect(),
            merge_shape: MergeShape {
                shares: group_shares(&config, options),
                dcp_rank: shape.dcp_rank(options.rank),
                head_dim: config.head_dim,
                n_rows: 0,
            },
            vocab_columns: (0..shape.n_ranks())
                .map(|rank| rank_range(config.vocab_size, 1, shape, rank).len())
                .collect(),
            kv_shape: kv_shape(&config, options, heads.kv.len())?,
            files: Arc::clone(files),
            merge_form: options.merge_form,
            backend,
            shape,
            heads,
            query_form,
            layers,
            final_norm,
            head,
            rope,
            config,
        })
    }

    /// The embedding, as the file stores it: rows are expanded as they are needed.
    pub(crate) fn embedding(&self) -> StoredMatrix<'_> {
        stored(&self.files, EMBEDDING).expect("checked when the head was loaded")
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down]);
        layers.chain([&self.head]).map(|matrix| self.backend.matrix_bytes(matrix)).sum()
    }
}

fn attention(config: &ModelConfig, heads: &HeadSplit, layer: usize) -> AttentionShape {
    AttentionShape {
        layer,
        n_q_heads: heads.group_q.len(),
        kv_index: heads.kv_index(),
        head_dim: config.head_dim,
        scale: 1.0 / (config.head_dim as f32).sqrt(),
        window: config.sliding_window[layer],
    }
}

fn kv_shape(config: &ModelConfig, options: &LoadOptions, n_kv_heads: usize) -> Result<KvShape, LoadError> {
    let layout = DcpLayout::new(options.block_size, options.shape.dcp_size())
        .map_err(|error| LoadError::Tensor { name: "KV cache".to_owned(), reason: error.to_string() })?;
    Ok(KvShape {
        n_layers: config.n_layers,
        n_kv_heads,
        head_dim: config.head_dim,
        dtype: options.kv_dtype,
        n_blocks: options.n_blocks,
        layout,
        dcp_rank: options.shape.dcp_rank(options.rank),
    })
}

/// Heads that each rank of this rank's head group keeps after the merge, counted within the group.
fn group_shares(config: &ModelConfig, options: &LoadOptions) -> Vec<Range<usize>> {
    let ranks = options.shape.ranks_of(options.shape.head_group(options.rank));
    ranks
        .map(|rank| {
            let split = head_split(config, options.shape, rank);
            split.own_q.start - split.group_q.start..split.own_q.end - split.group_q.start
        })
        .collect()
}

/// Query heads that a rank computes itself.
fn query_heads(heads: &HeadSplit, form: QueryForm) -> Range<usize> {
    match form {
        QueryForm::Replicate => heads.group_q.clone(),
        QueryForm::Gather => heads.own_q.clone(),
    }
}

/// The canonical segments of rank `rank` in a sum over `len` terms.
fn rank_segments(len: usize, align: usize, shape: GroupShape, rank: usize) -> Vec<Range<usize>> {
    let bounds = canonical_bounds(len, align);
    shape.segments(rank).map(|segment| bounds[segment]..bounds[segment + 1]).collect()
}

fn rank_range(len: usize, align: usize, shape: GroupShape, rank: usize) -> Range<usize> {
    let (bounds, segments) = (canonical_bounds(len, align), shape.segments(rank));
    bounds[segments.start]..bounds[segments.end]
}

/// The widest power of two up to a quantisation group that divides `len`.
fn segment_align(len: usize) -> usize {
    SEGMENT_ALIGN.min(1 << len.trailing_zeros().min(SEGMENT_ALIGN.trailing_zeros()))
}

fn stored<'a>(files: &'a ModelFiles, name: &str) -> Result<StoredMatrix<'a>, LoadError> {
    let view = files.tensor(name).ok_or_else(|| LoadError::Missing(name.to_owned()))?;
    let (n_rows, k) = match view.shape[..] {
        [n_rows, k] => (n_rows, k),
        [k] => (1, k),
        _ => {
            let reason = format!("has shape {:?}; a matrix or a vector is expected", view.shape);
            return Err(LoadError::Tensor { name: name.to_owned(), reason });
        }
    };
    Ok(StoredMatrix { ty: view.ty, n_rows, k, bytes: view.bytes })
}

/// Reads tensors for one rank.
struct Loader<'a, B> {
    backend: &'a B,
    files: &'a ModelFiles,
    config: &'a ModelConfig,
    options: &'a LoadOptions,
    heads: &'a HeadSplit,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, idx: usize) -> Result<Layer<B>, LoadError> {
        let name = |part: &str| format!("model.layers.{idx}.{part}");
        let (config, options) = (self.config, self.options);
        let head_rows = |heads: &Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
        let qkv = [
            ("self_attn.q_proj", head_rows(&query_heads(self.heads, options.query_form))),
            ("self_attn.k_proj", head_rows(&self.heads.kv)),
            ("self_attn.v_proj", head_rows(&self.heads.kv)),
        ]
        .map(|(part, rows)| (name(part), rows));
        let ffn_align = segment_align(config.ffn);
        let ffn_rows = rank_range(config.ffn, ffn_align, options.shape, options.rank);
        let gate_up = [(name("mlp.gate_proj"), ffn_rows.clone()), (name("mlp.up_proj"), ffn_rows)];
        let o_align = segment_heads(config) * config.head_dim;
        let o_segments = rank_segments(config.q_width(), o_align, options.shape, options.rank);
        let down_segments = rank_segments(config.ffn, ffn_align, options.shape, options.rank);
        let o_bias = config.o_bias.then(|| self.vector(&name("self_attn.o_proj.bias"), 0..config.hidden));
        let all_columns = 0..config.hidden;
        Ok(Layer {
            attn_norm: self.vector(&name("input_layernorm.weight"), 0..config.hidden)?,
            qkv: self.matrix(&qkv, std::slice::from_ref(&all_columns))?,
            qkv_bias: config.qkv_bias.then(|| self.fused_bias(&qkv)).transpose()?,
            o: self.matrix(&[(name("self_attn.o_proj"), 0..config.hidden)], &o_segments)?,
            o_bias: o_bias.transpose()?,
            ffn_norm: self.vector(&name("post_attention_layernorm.weight"), 0..config.hidden)?,
            gate_up: self.matrix(&gate_up, std::slice::from_ref(&all_columns))?,
            down: self.matrix(&[(name("mlp.down_proj"), 0..config.hidden)], &down_segments)?,
        })
    }

    /// The rank's slice of the vocabulary.
    fn head(&self) -> Result<B::Matrix, LoadError> {
        let name = if self.config.tied_head { EMBEDDING } else { "lm_head.weight" };
        stored(self.files, EMBEDDING)?;
        let rows = rank_range(self.config.vocab_size, 1, self.options.shape, self.options.rank);
        let all_columns = 0..self.config.hidden;
        self.pack(&[(name.to_owned(), rows)], std::slice::from_ref(&all_columns))
    }

    fn matrix(
        &self,
        parts: &[(String, Range<usize>)],
        segments: &[Range<usize>],
    ) -> Result<B::Matrix, LoadError> {
        let weights: Vec<_> =
            parts.iter().map(|(name, rows)| (format!("{name}.weight"), rows.clone())).collect();
        self.pack(&weights, segments)
    }

    fn pack(
        &self,
        parts: &[(String, Range<usize>)],
        segments: &[Range<usize>],
    ) -> Result<B::Matrix, LoadError> {
        let sources = parts
            .iter()
            .map(|(name, rows)| Ok((stored(self.files, name)?, rows.clone())))
            .collect::<Result<Vec<_>, LoadError>>()?;
        self.backend.pack(&sources, segments, self.options.weights).map_err(|reason| {
            let names: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
            LoadError::Tensor { name: names.join(" + "), reason }
        })
    }

    fn fused_bias(&self, parts: &[(String, Range<usize>)]) -> Result<B::Vector, LoadError> {
        let mut values = Vec::new();
        for (name, rows) in parts {
            values.extend(self.values(&format!("{name}.bias"), rows.clone())?);
        }
        Ok(self.backend.vector(values))
    }

    fn vector(&self, name: &str, range: Range<usize>) -> Result<B::Vector, LoadError> {
        Ok(self.backend.vector(self.values(name, range)?))
    }

    fn values(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, LoadError> {
        let tensor = stored(self.files, name)?;
        let mut values = vec![0.0; tensor.k];
        let fail = |reason: String| LoadError::Tensor { name: name.to_owned(), reason };
        longreach_kernels::dequantize_row(tensor.ty, tensor.bytes, &mut values)
            .map_err(|error| fail(error.to_string()))?;
        let len = values.len();
        let part = values.get(range.clone());
        part.map(<[f32]>::to_vec).ok_or_else(|| fail(format!("has {len} values; {range:?} are needed")))
    }
}

const _: () = assert!(N_SHARDS.is_power_of_two());
