//! One sequence, as submitted and as the scheduler keeps it.

use std::cmp::Reverse;

use longreach_kv::{PrefixSalt, TokenChain};
use longreach_types::{SeqId, TokenId};

/// A sequence to be scheduled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSeq {
    /// Unique for the life of the scheduler.
    pub seq: SeqId,
    /// The prompt, with the output of earlier legs where a stream is resumed.
    pub tokens: Vec<TokenId>,
    /// Sequences of different salts share no blocks.
    pub salt: PrefixSalt,
    /// The most tokens, prompt and output: the sequence ends by itself when it has them. For `Send` the first
    /// token ends the work in any case.
    pub max_len: usize,
    /// Higher goes first, strictly: in admission, and last in preemption.
    pub priority: i32,
    /// Where the KV of the prompt comes from, and what becomes of it.
    pub kind: SeqKind,
    /// Of a `Send`: leading prompt tokens whose KV the receiving group holds, and lets us pull. A block that is not
    /// full does not count. 0 for the other kinds.
    pub remote_len: usize,
}

/// Where the KV of a prompt comes from, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SeqKind {
    /// Computed here, decoded here.
    Local,
    /// Comes by hand-off, decoded here. What is short or mostly cached is computed here all the same.
    Receive,
    /// Computed here up to the first token, then kept until it is sent.
    Send,
}

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Holds no blocks.
    Waiting,
    /// Holds blocks that a hand-off fills.
    Receiving,
    /// Holds blocks whose first part is pulled from the group that the rest will be sent to.
    Pulling,
    /// Computes.
    Running,
    /// Computed; its blocks are being sent.
    Sending,
}

/// The scheduler's record of a sequence that has not ended.
#[derive(Debug)]
pub(crate) struct Seq {
    pub(crate) chain: TokenChain,
    pub(crate) prompt_len: usize,
    pub(crate) max_len: usize,
    pub(crate) kind: SeqKind,
    pub(crate) order: Order,
    pub(crate) phase: Phase,
    pub(crate) computed_len: usize,
    /// Whole blocks of the prompt that can be pulled, in tokens; short of the last token, which must run.
    pub(crate) remote_len: usize,
    /// Proposed next tokens, to be verified in the next step.
    pub(crate) drafts: Vec<TokenId>,
    pub(crate) wait: Wait,
    /// Part of the step in flight, which writes to its blocks.
    pub(crate) in_step: bool,
}

/// Sequences in the order they are served: by priority, then by arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    priority: Reverse<i32>,
    /// Preempted sequences wait before all others of their priority. Always true in the running set.
    not_preempted: bool,
    arrival: u64,
    pub(crate) seq: SeqId,
}

/// What is known about a waiting sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wait {
    /// Was admitted before.
    pub(crate) preempted: bool,
    /// Sequences admitted ahead of it while it waited for blocks.
    pub(crate) n_passes: u32,
    /// [`longreach_kv::KvManager::version`] at which there were too few blocks for it.
    pub(crate) blocked_at: Option<u64>,
}

impl Seq {
    pub(crate) fn new(new: NewSeq, arrival: u64, block_size: usize) -> Self {
        let order = Order { priority: Reverse(new.priority), not_preempted: true, arrival, seq: new.seq };
        let remote_len = new.remote_len.min(new.tokens.len().saturating_sub(1)) / block_size * block_size;
        Self {
            prompt_len: new.tokens.len(),
            remote_len,
            chain: TokenChain::new(new.salt, block_size, new.tokens),
            max_len: new.max_len,
            kind: new.kind,
            order,
            phase: Phase::Waiting,
            computed_len: 0,
            drafts: Vec::new(),
            wait: Wait::default(),
            in_step: false,
        }
    }

    /// Tokens whose KV is not computed: 1 while it decodes.
    pub(crate) const fn pending_len(&self) -> usize {
        self.chain.len() - self.computed_len
    }

    /// Whether proposed tokens can be verified in its next step.
    pub(crate) fn takes_drafts(&self) -> bool {
        let decodes = self.phase == Phase::Running && self.kind != SeqKind::Send && self.pending_len() == 1;
        decodes && !self.in_step
    }

    /// The key under which it waits.
    pub(crate) const fn wait_order(&self) -> Order {
        Order { not_preempted: !self.wait.preempted, ..self.order }
    }

    pub(crate) const fn output_len(&self) -> usize {
        self.chain.len() - self.prompt_len
    }
}

impl NewSeq {
    /// Tokens for which blocks may be needed: the last token is never computed, but counted all the same, so that
    /// limits are those of the sequence. A `Send` never holds more than its prompt.
    pub(crate) const fn need_len(&self) -> usize {
        match self.kind {
            SeqKind::Send => self.tokens.len(),
            SeqKind::Local | SeqKind::Receive => self.max_len,
        }
    }
}
