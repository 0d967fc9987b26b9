//! Figures for metrics and for the router's view of this engine.

use longreach_kv::PoolCounts;

/// A snapshot of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedStats {
    /// Sequences that hold no blocks yet, or lost them.
    pub n_waiting: usize,
    /// Sequences whose KV is on its way.
    pub n_receiving: usize,
    /// Sequences whose prefix is being pulled.
    pub n_pulling: usize,
    /// Sequences that compute.
    pub n_running: usize,
    /// Sequences whose KV is being sent.
    pub n_sending: usize,
    /// Ended sequences whose blocks a step or the caller still holds.
    pub n_held: usize,
    /// Tokens of waiting sequences.
    pub waiting_tokens: usize,
    /// Tokens accepted whose KV is not computed yet: those of waiting, pulling and running sequences.
    pub pending_tokens: usize,
    /// Blocks by state and reason, by DCP rank.
    pub blocks: Vec<PoolCounts>,
    /// What has been counted since the start.
    pub totals: SchedTotals,
}

/// Counters since the start of the scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedTotals {
    /// Sequences accepted.
    pub accepted: u64,
    /// Sequences refused.
    pub refused: u64,
    /// Sequences ended, for any reason.
    pub ended: u64,
    /// Steps planned.
    pub steps: u64,
    /// Preemptions, not preempted sequences.
    pub preemptions: u64,
    /// Tokens looked up in the prefix cache at first admissions.
    pub prefix_lookup_tokens: u64,
    /// Tokens found there: `prefix_hit_tokens / prefix_lookup_tokens` is the hit rate.
    pub prefix_hit_tokens: u64,
    /// Prefixes pulled from the group that the rest was sent to.
    pub pulls: u64,
    /// Their tokens beyond what was found in the own prefix cache.
    pub pulled_tokens: u64,
    /// Pulls that failed or took too long, and were computed instead.
    pub pull_fallbacks: u64,
    /// Tokens computed again after preemptions. Never part of the hit rate.
    pub recomputed_tokens: u64,
    /// Entries of outcomes that named no sequence that was to sample, or too few or too many tokens. An abort
    /// while a step runs makes one.
    pub ignored_outcomes: u64,
}
