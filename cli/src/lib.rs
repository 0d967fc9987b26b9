//! The parts of the command that tests use too.

pub mod certs;
pub mod local;
