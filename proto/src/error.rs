//! What a worker can answer instead of a result: one closed set, one match to a gRPC status.

use tonic::{Code, Status};

use crate::worker::KvLayout;

/// Longest message put in a status: it travels in HTTP/2 trailers, which peers bound.
const MAX_MESSAGE_BYTES: usize = 1024;

/// A worker's refusal or failure. Each variant is a decision its caller can take.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The request can never succeed; nobody retries.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// The sequence could not fit even into an empty pool.
    #[error("the request needs {need} tokens of KV, the group can hold {have}: shorten prompt or max_tokens")]
    TooLarge {
        /// Prompt and output.
        need: usize,
        /// Capacity.
        have: usize,
    },
    /// A bounded queue is full; the client may retry later.
    #[error("{queue} is full: {len} of {max}; retry later")]
    QueueFull {
        /// Which queue.
        queue: &'static str,
        /// What it holds.
        len: usize,
        /// Its bound.
        max: usize,
    },
    /// Draining, starting, or gone; another worker may serve.
    #[error("worker unavailable: {0}")]
    Unavailable(&'static str),
    /// The hand-off or the epoch ended; the router starts again from prefill.
    #[error("aborted: {0}")]
    Aborted(String),
    /// The two sides hold KV differently; an operator must act.
    #[error("KV layouts differ in {field}: expected {expected}, got {got}")]
    LayoutMismatch {
        /// The first field that differs.
        field: &'static str,
        /// The receiver's value.
        expected: String,
        /// The sender's value.
        got: String,
    },
    /// A peer of the worker refused to work with it; an operator must act.
    #[error("{0}")]
    PeerMismatch(String),
    /// Transferred bytes are wrong; the router starts again from prefill.
    #[error("KV data wrong: {0}")]
    DataLoss(String),
    /// The caller went away.
    #[error("cancelled")]
    Cancelled,
    /// A broken invariant.
    #[error("internal: {0}")]
    Internal(String),
}

impl WorkerError {
    /// The gRPC code of the variant.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::TooLarge { .. } => Code::InvalidArgument,
            Self::QueueFull { .. } => Code::ResourceExhausted,
            Self::Unavailable(_) => Code::Unavailable,
            Self::Aborted(_) => Code::Aborted,
            Self::LayoutMismatch { .. } | Self::PeerMismatch(_) => Code::FailedPrecondition,
            Self::DataLoss(_) => Code::DataLoss,
            Self::Cancelled => Code::Cancelled,
            Self::Internal(_) => Code::Internal,
        }
    }

    /// The error for two layouts that differ, naming both values of the first field that does.
    pub fn layout_mismatch(expected: &KvLayout, got: &KvLayout) -> Option<Self> {
        expected.first_difference(got).map(|(field, expected, got)| Self::LayoutMismatch {
            field,
            expected,
            got,
        })
    }
}

impl From<WorkerError> for Status {
    fn from(error: WorkerError) -> Self {
        let mut message = error.to_string();
        if message.len() > MAX_MESSAGE_BYTES {
            let cut = (0..=MAX_MESSAGE_BYTES).rev().find(|&i| message.is_char_boundary(i)).unwrap_or(0);
            message.truncate(cut);
        }
        Status::new(error.code(), message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_on_a_character() {
        let status = Status::from(WorkerError::Invalid("ä".repeat(100_000)));
        assert!(status.message().len() <= MAX_MESSAGE_BYTES);
        assert!(status.message().ends_with('ä'));
    }
}
