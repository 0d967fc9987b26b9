//! How an engine is set up: the model, the configuration that every rank of a group has, and what follows from both.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use longreach_collective::{
    CommConfig, CommError, ConnectError,
    control::{ControlConfig, Heartbeat},
};
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
    worker::{KvLayout, MAX_CELL_BYTES, RankTarget},
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
    /// How long a side of a hand-off waits for the other to move. The time that the prompt waits for its turn, or takes,
    /// does not count. Longer: slower links and busier peers are waited for. Shorter: a prompt whose hand-off is stuck is
    /// tried elsewhere sooner.
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
    /// The machine does not give so much memory.
    #[error(
        "kv_bytes is {bytes}, which this machine cannot give a KV cache: {source}; give the KV cache less memory"
    )]
    KvMemory {
        /// Bytes of the cache.
        bytes: usize,
        /// What the system says.
        source: std::io::Error,
    },
    /// One layer of one block is more than a message between workers can carry.
    #[error(
        "block_size is {block_size}; one layer of one block must fit a message between workers, \
         {MAX_CELL_BYTES} bytes, so with this model and KV format it may be at most {max}"
    )]
    CellSize {
        /// B.
        block_size: usize,
        /// The largest B for this model and number format.
        max: usize,
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
         (shape, weights, merge, query, block size, KV memory, longest sequence, sequences and tokens of a step)"
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
    /// Bytes of the pool of the rank with the most heads.
    pub(crate) kv_bytes: usize,
    /// KV of one token over all heads, as it travels.
    kv_token_bytes: usize,
}

impl Plan {
    pub(crate) fn new(model: &Model, config: &EngineConfig) -> Result<Self, BuildError> {
        longreach_kv::self_check()?;
        let dcp = DcpLayout::new(config.block_size, config.shape.dcp_size())?;
        // Of all heads, not of a rank's: a prefill worker does not know which group it will send to, and a worker that
        // starts must be able to serve.
        let layout = model.kv_layout(config);
        let slot = layout.n_kv_heads * 2 * layout.head_dim * layout.kv_dtype.bytes();
        let max = MAX_CELL_BYTES / slot;
        if config.block_size > max {
            return Err(BuildError::CellSize { block_size: config.block_size, max });
        }
        let heads = |rank| head_split(&model.config, config.shape, rank).kv.len();
        let n_kv_heads = (0..config.shape.n_ranks()).map(heads).max().unwrap_or(0).max(1);
        let cell = n_kv_heads * 2 * model.config.head_dim * config.block_size * config.kv_dtype.bytes();
        let (need, have) = (cell * model.config.n_layers, config.kv_bytes);
        // Blocks have numbers of 32 bits.
        let n_blocks = (have / need).min(u32::MAX as usize);
        if n_blocks == 0 {
            return Err(BuildError::KvBudget { need, have, block_size: config.block_size });
        }
        let capacity = (n_blocks * config.block_size).saturating_mul(dcp.dcp_size());
        let wanted = config.max_seq_len.unwrap_or(usize::MAX);
        let max_seq_len = model.config.max_position.min(capacity).min(wanted);
        Ok(Self {
            dcp,
            n_blocks,
            max_seq_len,
            kv_bytes: n_blocks * need,
            kv_token_bytes: layout.n_layers * slot,
        })
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

    /// The bounds of control links. Both ends come to the same.
    pub(crate) fn control(&self, config: &EngineConfig) -> ControlConfig {
        let base = ControlConfig { heartbeat: config.heartbeat, ..ControlConfig::default() };
        ControlConfig { max_message_bytes: base.max_message_bytes.max(self.max_plan_bytes(config)), ..base }
    }

    /// What the plan of one step may come to on the link: every sequence that may run has its whole table in it, and
    /// sequences that share a prefix share no entries. Numbers take at most 5 bytes, fields some beside that.
    fn max_plan_bytes(&self, config: &EngineConfig) -> usize {
        let SchedConfig { max_seqs, max_batch_tokens, .. } = config.sched;
        let n_blocks = self.max_seq_len.div_ceil(self.dcp.block_size());
        let seq = 5 * n_blocks + 16 * self.dcp.dcp_size() + 64;
        max_seqs.saturating_mul(seq).saturating_add(5 * max_batch_tokens).saturating_add(64)
    }

    /// Digest of all that ranks must agree on before their first step. Where it is equal, every rank lays out the
    /// same weights, pools and messages.
    pub(crate) fn digest(&self, model: &Model, config: &EngineConfig, epoch: Epoch) -> [u8; 32] {
        let EngineConfig { shape, weights, merge_form, query_form, .. } = config;
        let layout = model.kv_layout(config);
        let Self { dcp, n_blocks, max_seq_len, .. } = self;
        let pools = (dcp, n_blocks, max_seq_len, self.max_plan_bytes(config));
        // The ranks of a group are built from one source, so one text form of these plain values will do.
        let agreed = (epoch, layout, (shape, weights, merge_form, query_form), pools);
        Sha256::digest(format!("{agreed:?}")).into()
    }
}

#[cfg(test)]
mod tests {
    use longreach_proto::group::LeaderMessage;
    use longreach_types::{BlockId, SeqId, SeqStep, StepId, StepPlan, TokenId};

    use super::*;

    /// The plan of a step in which as much runs as may, every sequence of it as long as it may be, with the largest numbers.
    fn largest_plan(plan: &Plan, config: &EngineConfig) -> StepPlan {
        let SchedConfig { max_seqs, max_batch_tokens, .. } = config.sched;
        let n_blocks = plan.max_seq_len.div_ceil(plan.dcp.block_size());
        let seq = |i| SeqStep {
            seq: SeqId(u64::MAX),
            context_len: u32::MAX as usize,
            // One each, and what is left is the first one's.
            tokens: vec![TokenId(u32::MAX); if i == 0 { max_batch_tokens - (max_seqs - 1) } else { 1 }],
            n_logits: u32::MAX as usize,
            tables: (0..plan.dcp.dcp_size())
                .map(|rank| vec![BlockId(u32::MAX); plan.dcp.local_n_blocks(n_blocks, rank)])
                .collect(),
        };
        StepPlan { step: StepId(u64::MAX), epoch: Epoch(u64::MAX), seqs: (0..max_seqs).map(seq).collect() }
    }

    #[test]
    fn the_largest_plan_fits_a_control_link() {
        for (block_size, dcp_size, max_seq_len, max_seqs) in
            [(32, 8, 131_072, 512), (1, 1, 8000, 512), (1, 2, 1, 1), (16, 3, 1000, 7)]
        {
            let dcp = DcpLayout::new(block_size, dcp_size).unwrap();
            let plan = Plan { dcp, n_blocks: 1, max_seq_len, kv_bytes: 0, kv_token_bytes: 0 };
            let mut config = EngineConfig::default();
            (config.sched.max_seqs, config.sched.max_batch_tokens) = (max_seqs, 2 * max_seqs);
            let n_bytes = LeaderMessage::Plan(largest_plan(&plan, &config)).encode().len();
            let bound = plan.control(&config).max_message_bytes;
            assert!(n_bytes <= bound, "{n_bytes} of {bound}");
        }
    }
}
