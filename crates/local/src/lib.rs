//! A cluster on this machine, as processes: for people who want to watch one, and for tests that kill them.
//!
//! [`Process`] is a child that never outlives its owner; [`EtcdCluster`] is one or three real etcd servers on loopback,
//! which can be killed, stopped, continued, restarted and wiped; [`RoleProcess`] is a role of ours, to which the same can
//! happen.
//!
//! Nothing here is used by a deployment: there, something else starts processes, and etcd is somebody's service.

mod etcd;
mod http;
mod ports;
mod process;
mod roles;

pub use etcd::{EtcdCluster, EtcdError, EtcdFiles, EtcdOptions};
pub use ports::free_ports;
pub use process::{Process, Signal};
pub use roles::{LineSink, Probe, Role, RoleError, RoleProcess, RolePrograms, RoleSpec, Site};
