//! The store itself: plain data, time as an argument.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use super::{MemoryConfig, Outage};
use crate::{
    coordinator::{
        Change, CoordinatorError, Entry, Expect, Lease, LeaseId, Revision, Snapshot, Swap, WatchError,
    },
    keys::Prefix,
};

#[derive(Debug)]
pub(super) struct Store {
    config: MemoryConfig,
    available: bool,
    revision: Revision,
    entries: BTreeMap<String, Held>,
    leases: BTreeMap<LeaseId, LeaseState>,
    last_lease: i64,
    /// Latest changes, ascending; all of revision `oldest` and later.
    changes: VecDeque<Change>,
    oldest: Revision,
    watch_generation: u64,
}

#[derive(Debug)]
struct Held {
    entry: Entry,
    lease: Option<LeaseId>,
}

#[derive(Debug)]
struct LeaseState {
    ttl: Duration,
    expires: Instant,
    keys: BTreeSet<String>,
}

impl Store {
    pub(super) fn new(config: MemoryConfig) -> Self {
        Self {
            config,
            available: true,
            revision: Revision(1),
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            last_lease: 0,
            changes: VecDeque::new(),
            oldest: Revision(2),
            watch_generation: 0,
        }
    }

    pub(super) fn check_available(&self) -> Result<(), CoordinatorError> {
        if self.available { Ok(()) } else { Err(CoordinatorError::Unavailable(Box::new(Outage))) }
    }

    pub(super) fn set_available(&mut self, available: bool, now: Instant) {
        if available && !self.available {
            self.leases.values_mut().for_each(|lease| lease.expires = now + lease.ttl);
        }
        self.available = available;
    }

    pub(super) fn revision(&self) -> Revision {
        self.revision
    }

    pub(super) fn watch_generation(&self) -> u64 {
        self.watch_generation
    }

    pub(super) fn break_watches(&mut self) {
        self.watch_generation += 1;
    }

    pub(super) fn compact(&mut self) {
        self.changes.clear();
        self.oldest = Revision(self.revision.0 + 1);
    }

    pub(super) fn grant_lease(&mut self, ttl: Duration, now: Instant) -> Lease {
        self.last_lease += 1;
        let id = LeaseId(self.last_lease);
        self.leases.insert(id, LeaseState { ttl, expires: now + ttl, keys: BTreeSet::new() });
        Lease { id, ttl, revision: self.revision }
    }

    pub(super) fn keep_alive(&mut self, id: LeaseId, now: Instant) -> Result<Duration, CoordinatorError> {
        let lease = self.leases.get_mut(&id).ok_or(CoordinatorError::LeaseLost(id))?;
        lease.expires = now + lease.ttl;
        Ok(lease.ttl)
    }

    /// Ends the leases that are due; whether there were any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        if !self.available {
            return false;
        }
        let due: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| lease.expires <= now).map(|(&id, _)| id).collect();
        due.iter().for_each(|&id| self.end_lease(id));
        !due.is_empty()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    pub(super) fn end_leases(&mut self) {
        let all: Vec<LeaseId> = self.leases.keys().copied().collect();
        all.into_iter().for_each(|id| self.end_lease(id));
    }

    /// Deletes a lease and, in one revision, its keys.
    pub(super) fn end_lease(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        if !lease.keys.is_empty() {
            self.revision.0 += 1;
        }
        for key in lease.keys {
            self.entries.remove(&key);
            self.record(Change::Delete { key, revision: self.revision });
        }
    }

    pub(super) fn swap(&mut self, swap: Swap) -> Result<Revision, CoordinatorError> {
        let Swap { key, expect, value, lease } = swap;
        if let Some(id) = lease.filter(|id| !self.leases.contains_key(id)) {
            return Err(CoordinatorError::LeaseLost(id));
        }
        let current = self.entries.get(&key).map(|held| &held.entry);
        let as_expected = match expect {
            Expect::Absent => current.is_none(),
            Expect::At(revision) => current.is_some_and(|entry| entry.revision == revision),
        };
        if !as_expected {
            return Err(CoordinatorError::Conflict { current: current.cloned(), key });
        }
        self.revision.0 += 1;
        self.detach(&key);
        match value {
            Some(value) => self.put(key, value, lease),
            None => self.record(Change::Delete { key, revision: self.revision }),
        }
        Ok(self.revision)
    }

    fn detach(&mut self, key: &str) {
        let Some(held) = self.entries.remove(key) else { return };
        if let Some(lease) = held.lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.remove(key);
        }
    }

    fn put(&mut self, key: String, value: Vec<u8>, lease: Option<LeaseId>) {
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.insert(key.clone());
        }
        let entry = Entry { key: key.clone(), value, revision: self.revision };
        self.record(Change::Put(entry.clone()));
        self.entries.insert(key, Held { entry, lease });
    }

    fn record(&mut self, change: Change) {
        self.changes.push_back(change);
        while self.changes.len() > self.config.max_changes {
            // All changes of a revision go together, so that no watch sees half of one.
            let Some(first) = self.changes.front().map(Change::revision) else { return };
            self.oldest = Revision(first.0 + 1);
            while self.changes.front().is_some_and(|change| change.revision() == first) {
                self.changes.pop_front();
            }
        }
    }

    pub(super) fn snapshot(&self, prefix: &Prefix) -> Snapshot {
        let start = prefix.as_str().to_owned();
        let held = self.entries.range(start..).take_while(|(key, _)| prefix.contains(key));
        Snapshot { revision: self.revision, entries: held.map(|(_, held)| held.entry.clone()).collect() }
    }

    /// The changes of a prefix at `from` and later.
    pub(super) fn changes(&self, prefix: &Prefix, from: Revision) -> Result<Vec<Change>, WatchError> {
        if from < self.oldest {
            return Err(WatchError::Compacted { oldest: self.oldest });
        }
        let start = self.changes.partition_point(|change| change.revision() < from);
        let later = self.changes.range(start..);
        Ok(later.filter(|change| prefix.contains(change.key())).cloned().collect())
    }
}
