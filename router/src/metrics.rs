//! What the router measures, under the names that operators know.
//!
//! A [`RequestMeter`] lives as long as its request and counts its end exactly once: as what it ended with, or, when it
//! is dropped before, as cancelled. Nothing is read from a clock that is not passed in, except at the beginning.

use std::sync::atomic::AtomicI64;

use longreach_types::Usage;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::time::Instant;
use tonic::Code;

use crate::{call::CallContext, error::ServiceError, output::UsageReport};

/// Bounds of the time histograms, in seconds: fine where people notice, wide where prompts are long.
const SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0,
];

/// How a request came in and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    code: &'static str,
}

/// A kind of worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

/// What a worker has otherwise than most.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MismatchLabels {
    role: &'static str,
    field: &'static str,
}

/// All measures. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    requests: Family<RequestLabels, Counter>,
    in_flight: Gauge,
    ttft: Histogram,
    inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    queue: Histogram,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    prefix_hit_tokens: Counter,
    interrupted_streams: Counter,
    resumed_streams: Counter,
    stalled_streams: Counter,
    workers: Family<RoleLabels, Gauge>,
    layout_mismatches: Family<MismatchLabels, Counter>,
}

/// The measures of one request.
pub(crate) struct RequestMeter {
    metrics: Metrics,
    method: &'static str,
    started: Instant,
    /// When each output last grew.
    last_shown: Vec<Option<Instant>>,
    has_shown: bool,
    has_ended: bool,
}

impl Metrics {
    /// All measures, registered in `registry`.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let seconds = || Histogram::new(SECONDS);
        let metrics = Self {
            requests: Family::default(),
            in_flight: Gauge::<i64, AtomicI64>::default(),
            ttft: seconds(),
            inter_token_latency: seconds(),
            time_per_output_token: seconds(),
            queue: seconds(),
            prompt_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            prefix_hit_tokens: Counter::default(),
            interrupted_streams: Counter::default(),
            resumed_streams: Counter::default(),
            stalled_streams: Counter::default(),
            workers: Family::default(),
            layout_mismatches: Family::default(),
        };
        metrics.register_times(registry);
        metrics.register_counts(registry);
        metrics
    }

    fn register_times(&self, registry: &mut Registry) {
        let mut seconds = |name: &str, help: &str, metric: &Histogram| {
            registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
        };
        seconds("ttft", "from the complete request to the first text sent", &self.ttft);
        seconds("inter_token_latency", "between consecutive pieces of one output", &self.inter_token_latency);
        seconds(
            "time_per_output_token",
            "mean over the tokens of a request after the first",
            &self.time_per_output_token,
        );
        seconds("queue", "until a decode group had reserved blocks", &self.queue);
    }

    fn register_counts(&self, registry: &mut Registry) {
        registry.register("requests", "requests by method and gRPC code of their end", self.requests.clone());
        registry.register("requests_in_flight", "requests that have not ended", self.in_flight.clone());
        registry.register("workers", "workers that are known", self.workers.clone());
        registry.register(
            "layout_mismatches",
            "workers that came and hold KV otherwise than most",
            self.layout_mismatches.clone(),
        );
        let mut count =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        count("prompt_tokens", "tokens of the prompts of finished requests", &self.prompt_tokens);
        count("completion_tokens", "tokens of the outputs of finished requests", &self.completion_tokens);
        count("prefix_hit_tokens", "prompt tokens found in a cache", &self.prefix_hit_tokens);
        count("interrupted_streams", "outputs that lost a worker, or found none", &self.interrupted_streams);
        count("resumed_streams", "outputs that went on after a worker was lost", &self.resumed_streams);
        count("stalled_streams", "streams whose client had stopped reading", &self.stalled_streams);
    }

    /// A request came in by `method`.
    pub(crate) fn begin(&self, method: &'static str) -> RequestMeter {
        self.in_flight.inc();
        RequestMeter {
            metrics: self.clone(),
            method,
            started: Instant::now(),
            last_shown: Vec::new(),
            has_shown: false,
            has_ended: false,
        }
    }

    /// A stream was ended because its client had stopped reading.
    pub(crate) fn stalled(&self) {
        self.stalled_streams.inc();
    }

    /// A role has `n_workers`.
    pub(crate) fn workers(&self, role: &'static str, n_workers: usize) {
        self.workers.get_or_create(&RoleLabels { role }).set(i64::try_from(n_workers).unwrap_or(i64::MAX));
    }

    /// A worker came that has `field` otherwise than most.
    pub(crate) fn layout_mismatch(&self, role: &'static str, field: &'static str) {
        self.layout_mismatches.get_or_create(&MismatchLabels { role, field }).inc();
    }

    /// An output lost a worker, and another is looked for.
    pub(crate) fn interrupted(&self) {
        self.interrupted_streams.inc();
    }

    /// An output went on after a worker was lost.
    pub(crate) fn resumed(&self) {
        self.resumed_streams.inc();
    }
}

impl RequestMeter {
    /// A decode group took the first output.
    pub(crate) fn accepted(&self) {
        self.metrics.queue.observe(self.started.elapsed().as_secs_f64());
    }

    /// A piece of output `index` was shown.
    pub(crate) fn shown(&mut self, index: usize, now: Instant) {
        if !std::mem::replace(&mut self.has_shown, true) {
            self.metrics.ttft.observe((now - self.started).as_secs_f64());
        }
        if self.last_shown.len() <= index {
            self.last_shown.resize(index + 1, None);
        }
        if let Some(last) = self.last_shown[index].replace(now) {
            self.metrics.inter_token_latency.observe((now - last).as_secs_f64());
        }
    }

    /// The request is answered.
    pub(crate) fn finished(&mut self, report: &UsageReport) {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = report.tokens;
        self.metrics.prompt_tokens.inc_by(prompt_tokens as u64);
        self.metrics.completion_tokens.inc_by(completion_tokens as u64);
        self.metrics.prefix_hit_tokens.inc_by(cached_tokens as u64);
        if completion_tokens > 1 {
            let mean = report.timings.decode.as_secs_f64() / (completion_tokens - 1) as f64;
            self.metrics.time_per_output_token.observe(mean);
        }
        self.end(Code::Ok);
    }

    /// The request ended in `error`. This is where it is logged.
    pub(crate) fn failed(&mut self, error: &ServiceError, call: &CallContext) {
        let code = error.class().code;
        match code {
            Code::Internal | Code::FailedPrecondition | Code::Aborted => {
                tracing::error!(request = %call.request_id, method = self.method, %error, "request failed");
            }
            _ => tracing::debug!(request = %call.request_id, method = self.method, %error, "request refused"),
        }
        self.end(code);
    }

    fn end(&mut self, code: Code) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.metrics.in_flight.dec();
            let labels = RequestLabels { method: self.method, code: code_name(code) };
            self.metrics.requests.get_or_create(&labels).inc();
        }
    }
}

impl Drop for RequestMeter {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

/// A code as operators write it.
pub(crate) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
