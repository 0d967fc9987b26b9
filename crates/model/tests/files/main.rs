//! Model files and configurations, from the outside: what is accepted, what is refused, and with which words.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot build its fixture has failed")]

mod config;
mod damage;
mod fixture;
mod gguf;
mod golden;
mod inputs;
mod resolve;
mod rope;
mod sharded;
