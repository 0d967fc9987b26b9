//! Identifiers. Each is its own type, so that a block number can never stand where a token belongs.

use std::fmt;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id!(
    /// Index in the tokenizer's vocabulary.
    TokenId(u32)
);
number_id!(
    /// One stream of tokens on one engine. Unique within the life of an engine, never reused.
    SeqId(u64)
);
number_id!(
    /// `block_size` consecutive slots on one rank: all layers and KV heads of that rank.
    BlockId(u32)
);
number_id!(
    /// One forward pass over one batch; the engine's unit of time.
    StepId(u64)
);
number_id!(
    /// Life of a decode group. Every message carries it; a stale one is refused.
    Epoch(u64)
);
number_id!(
    /// Number of this life of a worker process.
    Incarnation(u64)
);
number_id!(
    /// One move of one sequence's KV from a prefill worker to a decode group. Never reused.
    HandoffId(u128)
);

/// One client RPC: minted by the router, constant across workers, retries and log lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub String);

/// A worker's stable name. Together with its [`Incarnation`] it addresses one process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names a prefix: a digest of a full block's tokens *and* its parent's hash and salt. It is never trusted
/// alone; the token ids are compared on a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 16]);

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
