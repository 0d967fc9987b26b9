//! An engine's settings as an operator writes them. What each trades is said in [`EngineConfig`] and [`SchedConfig`];
//! defaults are theirs too.

use std::path::Path;

use clap::Args;
use longreach_engine::{EngineConfig, Model};
use longreach_kernels::Isa;
use longreach_model::files::{self, ModelFiles};
use longreach_sched::{ReuseCosts, SchedConfig};
use longreach_service::{
    ByteSize, ConfigError, RoleError,
    config::{Span, Text},
};
use longreach_types::{GroupShape, KvDtype, WeightForm};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

/// How an engine computes and what it may hold.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSection {
    /// KV memory of each rank.
    #[arg(
        long,
        id = "engine.kv_mem",
        alias = "kv-mem",
        default_value_t = ByteSize(EngineConfig::default().kv_bytes as u64)
    )]
    pub kv_mem: ByteSize,
    /// Number format of the KV cache: f16, f32 or bf16. All workers of a cluster must have the same.
    #[arg(
        long,
        id = "engine.kv_dtype",
        alias = "kv-dtype",
        default_value_t = Text(EngineConfig::default().kv_dtype)
    )]
    pub kv_dtype: Text<KvDtype>,
    /// Positions of a KV block. All workers of a cluster must have the same; the kernels are tuned for 32.
    #[arg(long, id = "engine.block_size", default_value_t = EngineConfig::default().block_size)]
    pub block_size: usize,
    /// How weights are held: as-stored or f32 (large and slow, to compare with f32 references).
    #[arg(long, id = "engine.weights", default_value_t = Text(EngineConfig::default().weights))]
    pub weights: Text<WeightForm>,
    /// The longest sequence, prompt and output. Default: what model and KV memory allow.
    #[arg(long, id = "engine.max_seq_len", value_name = "TOKENS")]
    pub max_seq_len: Option<usize>,
    /// Compute threads of each rank. Default: all cores for a prefill worker, 1 for a rank of a decode group.
    #[arg(long, id = "engine.threads", alias = "threads", value_name = "N")]
    pub threads: Option<usize>,
    /// Kernels: reference, portable, avx2 or avx512. All give the same bits. Default: the fastest this machine has.
    #[arg(long, id = "engine.isa")]
    pub isa: Option<Text<Isa>>,
    /// Sequences that compute, or wait for the KV of a hand-off, at once.
    #[arg(long, id = "engine.max_seqs", default_value_t = sched().max_seqs)]
    pub max_seqs: usize,
    /// Rows computed in one step, over all sequences; at least max_seqs.
    #[arg(long, id = "engine.max_batch_tokens", default_value_t = sched().max_batch_tokens)]
    pub max_batch_tokens: usize,
    /// Prompt rows of one sequence in one step.
    #[arg(long, id = "engine.max_chunk_len", default_value_t = sched().max_chunk_len)]
    pub max_chunk_len: usize,
    /// Sequences that may wait for admission.
    #[arg(long, id = "engine.max_waiting", default_value_t = sched().max_waiting)]
    pub max_waiting: usize,
    /// Submissions that may wait for the engine between two steps.
    #[arg(long, id = "engine.max_intake", default_value_t = EngineConfig::default().intake_len)]
    pub max_intake: usize,
    /// How long a side of a hand-off waits for the other to move.
    #[arg(
        long,
        id = "engine.handoff_timeout",
        default_value_t = Span(EngineConfig::default().handoff_timeout)
    )]
    pub handoff_timeout: Span,
}

/// What computing and moving KV costs here: by it a decode group and its prefill workers choose who computes a prompt,
/// and what of it is pulled instead. Only the ratios matter. What each trades is said in [`ReuseCosts`].
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReuseSection {
    /// Prompt tokens that a prefill worker computes in a second.
    #[arg(long, id = "reuse.prefill_tokens_per_s", default_value_t = ReuseCosts::default().prefill_tokens_per_s)]
    pub prefill_tokens_per_s: f64,
    /// Prompt tokens that a decode group computes in a second.
    #[arg(long, id = "reuse.group_tokens_per_s", default_value_t = ReuseCosts::default().group_tokens_per_s)]
    pub group_tokens_per_s: f64,
    /// KV that passes between a prefill worker and the ranks in a second.
    #[arg(long, id = "reuse.link_per_s", default_value_t = ByteSize(ReuseCosts::default().link_bytes_per_s as u64))]
    pub link_per_s: ByteSize,
    /// What a hand-off takes besides computing and moving.
    #[arg(long, id = "reuse.handoff_latency", default_value_t = Span(ReuseCosts::default().handoff_latency))]
    pub handoff_latency: Span,
    /// What a pull takes besides moving.
    #[arg(long, id = "reuse.pull_latency", default_value_t = Span(ReuseCosts::default().pull_latency))]
    pub pull_latency: Span,
    /// What a second of delay of a stream that decodes counts, against one of the new request.
    #[arg(long, id = "reuse.stall_weight", default_value_t = ReuseCosts::default().stall_weight)]
    pub stall_weight: f64,
    /// How long a pull may take at least before its prefix is computed instead.
    #[arg(long, id = "reuse.min_pull_patience", default_value_t = Span(ReuseCosts::default().min_pull_patience))]
    pub min_pull_patience: Span,
}

/// How a worker ends.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerDrainSection {
    /// How long a drain waits for what is in flight. Longer finishes more of it; shorter ends sooner.
    #[arg(long, id = "drain.grace", default_value = "60s")]
    pub grace: Span,
}

fn sched() -> SchedConfig {
    EngineConfig::default().sched
}

impl EngineSection {
    /// Checks what the section alone can say. What the model has to do with it is checked when it is loaded.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let fields = [
            ("engine.block_size", self.block_size),
            ("engine.max_seqs", self.max_seqs),
            ("engine.max_chunk_len", self.max_chunk_len),
            ("engine.max_waiting", self.max_waiting),
            ("engine.max_intake", self.max_intake),
            ("engine.threads", self.threads.unwrap_or(1)),
            ("engine.max_seq_len", self.max_seq_len.unwrap_or(1)),
        ];
        if let Some((key, _)) = fields.into_iter().find(|&(_, value)| value == 0) {
            return Err(contradiction(key, "0", "at least 1"));
        }
        if self.max_intake > Semaphore::MAX_PERMITS {
            let must = format!("at most {}", Semaphore::MAX_PERMITS);
            return Err(contradiction("engine.max_intake", &self.max_intake.to_string(), &must));
        }
        if self.max_batch_tokens < self.max_seqs {
            let must = format!("at least engine.max_seqs, which is {}", self.max_seqs);
            return Err(contradiction("engine.max_batch_tokens", &self.max_batch_tokens.to_string(), &must));
        }
        if self.handoff_timeout.0.is_zero() {
            return Err(contradiction("engine.handoff_timeout", "0", "longer than zero"));
        }
        Ok(())
    }

    /// The engine, with this many threads where no number is set.
    pub fn config(&self, shape: GroupShape, default_threads: usize) -> EngineConfig {
        let base = EngineConfig::default();
        EngineConfig {
            shape,
            weights: self.weights.0,
            kv_dtype: self.kv_dtype.0,
            block_size: self.block_size,
            kv_bytes: usize::try_from(self.kv_mem.0).unwrap_or(usize::MAX),
            max_seq_len: self.max_seq_len,
            n_threads: self.threads.unwrap_or(default_threads),
            isa: self.isa.map_or(base.isa, |Text(isa)| isa),
            sched: SchedConfig {
                max_seqs: self.max_seqs,
                max_batch_tokens: self.max_batch_tokens,
                max_chunk_len: self.max_chunk_len,
                max_waiting: self.max_waiting,
                ..base.sched
            },
            handoff_timeout: self.handoff_timeout.0,
            intake_len: self.max_intake,
            ..base
        }
    }
}

impl ReuseSection {
    /// Refuses costs that are none.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Some(field) = self.costs().first_bad_field() else { return Ok(()) };
        Err(ConfigError::BadValue {
            file: None,
            key: format!("reuse.{}", if field == "link_bytes_per_s" { "link_per_s" } else { field }),
            reason: "is no cost: rates must be finite and above 0, weights finite and at least 0".to_owned(),
        })
    }

    /// The costs, but for the size of a token's KV, which is the model's.
    pub fn costs(&self) -> ReuseCosts {
        ReuseCosts {
            prefill_tokens_per_s: self.prefill_tokens_per_s,
            group_tokens_per_s: self.group_tokens_per_s,
            link_bytes_per_s: self.link_per_s.0 as f64,
            handoff_latency: self.handoff_latency.0,
            pull_latency: self.pull_latency.0,
            stall_weight: self.stall_weight,
            min_pull_patience: self.min_pull_patience.0,
            ..ReuseCosts::default()
        }
    }
}

fn contradiction(key: &str, value: &str, must: &str) -> ConfigError {
    ConfigError::Contradiction { key: key.to_owned(), value: value.to_owned(), must: must.to_owned() }
}

/// Why a model's files cannot be used.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error(transparent)]
    Files(#[from] files::OpenError),
    #[error(transparent)]
    Model(#[from] longreach_model::config::ConfigError),
}

/// Opens the model's files, off the async threads.
pub async fn open_model(path: &Path) -> Result<Model, RoleError> {
    let path = path.to_owned();
    let open = move || -> Result<Model, OpenError> { Ok(Model::open(ModelFiles::open(&path)?)?) };
    let opened = tokio::task::spawn_blocking(open).await.map_err(RoleError::failed)?;
    opened.map_err(RoleError::failed)
}
