//! Limits of the scheduler, with what each costs in both directions.

use longreach_kv::KvManager;

use crate::reuse::ReuseCosts;

/// Limits of a [`crate::Scheduler`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedConfig {
    /// Rows computed in one step, over all sequences. More: fewer, more efficient steps. Fewer: shorter steps,
    /// so steadier gaps between the tokens of sequences that decode beside a prefill. At least `max_seqs`, so
    /// that every decoding sequence gets its row in every step.
    pub max_batch_tokens: usize,
    /// Sequences that compute, or wait for the KV of a hand-off, at once. More: higher throughput while KV
    /// lasts, then preemptions. Fewer: each sequence decodes faster, others wait longer.
    pub max_seqs: usize,
    /// Prompt rows of one sequence in one step. Larger: a long prompt is done sooner. Smaller: short prompts
    /// share its steps, and the sender can stream its KV in finer pieces.
    pub max_chunk_len: usize,
    /// The longest sequence, prompt and output, that is accepted: the model's context, or what the pools hold
    /// if that is less. It is checked against the pools at start, so an accepted sequence always fits.
    pub max_seq_len: usize,
    /// Sequences that may wait for admission. More: longer bursts are absorbed. Fewer: overload is answered
    /// sooner, while the router can still choose another worker.
    pub max_waiting: usize,
    /// Tokens of all waiting sequences together: the bound on the *work* that waits, which counts do not show.
    /// One sequence is always accepted when none waits, however long.
    pub max_waiting_tokens: usize,
    /// How many sequences may be admitted ahead of one that waits for blocks before it gets an exclusive claim:
    /// then nobody behind it is admitted until it is. More: short requests flow past long ones for longer.
    /// Fewer: the long one is served sooner, at the price of blocks that stand empty for it. 0 is strict order.
    pub max_passes: u32,
    /// Waiting sequences tried for admission per call. More: a request that fits is found behind many that do
    /// not. Fewer: less time between steps when many wait. Those known not to fit cost nothing.
    pub admission_window: usize,
    /// A sequence of kind `Receive` may be computed here instead if its uncached prompt is at most this long, and is
    /// if `reuse` finds that cheaper. Longer: fewer hand-offs. Shorter: no prompt takes many rows of a step from
    /// the sequences that decode. 0: always receive.
    pub local_prefill_max: usize,
    /// What computing and moving KV costs: decides where it comes from.
    pub reuse: ReuseCosts,
    /// Fraction of each pool that admission leaves available, so that running sequences can grow. More: fewer
    /// preemptions. Less: fuller pools. Not applied while nobody holds a block.
    pub watermark_frac: f64,
}

/// Limits that contradict each other or the pools.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A limit under which nothing could run.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// Decoding sequences would be left out of steps.
    #[error("max_batch_tokens is {max_batch_tokens}; it must be at least max_seqs, which is {max_seqs}")]
    BatchBelowSeqs {
        /// As configured.
        max_batch_tokens: usize,
        /// As configured.
        max_seqs: usize,
    },
    /// A sequence could be accepted that fits into no pool.
    #[error(
        "max_seq_len is {max_seq_len}, but all KV blocks together hold {capacity} tokens; lower it or add blocks"
    )]
    LimitAboveCapacity {
        /// As configured.
        max_seq_len: usize,
        /// Positions all blocks hold.
        capacity: usize,
    },
    /// A cost of which no comparison could be made.
    #[error("reuse.{0} is no cost; rates must be finite and above 0, weights finite and at least 0")]
    Reuse(&'static str),
    /// Not a fraction that leaves blocks to hand out.
    #[error("watermark_frac is {0}; it must be at least 0 and below 1")]
    Watermark(f64),
}

impl Default for SchedConfig {
    fn default() -> Self {
        Self {
            max_batch_tokens: 2_048,
            max_seqs: 256,
            max_chunk_len: 1_024,
            max_seq_len: 8_192,
            max_waiting: 1_024,
            max_waiting_tokens: 4 << 20,
            max_passes: 32,
            admission_window: 256,
            local_prefill_max: 64,
            reuse: ReuseCosts::default(),
            watermark_frac: 0.01,
        }
    }
}

impl SchedConfig {
    /// Checks the limits against each other and against the pools.
    pub fn validate(&self, kv: &KvManager) -> Result<(), ConfigError> {
        let at_least_1 = [
            ("max_batch_tokens", self.max_batch_tokens),
            ("max_seqs", self.max_seqs),
            ("max_chunk_len", self.max_chunk_len),
            ("max_seq_len", self.max_seq_len),
            ("max_waiting", self.max_waiting),
            ("max_waiting_tokens", self.max_waiting_tokens),
            ("admission_window", self.admission_window),
        ];
        if let Some((name, _)) = at_least_1.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero(name));
        }
        let (max_batch_tokens, max_seqs) = (self.max_batch_tokens, self.max_seqs);
        if max_batch_tokens < max_seqs {
            return Err(ConfigError::BatchBelowSeqs { max_batch_tokens, max_seqs });
        }
        let (max_seq_len, capacity) = (self.max_seq_len, kv.max_seq_len());
        if max_seq_len > capacity {
            return Err(ConfigError::LimitAboveCapacity { max_seq_len, capacity });
        }
        if let Some(field) = self.reuse.first_bad_field() {
            return Err(ConfigError::Reuse(field));
        }
        if !(0.0..1.0).contains(&self.watermark_frac) {
            return Err(ConfigError::Watermark(self.watermark_frac));
        }
        Ok(())
    }

    /// Blocks of a pool of `n_blocks` that admission leaves available.
    pub(crate) fn headroom(&self, n_blocks: usize) -> usize {
        (self.watermark_frac * n_blocks as f64).ceil() as usize
    }
}
