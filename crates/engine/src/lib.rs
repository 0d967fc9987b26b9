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
//! ```

mod engine;
mod follower;
pub mod group;
pub mod handle;
mod inbound;
pub mod inlet;
mod intake;
mod live;
mod outbound;
pub mod pair;
pub mod process;
pub mod rank;
mod send;
pub mod serve;
pub mod transport;

pub use group::{BuildError, DecodeGroup, EngineConfig, Model, RunningEngine, start_prefill};
pub use handle::{EngineEvent, EngineHandle, EngineInfo, SeqStream, Submission, Work};
pub use inlet::KvInlet;
pub use pair::{EnginePair, Generated};
pub use transport::{GrpcTransport, KvTransport, LocalTransport};
