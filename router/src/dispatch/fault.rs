//! Why a leg failed, and whether another may do better.

use std::{fmt, time::Duration};

use longreach_types::WorkerId;
use tonic::{Code, Status};

use crate::{
    error::{ServiceError, Stage, cut},
    health::Outcome,
    workers::PickError,
};

/// The end of a leg before its output was complete.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// Who failed; `None` if there was nobody to ask.
    pub(crate) worker: Option<WorkerId>,
    /// How.
    pub(crate) cause: Cause,
}

/// How a leg failed. Each variant is another decision.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    /// The worker or its connection is gone: another attempt may succeed.
    Lost(String),
    /// The worker says that it takes or keeps no work now: it starts, drains, or forms its group again. It is well, and
    /// another may go on at once.
    Moved(String),
    /// The worker gave the attempt up, perhaps through no fault of its own: a hand-off was spoilt, an epoch ended.
    /// Another attempt may succeed.
    Aborted(String),
    /// No worker of a role is there: one may come.
    Nobody(&'static str),
    /// Workers are there, but none that fits.
    NoneFits(&'static str),
    /// The worker's queue is full: another may have room.
    Busy(String),
    /// The worker found the request wrong.
    Invalid(String),
    /// The two workers cannot work together; others may.
    Mismatch(String),
    /// The time is over.
    Deadline,
    /// A worker broke the protocol.
    Broken(String),
}

impl Fault {
    /// What `status`, which ended a call to `worker`, means.
    pub(crate) fn from_status(worker: &WorkerId, status: &Status) -> Self {
        let message = || cut(status.message(), 300).to_owned();
        // A status that was made on this side, out of a broken connection, has a source; one from the wire has none.
        let is_local = std::error::Error::source(status).is_some();
        let cause = match status.code() {
            Code::InvalidArgument | Code::OutOfRange if !is_local => Cause::Invalid(message()),
            Code::ResourceExhausted if !is_local => Cause::Busy(message()),
            Code::FailedPrecondition => Cause::Mismatch(message()),
            Code::DeadlineExceeded => Cause::Deadline,
            Code::Aborted | Code::DataLoss => Cause::Aborted(message()),
            Code::Unavailable if !is_local => Cause::Moved(message()),
            Code::Unavailable | Code::Cancelled | Code::Unknown => Cause::Lost(message()),
            // Somebody else has the worker's address now. The worker itself may come back with another.
            Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated => Cause::Lost(message()),
            _ if is_local => Cause::Lost(message()),
            _ => Cause::Broken(message()),
        };
        Self { worker: Some(worker.clone()), cause }
    }

    /// The stream of `worker` ended without the end of the output: for us that is a failure, never a normal end.
    pub(crate) fn cut_short(worker: &WorkerId) -> Self {
        Self { worker: Some(worker.clone()), cause: Cause::Lost("the stream ended too early".to_owned()) }
    }

    /// `worker` said something that its protocol does not allow here.
    pub(crate) fn broken(worker: &WorkerId, problem: impl Into<String>) -> Self {
        Self { worker: Some(worker.clone()), cause: Cause::Broken(problem.into()) }
    }

    /// No worker of `role` could be picked.
    pub(crate) fn from_pick(role: &'static str, error: PickError) -> Self {
        let cause = match error {
            PickError::Nobody => Cause::Nobody(role),
            PickError::NoneFits => Cause::NoneFits(role),
        };
        Self { worker: None, cause }
    }

    /// Whether another attempt may succeed where this failed.
    pub(crate) fn is_retryable(&self) -> bool {
        !matches!(self.cause, Cause::Invalid(_) | Cause::Deadline | Cause::Broken(_))
    }

    /// Whether the worker only declined: the request did no harm, and is not to be given up for what it does.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.cause, Cause::Moved(_) | Cause::Busy(_) | Cause::Mismatch(_))
    }

    /// Whether it takes another worker: the same one would say the same again.
    pub(crate) fn needs_another(&self) -> bool {
        matches!(self.cause, Cause::Busy(_) | Cause::Mismatch(_))
    }

    /// Whether there was only no room.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.cause, Cause::Busy(_))
    }

    /// What the fault says about the worker.
    pub(crate) fn outcome(&self) -> Outcome {
        match self.cause {
            Cause::Lost(_) | Cause::Broken(_) => Outcome::Fault,
            Cause::Busy(_) | Cause::Moved(_) => Outcome::Backpressure,
            Cause::Aborted(_)
            | Cause::Nobody(_)
            | Cause::NoneFits(_)
            | Cause::Invalid(_)
            | Cause::Mismatch(_)
            | Cause::Deadline => Outcome::Neutral,
        }
    }

    /// What the client is told when it is not tried again.
    pub(crate) fn into_error(self, retry_after: Duration, stage: Stage) -> ServiceError {
        match self.cause {
            Cause::Lost(problem) | Cause::Moved(problem) | Cause::Aborted(problem) => {
                ServiceError::Unavailable { problem: format!("workers were lost: {problem}"), retry_after }
            }
            Cause::Nobody(role) => {
                ServiceError::Unavailable { problem: format!("no {role} worker is ready"), retry_after }
            }
            Cause::NoneFits(role) => ServiceError::Misconfigured {
                problem: format!("no {role} worker holds KV in the form, or of the length, that is needed"),
            },
            Cause::Busy(problem) => ServiceError::Overloaded { problem, retry_after },
            Cause::Invalid(problem) => ServiceError::invalid("request", problem),
            Cause::Mismatch(problem) => ServiceError::Misconfigured { problem },
            Cause::Deadline => ServiceError::Deadline { stage },
            Cause::Broken(problem) => ServiceError::Internal { problem },
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(problem)
            | Self::Moved(problem)
            | Self::Aborted(problem)
            | Self::Busy(problem)
            | Self::Invalid(problem)
            | Self::Mismatch(problem)
            | Self::Broken(problem) => f.write_str(problem),
            Self::Nobody(role) => write!(f, "no {role} worker is ready"),
            Self::NoneFits(role) => write!(f, "no {role} worker fits"),
            Self::Deadline => f.write_str("the deadline passed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address may be somebody else's by now: whoever answers there without knowing the call says nothing about the
    /// output.
    #[test]
    fn a_stranger_at_a_workers_address_does_not_end_an_output() {
        for code in [Code::Unimplemented, Code::PermissionDenied, Code::Unauthenticated] {
            let fault = Fault::from_status(&WorkerId("a".to_owned()), &Status::new(code, "no such method"));
            assert!(fault.is_retryable() && !fault.is_refusal(), "{code}");
            assert_eq!(fault.outcome(), Outcome::Fault, "{code}");
        }
    }
}
