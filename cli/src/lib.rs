//! The parts of the command that tests use too.

pub mod local;
