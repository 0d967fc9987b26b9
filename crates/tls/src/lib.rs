//! Mutual TLS between the processes of a cluster, and TLS at its public faces.
//!
//! Every process has one certificate, and its names say what it is: `decode.prod.longreach` is a decode rank of cluster
//! `prod`. Who dials expects the name of the role that it wants to reach, not the host's, so a prefill worker cannot
//! pose as a decode leader wherever it listens; who is called looks up in a table which roles may call a service. That a
//! certificate comes from the cluster's CA is necessary and not enough.
//!
//! [`Security`] is what the configuration of a process says, and the only way to dial: with it, plaintext cannot be
//! fallen back to, neither by an address with the wrong scheme nor by a file that is missing. Files are read again when
//! they change (see `reload`); a connection keeps the identity with which it was made.
//!
//! tonic's own TLS is not used, because it reads a certificate once and forgets how: rotating would mean restarting.
//! The process-wide default provider of rustls is neither read nor set; everything here is built with *ring*.
//!
//! It does not issue certificates (`longreach certs` does, for development), does not look at revocation lists (use
//! short lives and rotation), and does not protect the collectives between ranks.

mod access;
mod dial;
mod error;
mod files;
mod identity;
mod listen;
mod reload;
mod role;

pub use access::{ANY_ROLE, Access, Guard, GuardLayer};
pub use dial::{EndpointError, Security, handshake_error};
pub use error::{HandshakeError, TlsError};
pub use files::{FaceFiles, TlsFiles};
pub use identity::{FaceTls, Identity};
pub use listen::{Conn, Listener, Peer};
pub use role::Role;

#[cfg(test)]
mod tests;
