//! How a router ends.

use std::time::Duration;

use longreach_service::DrainEnd;
use serde_json::json;

use crate::support::{Plan, eventually, simple};

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
