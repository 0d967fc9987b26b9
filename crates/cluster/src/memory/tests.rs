//! The store keeps the promises of the trait.

use std::time::Duration;

use tokio::time::{self, timeout};

use super::*;
use crate::{
    coordinator::{Change, Entry, Expect},
    keys::{Key, KeySpace},
};

const TTL: Duration = Duration::from_secs(30);

fn keys() -> KeySpace {
    KeySpace::new("c").unwrap()
}

fn key(id: &str) -> String {
    keys().encode(&Key::Prefill(longreach_types::WorkerId(id.into()))).unwrap()
}

async fn put(store: &MemoryCoordinator, id: &str, value: u8) -> Revision {
    let current = store.snapshot(keys().all()).await.unwrap();
    let held = current.entries.into_iter().find(|entry| entry.key == key(id));
    let expect = held.map_or(Expect::Absent, |entry| Expect::At(entry.revision));
    store.swap(Swap { key: key(id), expect, value: Some(vec![value]), lease: None }).await.unwrap()
}

#[tokio::test]
async fn a_key_is_registered_once_and_the_second_sees_the_first() {
    let store = MemoryCoordinator::default();
    let lease = store.grant_lease(TTL).await.unwrap().id;
    let revision = store.put_if_absent(key("p"), vec![1], lease).await.unwrap();
    let refused = store.put_if_absent(key("p"), vec![2], lease).await.unwrap_err();
    let first = Entry { key: key("p"), value: vec![1], revision };
    assert!(matches!(refused, CoordinatorError::Conflict { current: Some(entry), .. } if entry == first));
}

#[tokio::test]
async fn a_swap_needs_the_revision_that_is_there() {
    let store = MemoryCoordinator::default();
    let first = put(&store, "p", 1).await;
    let second = put(&store, "p", 2).await;
    let swap = |at, value| Swap { key: key("p"), expect: Expect::At(at), value, lease: None };
    for value in [Some(vec![3]), None] {
        let err = store.swap(swap(first, value)).await.unwrap_err();
        assert!(matches!(err, CoordinatorError::Conflict { .. }), "{err}");
    }
    store.swap(swap(second, None)).await.unwrap();
    let err = store.swap(swap(second, None)).await.unwrap_err();
    assert!(matches!(err, CoordinatorError::Conflict { current: None, .. }), "{err}");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_watch_sees_a_lease_expire_on_time() {
    let store = MemoryCoordinator::default();
    let lease = store.grant_lease(TTL).await.unwrap().id;
    let put = store.put_if_absent(key("p"), vec![1], lease).await.unwrap();
    let start = Instant::now();
    let mut watch = store.watch(keys().all(), Revision(put.0 + 1)).await.unwrap();
    let batch = watch.next().await.unwrap();
    assert_eq!(batch.changes, [Change::Delete { key: key("p"), revision: Revision(put.0 + 1) }]);
    assert_eq!(start.elapsed(), TTL);
    assert!(matches!(store.keep_alive(lease).await, Err(CoordinatorError::LeaseLost(id)) if id == lease));
    let late = store.put_if_absent(key("q"), vec![], lease).await;
    assert!(matches!(late, Err(CoordinatorError::LeaseLost(id)) if id == lease));
}

#[tokio::test(start_paused = true)]
async fn a_lease_lives_while_it_is_kept_alive_and_a_key_belongs_to_its_last_lease() {
    let store = MemoryCoordinator::default();
    let [old, new] = [store.grant_lease(TTL).await.unwrap().id, store.grant_lease(TTL).await.unwrap().id];
    let at = store.put_if_absent(key("p"), vec![1], old).await.unwrap();
    store
        .swap(Swap { key: key("p"), expect: Expect::At(at), value: Some(vec![2]), lease: Some(new) })
        .await
        .unwrap();
    for _ in 0..5 {
        time::advance(TTL - Duration::from_millis(1)).await;
        assert_eq!(store.keep_alive(new).await.unwrap(), TTL);
        assert_eq!(store.snapshot(keys().all()).await.unwrap().entries.len(), 1);
    }
    store.revoke(new).await.unwrap();
    store.revoke(new).await.unwrap();
    assert_eq!(store.snapshot(keys().all()).await.unwrap().entries, []);
}

#[tokio::test(start_paused = true)]
async fn a_watch_gives_every_change_of_its_prefix_from_its_revision_on() {
    let store = MemoryCoordinator::default();
    let revisions = [put(&store, "a", 1).await, put(&store, "b", 2).await, put(&store, "a", 3).await];
    let other = KeySpace::new("cc").unwrap();
    let strange = other.encode(&Key::Prefill(longreach_types::WorkerId("a".into()))).unwrap();
    store
        .swap(Swap { key: strange, expect: Expect::Absent, value: Some(vec![]), lease: None })
        .await
        .unwrap();
    for (i, &from) in revisions.iter().enumerate() {
        let mut watch = store.watch(keys().all(), from).await.unwrap();
        let batch = watch.next().await.unwrap();
        let got: Vec<_> = batch.changes.iter().map(Change::revision).collect();
        assert_eq!(got, revisions[i..]);
        assert!(timeout(TTL, watch.next()).await.is_err(), "nothing more");
    }
    let mut watch = store.watch(keys().all(), revisions[0]).await.unwrap();
    store.compact();
    let next = Revision(store.snapshot(keys().all()).await.unwrap().revision.0 + 1);
    assert!(matches!(watch.next().await, Err(WatchError::Compacted { oldest }) if oldest == next));
}

#[tokio::test(start_paused = true)]
async fn old_changes_are_forgotten_by_whole_revisions() {
    let store = MemoryCoordinator::new(MemoryConfig { max_changes: 3 });
    let lease = store.grant_lease(TTL).await.unwrap().id;
    for id in ["a", "b"] {
        store.put_if_absent(key(id), vec![], lease).await.unwrap();
    }
    // One revision with two changes, then one more: the first put is forgotten, then the second with nothing else.
    store.revoke(lease).await.unwrap();
    put(&store, "c", 1).await;
    let from = |revision| store.watch(Box::leak(Box::new(keys().all().clone())), Revision(revision));
    assert!(matches!(
        from(3).await.unwrap().next().await,
        Err(WatchError::Compacted { oldest: Revision(4) })
    ));
    assert_eq!(from(4).await.unwrap().next().await.unwrap().changes.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_calls_fail_watches_are_silent_and_leases_stay() {
    let store = MemoryCoordinator::default();
    let lease = store.grant_lease(TTL).await.unwrap().id;
    let at = store.put_if_absent(key("p"), vec![], lease).await.unwrap();
    let mut watch = store.watch(keys().all(), Revision(at.0 + 1)).await.unwrap();
    store.set_available(false);
    assert!(matches!(store.keep_alive(lease).await, Err(CoordinatorError::Unavailable(_))));
    assert!(timeout(10 * TTL, watch.next()).await.is_err());
    store.set_available(true);
    time::advance(TTL - Duration::from_millis(1)).await;
    store.keep_alive(lease).await.unwrap();
    store.break_watches();
    assert!(matches!(watch.next().await, Err(WatchError::Broken(_))));
}
