//! Clients that read slowly, or not at all.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach_proto::inference::{
    GenerateOptions, GenerateStreamRequest, GenerateStreamResponse, Prompt,
    inference_service_client::InferenceServiceClient, prompt,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};
use tonic::{Code, Streaming, transport::Channel};

use crate::support::{FakeDecode, Plan, TestRouter, eventually, quick_config};

const N_CLIENTS: usize = 50;
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
    // At a pace, so that a connection that has sent what was there waits for the next token before it finds that it cannot
    // send it.
    let plan = Plan { pace: Duration::from_millis(1), ..Plan::default() };
    let decode = FakeDecode::start_sized(Arc::default(), 1_000_000, move |_, _| plan.clone()).await;
    let mut config = quick_config();
    config.streams.stall_timeout = STALL;
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let narrow = router.narrow_channel().await;
    let mut silent = Vec::new();
    for _ in 0..N_CLIENTS {
        silent.push(open(&narrow).await);
    }
    // One that reads slowly. Its window is wanted again long before the limit, on a busy machine too.
    let mut slow = open(&narrow).await;
    let mut readers = tokio::task::JoinSet::new();
    readers.spawn(async move {
        for _ in 0..1600 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            slow.message().await.unwrap().unwrap();
        }
    });
    // Buffers fill, and then nothing more is taken from the workers for them.
    let mut before = 0;
    eventually("the workers are held back", async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let n_said = decode.n_said();
        let grown = n_said - std::mem::replace(&mut before, n_said);
        grown < N_CLIENTS
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

/// A client of the OpenAI face that reads the start of its answer and then nothing, through a small window.
async fn stalled_sse(addr: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut stream = socket.connect(addr).await.unwrap();
    let body = serde_json::json!({"prompt": "x", "max_tokens": 500_000, "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {addr}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let mut start = [0; 512];
    stream.read_exact(&mut start).await.unwrap();
    assert!(start.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&start));
    stream
}

/// The same over HTTP, where an answer is a body that a connection carries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_streams_that_nobody_reads_hold_little_slow_nobody_and_are_ended() {
    const N_STALLED: usize = 20;
    const STALL: Duration = Duration::from_secs(1);
    let decode = FakeDecode::start_sized(Arc::default(), 1_000_000, |_, _| Plan::default()).await;
    let mut config = quick_config();
    config.streams.stall_timeout = STALL;
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let mut silent = Vec::new();
    for _ in 0..N_STALLED {
        silent.push(stalled_sse(router.http.addr).await);
    }
    let mut before = 0;
    eventually("the workers are held back", async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let n_said = decode.n_said();
        n_said - std::mem::replace(&mut before, n_said) < 50
    })
    .await;
    // What the system's buffers hold, and no more.
    assert!(before < N_STALLED * 100_000, "{before} tokens were taken for clients that do not read");
    let body = serde_json::json!({"prompt": "x", "max_tokens": 50});
    let asking = router.http.post_json("/v1/completions", &body);
    assert_eq!(tokio::time::timeout(Duration::from_secs(5), asking).await.unwrap().status, 200);
    eventually("those that do not read are ended", async || {
        decode.n_open() == 0
            && router.metric("longreach_router_stalled_streams_total").await == N_STALLED as f64
    })
    .await;
    // What was said before waits in the connection, until that is ended too: the system refuses what is sent to it.
    eventually("their connections are ended", async || {
        silent.retain(|stream| stream.try_write(b" ").is_ok());
        silent.is_empty()
    })
    .await;
}
