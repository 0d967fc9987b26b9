//! What the trait promises, as one list of cases for every store that fills it.
//!
//! Each case gets a cluster of its own in the store, so that one server serves them all.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future};
use longreach_cluster::{
    Batch, BoxFuture, Change, Coordinator, CoordinatorError, EtcdConfig, EtcdCoordinator, Expect, Key,
    KeySpace, MemoryCoordinator, Prefix, Revision, Swap, Watch, WatchError,
};
use longreach_local::EtcdCluster;
use longreach_types::WorkerId;
use tokio::time::timeout;

/// A store under test.
struct Store {
    coordinator: Arc<dyn Coordinator>,
    keys: KeySpace,
    /// Forgets all changes up to a revision.
    compact: Arc<dyn Fn(Revision) -> BoxFuture<'static, ()> + Send + Sync>,
}

type Case = fn(Store) -> BoxFuture<'static, ()>;

/// Names of cases, and the cases.
const CASES: &[(&str, Case)] = &[
    ("swaps", |store| Box::pin(a_swap_changes_a_key_only_if_it_is_as_expected(store))),
    ("snapshots", |store| Box::pin(a_snapshot_is_a_prefix_in_key_order(store))),
    ("pages", |store| Box::pin(a_large_snapshot_is_complete(store))),
    ("watch", |store| Box::pin(a_watch_from_a_snapshot_misses_and_repeats_nothing(store))),
    ("cancel", |store| Box::pin(an_abandoned_wait_loses_nothing(store))),
    ("compaction", |store| Box::pin(a_watch_of_what_is_compacted_says_so(store))),
    ("revoke", |store| Box::pin(keys_go_with_their_lease_in_one_batch(store))),
    ("expiry", |store| Box::pin(a_lease_lives_as_long_as_it_is_kept_alive(store))),
    ("moved", |store| Box::pin(a_key_put_anew_leaves_its_lease(store))),
    ("lives", |store| Box::pin(a_lease_knows_a_later_revision_than_any_change_before(store))),
];

/// Longest wait for what must come.
const PATIENCE: Duration = Duration::from_secs(30);

impl Store {
    fn key(&self, name: &str) -> String {
        self.keys.encode(&Key::Prefill(WorkerId(name.to_owned()))).unwrap()
    }

    fn prefix(&self) -> Prefix {
        self.keys.prefills()
    }

    async fn put(&self, name: &str, expect: Expect, value: &str) -> Revision {
        self.try_swap(name, expect, Some(value)).await.unwrap()
    }

    async fn delete(&self, name: &str, at: Revision) -> Revision {
        self.try_swap(name, Expect::At(at), None).await.unwrap()
    }

    async fn try_swap(
        &self,
        name: &str,
        expect: Expect,
        value: Option<&str>,
    ) -> Result<Revision, CoordinatorError> {
        let value = value.map(|value| value.as_bytes().to_vec());
        self.coordinator.swap(Swap { key: self.key(name), expect, value, lease: None }).await
    }

    /// The changes after now.
    async fn watch(&self) -> Box<dyn Watch> {
        let now = self.coordinator.snapshot(&self.prefix()).await.unwrap().revision;
        self.coordinator.watch(&self.prefix(), Revision(now.0 + 1)).await.unwrap()
    }

    /// `name` and the value it was put with, or none for a deletion, and when.
    fn shown(&self, change: &Change) -> (String, Option<String>, Revision) {
        let name = change.key().strip_prefix(self.prefix().as_str()).unwrap().to_owned();
        let value = match change {
            Change::Put(entry) => Some(String::from_utf8(entry.value.clone()).unwrap()),
            Change::Delete { .. } => None,
        };
        (name, value, change.revision())
    }

    async fn take(&self, watch: &mut dyn Watch, n: usize) -> Vec<(String, Option<String>, Revision)> {
        let mut changes = Vec::new();
        while changes.len() < n {
            changes.extend(next(watch).await.changes);
        }
        changes.iter().map(|change| self.shown(change)).collect()
    }
}

async fn next(watch: &mut dyn Watch) -> Batch {
    let batch = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
    assert!(!batch.changes.is_empty());
    batch
}

fn put(name: &str, value: &str, revision: Revision) -> (String, Option<String>, Revision) {
    (name.to_owned(), Some(value.to_owned()), revision)
}

fn gone(name: &str, revision: Revision) -> (String, Option<String>, Revision) {
    (name.to_owned(), None, revision)
}

async fn a_swap_changes_a_key_only_if_it_is_as_expected(store: Store) {
    let conflict = |outcome| match outcome {
        Err(CoordinatorError::Conflict { key, current }) => {
            assert_eq!(key, store.key("a"));
            current.map(|entry| (String::from_utf8(entry.value).unwrap(), entry.revision))
        }
        other => panic!("{other:?}"),
    };
    let never = Revision(1);
    assert_eq!(conflict(store.try_swap("a", Expect::At(never), Some("x")).await), None);
    assert_eq!(conflict(store.try_swap("a", Expect::At(never), None).await), None);
    let first = store.put("a", Expect::Absent, "1").await;
    for value in [Some("x"), None] {
        for expect in [Expect::Absent, Expect::At(never)] {
            assert_eq!(conflict(store.try_swap("a", expect, value).await), Some(("1".to_owned(), first)));
        }
    }
    // The same value again is a change too.
    let second = store.put("a", Expect::At(first), "1").await;
    assert!(second > first);
    assert_eq!(
        conflict(store.try_swap("a", Expect::At(first), Some("x")).await),
        Some(("1".to_owned(), second))
    );
    assert!(store.delete("a", second).await > second);
    assert_eq!(conflict(store.try_swap("a", Expect::At(second), Some("x")).await), None);
    store.put("a", Expect::Absent, "2").await;
}

async fn a_snapshot_is_a_prefix_in_key_order(store: Store) {
    assert_eq!(store.coordinator.snapshot(&store.prefix()).await.unwrap().entries, []);
    assert_eq!(store.coordinator.get(&store.key("a")).await.unwrap(), None);
    let mut last = Revision(0);
    for name in ["b", "a10", "a", "a1"] {
        last = store.put(name, Expect::Absent, name).await;
    }
    // Beside the prefix, on both sides.
    for key in [format!("{}", store.keys.all()), format!("{}zzz", store.keys.all())] {
        let swap = Swap { key, expect: Expect::Absent, value: Some(vec![]), lease: None };
        last = store.coordinator.swap(swap).await.unwrap();
    }
    let snapshot = store.coordinator.snapshot(&store.prefix()).await.unwrap();
    assert!(snapshot.revision >= last);
    let names: Vec<_> =
        snapshot.entries.iter().map(|entry| String::from_utf8(entry.value.clone()).unwrap()).collect();
    assert_eq!(names, ["a", "a1", "a10", "b"]);
    for entry in snapshot.entries {
        assert_eq!(store.coordinator.get(&entry.key).await.unwrap(), Some(entry));
    }
}

/// More keys than one answer holds.
async fn a_large_snapshot_is_complete(store: Store) {
    let names: Vec<_> = (0..1_100).map(|n| format!("w{n:04}")).collect();
    future::join_all(names.iter().map(|name| store.put(name, Expect::Absent, name))).await;
    let snapshot = store.coordinator.snapshot(&store.prefix()).await.unwrap();
    let keys: Vec<_> = snapshot.entries.into_iter().map(|entry| entry.key).collect();
    assert_eq!(keys, names.iter().map(|name| store.key(name)).collect::<Vec<_>>());
}

async fn a_watch_from_a_snapshot_misses_and_repeats_nothing(store: Store) {
    let before = store.put("a", Expect::Absent, "0").await;
    let now = store.coordinator.snapshot(&store.prefix()).await.unwrap().revision;
    assert!(now >= before);
    let first = store.put("a", Expect::At(before), "1").await;
    let second = store.put("b", Expect::Absent, "1").await;
    let third = store.delete("a", first).await;
    // The other subtree has changes of its own.
    let swap = Swap {
        key: format!("{}x", store.keys.all()),
        expect: Expect::Absent,
        value: Some(vec![]),
        lease: None,
    };
    store.coordinator.swap(swap).await.unwrap();
    let mut watch = store.coordinator.watch(&store.prefix(), Revision(now.0 + 1)).await.unwrap();
    let past = store.take(&mut *watch, 3).await;
    assert_eq!(past, [put("a", "1", first), put("b", "1", second), gone("a", third)]);
    let fourth = store.put("a", Expect::Absent, "2").await;
    assert_eq!(store.take(&mut *watch, 1).await, [put("a", "2", fourth)]);
    // A watch may begin in the past.
    let mut late = store.coordinator.watch(&store.prefix(), second).await.unwrap();
    let seen = store.take(&mut *late, 3).await;
    assert_eq!(seen, [put("b", "1", second), gone("a", third), put("a", "2", fourth)]);
}

async fn an_abandoned_wait_loses_nothing(store: Store) {
    let mut watch = store.watch().await;
    let mut last = Expect::Absent;
    for value in ["1", "2", "3"] {
        assert!(watch.next().now_or_never().is_none());
        let revision = store.put("a", last, value).await;
        last = Expect::At(revision);
        // It may be there or not by now; what is given out here is not given out again.
        let early = watch.next().now_or_never().map(|batch| batch.unwrap().changes);
        let changes = match early {
            Some(changes) => changes.iter().map(|change| store.shown(change)).collect(),
            None => store.take(&mut *watch, 1).await,
        };
        assert_eq!(changes, [put("a", value, revision)]);
    }
}

async fn a_watch_of_what_is_compacted_says_so(store: Store) {
    let first = store.put("a", Expect::Absent, "1").await;
    let second = store.put("a", Expect::At(first), "2").await;
    (store.compact)(second).await;
    let mut watch = store.coordinator.watch(&store.prefix(), first).await.unwrap();
    match timeout(PATIENCE, watch.next()).await.unwrap() {
        Err(WatchError::Compacted { oldest }) => assert!(oldest > first, "{oldest}"),
        other => panic!("{other:?}"),
    }
    // A snapshot still has everything, and a watch from it goes on.
    let snapshot = store.coordinator.snapshot(&store.prefix()).await.unwrap();
    assert_eq!(snapshot.entries.len(), 1);
    let mut watch =
        store.coordinator.watch(&store.prefix(), Revision(snapshot.revision.0 + 1)).await.unwrap();
    let third = store.delete("a", second).await;
    assert_eq!(store.take(&mut *watch, 1).await, [gone("a", third)]);
}

async fn keys_go_with_their_lease_in_one_batch(store: Store) {
    let lease = store.coordinator.grant_lease(PATIENCE).await.unwrap();
    assert!(lease.ttl >= PATIENCE);
    for name in ["a", "b"] {
        store.coordinator.put_if_absent(store.key(name), name.into(), lease.id).await.unwrap();
    }
    let mut watch = store.watch().await;
    store.coordinator.revoke(lease.id).await.unwrap();
    let batch = next(&mut *watch).await;
    let mut names: Vec<_> = batch.changes.iter().map(|change| store.shown(change)).collect();
    names.sort();
    let revision = batch.changes[0].revision();
    assert_eq!(names, [gone("a", revision), gone("b", revision)]);
    // Once more is no error; everything else with a lost lease is.
    store.coordinator.revoke(lease.id).await.unwrap();
    let kept = store.coordinator.keep_alive(lease.id).await;
    assert!(matches!(&kept, Err(CoordinatorError::LeaseLost(id)) if *id == lease.id), "{kept:?}");
    let late = store.coordinator.put_if_absent(store.key("c"), vec![], lease.id).await;
    assert!(matches!(&late, Err(CoordinatorError::LeaseLost(id)) if *id == lease.id), "{late:?}");
}

async fn a_lease_lives_as_long_as_it_is_kept_alive(store: Store) {
    let lease = store.coordinator.grant_lease(Duration::from_millis(1_900)).await.unwrap();
    // A store may grant more than was asked for; etcd grants whole seconds.
    assert!(lease.ttl >= Duration::from_millis(1_900));
    store.coordinator.put_if_absent(store.key("a"), b"1".to_vec(), lease.id).await.unwrap();
    let mut watch = store.watch().await;
    // Kept alive for longer than it lives by itself.
    for _ in 0..4 {
        assert_eq!(store.coordinator.keep_alive(lease.id).await.unwrap(), lease.ttl);
        assert!(timeout(lease.ttl / 3, watch.next()).await.is_err());
    }
    let gone: Vec<_> = next(&mut *watch).await.changes.iter().map(|change| store.shown(change)).collect();
    assert!(matches!(&gone[..], [(name, None, _)] if name == "a"), "{gone:?}");
    let kept = store.coordinator.keep_alive(lease.id).await;
    assert!(matches!(kept, Err(CoordinatorError::LeaseLost(_))), "{kept:?}");
}

/// What a takeover needs: the key belongs to the later lease, and the end of the earlier one does not touch it.
async fn a_key_put_anew_leaves_its_lease(store: Store) {
    let early = store.coordinator.grant_lease(PATIENCE).await.unwrap().id;
    let late = store.coordinator.grant_lease(PATIENCE).await.unwrap().id;
    let first = store.coordinator.put_if_absent(store.key("a"), b"1".to_vec(), early).await.unwrap();
    let swap = Swap {
        key: store.key("a"),
        expect: Expect::At(first),
        value: Some(b"2".to_vec()),
        lease: Some(late),
    };
    let second = store.coordinator.swap(swap).await.unwrap();
    store.coordinator.revoke(early).await.unwrap();
    let held = store.coordinator.get(&store.key("a")).await.unwrap().unwrap();
    assert_eq!((&held.value[..], held.revision), (&b"2"[..], second));
    store.coordinator.revoke(late).await.unwrap();
    assert_eq!(store.coordinator.get(&store.key("a")).await.unwrap(), None);
}

async fn a_lease_knows_a_later_revision_than_any_change_before(store: Store) {
    let mut last = Expect::Absent;
    for value in ["1", "2", "3"] {
        let change = store.put("a", last, value).await;
        last = Expect::At(change);
        assert!(store.coordinator.grant_lease(PATIENCE).await.unwrap().revision >= change);
    }
}

#[test]
fn the_store_in_memory_keeps_the_promises() {
    for (name, case) in CASES {
        // Time is paused: a lease that ends is waited for in no time.
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let memory = MemoryCoordinator::default();
        let store = Store {
            coordinator: Arc::new(memory.clone()),
            keys: KeySpace::new(name).unwrap(),
            compact: Arc::new(move |_| {
                memory.compact();
                Box::pin(future::ready(()))
            }),
        };
        runtime.block_on(case(store));
    }
}

#[tokio::test]
async fn etcd_keeps_the_promises() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let cases = CASES.iter().map(|(name, case)| {
        let endpoints = etcd.endpoints();
        let coordinator =
            EtcdCoordinator::new(EtcdConfig { endpoints: endpoints.clone(), ..EtcdConfig::default() });
        case(Store {
            coordinator: Arc::new(coordinator.unwrap()),
            keys: KeySpace::new(name).unwrap(),
            compact: Arc::new(move |revision| Box::pin(crate::compact(endpoints.clone(), revision))),
        })
    });
    // One after another: one case compacts.
    for case in cases {
        case.await;
    }
}
