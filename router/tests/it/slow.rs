//! Clients that read slowly, or not at all.

use std::{sync::Arc, time::Duration};

use longreach_proto::inference::{
    GenerateOptions, GenerateStreamRequest, GenerateStreamResponse, Prompt,
    inference_service_client::InferenceServiceClient, prompt,
};
use tonic::{Code, Streaming, transport::Channel};

use crate::support::{FakeDecode, Plan, TestRouter, eventually, quick_config};

const N_CLIENTS: usize = 200;
const STALL: Duration = Duration::from_secs(4);

fn endless() -> GenerateStreamRequest {
    let options =
        GenerateOptions { max_tokens: Some(500_000), top_logprobs: Some(20), ..GenerateOptions::default() };
    GenerateStreamRequest {
        prompt: Some(Prompt { prompt: Some(prompt::Prompt::Text("prompt".to_owned())) }),
        options: Some(options),
        ..GenerateStreamRequest::default()
    }
}

async fn open(channel: &Channel) -> Streaming<GenerateStreamResponse> {
    let mut client = InferenceServiceClient::new(channel.clone());
    let mut events = client.generate_stream(endless()).await.unwrap().into_inner();
    events.message().await.unwrap().unwrap();
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_do_not_read_hold_little_slow_nobody_and_are_ended() {
    let decode = FakeDecode::start_sized(Arc::default(), 1_000_000, |_, _| Plan::default()).await;
    let mut config = quick_config();
    config.streams.stall_timeout = STALL;
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let narrow = router.narrow_channel().await;
    let mut silent = Vec::new();
    for _ in 0..N_CLIENTS {
        silent.push(open(&narrow).await);
    }
    // One that reads slowly, and asks for less than its window holds at a time.
    let mut slow = open(&narrow).await;
    let mut readers = tokio::task::JoinSet::new();
    readers.spawn(async move {
        for _ in 0..400 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            slow.message().await.unwrap().unwrap();
        }
    });
    // Buffers fill, and then nothing more is taken from the workers for them.
    let mut before = 0;
    eventually("the workers are held back", async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let n_said = decode.n_said();
        let grown = n_said - std::mem::replace(&mut before, n_said);
        grown < 200
    })
    .await;
    assert!(before < N_CLIENTS * 2000, "{before} tokens were taken for clients that do not read");
    for _ in 0..5 {
        let body = serde_json::json!({"prompt": "x", "max_tokens": 50});
        let asking = router.http.post_json("/v1/completions", &body);
        assert_eq!(tokio::time::timeout(Duration::from_secs(5), asking).await.unwrap().status, 200);
    }
    eventually("those that do not read are ended", async || decode.n_open() <= 1).await;
    readers.join_next().await.unwrap().unwrap();
    // The slow one may have been the first to go.
    eventually("each of them is counted", async || {
        router.metric("longreach_router_stalled_streams_total").await == N_CLIENTS as f64
    })
    .await;
    let mut late = silent.pop().unwrap();
    let status = loop {
        match late.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a stream that was ended is no answer"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Cancelled);
    assert!(status.message().contains("nothing was read for 4000 ms"), "{}", status.message());
}
