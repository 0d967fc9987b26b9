//! The skeleton of a Longreach process: everything that is the same whatever the process serves.
//!
//! [`Lifecycle`] owns the life of a process: its tasks, what is in flight, whether it is ready, and the one order in
//! which it drains. [`Signals`] begin the end. [`init_tracing`] sets up logs, [`Metrics`] the numbers, and [`Exit`]
//! what the operating system is told. A role brings its configuration and its services, and its `main` stays small.
//!
//! [`RoleArgs`] reads a role's configuration, and [`run_role`] is its process from there to the exit code.
//!
//! There is no server of a role here, and no framework: roles serve gRPC, HTTP or nothing, and each hands the same
//! lifecycle to whatever it serves with. What operators ask is the same for all: [`Admin`] answers it over HTTP, and
//! [`mirror_health`] over gRPC.

mod admin;
pub mod config;
mod exit;
mod health;
mod lifecycle;
mod metrics;
mod readiness;
mod role;
mod run;
mod signals;
mod telemetry;
mod units;

pub use admin::{Admin, AdminBindError, AdminDoor};
pub use config::{ConfigError, RoleArgs, Settings};
pub use exit::{Exit, parse_args};
pub use health::mirror_health;
pub use lifecycle::{DrainConfig, DrainEnd, DrainReport, Draining, InFlight, Lifecycle, StopReason};
pub use metrics::Metrics;
pub use readiness::{Hold, Readiness, ReadinessCell};
pub use role::{RoleError, run_role, sentence};
pub use run::serve_until_signal;
pub use signals::{Signal, Signals};
pub use telemetry::{LogConfig, LogError, init_tracing};
pub use units::{ByteSize, UnitError, parse_duration};
