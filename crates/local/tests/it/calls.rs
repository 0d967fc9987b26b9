//! Calls to etcd over links that fail.

use std::{future::Future, time::Duration};

use longreach_cluster::{Coordinator, CoordinatorError, EtcdConfig, EtcdCoordinator, Expect, KeySpace, Swap};
use longreach_local::{EtcdCluster, free_ports};
use tokio::time::timeout;

use crate::relay::{Line, Relay};

/// Bounds that make a test short. What a call costs is counted, not timed.
fn coordinator(endpoints: Vec<String>) -> EtcdCoordinator {
    let config = EtcdConfig {
        endpoints,
        connect_timeout: Duration::from_millis(500),
        attempt_timeout: Duration::from_millis(500),
        request_timeout: Duration::from_secs(20),
        watch_probe: Duration::from_secs(1),
        ..EtcdConfig::default()
    };
    EtcdCoordinator::new(config).unwrap()
}

fn swap(expect: Expect, value: Option<&str>) -> Swap {
    let value = value.map(|value| value.as_bytes().to_vec());
    Swap { key: "/longreach/v1/c/x".to_owned(), expect, value, lease: None }
}

#[tokio::test]
async fn a_change_whose_answer_was_lost_is_no_conflict_with_itself() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let direct = coordinator(etcd.endpoints());
    // Every coordinator is new, so that it asks the deaf endpoint first.
    let relay = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let endpoints = [relay.endpoint(), etcd.endpoints()[0].clone()];
    let mut revisions = Vec::new();
    let mut expect = Expect::Absent;
    for value in [Some("1"), Some("2"), None] {
        let store = coordinator(endpoints.to_vec());
        relay.set(Line::Open);
        // Connected, so that the next question arrives.
        store.get("/longreach/v1/c/x").await.unwrap();
        relay.set(Line::NoAnswers);
        let revision = store.swap(swap(expect, value)).await.unwrap();
        let held = direct.get("/longreach/v1/c/x").await.unwrap();
        assert_eq!(
            held.as_ref().map(|held| held.value.clone()),
            value.map(|value| value.as_bytes().to_vec())
        );
        assert!(held.is_none_or(|held| held.revision == revision));
        revisions.push(revision.0);
        expect = Expect::At(revision);
    }
    // Each change was made once.
    assert!(revisions.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{revisions:?}");

    // What somebody else wrote is still a conflict.
    direct.swap(swap(Expect::Absent, Some("theirs"))).await.unwrap();
    let store = coordinator(endpoints.to_vec());
    relay.set(Line::Open);
    store.get("/longreach/v1/c/x").await.unwrap();
    relay.set(Line::NoAnswers);
    let refused = store.swap(swap(Expect::Absent, Some("ours"))).await;
    assert!(matches!(refused, Err(CoordinatorError::Conflict { current: Some(_), .. })), "{refused:?}");
}

#[tokio::test]
async fn dead_endpoints_cost_the_first_call_and_no_other() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let silent = Relay::start(&etcd.endpoints()[0], Line::Silent).await;
    let good = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let nobody = format!("http://127.0.0.1:{}", free_ports(1).unwrap()[0]);
    let store = coordinator(vec![nobody, silent.endpoint(), good.endpoint()]);
    let mut expect = Expect::Absent;
    for value in 0..100 {
        expect = Expect::At(store.swap(swap(expect, Some(&value.to_string()))).await.unwrap());
    }
    assert_eq!((silent.n_connections(), good.n_connections()), (1, 1));
}

#[tokio::test]
async fn every_call_ends_within_its_bound_while_nothing_answers() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let relay = Relay::start(&etcd.endpoints()[0], Line::Open).await;
    let request_timeout = Duration::from_secs(1);
    let config = EtcdConfig {
        endpoints: vec![relay.endpoint()],
        attempt_timeout: Duration::from_millis(400),
        request_timeout,
        ..EtcdConfig::default()
    };
    let store = EtcdCoordinator::new(config).unwrap();
    let keys = KeySpace::new("c").unwrap();
    let lease = store.grant_lease(Duration::from_secs(60)).await.unwrap();
    store.keep_alive(lease.id).await.unwrap();
    relay.set(Line::Silent);
    // Ten times the bound is for a busy machine; without a bound it would be for ever.
    async fn unavailable<T>(limit: Duration, call: impl Future<Output = Result<T, CoordinatorError>>) {
        let error = timeout(limit, call).await.unwrap().err().unwrap();
        assert!(matches!(error, CoordinatorError::Unavailable(_)), "{error}");
    }
    let limit = 10 * request_timeout;
    tokio::join!(
        unavailable(limit, store.grant_lease(Duration::from_secs(60))),
        unavailable(limit, store.keep_alive(lease.id)),
        unavailable(limit, store.swap(swap(Expect::Absent, Some("1")))),
        unavailable(limit, store.snapshot(keys.all())),
        unavailable(limit, store.get("/longreach/v1/c/x")),
        unavailable(limit, store.watch(keys.all(), longreach_cluster::Revision(1))),
    );
    unavailable(limit, store.revoke(lease.id)).await;
    // The link that was cut is not used again, and another one is good.
    relay.set(Line::Open);
    store.swap(swap(Expect::Absent, Some("1"))).await.unwrap();
}
