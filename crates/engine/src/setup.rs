//! How an engine is set up: the model, the configuration that every rank of a group has, and what follows from both.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use longreach_collective::{CommConfig, CommError, ConnectError, control::Heartbeat};
use longreach_kernels::{ExecError, Isa};
use longreach_kv::{KvConfig, KvManager};
use longreach_model::{
    LoadError,
    config::{ConfigError, ModelConfig},
    files::{ModelFiles, fingerprint},
    shard::head_split,
};
use longreach_proto::{
    WIRE_VERSION,
    worker::{KvLayout, RankTarget},
};
use longreach_sched::{ReuseCosts, SchedConfig, Scheduler};
use longreach_types::{DcpLayout, Epoch, GroupShape, KvDtype, MergeForm, N_SHARDS, QueryForm, WeightForm};
use sha2::{Digest, Sha256};

use crate::{core::EngineSetup, send::MAX_CHUNK_BYTES};

/// An opened model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its mapped files.
    pub files: Arc<ModelFiles>,
    /// Its configuration.
    pub config: ModelConfig,
    /// First half of its fingerprint.
    pub fingerprint: [u8; 16],
}

/// How an engine is built. Every rank of a group is built with the same.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// N and D. A prefill worker is a group of one.
    pub shape: GroupShape,
    /// How weights are held.
    pub weights: WeightForm,
    /// Number format of the KV cache.
    pub kv_dtype: KvDtype,
    /// How partial attention becomes one.
    pub merge_form: MergeForm,
    /// How a rank comes by its queries.
    pub query_form: QueryForm,
    /// B, positions a KV block. The kernels are tuned for 32.
    pub block_size: usize,
    /// Bytes of KV a rank may hold. More: more and longer sequences before any waits. Less: room for weights.
    pub kv_bytes: usize,
    /// The longest sequence; unset is what the model and the pools allow.
    pub max_seq_len: Option<usize>,
    /// Threads of each rank.
    pub n_threads: usize,
    /// Which kernels; all give the same bits.
    pub isa: Isa,
    /// Limits of the scheduler; `max_seq_len` and `reuse.kv_token_bytes` there are set from the above.
    pub sched: SchedConfig,
    /// Bounds of collectives.
    pub comm: CommConfig,
    /// How ranks in processes of their own notice that one has gone silent.
    pub heartbeat: Heartbeat,
    /// How long one hand-off may stand still on either side. Longer: a prompt may wait longer for a busy prefill
    /// worker. Shorter: one that is stuck is given up, and tried elsewhere, sooner.
    pub handoff_timeout: Duration,
    /// Submissions that may wait for the engine thread between two steps.
    pub intake_len: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            shape: GroupShape::SINGLE,
            weights: WeightForm::default(),
            kv_dtype: KvDtype::default(),
            merge_form: MergeForm::default(),
            query_form: QueryForm::default(),
            block_size: 32,
            kv_bytes: 512 << 20,
            max_seq_len: None,
            n_threads: 1,
            isa: Isa::best(),
            sched: SchedConfig { max_batch_tokens: 512, max_chunk_len: 256, ..SchedConfig::default() },
            comm: CommConfig::default(),
            heartbeat: Heartbeat::default(),
            handoff_timeout: Duration::from_secs(120),
            intake_len: 1024,
        }
    }
}

/// Why an engine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's weights.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernels or their threads.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The scheduler's limits.
    #[error(transparent)]
    Sched(#[from] longreach_sched::ConfigError),
    /// Block size or group shape.
    #[error(transparent)]
    Layout(#[from] longreach_types::LayoutError),
    /// The KV budget holds not even one sequence of one block.
    #[error(
        "kv_bytes is {have}, one block of {block_size} positions takes {need}; give the KV cache more memory"
    )]
    KvBudget {
        /// Bytes of one block.
        need: usize,
        /// Bytes allowed.
        have: usize,
        /// B.
        block_size: usize,
    },
    /// This build's block hash is not the one that keys are made of.
    #[error(transparent)]
    Hash(#[from] longreach_kv::HashMismatch),
    /// The first collective failed.
    #[error("the group did not come together: {0}")]
    Comm(#[from] CommError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A rank was started with other settings than this one.
    #[error(
        "rank {peer} was started with other settings than rank {rank}: compare the engine settings of both \
         (shape, weights, merge, query, block size, KV memory, longest sequence)"
    )]
    Differs {
        /// This rank.
        rank: usize,
        /// The lowest that differs.
        peer: usize,
    },
    /// A thread ended before it had joined its group.
    #[error("the rank's thread ended before it had joined its group")]
    Lost,
    /// Rank 0 leads and no other.
    #[error("rank {rank} was started as the wrong end: rank 0 leads, all others follow")]
    WrongEnd {
        /// The rank.
        rank: usize,
    },
    /// A thread could not be started.
    #[error("thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The number of addresses is not the number of ranks.
    #[error("{got} rank endpoints for {want} ranks")]
    Endpoints {
        /// Ranks.
        want: usize,
        /// Endpoints given.
        got: usize,
    },
}

impl Model {
    /// Reads the configuration of `files`.
    pub fn open(files: ModelFiles) -> Result<Self, ConfigError> {
        let config = ModelConfig::from_files(&files)?;
        let full = fingerprint(&files, &config).0;
        let mut half = [0; 16];
        half.copy_from_slice(&full[..16]);
        Ok(Self { files: Arc::new(files), config, fingerprint: half })
    }

    /// What KV of this model looks like under `config`.
    pub fn kv_layout(&self, config: &EngineConfig) -> KvLayout {
        KvLayout {
            model_fingerprint: self.fingerprint,
            n_layers: self.config.n_layers,
            n_kv_heads: self.config.n_kv_heads,
            head_dim: self.config.head_dim,
            kv_dtype: config.kv_dtype,
            block_size: config.block_size,
            n_shards: N_SHARDS,
            wire_version: WIRE_VERSION,
        }
    }

    /// The longest sequence under `config`, or why there is no such engine.
    pub fn max_seq_len(&self, config: &EngineConfig) -> Result<usize, BuildError> {
        Ok(Plan::new(self, config)?.max_seq_len)
    }

    /// What workers of a cluster must agree on, in the words of registrations.
    pub fn layout_hash(&self, config: &EngineConfig) -> String {
        self.kv_layout(config).to_string()
    }
}

/// What follows from a model and a configuration, equal on every rank.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    dcp: DcpLayout,
    /// Blocks of every rank's pool: ranks of one DCP rank hold the same blocks, and plans name them once.
    pub(crate) n_blocks: usize,
    pub(crate) max_seq_len: usize,
    /// KV of one token over all heads, as it travels.
    kv_token_bytes: usize,
}

impl Plan {
    pub(crate) fn new(model: &Model, config: &EngineConfig) -> Result<Self, BuildError> {
        longreach_kv::self_check()?;
        let dcp = DcpLayout::new(config.block_size, config.shape.dcp_size())?;
        let heads = |rank| head_split(&model.config, config.shape, rank).kv.len();
        let n_kv_heads = (0..config.shape.n_ranks()).map(heads).max().unwrap_or(0).max(1);
        let cell = n_kv_heads * 2 * model.config.head_dim * config.block_size * config.kv_dtype.bytes();
        let (need, have) = (cell * model.config.n_layers, config.kv_bytes);
        let n_blocks = have / need;
        if n_blocks == 0 {
            return Err(BuildError::KvBudget { need, have, block_size: config.block_size });
        }
        let capacity = n_blocks * config.block_size * dcp.dcp_size();
        let wanted = config.max_seq_len.unwrap_or(usize::MAX);
        let max_seq_len = model.config.max_position.min(capacity).min(wanted);
        let layout = model.kv_layout(config);
        let token_heads = layout.n_layers * layout.n_kv_heads;
        let kv_token_bytes = token_heads * 2 * layout.head_dim * layout.kv_dtype.bytes();
        Ok(Self { dcp, n_blocks, max_seq_len, kv_token_bytes })
    }

    pub(crate) fn setup(
        &self,
        model: &Model,
        config: &EngineConfig,
        targets: Vec<RankTarget>,
    ) -> EngineSetup {
        EngineSetup {
            layout: model.kv_layout(config),
            dcp: self.dcp,
            shape: config.shape,
            targets,
            eos: model.config.eos.clone(),
            vocab_size: model.config.vocab_size,
            max_seq_len: self.max_seq_len,
            handoff_timeout: config.handoff_timeout,
            max_chunk_bytes: MAX_CHUNK_BYTES,
            intake_len: config.intake_len,
            // A new hasher's keys are random, which makes this number unlike that of any other life.
            nonce: RandomState::new().hash_one(self.n_blocks),
        }
    }

    pub(crate) fn scheduler(&self, config: &EngineConfig, epoch: Epoch) -> Result<Scheduler, BuildError> {
        let n_blocks = u32::try_from(self.n_blocks).unwrap_or(u32::MAX);
        let kv = KvManager::new(KvConfig::new(self.dcp, n_blocks));
        let reuse = ReuseCosts { kv_token_bytes: self.kv_token_bytes, ..config.sched.reuse };
        let sched = SchedConfig { max_seq_len: self.max_seq_len, reuse, ..config.sched };
        sched.validate(&kv)?;
        Ok(Scheduler::new(sched, kv, epoch)?)
    }

    /// Digest of all that ranks must agree on before their first step. Where it is equal, every rank lays out the
    /// same weights, pools and messages.
    pub(crate) fn digest(&self, model: &Model, config: &EngineConfig, epoch: Epoch) -> [u8; 32] {
        let EngineConfig { shape, weights, merge_form, query_form, .. } = config;
        let layout = model.kv_layout(config);
        let Self { dcp, n_blocks, max_seq_len, .. } = self;
        // The ranks of a group are built from one source, so one text form of these plain values will do.
        let agreed = (epoch, layout, (shape, weights, merge_form, query_form), (dcp, n_blocks, max_seq_len));
        Sha256::digest(format!("{agreed:?}")).into()
    }
}
