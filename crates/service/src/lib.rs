//! The skeleton of a Longreach process: everything that is the same whatever the process serves.
//!
//! [`Lifecycle`] owns the life of a process: its tasks, what is in flight, whether it is ready, and the one order in
//! which it drains. [`Signals`] begin the end. [`init_tracing`] sets up logs, [`Metrics`] the numbers, and [`Exit`]
//! what the operating system is told. A role brings its configuration and its services, and its `main` stays small.
//!
//! There is no server here, and no framework: roles serve gRPC, HTTP or nothing, and each hands the same lifecycle
//! to whatever it serves with.

mod exit;
mod lifecycle;
mod metrics;
mod readiness;
mod run;
mod signals;
mod telemetry;
mod units;

pub use exit::{Exit, parse_args};
pub use lifecycle::{DrainConfig, DrainEnd, DrainReport, Draining, InFlight, Lifecycle, StopReason};
pub use metrics::{CONTENT_TYPE, Metrics};
pub use readiness::{Hold, Readiness};
pub use run::serve_until_signal;
pub use signals::{Signal, Signals};
pub use telemetry::{LogConfig, LogError, init_tracing};
pub use units::{ByteSize, UnitError, parse_duration};
