//! Everything a request can end in other than an answer: one closed set, and one table that gives each member its
//! gRPC code, its HTTP status and its names.
//!
//! The faces add nothing to it: both read [`ServiceError::class`], so that they cannot come to disagree. Text from
//! outside is cut before it goes into a message, because a gRPC status travels in trailers, which peers bound.

use std::{collections::HashMap, fmt, time::Duration};

use longreach_types::SamplingError;
use tonic::{Code, Status, metadata::MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

/// Longest message put in an answer.
const MAX_MESSAGE_BYTES: usize = 1000;

/// The domain of our `google.rpc.ErrorInfo`.
const ERROR_DOMAIN: &str = "longreach";

/// Why a request has no (complete) answer. Each variant is a decision the client or operator can take.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ServiceError {
    /// A field of the request is malformed or out of its range.
    #[error("{field}: {problem}")]
    Invalid {
        /// Path of the field, as the client wrote it.
        field: String,
        /// What was wrong, with the value, and what is allowed.
        problem: String,
    },
    /// Prompt and output do not fit into the model's context.
    #[error(
        "the context holds {limit} tokens; the prompt has {prompt_len} and the output may take {max_tokens}: \
         shorten the prompt or lower max_tokens"
    )]
    ContextLength {
        /// Tokens the largest group holds in one sequence.
        limit: usize,
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Tokens asked for; 1 if the request left it open.
        max_tokens: usize,
    },
    /// The body of the request is too long to be read.
    #[error("the request body is larger than {limit} bytes")]
    BodyTooLarge {
        /// The configured limit.
        limit: usize,
    },
    /// The named model is not served.
    #[error("model {model:?} is not served here; {served:?} is")]
    UnknownModel {
        /// The name in the request.
        model: String,
        /// The name that would have worked.
        served: String,
    },
    /// A field asks for something this server or model cannot do.
    #[error("{field}: {problem}")]
    Unsupported {
        /// The field.
        field: String,
        /// What cannot be done.
        problem: String,
    },
    /// A bounded queue is full.
    #[error("{problem}; retry in {} ms", retry_after.as_millis())]
    Overloaded {
        /// Which queue, with its numbers.
        problem: String,
        /// When to come back.
        retry_after: Duration,
    },
    /// No worker can take the request now.
    #[error("{problem}; retry in {} ms", retry_after.as_millis())]
    Unavailable {
        /// What is missing.
        problem: String,
        /// When to come back.
        retry_after: Duration,
    },
    /// The call's deadline passed.
    #[error("the deadline passed {stage}")]
    Deadline {
        /// Where the request was.
        stage: Stage,
    },
    /// The client stopped reading.
    #[error("nothing was read for {} ms, so the request was ended", patience.as_millis())]
    Stalled {
        /// How long that is borne.
        patience: Duration,
    },
    /// The output was interrupted and could not be resumed.
    #[error("the output was interrupted after {n_emitted} tokens and could not be resumed: {cause}")]
    Lost {
        /// Tokens the client has.
        n_emitted: usize,
        /// The last failure.
        cause: String,
    },
    /// The workers do not fit each other; an operator must act.
    #[error("the workers do not fit each other: {problem}")]
    Misconfigured {
        /// What differs.
        problem: String,
    },
    /// A broken invariant: a bug of ours.
    #[error("internal error: {problem}")]
    Internal {
        /// Which invariant.
        problem: String,
    },
}

/// Where a request was when its time ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Text is being made into tokens, or tokens into text.
    Text,
    /// No decode group has reserved blocks yet.
    Queue,
    /// The prompt is being computed.
    Prefill,
    /// Tokens are being generated.
    Decode,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "while text was made into tokens, or tokens into text",
            Self::Queue => "while the request waited for a decode group",
            Self::Prefill => "while the prompt was computed",
            Self::Decode => "while tokens were generated",
        })
    }
}

/// How an error looks from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// On gRPC.
    pub(crate) code: Code,
    /// On HTTP.
    pub(crate) http_status: u16,
    /// `type` of the OpenAI error object.
    pub(crate) kind: &'static str,
    /// `reason` of `google.rpc.ErrorInfo`; in lower case, `code` of the OpenAI error object.
    pub(crate) reason: &'static str,
}

impl ServiceError {
    /// A field out of its range.
    pub(crate) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), problem: problem.into() }
    }

    /// Something that cannot be done here.
    pub(crate) fn unsupported(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Unsupported { field: field.into(), problem: problem.into() }
    }

    /// Whether the same request would end in the same way again: what the table of `docs/errors.md` says of retries.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Invalid { .. }
            | Self::ContextLength { .. }
            | Self::BodyTooLarge { .. }
            | Self::UnknownModel { .. }
            | Self::Unsupported { .. }
            | Self::Misconfigured { .. }
            | Self::Internal { .. } => true,
            Self::Overloaded { .. }
            | Self::Unavailable { .. }
            | Self::Deadline { .. }
            | Self::Stalled { .. }
            | Self::Lost { .. } => false,
        }
    }

    /// The table of `docs/errors.md`.
    pub(crate) fn class(&self) -> Class {
        let class = |code, http_status, kind, reason| Class { code, http_status, kind, reason };
        match self {
            Self::Invalid { .. } => {
                class(Code::InvalidArgument, 400, "invalid_request_error", "INVALID_FIELD")
            }
            Self::ContextLength { .. } => {
                class(Code::InvalidArgument, 400, "invalid_request_error", "CONTEXT_LENGTH_EXCEEDED")
            }
            Self::BodyTooLarge { .. } => {
                class(Code::InvalidArgument, 413, "invalid_request_error", "BODY_TOO_LARGE")
            }
            Self::UnknownModel { .. } => {
                class(Code::NotFound, 404, "invalid_request_error", "MODEL_NOT_FOUND")
            }
            Self::Unsupported { .. } => {
                class(Code::Unimplemented, 501, "invalid_request_error", "UNSUPPORTED")
            }
            Self::Overloaded { .. } => class(Code::ResourceExhausted, 429, "rate_limit_error", "OVERLOADED"),
            Self::Unavailable { .. } => class(Code::Unavailable, 503, "server_error", "UNAVAILABLE"),
            Self::Deadline { .. } => class(Code::DeadlineExceeded, 504, "timeout_error", "DEADLINE_EXCEEDED"),
            Self::Stalled { .. } => class(Code::Cancelled, 408, "timeout_error", "CLIENT_STALLED"),
            Self::Lost { .. } => class(Code::Aborted, 502, "server_error", "OUTPUT_LOST"),
            Self::Misconfigured { .. } => {
                class(Code::FailedPrecondition, 500, "server_error", "WORKERS_MISCONFIGURED")
            }
            Self::Internal { .. } => class(Code::Internal, 500, "server_error", "INTERNAL"),
        }
    }

    /// The field to correct, if there is one.
    pub(crate) fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } | Self::Unsupported { field, .. } => Some(field),
            Self::ContextLength { limit, prompt_len, .. } if prompt_len >= limit => Some("prompt"),
            Self::ContextLength { .. } => Some("max_tokens"),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    /// When the same request may succeed, if it may.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after, .. } | Self::Unavailable { retry_after, .. } => {
                Some(*retry_after)
            }
            _ => None,
        }
    }

    /// The message, short enough for any transport.
    pub(crate) fn message(&self) -> String {
        cut(&self.to_string(), MAX_MESSAGE_BYTES).to_owned()
    }

    /// The values behind the message, for machines.
    fn values(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::ContextLength { limit, prompt_len, max_tokens } => vec![
                ("limit", limit.to_string()),
                ("prompt_tokens", prompt_len.to_string()),
                ("max_tokens", max_tokens.to_string()),
            ],
            Self::BodyTooLarge { limit } => vec![("limit", limit.to_string())],
            Self::UnknownModel { model, served } => {
                vec![("model", cut(model, 100).to_owned()), ("served", served.clone())]
            }
            Self::Invalid { field, .. } | Self::Unsupported { field, .. } => {
                vec![("field", cut(field, 100).to_owned())]
            }
            Self::Deadline { stage } => vec![("stage", format!("{stage:?}").to_lowercase())],
            Self::Lost { n_emitted, .. } => vec![("emitted_tokens", n_emitted.to_string())],
            Self::Overloaded { .. }
            | Self::Unavailable { .. }
            | Self::Stalled { .. }
            | Self::Misconfigured { .. }
            | Self::Internal { .. } => Vec::new(),
        }
    }

    /// The `google.rpc` details.
    fn details(&self) -> ErrorDetails {
        let values = self.values().into_iter().map(|(key, value)| (key.to_owned(), value));
        let values: HashMap<String, String> = values.collect();
        let mut details = ErrorDetails::with_error_info(self.class().reason, ERROR_DOMAIN, values);
        match self {
            Self::Invalid { field, problem } => {
                details.add_bad_request_violation(cut(field, 200), cut(problem, MAX_MESSAGE_BYTES));
            }
            Self::ContextLength { .. } => {
                details.add_bad_request_violation(self.field().unwrap_or_default(), self.message());
            }
            Self::Overloaded { problem, .. } => {
                details.add_quota_failure_violation(cut(problem, 200), self.message());
            }
            _ => {}
        }
        if let Some(delay) = self.retry_after() {
            details.set_retry_info(Some(delay));
        }
        details
    }
}

impl From<ServiceError> for Status {
    fn from(error: ServiceError) -> Self {
        let mut status = Status::with_error_details(error.class().code, error.message(), error.details());
        if let Some(delay) = error.retry_after() {
            let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
            status.metadata_mut().insert("grpc-retry-pushback-ms", MetadataValue::from(millis));
        }
        status
    }
}

impl From<SamplingError> for ServiceError {
    fn from(error: SamplingError) -> Self {
        Self::invalid(error.field, format!("is {}; it must be {}", error.value, error.allowed))
    }
}

/// The longest start of `text` of at most `max_bytes` bytes that ends on a character.
pub(crate) fn cut(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_stays_small_whatever_it_quotes() {
        let error = ServiceError::invalid("ä".repeat(50_000), "ö".repeat(50_000));
        let status = Status::from(error);
        assert!(status.message().len() <= MAX_MESSAGE_BYTES);
        assert!(status.details().len() < 4096, "{} bytes of details", status.details().len());
    }

    /// One of each variant. The match makes a new one fail to compile until it is added.
    fn one_of_each() -> Vec<ServiceError> {
        let (text, retry_after) = (String::new, Duration::from_secs(1));
        let all = vec![
            ServiceError::invalid("f", "p"),
            ServiceError::ContextLength { limit: 1, prompt_len: 2, max_tokens: 3 },
            ServiceError::BodyTooLarge { limit: 1 },
            ServiceError::UnknownModel { model: text(), served: text() },
            ServiceError::unsupported("f", "p"),
            ServiceError::Overloaded { problem: text(), retry_after },
            ServiceError::Unavailable { problem: text(), retry_after },
            ServiceError::Deadline { stage: Stage::Queue },
            ServiceError::Stalled { patience: retry_after },
            ServiceError::Lost { n_emitted: 1, cause: text() },
            ServiceError::Misconfigured { problem: text() },
            ServiceError::Internal { problem: text() },
        ];
        for error in &all {
            match error {
                ServiceError::Invalid { .. }
                | ServiceError::ContextLength { .. }
                | ServiceError::BodyTooLarge { .. }
                | ServiceError::UnknownModel { .. }
                | ServiceError::Unsupported { .. }
                | ServiceError::Overloaded { .. }
                | ServiceError::Unavailable { .. }
                | ServiceError::Deadline { .. }
                | ServiceError::Stalled { .. }
                | ServiceError::Lost { .. }
                | ServiceError::Misconfigured { .. }
                | ServiceError::Internal { .. } => {}
            }
        }
        all
    }

    #[test]
    fn the_published_table_is_the_one_in_force() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (page, _) = page.split_once("## Between workers").unwrap();
        let errors = one_of_each();
        for error in &errors {
            let Class { code, http_status, kind, reason } = error.class();
            let code = crate::metrics::code_name(code);
            let row = format!("| `{reason}` | `{code}` | {http_status} | `{kind}` |");
            assert!(page.contains(&row), "docs/errors.md has no row {row}");
        }
        let n_rows = page.lines().filter(|line| line.matches("| `").count() == 3).count();
        assert_eq!(n_rows, errors.len(), "rows of docs/errors.md for clients");
    }

    #[test]
    fn a_full_queue_says_when_to_come_back_in_every_form() {
        let retry_after = Duration::from_millis(1500);
        let status = Status::from(ServiceError::Overloaded { problem: "requests".to_owned(), retry_after });
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1500");
        let details = status.get_error_details();
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(retry_after));
        assert_eq!(details.quota_failure().unwrap().violations[0].subject, "requests");
        assert_eq!(details.error_info().unwrap().reason, "OVERLOADED");
    }

    #[test]
    fn a_context_that_is_too_long_names_limit_and_length() {
        let status = Status::from(ServiceError::ContextLength { limit: 256, prompt_len: 300, max_tokens: 1 });
        assert_eq!(status.code(), Code::InvalidArgument);
        let details = status.get_error_details();
        let values = &details.error_info().unwrap().metadata;
        assert_eq!((values["limit"].as_str(), values["prompt_tokens"].as_str()), ("256", "300"));
        assert_eq!(details.bad_request().unwrap().field_violations[0].field, "prompt");
    }
}
