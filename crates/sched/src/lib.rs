//! Continuous batching: which sequences hold KV blocks, and what the next step computes.
//!
//! One [`Scheduler`] serves both roles. A prefill worker runs it with one pool and sequences of kind
//! [`SeqKind::Send`]; the leader of a decode group runs it with D pools and [`SeqKind::Receive`]. The life of a
//! sequence:
//!
//! ```text
//!            submit                  admission                      received
//!   (caller) ──────► Waiting ──┬──────────────────► Receiving ──────────────────┐
//!                       ▲      │ Reserved{Receive}                              ▼
//!                       │      ├───────────────────────────────────────────► Running ──► Sending
//!                       │      │ Reserved{Pull}          pulled, pull_failed    ▲ │  first token, Send only
//!                       │      └──────────────────► Pulling ────────────────────┘ │
//!                       └──────────────── preempted, to the front ────────────────┘
//!
//!   any of them ── finish, abort, release, length, out of blocks ──► Ended, exactly one event
//! ```
//!
//! The driving loop, at its own pace: hand in what arrived ([`Scheduler::submit`], [`Scheduler::received`],
//! [`Scheduler::pulled`], [`Scheduler::abort`], …), take a plan ([`Scheduler::next_plan`]), run it, report it
//! ([`Scheduler::complete`]), and handle [`Scheduler::take_events`] after each. One step is in flight at a time.
//! Everything but `complete` may also be called while it runs: what would disturb it takes effect when it
//! is over, and blocks it writes to are not given to anyone else before.
//!
//! Pure: no I/O, no clock, no threads, no randomness; the same calls give the same plans, so the simulator
//! runs this very code. Deadlines, end-of-sequence tokens and stop ids are the caller's business.

mod admit;
mod audit;
mod config;
mod events;
mod plan;
mod reuse;
mod scheduler;
mod seq;
mod stats;
#[cfg(test)]
mod tests;

pub use config::{ConfigError, SchedConfig};
pub use events::{End, Event, Mode, NotReceiving, Refused, Sampled, StepOutcome, WrongStep};
pub use reuse::{GroupLoad, KvSource, PromptReuse, ReuseCosts};
pub use scheduler::Scheduler;
pub use seq::{NewSeq, Phase, SeqKind};
pub use stats::{SchedStats, SchedTotals};
