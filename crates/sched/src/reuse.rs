//! Where the KV of a prompt comes from: computed by the decode group, computed by a prefill worker and pushed, or
//! pulled in part by the prefill worker from the ranks that hold it.
//!
//! One function for both places that decide, the leader of a decode group ([`KvSource::Local`] or not) and a prefill
//! worker ([`KvSource::Pull`] or not), so that they weigh the same things the same way. A bare limit on the uncached
//! length was not used: whether a hand-off pays depends on how long the cached part is that the prefill worker would
//! have to come by, and on how many streams a prompt computed in the group would hold up.
//!
//! The unit is the second of a stream that waits: the request's own wait for its first token, and
//! [`ReuseCosts::stall_weight`] times the delay of each stream that decodes beside it. The estimates are coarse on
//! purpose. What they must get right is the order of the choices where these are far apart; where they are close,
//! either will do.

use std::time::Duration;

/// Where the KV of a prompt's uncached part comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvSource {
    /// The decode group computes it.
    Local,
    /// A prefill worker computes everything that it does not hold, and pushes what the group lacks.
    Push,
    /// A prefill worker pulls what the group holds and it does not, computes the rest, and pushes that.
    Pull,
}

/// What the choice is about. Lengths are in tokens and count from the start of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptReuse {
    /// The whole prompt.
    pub prompt_len: usize,
    /// What the decode group holds of it.
    pub group_len: usize,
    /// What the prefill worker holds of it: 0 while no worker is chosen, since nothing may be assumed of it.
    pub prefill_len: usize,
    /// The decode group as one that could compute it; `None` once the prompt is with a prefill worker.
    pub group: Option<GroupLoad>,
}

/// What computing a prompt on the decode group would meet there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLoad {
    /// The longest uncached part that it may compute at all.
    pub max_len: usize,
    /// Prompt tokens that it computes before.
    pub pending_tokens: usize,
    /// Streams that decode and would be held up.
    pub n_decoding: usize,
}

/// No pull is waited for longer, whatever the rates say that it saves: moments further away than this cannot be told.
const MAX_PULL_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// What computing and moving KV costs.
///
/// The defaults are rounded figures of `crates/engine/examples/reuse_costs.rs`, which says how each is measured, and
/// measures them again on any machine and model: the default model (KV in f16), 2 ranks of a thread each, a prefill
/// worker of 2 threads, gRPC on loopback, release build, 2 cores with AVX-512. Three runs: 1,103, 1,160 and 1,119 prompt
/// tokens a second on the prefill worker; 1,161, 583 (disturbed) and 1,196 on the group; 0.9 to 1.0 GB/s; 2.2 to 2.7 ms
/// for a pull with its connection; 6.5, -9.4 (lost in noise) and 3.1 ms for a hand-off. The choice follows the ratios: a
/// token is moved some 40 times as fast as it is computed. Other models and machines have others; the workers' `[reuse]`
/// settings say them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReuseCosts {
    /// Prompt tokens that a prefill worker computes in a second. Higher: less is pulled, more is handed off.
    pub prefill_tokens_per_s: f64,
    /// Prompt tokens that the decode group computes in a second. Higher: more is computed there.
    pub group_tokens_per_s: f64,
    /// KV bytes that pass between a prefill worker and the ranks in a second. Higher: more is pulled.
    pub link_bytes_per_s: f64,
    /// What a hand-off takes besides computing and moving. Longer: more is computed on the decode group.
    pub handoff_latency: Duration,
    /// What a pull takes besides moving. Longer: short prefixes are computed again instead.
    pub pull_latency: Duration,
    /// What a second of delay of one decoding stream counts, against a second of the new request's. Higher: a busy
    /// group computes fewer prompts itself, and its streams flow more evenly.
    pub stall_weight: f64,
    /// KV of one token, all layers and heads. The engine sets it from the model.
    pub kv_token_bytes: usize,
    /// A pull is given up for computing when it takes longer than computing would have, and at least this. Longer: a
    /// slow group delays first tokens. Shorter: a moment's delay wastes what was pulled.
    pub min_pull_patience: Duration,
}

impl Default for ReuseCosts {
    fn default() -> Self {
        Self {
            prefill_tokens_per_s: 1_100.0,
            group_tokens_per_s: 1_100.0,
            link_bytes_per_s: 1e9,
            handoff_latency: Duration::from_millis(5),
            pull_latency: Duration::from_millis(3),
            stall_weight: 0.1,
            kv_token_bytes: 0,
            min_pull_patience: Duration::from_secs(2),
        }
    }
}

impl ReuseCosts {
    /// Takes the cheapest source that is possible; of equal ones the first, which has the fewest moving parts.
    pub fn choose(&self, prompt: &PromptReuse) -> KvSource {
        let mut best = (KvSource::Push, self.push_cost(prompt));
        if let Some(cost) = self.pull_cost(prompt).filter(|cost| *cost < best.1) {
            best = (KvSource::Pull, cost);
        }
        match self.local_cost(prompt) {
            Some(cost) if cost <= best.1 => KvSource::Local,
            _ => best.0,
        }
    }

    /// How long a pull of `n_tokens` may take. Computing them instead when it is over costs at most as much again,
    /// so a group that does not answer makes a first token at most twice as late, the minimum aside.
    pub fn pull_patience(&self, n_tokens: usize) -> Duration {
        let saved = Duration::try_from_secs_f64(self.prefill_time(n_tokens)).unwrap_or(MAX_PULL_PATIENCE);
        saved.max(self.min_pull_patience).min(MAX_PULL_PATIENCE)
    }

    /// The first field that makes no sense, by name.
    pub fn first_bad_field(&self) -> Option<&'static str> {
        let rates = [
            ("prefill_tokens_per_s", self.prefill_tokens_per_s),
            ("group_tokens_per_s", self.group_tokens_per_s),
            ("link_bytes_per_s", self.link_bytes_per_s),
        ];
        let bad_rate = rates.into_iter().find(|(_, rate)| !(rate.is_finite() && *rate > 0.0));
        let bad_weight = !(self.stall_weight.is_finite() && self.stall_weight >= 0.0);
        bad_rate.map(|(name, _)| name).or(bad_weight.then_some("stall_weight"))
    }

    /// Computed in the group: no latency, but it waits there, and others wait for it.
    fn local_cost(&self, prompt: &PromptReuse) -> Option<f64> {
        let group = prompt.group?;
        let n_missing = prompt.n_missing();
        if n_missing > group.max_len {
            return None;
        }
        let wait = (group.pending_tokens + n_missing) as f64 / self.group_tokens_per_s;
        let stall = n_missing as f64 / self.group_tokens_per_s * group.n_decoding as f64;
        Some(wait + self.stall_weight * stall)
    }

    /// Sending overlaps computing, so the slower of the two counts.
    fn push_cost(&self, prompt: &PromptReuse) -> f64 {
        let n_computed = prompt.prompt_len.saturating_sub(prompt.prefill_len);
        let work = self.prefill_time(n_computed).max(self.link_time(prompt.n_missing()));
        self.handoff_latency.as_secs_f64() + work
    }

    /// What is pulled must be there before the rest can be computed: nothing overlaps.
    fn pull_cost(&self, prompt: &PromptReuse) -> Option<f64> {
        let n_pulled = prompt.group_len.checked_sub(prompt.prefill_len).filter(|n| *n > 0)?;
        let n_missing = prompt.n_missing();
        let work = self.prefill_time(n_missing).max(self.link_time(n_missing));
        let latency = self.handoff_latency.as_secs_f64() + self.pull_latency.as_secs_f64();
        Some(latency + self.link_time(n_pulled) + work)
    }

    fn prefill_time(&self, n_tokens: usize) -> f64 {
        n_tokens as f64 / self.prefill_tokens_per_s
    }

    fn link_time(&self, n_tokens: usize) -> f64 {
        n_tokens as f64 * self.kv_token_bytes as f64 / self.link_bytes_per_s
    }
}

impl PromptReuse {
    /// Tokens whose KV the group lacks.
    const fn n_missing(&self) -> usize {
        self.prompt_len.saturating_sub(self.group_len)
    }
}

#[cfg(test)]
mod tests;
