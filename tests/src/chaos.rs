//! A cluster of real processes under attack: every row of the failure table, with the streams of many clients running.
//!
//! A row is an event (a rank is killed, etcd stands still) and what clients may see of it. In each of its rounds the
//! event comes at a random moment into a running load; every output is compared with the undisturbed one, token by token
//! and for some to the bits of the log-probabilities; then all workers must have given back what they held. Nothing is
//! simulated here: for that there is `crates/sim`, which tries a thousand times as many histories with none of the
//! processes. What only processes show is here: signals, sockets, leases, start-up, memory.

pub mod catalogue;
pub mod client;
pub mod etcd;
pub mod fleet;
pub mod judge;
pub mod launch;
pub mod load;
pub mod pools;
pub mod process;
pub mod procfs;
pub mod report;
pub mod rows;
pub mod run;
pub mod special;
pub mod world;
