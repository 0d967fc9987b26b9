//! The coordinator of a cluster in one process, and of tests.
//!
//! It keeps etcd's promises, the unpleasant ones included: leases expire, old changes are compacted, watches break,
//! and the store can be away. [`MemoryCoordinator::set_available`], [`MemoryCoordinator::compact`] and
//! [`MemoryCoordinator::break_watches`] make them happen, so that what is built on the trait is tested against them.
//!
//! There is no background task. Whoever waits on a watch also waits for the next lease to expire, and every call
//! first expires what is due; nobody can see a key whose lease has ended.

mod store;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use thiserror::Error;
use tokio::{
    sync::watch,
    time::{self, Instant},
};

use self::store::Store;
use crate::{
    coordinator::{
        Batch, BoxFuture, Coordinator, CoordinatorError, Lease, LeaseId, Revision, Snapshot, Swap, Watch,
        WatchError,
    },
    keys::Prefix,
};

/// Bounds of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Changes that are kept for watches. More lets a slow watcher catch up without a snapshot; it costs memory.
    pub max_changes: usize,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { max_changes: 4096 }
    }
}

/// The store was made unavailable by [`MemoryCoordinator::set_available`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the in-memory coordinator is switched off")]
pub struct Outage;

#[derive(Debug, Error)]
#[error("the in-memory coordinator was told to break its watches")]
struct Broken;

/// A handle on a store in memory; clones share it.
#[derive(Clone, Debug)]
pub struct MemoryCoordinator {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    /// Changes whenever a watch may have something to do.
    bell: watch::Sender<()>,
}

impl MemoryCoordinator {
    /// An empty store.
    pub fn new(config: MemoryConfig) -> Self {
        let shared = Shared { store: Mutex::new(Store::new(config)), bell: watch::Sender::new(()) };
        Self { shared: Arc::new(shared) }
    }

    /// Switches the store off and on. While it is off calls fail and watches are silent; leases do not expire, and
    /// start afresh when it is back, as after a new leader in etcd.
    pub fn set_available(&self, available: bool) {
        self.change(|store, now| store.set_available(available, now));
    }

    /// Forgets the changes that are kept: a watch that has not seen them ends as compacted.
    pub fn compact(&self) {
        self.change(|store, _| store.compact());
    }

    /// Ends all running watches.
    pub fn break_watches(&self) {
        self.change(|store, _| store.break_watches());
    }

    /// Ends a lease as if it had not been kept alive.
    pub fn expire_lease(&self, lease: LeaseId) {
        self.change(|store, _| store.end_lease(lease));
    }

    /// Ends all leases at once, as a store does that was away for longer than they live.
    pub fn expire_leases(&self) {
        self.change(|store, _| store.end_leases());
    }

    fn change<R>(&self, change: impl FnOnce(&mut Store, Instant) -> R) -> R {
        let result = self.with(change);
        self.shared.bell.send_replace(());
        result
    }

    fn with<R>(&self, body: impl FnOnce(&mut Store, Instant) -> R) -> R {
        let mut store = self.shared.store.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let expired = store.expire(now);
        let result = body(&mut store, now);
        drop(store);
        if expired {
            self.shared.bell.send_replace(());
        }
        result
    }

    /// A call, of which everything happens when it is polled.
    fn call<'a, R: 'a>(
        &'a self,
        body: impl FnOnce(&mut Store, Instant) -> Result<R, CoordinatorError> + Send + 'a,
    ) -> BoxFuture<'a, Result<R, CoordinatorError>> {
        Box::pin(
            async move { self.change(|store, now| store.check_available().and_then(|()| body(store, now))) },
        )
    }
}

impl Default for MemoryCoordinator {
    fn default() -> Self {
        Self::new(MemoryConfig::default())
    }
}

impl Coordinator for MemoryCoordinator {
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, CoordinatorError>> {
        self.call(move |store, now| Ok(store.grant_lease(ttl, now)))
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, CoordinatorError>> {
        self.call(move |store, now| store.keep_alive(lease, now))
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), CoordinatorError>> {
        self.call(move |store, _| {
            store.end_lease(lease);
            Ok(())
        })
    }

    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Revision, CoordinatorError>> {
        self.call(move |store, _| store.swap(swap))
    }

    fn snapshot<'a>(&'a self, prefix: &'a Prefix) -> BoxFuture<'a, Result<Snapshot, CoordinatorError>> {
        self.call(move |store, _| Ok(store.snapshot(prefix)))
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a Prefix,
        from: Revision,
    ) -> BoxFuture<'a, Result<Box<dyn Watch>, CoordinatorError>> {
        self.call(move |store, _| {
            let watch = MemoryWatch {
                coordinator: self.clone(),
                bell: self.shared.bell.subscribe(),
                prefix: prefix.clone(),
                next: from,
                generation: store.watch_generation(),
            };
            Ok(Box::new(watch) as Box<dyn Watch>)
        })
    }
}

struct MemoryWatch {
    coordinator: MemoryCoordinator,
    bell: watch::Receiver<()>,
    prefix: Prefix,
    next: Revision,
    generation: u64,
}

/// What there is to do for a watch.
enum Look {
    Give(Batch),
    End(WatchError),
    /// Nothing before the bell rings or a lease expires.
    Wait(Option<Instant>),
}

impl MemoryWatch {
    fn look(&mut self) -> Look {
        let Self { coordinator, prefix, next, generation, .. } = self;
        coordinator.with(|store, _| {
            if store.watch_generation() != *generation {
                return Look::End(WatchError::Broken(Box::new(Broken)));
            }
            if store.check_available().is_err() {
                return Look::Wait(None);
            }
            match store.changes(prefix, *next) {
                Err(end) => Look::End(end),
                Ok(changes) => {
                    *next = Revision(store.revision().0 + 1).max(*next);
                    if changes.is_empty() {
                        Look::Wait(store.next_expiry())
                    } else {
                        Look::Give(Batch { changes })
                    }
                }
            }
        })
    }
}

impl Watch for MemoryWatch {
    fn next(&mut self) -> BoxFuture<'_, Result<Batch, WatchError>> {
        Box::pin(async move {
            loop {
                // Before the look, so that a bell that rings after it is heard.
                self.bell.mark_unchanged();
                let expiry = match self.look() {
                    Look::Give(batch) => return Ok(batch),
                    Look::End(end) => return Err(end),
                    Look::Wait(expiry) => expiry,
                };
                let expire = async {
                    match expiry {
                        Some(at) => time::sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                };
                // Both arms only say that it is worth looking again.
                tokio::select! {
                    rung = self.bell.changed() => rung.expect("the watch itself holds the bell's other end"),
                    () = expire => {}
                }
            }
        })
    }
}

#[cfg(test)]
mod tests;
