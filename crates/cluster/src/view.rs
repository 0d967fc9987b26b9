//! What a prefix holds, kept up to date, and how it differs from before.
//!
//! A pure state machine: snapshots and batches go in, differences come out. It does not trust that a watch tells
//! each change once. What was seen before is recognised by its revision, and a difference is a difference of
//! *values*: a key that was written again with the same bytes, or deleted and restored between two snapshots, is
//! none. So after any mix of broken watches the differences add up to the store's content, and none comes twice.

use std::collections::{BTreeMap, BTreeSet};

use crate::coordinator::{Batch, Change, Entry, Revision, Snapshot};

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// The key is gone.
    Removed(Entry),
    /// The key has another value.
    Changed {
        /// Before.
        old: Entry,
        /// Now.
        new: Entry,
    },
    /// The key is new.
    Added(Entry),
}

/// The content of one prefix.
#[derive(Clone, Debug, Default)]
pub struct View {
    revision: Revision,
    entries: BTreeMap<String, Entry>,
}

impl View {
    /// The content as last known, in key order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The entry of `key`.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// The last revision that is included.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Takes a snapshot as the truth, whatever was known before. Removals come first, then the rest in key order.
    pub fn apply_snapshot(&mut self, snapshot: Snapshot) -> Vec<Delta> {
        let new = snapshot.entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        let old = std::mem::replace(&mut self.entries, new);
        self.revision = snapshot.revision;
        let touched = old.keys().chain(self.entries.keys()).cloned().collect();
        self.deltas(&old, touched)
    }

    /// Takes changes; those that are already included are passed over. Removals come first, then the rest in key
    /// order.
    pub fn apply_batch(&mut self, batch: Batch) -> Vec<Delta> {
        let known = self.revision;
        let mut old = BTreeMap::new();
        let mut touched = BTreeSet::new();
        for change in batch.changes {
            if change.revision() <= known {
                continue;
            }
            self.revision = self.revision.max(change.revision());
            let key = change.key().to_owned();
            let before = match change {
                Change::Put(entry) => self.entries.insert(key.clone(), entry),
                Change::Delete { .. } => self.entries.remove(&key),
            };
            // What counts is the value before the whole batch.
            if touched.insert(key.clone())
                && let Some(before) = before
            {
                old.insert(key, before);
            }
        }
        self.deltas(&old, touched)
    }

    fn deltas(&self, old: &BTreeMap<String, Entry>, touched: BTreeSet<String>) -> Vec<Delta> {
        let (mut removed, mut rest) = (Vec::new(), Vec::new());
        for key in touched {
            match (old.get(&key).cloned(), self.entries.get(&key).cloned()) {
                (Some(old), None) => removed.push(Delta::Removed(old)),
                (None, Some(new)) => rest.push(Delta::Added(new)),
                (Some(old), Some(new)) if old.value != new.value => rest.push(Delta::Changed { old, new }),
                _ => {}
            }
        }
        removed.append(&mut rest);
        removed
    }
}
