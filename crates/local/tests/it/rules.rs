//! The rules of membership (design paper "Membership, epochs, failure"), each against real etcd servers and what can
//! happen to them.

use std::{sync::Arc, time::Duration};

use longreach_cluster::{
    Coordinator, EpochRecord, Expect, GroupId, Key, MemberEvent, RegistrationState, Swap, raise_epoch,
    read_epoch,
};
use longreach_local::EtcdCluster;
use longreach_types::{Epoch, GroupSecret, Incarnation, WorkerId};
use tokio::time::{Instant, timeout};

use crate::{
    relay::{Line, Relay},
    world::{Follower, PATIENCE, coordinator, keys, register, registered},
};

/// Longer than any outage of these tests.
const LONG: Duration = Duration::from_secs(60);
/// The shortest that etcd grants here, or near it.
const SHORT: Duration = Duration::from_secs(2);

/// ETC-1, ETC-2, ETC-4: a follower that was cut off while everything changed and the changes were compacted.
#[tokio::test]
async fn a_compacted_watch_is_replaced_by_a_snapshot_and_only_differences_are_told() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let relay = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let store = coordinator(etcd.endpoints());
    let workers: Vec<_> = ["stays", "leaves", "returns"].map(|id| register(&store, id, LONG)).into();
    let mut lives = Vec::new();
    for worker in &workers {
        lives.push(registered(worker, None).await);
    }
    let mut follower = Follower::new(coordinator(vec![relay.endpoint()]));
    follower.until_members(&[("stays", lives[0]), ("leaves", lives[1]), ("returns", lives[2])]).await;

    relay.set(Line::Silent);
    let mut workers = workers.into_iter();
    let _stays = workers.next();
    for worker in workers {
        worker.leave().await;
    }
    let returns = register(&store, "returns", LONG);
    let returned = registered(&returns, None).await;
    // Written again with the same bytes: no difference.
    let key = keys().encode(&Key::Prefill(WorkerId("stays".into()))).unwrap();
    let held = store.get(&key).await.unwrap().unwrap();
    let lease = store.grant_lease(LONG).await.unwrap().id;
    let again = Swap { key, expect: Expect::At(held.revision), value: Some(held.value), lease: Some(lease) };
    let last = store.swap(again).await.unwrap();
    crate::compact(etcd.endpoints(), last).await;
    follower.until_interrupted().await;
    assert_eq!(follower.members.len(), 3, "an interruption changes nothing");

    relay.set(Line::Open);
    let n_before = follower.heard.len();
    follower.until_members(&[("stays", lives[0]), ("returns", returned)]).await;
    let told: Vec<_> = follower.heard[n_before..]
        .iter()
        .filter_map(|event| match event {
            MemberEvent::PrefillLeft { id, .. } => Some(format!("-{}", id.0)),
            MemberEvent::PrefillJoined(joined) => Some(format!("+{}", joined.id.0)),
            _ => None,
        })
        .collect();
    assert_eq!(told, ["-leaves", "-returns", "+returns"]);
}

/// ETC-13: a store that compacts itself all the time, as a busy one does, takes nobody's lease and breaks no watch.
#[tokio::test]
async fn compaction_disturbs_no_lease_and_no_view() {
    const N_PUTS: usize = 3000;
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let workers: Vec<_> = ["a", "b", "c"].map(|id| register(&store, id, SHORT)).into();
    let mut lives = Vec::new();
    for worker in &workers {
        lives.push(registered(worker, None).await);
    }
    let members = [("a", lives[0]), ("b", lives[1]), ("c", lives[2])];
    let mut follower = Follower::new(coordinator(etcd.endpoints()));
    follower.until_members(&members).await;
    let n_before = follower.heard.len();

    let churn = async {
        let (key, began) = ("/elsewhere".to_owned(), Instant::now());
        let (mut at, mut n_puts) = (Expect::Absent, 0);
        // Until each lease has been renewed many times, too.
        while n_puts < N_PUTS || began.elapsed() < 4 * SHORT {
            let swap = Swap { key: key.clone(), expect: at, value: Some(Vec::new()), lease: None };
            let revision = store.swap(swap).await.unwrap();
            (at, n_puts) = (Expect::At(revision), n_puts + 1);
            if n_puts % 1000 == 0 {
                crate::compact(etcd.endpoints(), revision).await;
            }
        }
        let late = register(&store, "late", SHORT);
        let life = registered(&late, None).await;
        (late, life)
    };
    let everyone = |follower: &Follower| follower.members.contains_key("late");
    let ((_late, life), ()) = tokio::join!(churn, follower.until("the one that comes last", everyone));
    let [a, b, c] = members;
    follower.until_members(&[a, b, c, ("late", life)]).await;
    let left =
        |event: &MemberEvent| matches!(event, MemberEvent::PrefillLeft { .. } | MemberEvent::Interrupted);
    assert!(!follower.heard[n_before..].iter().any(left), "{:?}", &follower.heard[n_before..]);
}

/// A stopped member keeps its connections open and says nothing; the others elect another leader.
#[tokio::test]
async fn a_stopped_leader_is_noticed_and_left() {
    let etcd = EtcdCluster::start(crate::brisk(3)).await.unwrap();
    let leader = etcd.leader().await.unwrap();
    let mut endpoints = etcd.endpoints();
    // Everything begins at the leader.
    endpoints.rotate_left(leader);
    let store = coordinator(endpoints.clone());
    let first = register(&store, "first", LONG);
    let life = registered(&first, None).await;
    let mut follower = Follower::new(coordinator(endpoints));
    follower.until_members(&[("first", life)]).await;

    etcd.stop(leader).unwrap();
    let second = register(&store, "second", LONG);
    let other = registered(&second, None).await;
    // Nothing but another member can tell it.
    follower.until_members(&[("first", life), ("second", other)]).await;
    etcd.cont(leader).unwrap();
}

#[tokio::test]
async fn a_lost_lease_is_a_new_incarnation_and_not_the_end() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let relay = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let direct = coordinator(etcd.endpoints());
    let worker = register(&coordinator(vec![relay.endpoint()]), "w", SHORT);
    let first = registered(&worker, None).await;
    let mut follower = Follower::new(Arc::clone(&direct));
    follower.until_members(&[("w", first)]).await;

    // Revoked by somebody: told by the next renewal, with a time of zero (ETC-7).
    let RegistrationState::Registered { lease, .. } = *worker.state().borrow() else { panic!() };
    direct.revoke(lease).await.unwrap();
    let second = registered(&worker, Some(first)).await;
    assert!(second > first);
    follower.until_members(&[("w", second)]).await;

    // Expired, because the worker was cut off: it serves on, not knowing, and comes back by itself.
    relay.set(Line::Silent);
    follower.until_members(&[]).await;
    let mut state = worker.state();
    let unsure = state.wait_for(|state| matches!(state, RegistrationState::Unconfirmed { .. }));
    timeout(PATIENCE, unsure).await.unwrap().unwrap();
    relay.set(Line::Open);
    let third = registered(&worker, Some(second)).await;
    assert!(third > second);
    follower.until_members(&[("w", third)]).await;
    worker.leave().await;
    follower.until_members(&[]).await;
}

/// Isolated keep-alive: this test's runtime is not polled for some lives of the lease.
#[tokio::test]
async fn a_lease_is_renewed_while_the_runtime_of_its_process_is_stuck() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let worker = register(&store, "w", SHORT);
    let life = registered(&worker, None).await;
    let mut follower = Follower::new(Arc::clone(&store));
    follower.until_members(&[("w", life)]).await;
    let (_never, stuck) = std::sync::mpsc::channel::<()>();
    assert!(stuck.recv_timeout(3 * SHORT).is_err());
    // The next change comes behind all others: the worker never left.
    let other = register(&store, "other", LONG);
    let second = registered(&other, None).await;
    follower.until_members(&[("other", second), ("w", life)]).await;
    assert!(!follower.heard.iter().any(|event| matches!(event, MemberEvent::PrefillLeft { .. })));
}

/// Fail-static: the view stays while etcd is stopped, and nobody is lost or comes twice.
#[tokio::test]
async fn a_stopped_etcd_changes_no_view() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let worker = register(&store, "w", LONG);
    let life = registered(&worker, None).await;
    let mut follower = Follower::new(Arc::clone(&store));
    follower.until_members(&[("w", life)]).await;
    etcd.stop(0).unwrap();
    follower.until_interrupted().await;
    assert!(store.snapshot(keys().all()).await.is_err());
    assert_eq!(follower.members.len(), 1);
    etcd.cont(0).unwrap();
    let late = register(&store, "late", LONG);
    let other = registered(&late, None).await;
    follower.until_members(&[("late", other), ("w", life)]).await;
    let left = follower.heard.iter().filter(|event| matches!(event, MemberEvent::PrefillLeft { .. })).count();
    assert_eq!((left, registered(&worker, None).await), (0, life));
}

/// A writer goes on while the leader is killed: no change is lost, none is made twice, and watches see each once.
#[tokio::test]
async fn a_killed_leader_loses_and_repeats_nothing() {
    let mut etcd = EtcdCluster::start(crate::brisk(3)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let group = GroupId("g".into());
    let mut follower = Follower::new(Arc::clone(&store));
    let raised = |follower: &Follower| {
        let epoch = |event: &MemberEvent| match event {
            MemberEvent::EpochRaised { record, .. } => Some(record.epoch.0),
            _ => None,
        };
        follower.heard.iter().filter_map(epoch).collect::<Vec<_>>()
    };
    let leader = etcd.leader().await.unwrap();
    let mut last = Epoch(0);
    for n in 0..40 {
        if n == 10 {
            etcd.kill(leader).await.unwrap();
        }
        if n == 30 {
            etcd.restart(leader).await.unwrap();
        }
        let record = raise(&*store, &group, Epoch(0)).await;
        assert!(record.epoch > last);
        last = record.epoch;
        follower.until("the epoch", |follower| raised(follower).last() == Some(&last.0)).await;
    }
    let heard = raised(&follower);
    assert!(heard.is_sorted_by(|a, b| a < b), "{heard:?}");
    let (held, _) = read_epoch(&*store, &keys(), &group).await.unwrap().unwrap();
    assert_eq!(held.epoch, last);
    etcd.wait_ready().await.unwrap();
}

/// Raises the epoch; while nobody leads it is tried again, as its users do.
async fn raise(store: &dyn Coordinator, group: &GroupId, floor: Epoch) -> EpochRecord {
    // The secret is what tells one writer's record from another's.
    let secret = GroupSecret::new([7; 32]);
    let attempts = async {
        loop {
            let make = |epoch| EpochRecord { epoch, secret: secret.clone(), members: Vec::new() };
            if let Ok(record) = raise_epoch(store, &keys(), (group, floor), make).await {
                return record;
            }
        }
    };
    timeout(PATIENCE, attempts).await.unwrap()
}

#[tokio::test]
async fn all_members_killed_and_back_is_a_pause() {
    let mut etcd = EtcdCluster::start(crate::brisk(3)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let worker = register(&store, "w", LONG);
    let life = registered(&worker, None).await;
    let mut follower = Follower::new(Arc::clone(&store));
    follower.until_members(&[("w", life)]).await;
    for member in 0..3 {
        etcd.kill(member).await.unwrap();
    }
    follower.until_interrupted().await;
    assert_eq!(follower.members.len(), 1);
    for member in 0..3 {
        etcd.restart(member).await.unwrap();
    }
    let late = register(&store, "late", LONG);
    let other = registered(&late, None).await;
    follower.until_members(&[("late", other), ("w", life)]).await;

    // One loses its disk and joins again as a new member; nothing is missed meanwhile.
    etcd.wait_ready().await.unwrap();
    etcd.wipe(1).await.unwrap();
    let later = register(&store, "later", LONG);
    let third = registered(&later, None).await;
    etcd.wait_ready().await.unwrap();
    follower.until_members(&[("late", other), ("later", third), ("w", life)]).await;
    let wiped = coordinator(vec![etcd.endpoints()[1].clone()]);
    let mut beside = Follower::new(wiped);
    beside.until_members(&[("late", other), ("later", third), ("w", life)]).await;
}

/// The only member loses its disk: revisions start again, and nobody waits for the old ones.
#[tokio::test]
async fn a_store_that_lost_everything_is_filled_again() {
    let mut etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let group = GroupId("g".into());
    for _ in 0..20 {
        raise(&*store, &group, Epoch(0)).await;
    }
    let worker = register(&store, "w", SHORT);
    let first = registered(&worker, None).await;
    let mut follower = Follower::new(Arc::clone(&store));
    follower.until_members(&[("w", first)]).await;
    etcd.wipe(0).await.unwrap();
    let second = registered(&worker, Some(first)).await;
    assert!(second > first, "{second} is older than {first}");
    follower.until_members(&[("w", second)]).await;
    // The epoch goes on where its leader was.
    assert!(read_epoch(&*store, &keys(), &group).await.unwrap().is_none());
    assert_eq!(raise(&*store, &group, Epoch(20)).await.epoch, Epoch(21));
}

/// Any start order: the worker and the router are there before etcd.
#[tokio::test]
async fn etcd_may_come_last() {
    let mut etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    etcd.kill(0).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let worker = register(&store, "w", LONG);
    let mut follower = Follower::new(Arc::clone(&store));
    let early = timeout(Duration::from_secs(1), follower.until_members(&[("w", Incarnation(0))])).await;
    assert!(early.is_err());
    assert_eq!(*worker.state().borrow(), RegistrationState::Pending);
    etcd.restart(0).await.unwrap();
    let life = registered(&worker, None).await;
    follower.until_members(&[("w", life)]).await;
}

/// A process that was killed is back at once, and of two with one name the newer stays.
#[tokio::test]
async fn the_next_life_of_a_worker_takes_its_key_over() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let relay = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let store = coordinator(etcd.endpoints());
    let older = register(&coordinator(vec![relay.endpoint()]), "w", LONG);
    let first = registered(&older, None).await;
    let mut follower = Follower::new(Arc::clone(&store));
    follower.until_members(&[("w", first)]).await;
    // To etcd it looks dead, and its lease has a minute to go.
    relay.set(Line::Silent);
    let newer = register(&store, "w", LONG);
    let second = registered(&newer, None).await;
    follower.until_members(&[("w", second)]).await;
    relay.set(Line::Open);
    let mut state = older.state();
    let aside = state.wait_for(|state| *state == RegistrationState::Superseded { by: second });
    timeout(PATIENCE, aside).await.unwrap().unwrap();
    older.leave().await;
    assert_eq!(registered(&newer, None).await, second);
    let key = keys().encode(&Key::Prefill(WorkerId("w".into()))).unwrap();
    assert!(store.get(&key).await.unwrap().is_some());
}
