//! Watcher, view and membership together, over a store that does everything a store may do.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longreach_types::{Epoch, GroupSecret, Incarnation, WorkerId};
use proptest::{collection::vec, prelude::*};
use tokio::time::{self, timeout};

use crate::{
    Backoff, Batch, Change, Coordinator, DecodeRegistration, Delta, Entry, EpochRecord, Expect, GroupId, Key,
    KeySpace, LeaseId, MemberEvent, Membership, MemoryConfig, MemoryCoordinator, PrefillRegistration,
    ReadyRecord, Record, RecordError, Revision, Snapshot, Swap, View, WatchEvent, Watcher,
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
        let watcher = Watcher::new(Arc::new(store.clone()), keys.all().clone(), Backoff::of("follower"));
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

/// One of every kind of record, for somebody: `(name, rank)` of whoever wrote it, who may not be whom its key names.
#[derive(Clone, Debug)]
enum Written {
    Prefill { key: String, id: String },
    Rank { key: (String, usize), id: (String, usize), rank: usize },
    Epoch { key: String, members: Vec<((String, usize), usize)> },
    Ready { key: String },
}

fn written() -> impl Strategy<Value = Written> {
    // Few names, so that a record is often where it belongs; "a-0" is the name of a group and of a rank of another.
    let name = || prop_oneof![4 => Just("a"), 1 => Just("b"), 1 => Just("a-0")].prop_map(str::to_owned);
    let rank = || prop_oneof![4 => Just(0_usize), 1 => 1_usize..3];
    let member = move || ((name(), rank()), rank());
    prop_oneof![
        (name(), name()).prop_map(|(key, id)| Written::Prefill { key, id }),
        ((name(), rank()), member()).prop_map(|(key, (id, rank))| Written::Rank { key, id, rank }),
        (name(), vec(member(), 0..3)).prop_map(|(key, members)| Written::Epoch { key, members }),
        (name(), 1_usize..3).prop_map(|(key, n)| {
            let members = (0..n).map(|rank| ((key.clone(), rank), rank)).collect();
            Written::Epoch { key, members }
        }),
        name().prop_map(|key| Written::Ready { key }),
    ]
}

impl Written {
    fn key(&self) -> Key {
        match self {
            Self::Prefill { key, .. } => Key::Prefill(WorkerId(key.clone())),
            Self::Rank { key: (group, rank), .. } => Key::Rank { group: GroupId(group.clone()), rank: *rank },
            Self::Epoch { key, .. } => Key::Epoch(GroupId(key.clone())),
            Self::Ready { key } => Key::Ready(GroupId(key.clone())),
        }
    }

    fn value(&self) -> Vec<u8> {
        match self {
            Self::Prefill { id, .. } => {
                PrefillRegistration { id: WorkerId(id.clone()), ..prefill(1) }.encode()
            }
            Self::Rank { id, rank, .. } => member(id, *rank).encode(),
            Self::Epoch { members, .. } => {
                let members = members.iter().map(|(id, rank)| member(id, *rank)).collect();
                EpochRecord { epoch: Epoch(3), secret: GroupSecret::new([1; 32]), members }.encode()
            }
            Self::Ready { .. } => {
                let (endpoint, layout_hash) = (String::new(), String::new());
                ReadyRecord {
                    epoch: Epoch(3),
                    endpoint,
                    n_ranks: 1,
                    dcp_size: 1,
                    layout_hash,
                    max_seq_len: 1,
                }
                .encode()
            }
        }
    }

    /// The first two names that differ, that of the record first.
    fn difference(&self) -> Option<(String, String)> {
        let of_member = |(group, place): (&str, usize), (id, rank): (&(String, usize), usize)| {
            let ids = (format!("{}-{}", id.0, id.1), format!("{group}-{place}"));
            let ranks = (format!("rank {rank}"), format!("rank {place}"));
            [ids, ranks].into_iter().find(|(record, key)| record != key)
        };
        match self {
            Self::Prefill { key, id } => (key != id).then(|| (id.clone(), key.clone())),
            Self::Rank { key: (group, place), id, rank } => of_member((group, *place), (id, *rank)),
            Self::Epoch { key, members } => {
                let mut members = members.iter().enumerate();
                members.find_map(|(place, (id, rank))| of_member((key, place), (id, *rank)))
            }
            Self::Ready { .. } => None,
        }
    }
}

fn member((group, idx): &(String, usize), rank: usize) -> DecodeRegistration {
    DecodeRegistration {
        id: DecodeRegistration::id_of(&GroupId(group.clone()), *idx),
        incarnation: Incarnation(1),
        rank,
        n_ranks: 3,
        dcp_size: 3,
        endpoint: String::new(),
        peer_addr: String::new(),
        layout_hash: String::new(),
    }
}

proptest! {
    #[test]
    fn a_record_under_the_key_of_another_is_reported_with_both_names_and_ignored(written in written()) {
        let keys = KeySpace::new("c").unwrap();
        let key = keys.encode(&written.key()).unwrap();
        let mut membership = Membership::new(keys);
        let events = membership.apply(snapshot_of(&[(&key, written.value())]));
        match (written.difference(), &events[..]) {
            (Some(names), [MemberEvent::Unreadable { key: told, error: Some(error) }, MemberEvent::Current]) => {
                prop_assert_eq!(told, &key);
                let RecordError::Misplaced { record, key } = &**error else { panic!("{error}") };
                prop_assert_eq!((record.clone(), key.clone()), names);
            }
            (None, [event, MemberEvent::Current]) => {
                let is_there = match written {
                    Written::Prefill { .. } => matches!(event, MemberEvent::PrefillJoined(_)),
                    Written::Rank { .. } => matches!(event, MemberEvent::RankJoined { .. }),
                    Written::Epoch { .. } => matches!(event, MemberEvent::EpochRaised { .. }),
                    Written::Ready { .. } => matches!(event, MemberEvent::GroupReady { .. }),
                };
                prop_assert!(is_there, "{event:?}");
            }
            other => prop_assert!(false, "{other:?}"),
        }
        // Who was never there does not leave.
        let n_gone = membership.apply(snapshot_of(&[])).len();
        let leaves = written.difference().is_none() && !matches!(written, Written::Epoch { .. });
        prop_assert_eq!(n_gone, 1 + usize::from(leaves));
    }
}
