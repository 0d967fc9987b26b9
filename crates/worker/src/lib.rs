//! What the process of a worker has around its engine, whether it prefills or decodes: the engine's settings, its numbers,
//! and what operators and health checks are told.
//!
//! What both do *with* an engine (doors, drain) is in the engine's own crate. This one stands above it, so that an engine
//! can be built and tested without a command line, a metrics registry or an HTTP server.

mod introduction;
mod metrics;
mod ops;
mod settings;

pub use introduction::Introduction;
pub use metrics::EngineMetrics;
pub use ops::Ops;
pub use settings::{EngineSection, ReuseSection, WorkerDrainSection, open_model};
