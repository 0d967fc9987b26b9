//! Who is in the cluster: registrations under leases, group epochs, and the view of them that every role keeps.
//!
//! [`Coordinator`] is the store behind it, cut to what membership needs: compare-and-swap of one key, leases,
//! snapshots and watches of a prefix. [`EtcdCoordinator`] keeps it in etcd, [`MemoryCoordinator`] in one process.
//! Everything above the trait is common: [`Watcher`] repairs broken watches, [`View`] turns what it brings into
//! differences, [`Membership`] gives them their meaning, [`Registration`] keeps a worker registered, and
//! [`raise_epoch`] begins a group's next life.
//!
//! Trouble with the store never stops traffic: a watcher goes on trying, a view keeps what it last knew, and the
//! loss of a lease is an event, not an error that ends a process.
//!
//! There is no per-request and no per-block data here, and no wall clock: time is tokio's, so a simulator can own it.

mod backoff;
mod causes;
mod coordinator;
mod epoch;
mod etcd;
mod keys;
mod member;
mod memory;
mod record;
mod registration;
mod view;
mod watcher;

pub use backoff::Backoff;
pub use coordinator::{
    Batch, BoxFuture, Change, Coordinator, CoordinatorError, Entry, Expect, Lease, LeaseId, Revision,
    Snapshot, Swap, Watch, WatchError,
};
pub use epoch::{EpochError, publish_ready, raise_epoch, read_epoch, withdraw_ready};
pub use etcd::{EtcdAuth, EtcdConfig, EtcdConfigError, EtcdCoordinator, EtcdIdentity, EtcdTls};
pub use keys::{GroupId, Key, KeyError, KeySpace, Prefix};
pub use member::{MemberEvent, Membership};
pub use memory::{MemoryConfig, MemoryCoordinator, Outage};
pub use record::{DecodeRegistration, EpochRecord, PrefillRegistration, ReadyRecord, Record, RecordError};
pub use registration::{Registration, RegistrationSpec, RegistrationState, register, superseded};
pub use view::{Delta, View};
pub use watcher::{WatchEvent, Watcher};

#[cfg(test)]
mod tests;
