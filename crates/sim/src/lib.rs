//! The whole cluster in one thread, on simulated time and a simulated network: one seed, one history.
//!
//! What runs is the product: the router's dispatch, routing, health and discovery; an engine's [`Core`], which takes
//! requests in, plans, samples, sends and receives KV, pulls it and gives it up; its handle, lanes, doors and follower;
//! the scheduler and the KV manager below; registration, watches and views; and the part of a decode process in the lives
//! of its group, from the epoch in the store to the drain. A worker's thread and the simulation drive the same core by the
//! same calls, and a process's ranks and simulated ones are led by the same [`Ranks`], so there is no second engine and no
//! second formation whose virtues would be proved instead.
//!
//! What stands in is kept small: a network ([`net`]) and KV that travels over it ([`lane`]), the calls to workers that
//! are gRPC in the product ([`dial`]), the store's far end ([`store`]), ranks that meet on that network ([`host`]), the
//! time that a step takes and the collective in it ([`engine`], [`follower`]), and a model whose next token is a function
//! of KV cells ([`model`], [`rank`]).
//!
//! A run brings a cluster up, lets clients ask and faults happen, lets everything heal, and then holds what was said and
//! what is left against what must be: see [`client`] and [`world`]. The same seed gives the same event log, to the byte.
//!
//! Real sockets, threads and processes are not here: that is what tests with processes are for. Nor is text, or the bytes
//! of gRPC.
//!
//! [`Core`]: longreach_engine::core::Core
//! [`Ranks`]: longreach_decode::ranks::Ranks

mod client;
mod dial;
mod engine;
mod faults;
mod follower;
mod host;
mod journal;
mod lane;
mod model;
mod net;
mod rank;
mod rng;
mod scenario;
mod services;
mod store;
mod worker;
mod world;

use tokio::runtime::{Builder, Runtime};

pub use crate::journal::Report;

/// Runs one seed. The log is kept if asked for.
pub fn run_seed(seed: u64, keep_log: bool) -> Report {
    runtime().block_on(world::run(seed, keep_log))
}

/// One thread, and a clock that stands until everything waits for it.
fn runtime() -> Runtime {
    Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O needs nothing of the system")
}
