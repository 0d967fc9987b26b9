//! A cluster's registrations, written by the test.

use std::{collections::HashMap, sync::Arc};

use longreach_cluster::{
    Coordinator, Expect, GroupId, Key, KeySpace, MemoryConfig, MemoryCoordinator, PrefillRegistration,
    ReadyRecord, Record, Revision, Swap,
};
use longreach_router::WorkerSource;
use longreach_types::{Epoch, Incarnation, WorkerId};
use tokio::sync::Mutex;

/// A store in memory and what the test has put into it.
pub(crate) struct Registry {
    pub(crate) store: MemoryCoordinator,
    keys: KeySpace,
    put: Mutex<HashMap<String, Revision>>,
}

impl Registry {
    pub(crate) fn new() -> Self {
        let store = MemoryCoordinator::new(MemoryConfig::default());
        Self { store, keys: KeySpace::new("test").unwrap(), put: Mutex::default() }
    }

    /// Where a router finds the workers.
    pub(crate) fn source(&self) -> WorkerSource {
        WorkerSource::Cluster { coordinator: Arc::new(self.store.clone()), keys: self.keys.clone() }
    }

    /// Registers a life of a prefill worker.
    pub(crate) async fn prefill(&self, name: &str, life: u64, endpoint: String, layout: &str) {
        let id = WorkerId(name.to_owned());
        let layout_hash = layout.to_owned();
        let record = PrefillRegistration { id, incarnation: Incarnation(life), endpoint, layout_hash };
        self.set(prefill_key(name), Some(record.encode())).await;
    }

    /// Says that a life of a group is ready.
    pub(crate) async fn group(&self, name: &str, life: u64, endpoint: String, layout: &str) {
        let layout_hash = layout.to_owned();
        let record = ReadyRecord {
            epoch: Epoch(life),
            endpoint,
            n_ranks: 2,
            dcp_size: 2,
            layout_hash,
            max_seq_len: 0,
        };
        self.set(Key::Ready(GroupId(name.to_owned())), Some(record.encode())).await;
    }

    /// Takes a prefill worker's registration away.
    pub(crate) async fn remove_prefill(&self, name: &str) {
        self.set(prefill_key(name), None).await;
    }

    /// Takes a group's registration away.
    pub(crate) async fn remove_group(&self, name: &str) {
        self.set(Key::Ready(GroupId(name.to_owned())), None).await;
    }

    async fn set(&self, key: Key, value: Option<Vec<u8>>) {
        let key = self.keys.encode(&key).unwrap();
        let mut put = self.put.lock().await;
        let expect = put.get(&key).map_or(Expect::Absent, |&revision| Expect::At(revision));
        let is_removed = value.is_none();
        let swap = Swap { key: key.clone(), expect, value, lease: None };
        let revision = self.store.swap(swap).await.unwrap();
        if is_removed {
            put.remove(&key);
        } else {
            put.insert(key, revision);
        }
    }
}

fn prefill_key(name: &str) -> Key {
    Key::Prefill(WorkerId(name.to_owned()))
}
