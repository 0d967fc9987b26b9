//! Many workers, many routers, two layouts, and a store that is away.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use longreach_types::KvDtype;
use serde_json::json;

use crate::support::{
    FakeDecode, FakePrefill, Handoffs, Plan, Registry, TestRouter, eventually, layout, quick_config,
};

const N_WORKERS: usize = 200;

fn body(max_tokens: usize) -> serde_json::Value {
    json!({"prompt": "hello", "max_tokens": max_tokens, "temperature": 0})
}

async fn works(router: &TestRouter) -> bool {
    router.http.post_json("/v1/completions", &body(2)).await.status == 200
}

/// A prefill worker and a group that hand over.
async fn hand_over() -> (FakePrefill, FakeDecode) {
    let handoffs = Arc::new(Handoffs::default());
    let prefill = FakePrefill::start(Arc::clone(&handoffs), |_, _| Plan::default()).await;
    let decode = FakeDecode::start_with(handoffs, |_, _| Plan::default().split()).await;
    (prefill, decode)
}

#[tokio::test]
async fn routers_that_share_only_the_store_send_a_session_to_one_home_and_keep_equal_names_apart() {
    let registry = Registry::new();
    let (one, other) =
        (FakeDecode::start(|_, _| Plan::default()).await, FakeDecode::start(|_, _| Plan::default()).await);
    registry.group("one", 1, one.uri(), "").await;
    registry.group("other", 1, other.uri(), "").await;
    let mut config = quick_config();
    config.workers.prefill_optional = true;
    let routers = [
        TestRouter::start_from(config.clone(), registry.source()).await,
        TestRouter::start_from(config, registry.source()).await,
    ];
    for router in &routers {
        router.wait_ready().await;
        let knows_both = async || router.metric("longreach_router_workers").await == 2.0;
        eventually("both groups are known", knows_both).await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut homes = [0; 2];
    for session in 0..12 {
        let before = [one.calls().len(), other.calls().len()];
        let body = json!({"prompt": "hello", "max_tokens": 3, "session_id": format!("session {session}"),
            "request_id": "the same", "seed": 5, "temperature": 1});
        let ask = |router: &TestRouter| {
            let (http, body) = (router.http, body.clone());
            async move { http.post_json("/v1/completions", &body).await.json()["choices"][0]["text"].clone() }
        };
        let (a, b) = tokio::join!(ask(&routers[0]), ask(&routers[1]));
        assert!(a.is_string() && a == b, "{a} {b}");
        let shares = [one.calls().len() - before[0], other.calls().len() - before[1]];
        assert!(shares == [2, 0] || shares == [0, 2], "{shares:?}");
        homes[usize::from(shares[0] == 0)] += 1;
    }
    assert!(homes[0] > 0 && homes[1] > 0, "{homes:?}");
    let calls = [one.calls(), other.calls()].concat();
    let mut names: Vec<_> = calls.iter().map(|call| call.request_id.0.clone()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), calls.len(), "workers see another name for each request");
}

#[tokio::test]
async fn only_workers_of_one_layout_are_paired_and_the_difference_is_counted() {
    let handoffs = Arc::new(Handoffs::default());
    let prefill = FakePrefill::start(Arc::clone(&handoffs), |_, _| Plan::default()).await;
    let old = FakeDecode::start_with(Arc::clone(&handoffs), |_, _| Plan::default().split()).await;
    let new = FakeDecode::start_with(Arc::clone(&handoffs), |_, _| Plan::default().split()).await;
    new.set_kv_dtype(KvDtype::F16);
    let registry = Registry::new();
    let words = |dtype| layout(dtype).to_string();
    registry.prefill("p", 1, prefill.uri(), &words(KvDtype::F32)).await;
    registry.group("old", 1, old.uri(), &words(KvDtype::F32)).await;
    let router = TestRouter::start_from(quick_config(), registry.source()).await;
    router.wait_ready().await;
    let mismatches = async || router.metric("longreach_router_layout_mismatches_total").await;
    assert_eq!(mismatches().await, 0.0);
    registry.group("new", 1, new.uri(), &words(KvDtype::F16)).await;
    eventually("the difference is counted", async || mismatches().await == 1.0).await;
    eventually("the new group is known", async || new.n_descriptions() > 1).await;
    for _ in 0..8 {
        assert!(works(&router).await, "a pair that fits is there");
    }
    assert_eq!(new.calls().len(), 0, "nobody can feed it");
    // The upgrade goes on.
    let other = FakePrefill::start(handoffs, |_, _| Plan::default()).await;
    other.set_kv_dtype(KvDtype::F16);
    registry.prefill("q", 1, other.uri(), &words(KvDtype::F16)).await;
    let is_used = async || works(&router).await && !new.calls().is_empty();
    eventually("the new pair is used", is_used).await;
    assert!(!other.calls().is_empty());
    assert!(mismatches().await <= 2.0, "each worker is reported once");
}

#[tokio::test]
async fn an_output_goes_on_only_where_its_tokens_would_be_the_same() {
    let cut = Plan { cut_after: Some(3), ..Plan::default() };
    let old = FakeDecode::start(move |n, _| if n == 0 { cut.clone() } else { Plan::default() }).await;
    let new = FakeDecode::start(|_, _| Plan::default()).await;
    let router = TestRouter::start(&[&old], &[]).await;
    let undisturbed = router.http.post_json("/v1/completions", &body(9)).await.json();
    assert_eq!(old.calls().len(), 2);
    new.set_kv_dtype(KvDtype::F16);
    let cut = Plan { cut_after: Some(3), ..Plan::default() };
    let again = FakeDecode::start(move |n, _| if n == 0 { cut.clone() } else { Plan::default() }).await;
    let router = TestRouter::start(&[&again, &new], &[]).await;
    // Some requests begin on the one, some on the other; none changes over.
    for _ in 0..20 {
        let answer = router.http.post_json("/v1/completions", &body(9)).await.json();
        assert_eq!(answer["choices"][0]["text"], undisturbed["choices"][0]["text"]);
    }
    assert!(again.calls().iter().any(|call| call.prompt.n_resumed == 3), "one was interrupted");
    assert!(new.calls().iter().all(|call| call.prompt.n_resumed == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_workers_that_flap_leave_nothing_behind() {
    let (prefill, decode) = hand_over().await;
    let registry = Registry::new();
    registry.group("g", 1, decode.uri(), "").await;
    registry.prefill("p-0", 1, prefill.uri(), "").await;
    let mut config = quick_config();
    config.workers.poll_interval = Duration::from_millis(400);
    config.workers.unlisted_grace = Duration::from_millis(100);
    let router = TestRouter::start_from(config, registry.source()).await;
    eventually("the pair works", async || works(&router).await).await;
    let n_tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let (tasks_before, rss_before, started) = (n_tasks(), rss_bytes(), Instant::now());
    let descriptions_before = prefill.n_descriptions();
    let name = |i: usize| format!("p-{i}");
    let known = async || router.metric("longreach_router_workers").await as usize;
    for i in 1..N_WORKERS {
        registry.prefill(&name(i), 1, prefill.uri(), "").await;
    }
    eventually("all are known", async || known().await == N_WORKERS + 1).await;
    for life in 2..12_u64 {
        for i in (1..N_WORKERS).filter(|i| (i + life as usize).is_multiple_of(3)) {
            registry.remove_prefill(&name(i)).await;
            registry.prefill(&name(i), life, prefill.uri(), "").await;
        }
        assert!(works(&router).await, "requests succeed all the while");
    }
    eventually("the view converges", async || known().await == N_WORKERS + 1).await;
    for i in 1..N_WORKERS {
        registry.remove_prefill(&name(i)).await;
    }
    eventually("all have left", async || known().await == 2).await;
    eventually("no task is left", async || n_tasks() <= tasks_before + 8).await;
    assert!(works(&router).await);
    let grown = rss_bytes().saturating_sub(rss_before);
    assert!(grown < 200 << 20, "memory grew by {} MiB", grown >> 20);
    // Each worker is asked when it comes and then at most once in four fifths of the interval.
    let rounds = started.elapsed().as_millis() as usize / 320 + 2;
    let n_descriptions = prefill.n_descriptions() - descriptions_before;
    let joins = N_WORKERS + 10 * N_WORKERS / 3;
    assert!(n_descriptions <= N_WORKERS * rounds + 2 * joins, "{n_descriptions} in {rounds} rounds");
}

#[tokio::test]
async fn a_store_that_is_away_stops_nothing_and_what_left_meanwhile_is_gone_afterwards() {
    let (prefill, decode) = hand_over().await;
    let stale = FakeDecode::start(|_, _| Plan::default()).await;
    let registry = Registry::new();
    registry.group("g", 1, decode.uri(), "").await;
    registry.group("stale", 1, stale.uri(), "").await;
    registry.prefill("p", 1, prefill.uri(), "").await;
    let router = TestRouter::start_from(quick_config(), registry.source()).await;
    let known = async || router.metric("longreach_router_workers").await as usize;
    eventually("all are known", async || known().await == 3).await;
    router.wait_ready().await;
    registry.store.set_available(false);
    stale.kill();
    for _ in 0..20 {
        assert!(works(&router).await);
    }
    assert_eq!(router.http.get("/readyz").await.status, 200, "it serves, and says so");
    registry.store.set_available(true);
    registry.remove_group("stale").await;
    eventually("the stale group is gone", async || known().await == 2).await;
    assert!(works(&router).await);
}

#[tokio::test]
async fn readiness_names_the_kind_of_worker_that_is_missing() {
    let (prefill, decode) = hand_over().await;
    let registry = Registry::new();
    let router = TestRouter::start_from(quick_config(), registry.source()).await;
    let says = async |what: &str| {
        eventually(what, async || router.http.get("/readyz").await.text().contains(what)).await;
    };
    says("a decode group").await;
    registry.group("g", 1, decode.uri(), "").await;
    says("a prefill worker").await;
    assert_eq!(router.http.get("/readyz").await.status, 503);
    registry.prefill("p", 1, prefill.uri(), "").await;
    router.wait_ready().await;
    decode.kill();
    says("a decode group").await;
}

/// Memory of this process.
fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let n_pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    n_pages * 4096
}
