//! Watcher, view and membership together, over a store that does everything a store may do.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longreach_types::{Incarnation, WorkerId};
use proptest::{collection::vec, prelude::*};
use tokio::time::{self, timeout};

use crate::{
    Backoff, Batch, Change, Coordinator, Delta, Entry, Expect, Key, KeySpace, LeaseId, MemberEvent,
    Membership, MemoryConfig, MemoryCoordinator, PrefillRegistration, Record, Revision, Snapshot, Swap, View,
    WatchEvent, Watcher,
};

const TTL: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
enum Action {
    Put {
        key: u8,
        value: u8,
        leased: bool,
    },
    Delete {
        key: u8,
    },
    NewLease,
    ExpireLease,
    Pass(u64),
    Compact,
    BreakWatches,
    Available(bool),
    /// Lets the watcher take up to this many events.
    Follow(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (0_u8..4, 0_u8..3, any::<bool>()).prop_map(|(key, value, leased)| Action::Put { key, value, leased }),
        3 => (0_u8..4).prop_map(|key| Action::Delete { key }),
        1 => Just(Action::NewLease),
        1 => Just(Action::ExpireLease),
        1 => (0_u64..7).prop_map(Action::Pass),
        1 => Just(Action::Compact),
        1 => Just(Action::BreakWatches),
        1 => any::<bool>().prop_map(Action::Available),
        4 => (1_usize..4).prop_map(Action::Follow),
    ]
}

fn name(key: u8) -> String {
    format!("/longreach/v1/c/prefill/p{key}")
}

/// A store with a writer, and a follower that checks every difference it is told.
struct World {
    store: MemoryCoordinator,
    keys: KeySpace,
    lease: Option<LeaseId>,
    watcher: Watcher,
    view: View,
    /// The values as the differences tell them.
    told: BTreeMap<String, Vec<u8>>,
}

impl World {
    fn new() -> Self {
        let store = MemoryCoordinator::new(MemoryConfig { max_changes: 6 });
        let keys = KeySpace::new("c").unwrap();
        let watcher = Watcher::new(Arc::new(store.clone()), keys.all().clone(), Backoff::default());
        Self { store, keys, lease: None, watcher, view: View::default(), told: BTreeMap::new() }
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Put { key, value, leased } => {
                let lease = self.lease.filter(|_| leased);
                self.write(name(key), Some(vec![value]), lease).await;
            }
            Action::Delete { key } => self.write(name(key), None, None).await,
            Action::NewLease => self.lease = self.store.grant_lease(TTL).await.ok().map(|lease| lease.id),
            Action::ExpireLease => self.lease.into_iter().for_each(|lease| self.store.expire_lease(lease)),
            Action::Pass(secs) => time::advance(Duration::from_secs(secs)).await,
            Action::Compact => self.store.compact(),
            Action::BreakWatches => self.store.break_watches(),
            Action::Available(available) => self.store.set_available(available),
            Action::Follow(n) => self.follow(n, Duration::from_millis(300)).await,
        }
    }

    async fn write(&self, key: String, value: Option<Vec<u8>>, lease: Option<LeaseId>) {
        let Ok(snapshot) = self.store.snapshot(self.keys.all()).await else { return };
        let held = snapshot.entries.into_iter().find(|entry| entry.key == key);
        let expect = held.map_or(Expect::Absent, |entry| Expect::At(entry.revision));
        if value.is_some() || expect != Expect::Absent {
            // A lost lease refuses the write, which is as good as none.
            let _ = self.store.swap(Swap { key, expect, value, lease }).await;
        }
    }

    async fn follow(&mut self, n: usize, patience: Duration) {
        for _ in 0..n {
            match timeout(patience, self.watcher.next()).await {
                Ok(WatchEvent::Interrupted) => {}
                Ok(WatchEvent::Snapshot(snapshot)) => {
                    let deltas = self.view.apply_snapshot(snapshot);
                    self.hear(deltas);
                }
                Ok(WatchEvent::Changes(batch)) => {
                    let deltas = self.view.apply_batch(batch);
                    self.hear(deltas);
                }
                Err(_) => return,
            }
        }
    }

    fn hear(&mut self, deltas: Vec<Delta>) {
        hear(&mut self.told, deltas);
    }
}

/// Each difference fits what was told before, and removals come first.
fn hear(told: &mut BTreeMap<String, Vec<u8>>, deltas: Vec<Delta>) {
    assert!(deltas.is_sorted_by_key(|delta| !matches!(delta, Delta::Removed(_))));
    for delta in deltas {
        match delta {
            Delta::Removed(old) => assert_eq!(told.remove(&old.key), Some(old.value)),
            Delta::Added(new) => assert_eq!(told.insert(new.key, new.value), None),
            Delta::Changed { old, new } => {
                assert_ne!(old.value, new.value);
                assert_eq!(told.insert(new.key, new.value), Some(old.value));
            }
        }
    }
}

fn values<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> BTreeMap<String, Vec<u8>> {
    entries.into_iter().map(|entry| (entry.key.clone(), entry.value.clone())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever happens to the store and its watches, what is told adds up to what the store holds, without repeats.
    #[test]
    fn a_follower_converges_to_the_store(actions in vec(action(), 0..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut world = World::new();
            for action in actions {
                world.act(action).await;
                assert_eq!(world.told, values(world.view.entries()));
            }
            world.store.set_available(true);
            // Longer than any backoff and any lease.
            world.follow(usize::MAX, Duration::from_secs(30)).await;
            let truth = world.store.snapshot(world.keys.all()).await.unwrap();
            assert_eq!(world.view.entries().cloned().collect::<Vec<_>>(), truth.entries);
            assert_eq!(world.told, values(&truth.entries));
        });
    }

    /// A view recognises what it has seen: batches that begin too early, and snapshots of any moment.
    #[test]
    fn a_view_is_exact_under_replays(
        writes in vec((0_u8..3, proptest::option::of(0_u8..3)), 1..30),
        feeds in vec((any::<bool>(), any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..20),
    ) {
        let history = History::new(&writes);
        let (mut view, mut told) = (View::default(), BTreeMap::new());
        for (is_snapshot, a, b) in feeds {
            let known = view.revision().0 as usize;
            let deltas = if is_snapshot {
                view.apply_snapshot(history.snapshot(a.index(writes.len() + 1)))
            } else {
                // From any change up to the first unknown one, to any later end.
                let from = a.index(known + 1);
                view.apply_batch(history.batch(from, from + b.index(writes.len() + 1 - from)))
            };
            hear(&mut told, deltas);
            let truth = history.snapshot(view.revision().0 as usize);
            prop_assert_eq!(view.entries().cloned().collect::<Vec<_>>(), truth.entries.clone());
            prop_assert_eq!(&told, &values(&truth.entries));
        }
    }
}

/// All changes of a store, the change at index `i` with revision `i + 1`.
struct History(Vec<Change>);

impl History {
    fn new(writes: &[(u8, Option<u8>)]) -> Self {
        let change = |(i, &(key, value)): (usize, &(u8, Option<u8>))| {
            let (key, revision) = (name(key), Revision(i as u64 + 1));
            match value {
                Some(value) => Change::Put(Entry { key, value: vec![value], revision }),
                None => Change::Delete { key, revision },
            }
        };
        Self(writes.iter().enumerate().map(change).collect())
    }

    fn batch(&self, from: usize, to: usize) -> Batch {
        Batch { changes: self.0[from..to].to_vec() }
    }

    fn snapshot(&self, revision: usize) -> Snapshot {
        let mut entries = BTreeMap::new();
        for change in &self.0[..revision] {
            match change {
                Change::Put(entry) => drop(entries.insert(entry.key.clone(), entry.clone())),
                Change::Delete { key, .. } => drop(entries.remove(key)),
            }
        }
        Snapshot { revision: Revision(revision as u64), entries: entries.into_values().collect() }
    }
}

fn prefill(incarnation: u64) -> PrefillRegistration {
    PrefillRegistration {
        id: WorkerId("p".into()),
        incarnation: Incarnation(incarnation),
        endpoint: "http://h:1".into(),
        layout_hash: String::new(),
    }
}

fn snapshot_of(entries: &[(&str, Vec<u8>)]) -> WatchEvent {
    let entry = |(key, value): &(&str, Vec<u8>)| Entry {
        key: (*key).to_owned(),
        value: value.clone(),
        revision: Revision(1),
    };
    WatchEvent::Snapshot(Snapshot { revision: Revision(1), entries: entries.iter().map(entry).collect() })
}

#[test]
fn a_new_life_under_an_old_name_is_a_departure_and_an_arrival() {
    let keys = KeySpace::new("c").unwrap();
    let key = keys.encode(&Key::Prefill(WorkerId("p".into()))).unwrap();
    let mut membership = Membership::new(keys);
    membership.apply(snapshot_of(&[(&key, prefill(1).encode())]));
    let events = membership.apply(snapshot_of(&[(&key, prefill(2).encode())]));
    assert!(
        matches!(&events[..], [
        MemberEvent::PrefillLeft { incarnation: Incarnation(1), .. },
        MemberEvent::PrefillJoined(joined),
        MemberEvent::Current,
    ] if *joined == prefill(2)),
        "{events:?}"
    );
    let again = membership.apply(snapshot_of(&[(&key, prefill(2).encode())]));
    assert!(matches!(&again[..], [MemberEvent::Current]), "{again:?}");
}

#[test]
fn what_cannot_be_read_is_reported_and_hides_nobody() {
    let keys = KeySpace::new("c").unwrap();
    let good = keys.encode(&Key::Prefill(WorkerId("p".into()))).unwrap();
    let mut membership = Membership::new(keys);
    let (strange, bad) = ("/longreach/v1/c/new/thing", "/longreach/v1/c/prefill/bad");
    let events = membership.apply(snapshot_of(&[
        (strange, vec![]),
        (bad, b"{}".to_vec()),
        (&good, prefill(1).encode()),
    ]));
    assert!(
        matches!(&events[..], [
        MemberEvent::Unreadable { key: first, error: None },
        MemberEvent::Unreadable { key: second, error: Some(_) },
        MemberEvent::PrefillJoined(_),
        MemberEvent::Current,
    ] if first == strange && second == bad),
        "{events:?}"
    );
    // It was never there, so it does not leave.
    let gone = membership.apply(snapshot_of(&[]));
    assert!(matches!(&gone[..], [MemberEvent::PrefillLeft { .. }, MemberEvent::Current]), "{gone:?}");
}
