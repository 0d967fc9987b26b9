//! The router: the only role that sees text, and the only one that clients speak to.
//!
//! A request's way, top to bottom and back:
//!
//! ```text
//! grpc, http      a wire format becomes a Draft; events become messages        (two faces, no logic)
//!   gateway       admits, checks, tokenizes: a Draft becomes a GenerateSpec    (request: every check)
//!     output      merges the outputs of a request into one stream of events    (text, usage, deadline)
//!       dispatch  one output from a spec to its last token, over any deaths    (legs, recovery)
//!         workers whom to ask: load, health, connections                       (routing: the pure policy)
//! ```
//!
//! Nothing is pushed. A face pulls its events, which pulls tokens from workers; a client that goes away drops the
//! chain, and with it everything that worked for it, on every role. There is no task and no queue for each request.
//!
//! The router holds no KV and runs no model. Its own state is its streams, so two routers need not know each other.

mod call;
mod config;
mod discovery;
mod dispatch;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod gateway;
mod grpc;
mod health;
mod http;
mod metrics;
mod ops;
mod output;
mod random;
mod request;
mod role;
mod routing;
mod server;
mod settings;
#[cfg(feature = "simulation")]
pub mod simulation;
mod stall;
mod workers;

pub use config::{ConfigError, RouterConfig, ServingConfig};
pub use discovery::WorkerSource;
pub use dispatch::RecoveryConfig;
pub use http::StreamConfig;
pub use request::{RequestLimits, SamplingDefaults};
pub use role::run;
pub use server::{BoundRouter, Router, ServeError};
pub use settings::RouterSettings;
pub use workers::{DecodeCalls, Dial, DialError, PrefillCalls, WorkerConfig};
