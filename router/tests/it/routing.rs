//! Which workers requests go to, and how the router learns of them.

use std::sync::Arc;

use longreach_cluster::{
    Coordinator, Expect, GroupId, Key, KeySpace, MemoryConfig, MemoryCoordinator, PrefillRegistration,
    ReadyRecord, Record, Swap,
};
use longreach_router::WorkerSource;
use longreach_types::{Epoch, Incarnation, WorkerId};
use serde_json::json;

use crate::support::{FakeDecode, FakePrefill, Handoffs, Plan, TestRouter, eventually, quick_config};

fn body(session: Option<usize>) -> serde_json::Value {
    let session = session.map(|session| format!("session {session}"));
    json!({"prompt": "hello", "max_tokens": 2, "session_id": session})
}

#[tokio::test]
async fn idle_workers_share_requests() {
    let one = FakeDecode::start(|_, _| Plan::default()).await;
    let other = FakeDecode::start(|_, _| Plan::default()).await;
    let router = TestRouter::start(&[&one, &other], &[]).await;
    for _ in 0..40 {
        assert_eq!(router.http.post_json("/v1/completions", &body(None)).await.status, 200);
    }
    let shares = (one.calls().len(), other.calls().len());
    assert!(shares.0 >= 5 && shares.1 >= 5, "{shares:?}");
}

/// Whether a worker is well is known at its first token: outputs that end here, at a stop string, never see another end.
#[tokio::test]
async fn a_worker_that_has_healed_gets_its_share_though_its_outputs_end_at_stop_strings() {
    let sick = |n_call| {
        if n_call < 2 {
            Plan { cut_after: Some(1), ..Plan::saying("abcdef") }
        } else {
            Plan::saying("abcdef")
        }
    };
    let healed = FakeDecode::start(move |n_call, _| sick(n_call)).await;
    let well = FakeDecode::start(|_, _| Plan::saying("abcdef")).await;
    let router = TestRouter::start(&[&healed, &well], &[]).await;
    let ask = async || {
        let body = json!({"prompt": "hello", "max_tokens": 6, "stop": ["c"]});
        assert_eq!(router.http.post_json("/v1/completions", &body).await.status, 200);
    };
    while healed.calls().len() < 2 {
        ask().await;
    }
    eventually("it is asked again after its pause", async || {
        ask().await;
        healed.calls().len() > 2
    })
    .await;
    let before = healed.calls().len();
    for _ in 0..40 {
        ask().await;
    }
    assert!(healed.calls().len() - before >= 5, "{} of 40", healed.calls().len() - before);
}

#[tokio::test]
async fn sessions_return_to_the_worker_that_has_their_kv() {
    let one = FakeDecode::start(|_, _| Plan::default()).await;
    let other = FakeDecode::start(|_, _| Plan::default()).await;
    let router = TestRouter::start(&[&one, &other], &[]).await;
    let mut homes = [0; 2];
    for session in 0..16 {
        let before = (one.calls().len(), other.calls().len());
        for _ in 0..4 {
            router.http.post_json("/v1/completions", &body(Some(session))).await;
        }
        let shares = [one.calls().len() - before.0, other.calls().len() - before.1];
        assert!(shares == [4, 0] || shares == [0, 4], "{shares:?}");
        homes[usize::from(shares[0] == 0)] += 1;
    }
    assert!(homes[0] > 0 && homes[1] > 0, "{homes:?}");
}

#[tokio::test]
async fn work_in_flight_weighs_before_any_worker_reports_it() {
    let hang = Plan { hang_after: Some(1), ..Plan::default() };
    let one = FakeDecode::start({
        let hang = hang.clone();
        move |_, _| hang.clone()
    })
    .await;
    let other = FakeDecode::start(move |_, _| hang.clone()).await;
    let router = TestRouter::start(&[&one, &other], &[]).await;
    let mut held = Vec::new();
    for _ in 0..10 {
        let stream = json!({"prompt": "x", "max_tokens": 50, "stream": true});
        let mut stream = router.http.open("/v1/completions", &stream).await;
        stream.next_event().await.unwrap();
        held.push(stream);
    }
    let shares = (one.n_open(), other.n_open());
    assert!(shares.0.abs_diff(shares.1) <= 2, "{shares:?}");
}

#[tokio::test]
async fn the_smaller_group_gets_no_request_that_it_cannot_hold() {
    let small = FakeDecode::start_sized(Arc::default(), 32, |_, _| Plan::default()).await;
    let large = FakeDecode::start(|_, _| Plan::default()).await;
    let router = TestRouter::start(&[&small, &large], &[]).await;
    for _ in 0..8 {
        let body = json!({"prompt": "x", "max_tokens": 40});
        assert_eq!(router.http.post_json("/v1/completions", &body).await.status, 200);
    }
    assert_eq!((small.calls().len(), large.calls().len()), (0, 8));
}

#[tokio::test]
async fn workers_of_the_cluster_come_and_go() {
    let coordinator: Arc<dyn Coordinator> = Arc::new(MemoryCoordinator::new(MemoryConfig::default()));
    let keys = KeySpace::new("test").unwrap();
    let source = WorkerSource::Cluster { coordinator: Arc::clone(&coordinator), keys: keys.clone() };
    let router = TestRouter::start_from(quick_config(), source).await;
    assert_eq!(router.http.get("/readyz").await.status, 503);

    let handoffs = Arc::new(Handoffs::default());
    let prefill = FakePrefill::start(Arc::clone(&handoffs), |_, _| Plan::default()).await;
    let decode = FakeDecode::start_with(handoffs, |_, _| Plan::default().split()).await;
    let registration = PrefillRegistration {
        id: WorkerId("p".to_owned()),
        incarnation: Incarnation(1),
        endpoint: prefill.uri(),
        layout_hash: String::new(),
    };
    let ready = ReadyRecord {
        epoch: Epoch(1),
        endpoint: decode.uri(),
        n_ranks: 2,
        dcp_size: 2,
        layout_hash: String::new(),
        max_seq_len: 0,
    };
    let put = async |key: Key, value: Option<Vec<u8>>, expect: Expect| {
        let swap = Swap { key: keys.encode(&key).unwrap(), expect, value, lease: None };
        coordinator.swap(swap).await.unwrap()
    };
    let group = || Key::Ready(GroupId("g".to_owned()));
    put(Key::Prefill(WorkerId("p".to_owned())), Some(registration.encode()), Expect::Absent).await;
    let at = put(group(), Some(ready.encode()), Expect::Absent).await;
    let works = async || router.http.post_json("/v1/completions", &body(None)).await.status == 200;
    eventually("a request succeeds", works).await;

    put(group(), None, Expect::At(at)).await;
    router_is_not_ready(&router).await;
    let next_life = ReadyRecord { epoch: Epoch(2), ..ready };
    put(group(), Some(next_life.encode()), Expect::Absent).await;
    eventually("the group's next life serves", works).await;
}

async fn router_is_not_ready(router: &TestRouter) {
    eventually("the router is not ready", async || router.http.get("/readyz").await.status == 503).await;
}
