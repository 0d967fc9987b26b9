//! What the scheduler tells its caller, and what the caller reports of a step.

use std::ops::Range;

use longreach_types::{SeqId, StepId, TokenId};

/// Something that happened to a sequence. Every accepted sequence gets exactly one [`Event::Ended`], its last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// First admission: the sequence holds blocks for its whole prompt.
    Reserved {
        /// The sequence.
        seq: SeqId,
        /// Prompt tokens served from the prefix cache, counted now, not at submission.
        cached_len: usize,
        /// Who computes the rest.
        mode: Mode,
        /// Logical blocks whose KV is missing: to be filled by the hand-off, or computed here. The last one may
        /// be partial. Block g is entry `g / D` of the table of rank `g mod D`.
        blocks: Range<usize>,
    },
    /// All blocks were taken from a running sequence; it waits at the front and will be recomputed here.
    Preempted {
        /// The sequence.
        seq: SeqId,
    },
    /// A preempted sequence was admitted again.
    Resumed {
        /// The sequence.
        seq: SeqId,
        /// Tokens of prompt and output found in the prefix cache; the others are computed again.
        cached_len: usize,
    },
    /// A step gave the sequence new tokens.
    Sampled {
        /// The sequence.
        seq: SeqId,
        /// How many of the outcome's tokens were taken: all of them.
        n_new: usize,
        /// Output tokens so far, counted from the end of the submitted tokens.
        output_len: usize,
    },
    /// A sequence of kind `Send` is computed: its blocks stay until [`crate::Scheduler::release`].
    Sending {
        /// The sequence.
        seq: SeqId,
    },
    /// The sequence is over. Blocks that a running step uses, or that the caller holds, follow later.
    Ended {
        /// The sequence.
        seq: SeqId,
        /// Why.
        end: End,
    },
}

/// Who computes the uncached part of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// This engine.
    Local,
    /// A prefill worker; its KV comes by hand-off.
    Receive,
    /// This engine, once it has pulled the KV of the prefix that the receiving group holds.
    Pull,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// [`crate::Scheduler::finish`]: the caller has all it wanted.
    Finished,
    /// `max_len` tokens are reached.
    Length,
    /// [`crate::Scheduler::release`]: the hand-off it was computed for is over.
    Released,
    /// [`crate::Scheduler::abort`] or [`crate::Scheduler::abort_held`].
    Aborted,
    /// It was alone and could not grow: a bug, since accepted sequences fit into the empty pools.
    OutOfBlocks,
}

/// Why a sequence was not accepted. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Too much waits already; retry later, or elsewhere.
    #[error(
        "{n_waiting} sequences of {waiting_tokens} tokens wait already, \
         the limits are {max_waiting} and {max_waiting_tokens}; retry later"
    )]
    QueueFull {
        /// Sequences that wait.
        n_waiting: usize,
        /// The limit.
        max_waiting: usize,
        /// Their tokens.
        waiting_tokens: usize,
        /// The limit.
        max_waiting_tokens: usize,
    },
    /// It could never run here.
    #[error("the sequence may grow to {need} tokens, this engine takes {have} at most")]
    TooLarge {
        /// Tokens for which KV blocks would be needed.
        need: usize,
        /// Tokens the longest sequence may have.
        have: usize,
    },
    /// There is nothing to compute logits from.
    #[error("the prompt is empty; it must have at least one token")]
    EmptyPrompt,
    /// There is no room for any output.
    #[error("max_len is {max_len}, the prompt has {prompt_len} tokens; it must leave room for one more")]
    NoOutput {
        /// Prompt tokens.
        prompt_len: usize,
        /// The most tokens, output included.
        max_len: usize,
    },
    /// Ids name one sequence for the life of an engine.
    #[error("sequence {0} exists already")]
    Duplicate(SeqId),
}

/// KV was reported for a sequence that does not wait for any: it has ended, or was never to receive or pull. Count it
/// and go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sequence {0} does not wait for KV")]
pub struct NotReceiving(pub SeqId);

/// What came out of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepOutcome {
    /// The plan's step.
    pub step: StepId,
    /// The sequences that sampled, in any order. One that should have sampled and is missing is planned again.
    pub sampled: Vec<Sampled>,
}

/// The tokens a sequence gained in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// The sequence.
    pub seq: SeqId,
    /// At least one, at most `n_logits` of the plan: the accepted drafts, then the token sampled after them.
    pub tokens: Vec<TokenId>,
}

/// An outcome of a step that is not in flight. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outcome of step {got}, in flight is {in_flight:?}")]
pub struct WrongStep {
    /// The step in flight.
    pub in_flight: Option<StepId>,
    /// The one reported.
    pub got: StepId,
}
