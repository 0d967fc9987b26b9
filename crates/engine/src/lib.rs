//! A worker's engine: plan, forward, outcome, and the hand-off of KV between engines.
//!
//! Prefill workers and decode groups are the same engine with another kind of work: see [`handle::Work`]. The thinking
//! parts (scheduler, block pools, coverage) are pure crates below; here is the thread that drives them and the
//! channels by which the outside reaches it.
//!
//! ```text
//! services ──submit──► EngineHandle ──► engine thread (rank 0): intake ► plan ► forward ► sample ► events
//!                                          │ plans, expectations          ▲ arrivals
//! prefill ──Push──► KvInlet (per rank) ─►  └──► follower threads ─────────┘
//!         ◄──Pull──
//! ```

pub mod cells;
pub mod core;
pub mod door;
mod engine;
pub mod follower;
pub mod group;
pub mod handle;
mod inbound;
pub mod inlet;
pub mod intake;
mod live;
pub mod member;
mod offer;
mod outbound;
pub mod pair;
mod park;
pub mod process;
mod pull;
pub mod rank;
pub mod receive;
mod send;
pub mod serve;
pub mod setup;
pub mod transport;

pub use door::KvDoor;
pub use group::{DecodeGroup, GroupLife, start_prefill};
pub use handle::{EngineEvent, EngineHandle, EngineInfo, SeqStream, Submission, Work};
pub use inlet::KvInlet;
pub use live::prompt_hash;
pub use member::{Member, Rank, RunningEngine, RunningFollower};
pub use pair::{EnginePair, Generated};
pub use setup::{BuildError, EngineConfig, Model};
pub use transport::{GrpcTransport, KvTransport, LocalTransport};
