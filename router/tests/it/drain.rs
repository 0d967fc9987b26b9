//! How a router ends.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use longreach_service::DrainEnd;
use serde_json::json;

use crate::support::{FakeDecode, Plan, TestRouter, eventually, simple};

const MS: Duration = Duration::from_millis(1);

#[tokio::test]
async fn drain_is_not_ready_first_then_finishes_streams_in_flight() {
    let (router, _decode) = simple(Plan { pace: 10 * MS, ..Plan::default() }).await;
    let body = json!({"prompt": "x", "max_tokens": 40, "stream": true});
    let mut stream = router.http.open("/v1/completions", &body).await;
    stream.next_event().await.unwrap();
    let client = async {
        eventually("it is not ready", async || router.http.get("/readyz").await.status == 503).await;
        let short = json!({"prompt": "x", "max_tokens": 1});
        let answer = router.http.post_json("/v1/completions", &short).await;
        assert_eq!(answer.status, 200, "the notice is no refusal");
        let mut last = String::new();
        while let Some(event) = stream.next_event().await {
            last = event;
        }
        last
    };
    let (report, last) = tokio::join!(router.drain(150 * MS, 2000 * MS), client);
    assert_eq!(last, "[DONE]");
    assert_eq!((report.end, report.n_cut_off, report.n_stuck), (DrainEnd::Finished, 0, 0));
}

#[tokio::test]
async fn what_outlives_the_grace_ends_in_an_error_and_is_counted() {
    let (router, decode) = simple(Plan { hang_after: Some(1), ..Plan::default() }).await;
    let body = json!({"prompt": "x", "n": 2, "stream": true});
    let mut stream = router.http.open("/v1/completions", &body).await;
    stream.next_event().await.unwrap();
    let client = async {
        let mut last = String::new();
        while let Some(event) = stream.next_event().await {
            last = event;
        }
        last
    };
    let (report, last) = tokio::join!(router.drain(10 * MS, 50 * MS), client);
    assert!(last.contains("\"code\":\"unavailable\""), "{last}");
    assert_eq!((report.end, report.n_cut_off, report.n_stuck), (DrainEnd::GraceOver, 1, 0));
    eventually("the group is cancelled", async || decode.n_open() == 0).await;
}

#[tokio::test]
async fn an_idle_router_ends_at_once() {
    let (router, _decode) = simple(Plan::default()).await;
    let report = router.drain(Duration::ZERO, 5000 * MS).await;
    assert_eq!(report.end, DrainEnd::Finished);
    assert!(report.took < 1000 * MS, "took {:?}", report.took);
}

/// A rolling restart, as a balancer that heeds readiness sees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_drains_under_load_fails_no_request_of_a_client_that_heeds_readiness() {
    let decode = FakeDecode::start(|_, _| Plan { pace: MS, ..Plan::default() }).await;
    let leaving = TestRouter::start(&[&decode], &[]).await;
    let staying = TestRouter::start(&[&decode], &[]).await;
    let (is_ready, is_over) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..8 {
        let (is_ready, is_over, counts) = (Arc::clone(&is_ready), Arc::clone(&is_over), Arc::clone(&counts));
        let routers = [leaving.http, staying.http];
        clients.spawn(async move {
            let mut n_asked = client;
            while !is_over.load(Ordering::SeqCst) {
                n_asked += 1;
                let chosen = if is_ready.load(Ordering::SeqCst) { n_asked % 2 } else { 1 };
                let body = json!({"prompt": "x", "max_tokens": 20, "stream": n_asked % 3 == 0});
                let answer = routers[chosen].post_json("/v1/completions", &body).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert!(n_asked % 3 != 0 || answer.text().contains("[DONE]"), "{}", answer.text());
                counts[chosen].fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let watching = async {
        let http = leaving.http;
        eventually("it says that it is not ready", async || http.get("/readyz").await.status == 503).await;
        is_ready.store(false, Ordering::SeqCst);
    };
    eventually("both are used", async || counts.iter().all(|n| n.load(Ordering::SeqCst) > 20)).await;
    let (report, ()) = tokio::join!(leaving.drain(500 * MS, 5000 * MS), watching);
    let before = counts[1].load(Ordering::SeqCst);
    eventually("the other goes on", async || counts[1].load(Ordering::SeqCst) > before + 20).await;
    is_over.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    assert_eq!((report.end, report.n_cut_off, report.n_stuck), (DrainEnd::Finished, 0, 0));
}
