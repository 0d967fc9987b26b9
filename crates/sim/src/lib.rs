//! The whole cluster in one thread, on simulated time and a simulated network: one seed, one history.
//!
//! What is simulated is the product: the router's dispatch, routing, health and discovery, the scheduler, the KV
//! manager and the coverage of hand-offs, registration, epochs, watches and views. What stands in for the rest is kept
//! small: a network ([`net`]), the calls that are gRPC in the product ([`dial`], [`lane`]), the store's far end
//! ([`store`]), an engine's loop without its thread ([`engine`]) and a model whose next token is a function of KV cells
//! ([`model`]).
//!
//! A run brings a cluster up, lets clients ask and faults happen, lets everything heal, and then holds what was said and
//! what is left against what must be: see [`client`] and [`world`]. The same seed gives the same event log, to the byte.
//!
//! Real sockets and processes are not here: that is what tests with processes are for. Nor is text, or the bytes of gRPC.

mod client;
mod dial;
mod engine;
mod faults;
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
