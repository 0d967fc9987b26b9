//! An engine's numbers, read when they are scraped.
//!
//! The engine publishes what it is and how busy it was after each step; a second set of counters beside it could only
//! disagree. So nothing is counted here.

use std::fmt;

use longreach_engine::EngineInfo;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// A collector over whatever engine there is at the moment of a scrape.
pub struct EngineMetrics {
    source: Box<dyn Fn() -> Option<EngineInfo> + Send + Sync>,
}

impl EngineMetrics {
    /// Numbers of the engine that `source` gives; without one only that there is none.
    pub fn new(source: impl Fn() -> Option<EngineInfo> + Send + Sync + 'static) -> Self {
        Self { source: Box::new(source) }
    }
}

impl fmt::Debug for EngineMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineMetrics").finish_non_exhaustive()
    }
}

impl Collector for EngineMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let info = (self.source)();
        let is_up = info.as_ref().is_some_and(|info| info.failure.is_none());
        gauge(&mut encoder, "engine_up", "Whether there is an engine that has not failed", is_up.into())?;
        let Some(info) = info else { return Ok(()) };
        gauge(&mut encoder, "epoch", "Life of the group", as_i64(info.epoch.0))?;
        gauge(&mut encoder, "handoffs", "Hand-offs being sent or received", as_i64(info.n_handoffs))?;
        sequences(&mut encoder, &info)?;
        blocks(&mut encoder, &info)?;
        totals(&mut encoder, &info)
    }
}

fn sequences(encoder: &mut DescriptorEncoder<'_>, info: &EngineInfo) -> fmt::Result {
    let stats = &info.stats;
    let states = [
        ("waiting", stats.n_waiting),
        ("receiving", stats.n_receiving),
        ("pulling", stats.n_pulling),
        ("running", stats.n_running),
        ("sending", stats.n_sending),
        ("held", stats.n_held),
    ];
    let mut family = encoder.encode_descriptor("sequences", "Sequences by state", None, MetricType::Gauge)?;
    for (state, count) in states {
        ConstGauge::new(as_i64(count)).encode(family.encode_family(&[("state", state)])?)?;
    }
    gauge(encoder, "waiting_tokens", "Tokens of waiting sequences", as_i64(stats.waiting_tokens))?;
    gauge(
        encoder,
        "pending_tokens",
        "Tokens accepted whose KV is not computed yet",
        as_i64(stats.pending_tokens),
    )
}

fn blocks(encoder: &mut DescriptorEncoder<'_>, info: &EngineInfo) -> fmt::Result {
    let pools = info.pools();
    let mut by_state = encoder.encode_descriptor(
        "kv_blocks",
        "KV blocks of a DCP rank by state",
        None,
        MetricType::Gauge,
    )?;
    for (rank, pool) in pools.iter().enumerate() {
        let held = pool.held.values().sum();
        for (state, count) in [("free", pool.free), ("cached", pool.cached), ("held", held)] {
            let labels = [("dcp_rank", rank.to_string()), ("state", state.to_owned())];
            ConstGauge::new(as_i64(count)).encode(by_state.encode_family(&labels)?)?;
        }
    }
    let mut by_reason = encoder.encode_descriptor(
        "kv_blocks_held",
        "KV blocks of a DCP rank that are held, by reason",
        None,
        MetricType::Gauge,
    )?;
    for (rank, pool) in pools.iter().enumerate() {
        for (reason, &count) in &pool.held {
            let labels = [("dcp_rank", rank.to_string()), ("reason", reason.clone())];
            ConstGauge::new(as_i64(count)).encode(by_reason.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn totals(encoder: &mut DescriptorEncoder<'_>, info: &EngineInfo) -> fmt::Result {
    let totals = &info.stats.totals;
    for (name, help, count) in [
        ("sequences_accepted", "Sequences accepted", totals.accepted),
        ("sequences_refused", "Sequences refused", totals.refused),
        ("sequences_ended", "Sequences ended, for any reason", totals.ended),
        ("steps", "Steps planned", totals.steps),
        ("preemptions", "Preemptions, not preempted sequences", totals.preemptions),
        ("prefix_lookup_tokens", "Tokens looked up in the prefix cache", totals.prefix_lookup_tokens),
        ("prefix_hit_tokens", "Tokens found in the prefix cache", totals.prefix_hit_tokens),
        ("pulls", "Prefixes pulled from the decode group", totals.pulls),
        ("pulled_tokens", "Tokens whose KV was pulled", totals.pulled_tokens),
        ("pull_fallbacks", "Pulls that failed, and were computed instead", totals.pull_fallbacks),
        ("pulled_bytes", "KV bytes that were pulled, of failed pulls too", info.pulled_bytes),
        ("recomputed_tokens", "Tokens computed again after preemptions", totals.recomputed_tokens),
    ] {
        let counter = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(count).encode(counter)?;
    }
    Ok(())
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> fmt::Result {
    let encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(value).encode(encoder)
}

/// Gauges are signed; a count that does not fit is as good as endless.
fn as_i64(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}
