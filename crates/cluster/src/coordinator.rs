//! The store behind membership, as a trait.
//!
//! It is what etcd offers, cut to what is needed, with etcd's guarantees: revisions grow with every change, a
//! snapshot and a watch from the revision after it miss nothing, and keys under a lease vanish with the lease. It
//! is object safe, because the store is chosen by configuration.
//!
//! Calls are not repeated here. An implementation repeats what is safe to repeat at once (a dead endpoint), and
//! callers go on with [`Backoff`](crate::Backoff); [`CoordinatorError::Unavailable`] is all they need to know.

use std::{error::Error, fmt, pin::Pin, sync::Arc, time::Duration};

use thiserror::Error;

use crate::keys::Prefix;

/// A future behind a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Counts the changes of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// Names a lease in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A lease as it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// How long it lives without being kept alive. A store may grant more than was asked for.
    pub ttl: Duration,
    /// The store's revision at the grant. It is later than any change made before, so it can number a process's
    /// lives.
    pub revision: Revision,
}

/// One key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// When it was last put.
    pub revision: Revision,
}

/// All keys of a prefix at one moment, in key order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The moment.
    pub revision: Revision,
    /// The keys.
    pub entries: Vec<Entry>,
}

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key was put.
    Put(Entry),
    /// The key was deleted, or its lease ended.
    Delete {
        /// The key.
        key: String,
        /// When.
        revision: Revision,
    },
}

impl Change {
    /// The key that changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put(entry) => &entry.key,
            Self::Delete { key, .. } => key,
        }
    }

    /// When it changed.
    pub fn revision(&self) -> Revision {
        match self {
            Self::Put(entry) => entry.revision,
            Self::Delete { revision, .. } => *revision,
        }
    }
}

/// Changes in the order in which they happened. Those of one revision are never spread over two batches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The changes.
    pub changes: Vec<Change>,
}

/// What a key must be for a swap to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// It was last put at this revision.
    At(Revision),
}

/// A conditional change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The key.
    pub key: String,
    /// The condition.
    pub expect: Expect,
    /// The value to put; none deletes the key.
    pub value: Option<Vec<u8>>,
    /// The lease that the key is to live under.
    pub lease: Option<LeaseId>,
}

/// Why a call to the store had no effect, or an unknown one.
#[derive(Debug, Error)]
pub enum CoordinatorError {
    /// The store cannot be reached or has no leader. Whether a change happened is unknown; try again.
    #[error("the coordinator is not available")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// The key is not as expected.
    #[error("{key} is not as expected: {}", Found(.current.as_ref()))]
    Conflict {
        /// The key.
        key: String,
        /// What it is.
        current: Option<Entry>,
    },
    /// The lease has expired or was revoked, and its keys are gone.
    #[error("lease {0} is lost")]
    LeaseLost(LeaseId),
}

/// Says what was found at a key.
struct Found<'a>(Option<&'a Entry>);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(entry) => write!(f, "it was put at revision {}", entry.revision),
            None => f.write_str("it does not exist"),
        }
    }
}

/// Why a watch ended. All it takes is a new snapshot and a new watch.
#[derive(Debug, Error)]
pub enum WatchError {
    /// The changes that come next are no longer kept.
    #[error("changes before revision {oldest} are compacted")]
    Compacted {
        /// The oldest revision that is kept.
        oldest: Revision,
    },
    /// The connection ended, or was silent for too long.
    #[error("the watch broke")]
    Broken(#[source] Box<dyn Error + Send + Sync>),
}

/// A running watch of a prefix.
pub trait Watch: Send {
    /// Waits for the next changes; never an empty batch. Dropping the future loses nothing. After an error the
    /// watch is over.
    fn next(&mut self) -> BoxFuture<'_, Result<Batch, WatchError>>;
}

/// The store.
pub trait Coordinator: Send + Sync + 'static {
    /// Grants a lease of at least `ttl`.
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, CoordinatorError>>;

    /// Renews a lease and returns the time it now has.
    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, CoordinatorError>>;

    /// Ends a lease at once; its keys are deleted. Ending a lost lease is no error.
    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), CoordinatorError>>;

    /// Changes a key if it is as expected, and returns the revision of the change.
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Revision, CoordinatorError>>;

    /// All keys of a prefix, as of now or later, never as of an earlier moment than a call that has returned.
    fn snapshot<'a>(&'a self, prefix: &'a Prefix) -> BoxFuture<'a, Result<Snapshot, CoordinatorError>>;

    /// One key, as of now or later, as in [`Coordinator::snapshot`].
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, CoordinatorError>> {
        Box::pin(async move {
            let snapshot = self.snapshot(&Prefix::parent_of(key)).await?;
            Ok(snapshot.entries.into_iter().find(|entry| entry.key == key))
        })
    }

    /// Watches a prefix: all changes at revision `from` and later.
    fn watch<'a>(
        &'a self,
        prefix: &'a Prefix,
        from: Revision,
    ) -> BoxFuture<'a, Result<Box<dyn Watch>, CoordinatorError>>;

    /// A handle on the same store with connections of its own: used on another runtime, it goes on when this one is
    /// starved. None where there are no connections, and this handle is as good.
    fn detached(&self) -> Option<Arc<dyn Coordinator>> {
        None
    }

    /// Registers a key: puts it under a lease unless it exists.
    fn put_if_absent(
        &self,
        key: String,
        value: Vec<u8>,
        lease: LeaseId,
    ) -> BoxFuture<'_, Result<Revision, CoordinatorError>> {
        self.swap(Swap { key, expect: Expect::Absent, value: Some(value), lease: Some(lease) })
    }
}
