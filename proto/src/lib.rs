//! The wire: generated protobuf code, the domain types that stand for it, and the one place where an error of
//! ours becomes a gRPC status.
//!
//! Roles speak to each other in the types of [`worker`]; the generated types of the internal package do not leave
//! this crate. Messages are checked once, on receipt, by the conversions here. The public package is served by the
//! router's gRPC face alone, which converts [`inference`] messages itself, since their checks need the tokenizer.

mod error;
pub mod group;
pub mod worker;

pub use error::WorkerError;

#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated from commented .proto files"
)]
mod generated {
    pub(crate) mod worker {
        tonic::include_proto!("longreach.worker.v1");
    }
    pub mod inference {
        tonic::include_proto!("longreach.inference.v1");
    }
}

pub use generated::inference;

/// All descriptors of this crate's packages, for gRPC reflection.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/longreach.fds"));

/// Version of the KV wire format; part of the layout that two workers compare.
pub const WIRE_VERSION: u32 = 2;
