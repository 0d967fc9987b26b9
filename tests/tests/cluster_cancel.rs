//! A client that goes away frees both sides at once, wherever its request is.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use futures::StreamExt;
use longreach_engine::{EngineHandle, EngineInfo};
use longreach_proto::inference::generate_stream_response::Event;
use longreach_tests::{
    cluster::{PATIENCE, TestCluster, ask::Ask, cluster_config, model::ServedModel, report, tiny_engine},
    parts::Parts,
    tiny::Error,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// How soon both sides must be at rest when the client has gone. A loose bound: machines that run tests are busy.
const PROMPT: Duration = Duration::from_secs(1);

/// A cluster whose prompts take many steps, so that there is time to go away in the middle of one.
async fn slow_prompts() -> Result<TestCluster, Error> {
    let model = ServedModel::golden("llama", Some(8192))?;
    let mut engine = tiny_engine(2, 2);
    engine.kv_bytes = 8 << 20;
    engine.sched.max_chunk_len = 64;
    TestCluster::start(&model, cluster_config(engine)).await
}

fn long_prompt(n_tokens: u32) -> Ask {
    Ask::tokens((0..n_tokens).map(|i| i * 13 % 251).collect::<Vec<_>>()).max_tokens(400)
}

/// Asks for `ask` and listens, until it is dropped.
fn listen(cluster: &TestCluster, ask: &Ask) -> impl Future<Output = Result<(), tonic::Status>> + use<> {
    let (mut client, request) = (cluster.inference(), ask.stream_request());
    async move {
        let mut events = client.generate_stream(request).await?.into_inner();
        while let Some(event) = events.next().await {
            event?;
        }
        Ok(())
    }
}

/// Waits until `engine` is in the state of `condition`.
async fn until(engine: &EngineHandle, condition: impl FnMut(&EngineInfo) -> bool) -> Result<(), Error> {
    assert!(tokio::time::timeout(PATIENCE, engine.wait_for(condition)).await?);
    Ok(())
}

/// Checks that both sides come to rest soon after `stage`, at which the client has just gone.
async fn assert_freed(cluster: &TestCluster, stage: &str) -> Result<(), Error> {
    let took = cluster.wait_idle().await;
    report(&format!("client gone {stage}: both sides at rest after {took:?}"));
    assert!(took < PROMPT, "{stage}: {took:?}");
    cluster.assert_pools_whole().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_frees_both_sides_at_every_stage() -> Result<(), Error> {
    let cluster = slow_prompts().await?;
    let ask = long_prompt(2500);

    // While the prompt is computed, and its KV sent.
    let mut call = tokio::task::JoinSet::new();
    call.spawn(listen(&cluster, &ask));
    until(&cluster.decode, |info| info.stats.n_receiving == 1).await?;
    until(&cluster.prefills[0], |info| info.stats.n_running == 1 && info.stats.pending_tokens < 2000).await?;
    call.abort_all();
    assert_freed(&cluster, "while its prompt is computed").await?;

    // Between the first token, which the prefill worker says, and the others: whatever the hand-off is at.
    let mut events = ask.open(&cluster).await?;
    while let Some(event) = events.next().await {
        if matches!(event?.event, Some(Event::Delta(_))) {
            break;
        }
    }
    drop(events);
    assert_freed(&cluster, "at its first token").await?;

    // While it decodes.
    let mut events = ask.open(&cluster).await?;
    let mut n_deltas = 0;
    while let Some(event) = events.next().await {
        n_deltas += usize::from(matches!(event?.event, Some(Event::Delta(_))));
        if n_deltas == 20 {
            break;
        }
    }
    drop(events);
    assert_freed(&cluster, "while it decodes").await?;

    // The same over HTTP, where going away is a closed connection.
    let mut body = ask.body();
    body["stream"] = true.into();
    let mut answer = cluster.http.post("/v1/completions", &body).await?;
    for _ in 0..5 {
        answer.event().await?;
    }
    drop(answer);
    assert_freed(&cluster, "over HTTP").await?;
    let mut call = tokio::task::JoinSet::new();
    let (http, body) = (cluster.http, ask.body());
    call.spawn(async move { http.post("/v1/completions", &body).await.map(drop) });
    until(&cluster.decode, |info| info.stats.n_receiving == 1).await?;
    call.abort_all();
    assert_freed(&cluster, "over HTTP, before there was an answer").await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_while_it_queues_leaves_the_queue() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(1, 1);
    engine.sched.max_seqs = 1;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let running = Ask::tokens([1, 2, 3]).max_tokens(400);
    let mut first = running.open(&cluster).await?;
    first.next().await.ok_or("no event")??;
    let mut waiting = tokio::task::JoinSet::new();
    waiting.spawn(listen(&cluster, &running));
    until(&cluster.decode, |info| info.stats.n_waiting == 1).await?;
    let start = Instant::now();
    waiting.abort_all();
    until(&cluster.decode, |info| info.stats.n_waiting == 0).await?;
    report(&format!("client gone while it queues: out of the queue after {:?}", start.elapsed()));
    assert!(start.elapsed() < PROMPT);
    drop(first);
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// What a peer needs eleven seconds for: the request behind ten that were cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_cancelled_requests_free_both_sides_and_hold_nobody_up() -> Result<(), Error> {
    let cluster = slow_prompts().await?;
    let (ask, short) = (long_prompt(2500), Ask::tokens([1, 2, 3]).max_tokens(2));
    let first_token = async || {
        let start = Instant::now();
        let mut events = short.open(&cluster).await?;
        while let Some(event) = events.next().await {
            if matches!(event?.event, Some(Event::Delta(_))) {
                break;
            }
        }
        Ok::<_, Error>(start.elapsed())
    };
    let alone = first_token().await?;
    let (mut rests, mut behind) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..10 {
            calls.spawn(listen(&cluster, &ask));
        }
        until(&cluster.decode, |info| info.stats.n_receiving > 0).await?;
        until(&cluster.prefills[0], |info| info.stats.n_running > 0).await?;
        calls.shutdown().await;
        behind.push(first_token().await?);
        rests.push(cluster.wait_idle().await);
        cluster.assert_pools_whole().await?;
    }
    report(&format!(
        "behind ten cancelled: first token after {behind:?}, alone {alone:?}; at rest after {rests:?}"
    ));
    // The machine that runs this is busy with other tests: the best of three says what the system can.
    let best = |times: &[Duration]| times.iter().min().copied().unwrap_or_default();
    assert!(best(&behind) < alone + Duration::from_millis(500), "{behind:?} behind, {alone:?} alone");
    assert!(best(&rests) < Duration::from_millis(100), "{rests:?}");
    cluster.stop().await
}

/// A frame of HTTP/2 on `stream`.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Calls `path` many times and gives all of it up, in one packet, so that the server hears of the end of a call before it
/// has begun with it. Whether the connection is still there after that.
async fn survives_a_burst(addr: SocketAddr, path: &str) -> Result<bool, Error> {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const GOAWAY: u8 = 7;
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let host = addr.to_string();
    // POST, http, then :path, :authority, content-type and te as literals.
    let fields = [
        vec![0x83, 0x86, 0x04],
        text(path),
        vec![0x01],
        text(&host),
        vec![0x0f, 0x10],
        text("application/grpc"),
        vec![0x00],
        text("te"),
        text("trailers"),
    ]
    .concat();
    let mut packet = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    packet.extend(frame(SETTINGS, 0, 0, &[]));
    for call in 0..100 {
        packet.extend(frame(HEADERS, 4, 2 * call + 1, &fields));
        packet.extend(frame(RST_STREAM, 0, 2 * call + 1, &8_u32.to_be_bytes()));
    }
    packet.extend(frame(PING, 0, 0, &[7; 8]));
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(&packet).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await?;
        match (head[3], head[4]) {
            (PING, 1) if payload == [7; 8] => return Ok(true),
            (GOAWAY, _) => return Ok(false),
            _ => {}
        }
    }
}

/// All clients behind a proxy, or all of a router, share a connection to whom they call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_given_up_at_once_do_not_end_the_connection_of_the_others() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let cluster = TestCluster::start(&model, cluster_config(tiny_engine(1, 1))).await?;
    let generate = "/longreach.inference.v1.InferenceService/GenerateStream";
    for (addr, path) in [(cluster.grpc_addr, generate), (cluster.http_addr, "/v1/completions")] {
        assert!(survives_a_burst(addr, path).await?, "the router ended the connection at {addr}, {path}");
    }
    cluster.stop().await?;
    let parts = Parts::new(model)?;
    let mut rank = parts.rank("a", 0, tiny_engine(1, 1)).await?;
    rank.serves().await?;
    let addr = rank.endpoint.trim_start_matches("http://").parse()?;
    let generate = "/longreach.worker.v1.DecodeService/Generate";
    assert!(survives_a_burst(addr, generate).await?, "the worker ended the connection");
    rank.part.drain().await
}
