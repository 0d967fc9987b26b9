//! Models: their files and configuration, the forward pass over one rank's shard, and the sampler.
//!
//! The forward pass is written once, over a [`Backend`]; the CPU backend runs the bit-exact kernels. What this
//! crate does not do: choose batches (`longreach-sched`), own blocks (`longreach-kv`) or talk to other processes
//! (a communicator is handed in).

pub mod backend;
pub mod config;
pub mod cpu;
pub mod files;
pub mod forward;
pub mod sampler;
pub mod shard;

pub use backend::Backend;
pub use cpu::CpuBackend;
pub use forward::{Comms, ForwardError};
pub use sampler::{SampleError, Sampled, SamplerState};
pub use shard::{LoadError, LoadOptions, ModelShard};
