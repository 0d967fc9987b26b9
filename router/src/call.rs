//! What every worker call of one client call has in common: its name, its deadline, its trace.

use std::time::Duration;

use longreach_types::RequestId;
use tokio::time::Instant;
use tonic::{
    Request,
    metadata::{Ascii, MetadataMap, MetadataValue},
};

use crate::random;

/// What a worker call gets beyond the deadline. The router ends the call itself at the deadline, and a worker that it ends
/// on is not at fault; this bounds the work for a router that is gone without a trace.
const WORKER_SLACK: Duration = Duration::from_secs(1);

/// One client call. Cheap to clone is not needed: it is shared behind an `Arc`.
#[derive(Clone, Debug)]
pub(crate) struct CallContext {
    /// The client's name for the request, or one made here; echoed, never used as a key.
    pub(crate) client_id: String,
    /// Ours: the client's with a random suffix, so that two requests of one name stay two.
    pub(crate) request_id: RequestId,
    /// When the request must be answered: a little before the client stops waiting.
    pub(crate) deadline: Option<Instant>,
    /// W3C trace context, passed on as it came.
    pub(crate) trace_parent: Option<MetadataValue<Ascii>>,
}

impl CallContext {
    /// A context for a call that the client named `client_id`, if it did.
    pub(crate) fn new(client_id: Option<String>) -> Self {
        let suffix = format!("{:016x}", random::next_u64());
        let client_id = client_id.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("req-{suffix}"));
        let request_id = match client_id.strip_suffix(&suffix) {
            Some(_) => RequestId(client_id.clone()),
            None => RequestId(format!("{client_id}-{suffix}")),
        };
        Self { client_id, request_id, deadline: None, trace_parent: None }
    }

    /// With the deadline and the trace that came with a gRPC call.
    pub(crate) fn with_metadata(mut self, metadata: &MetadataMap) -> Self {
        self.deadline = deadline(metadata);
        self.trace_parent = metadata.get("traceparent").cloned();
        self
    }

    /// A worker call with what is left of the time and a little more, and the trace.
    pub(crate) fn worker_request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()) + WORKER_SLACK);
        }
        if let Some(trace) = &self.trace_parent {
            request.metadata_mut().insert("traceparent", trace.clone());
        }
        request
    }
}

/// When a gRPC call that begins now must be answered, if its client set a time.
pub(crate) fn deadline(metadata: &MetadataMap) -> Option<Instant> {
    let timeout = parse_grpc_timeout(metadata.get("grpc-timeout")?.to_str().ok()?)?;
    Instant::now().checked_add(timeout - answer_margin(timeout))
}

/// What is kept of the client's time for the answer's way: one that comes with the deadline is not read.
fn answer_margin(timeout: Duration) -> Duration {
    (timeout / 20).min(Duration::from_millis(50))
}

/// Reads the `grpc-timeout` header: up to eight digits and a unit. tonic reads it too, but bounds only the response's
/// headers by it, and a stream's time is spent after them.
fn parse_grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(amount * 3600)),
        "M" => Some(Duration::from_secs(amount * 60)),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_are_read_as_the_specification_writes_them() {
        assert_eq!(parse_grpc_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse_grpc_timeout("5M"), Some(Duration::from_secs(300)));
        assert_eq!(parse_grpc_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_grpc_timeout("7u"), Some(Duration::from_micros(7)));
        for bad in ["", "m", "123456789S", "1", "-1S", "1.5S", "1s", "1 S", "1ä"] {
            assert_eq!(parse_grpc_timeout(bad), None, "{bad:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn workers_are_told_the_time_that_is_left_and_the_trace() {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", "1S".parse().unwrap());
        metadata.insert(
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap(),
        );
        let call = CallContext::new(None).with_metadata(&metadata);
        tokio::time::advance(Duration::from_millis(600)).await;
        let request = call.worker_request(());
        assert_eq!(request.metadata().get("traceparent"), metadata.get("traceparent"));
        let timeout = request.metadata().get("grpc-timeout").unwrap().to_str().unwrap();
        assert_eq!(
            parse_grpc_timeout(timeout),
            Some(Duration::from_millis(1350)),
            "1 s less 50 ms less 600 ms, and the slack"
        );
    }

    #[test]
    fn two_calls_of_one_name_are_two_requests() {
        let call = || CallContext::new(Some("same".to_owned()));
        let (one, other) = (call(), call());
        assert_eq!(one.client_id, other.client_id);
        assert_ne!(one.request_id, other.request_id);
        let unnamed = CallContext::new(None);
        assert_eq!(unnamed.client_id, unnamed.request_id.0);
    }
}
