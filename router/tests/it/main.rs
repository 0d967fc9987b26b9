//! The router as clients and workers see it: over the wire on both sides.
//!
//! Workers here are doubles that speak the real worker protocol on loopback and say what a test wrote for them; what
//! is tested is the router. Real workers are tested with the router elsewhere.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail as its own lines do")]

mod cases;
mod drain;
mod fleet;
mod grpc;
mod http;
mod recovery;
mod routing;
mod slow;
mod support;
