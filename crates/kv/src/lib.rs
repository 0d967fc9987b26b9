//! KV blocks: who holds them, which prefixes they offer, and what of a hand-off has arrived.
//!
//! - [`KvManager`]: D block pools, the prefix index over them and the block table of every sequence.
//! - [`TokenChain`], [`PrefixSalt`]: a sequence's tokens with their block hashes, the keys of the prefix cache.
//! - [`Incoming`], [`Coverage`]: the receiving side of one hand-off on one rank.
//!
//! Everything here is pure: no I/O, no clock, no threads, no randomness, so it runs unchanged in a simulator.
//! It moves no bytes: blocks are numbers, and the arena behind them belongs to the engine.

mod audit;
mod chain;
mod coverage;
mod incoming;
mod index;
mod manager;
mod pool;

pub use audit::AuditError;
pub use chain::{HashMismatch, PrefixSalt, TokenChain, block_hash, self_check};
pub use coverage::{Coverage, CoverageDigest, CoverageError, Inserted, local_share};
pub use incoming::{Commit, DropReason, Incoming, IncomingError, IncomingState};
pub use manager::{Allocation, KvConfig, KvError, KvManager, NoSpace};
pub use pool::{BlockPool, BlockState, PoolCounts, Reason};
