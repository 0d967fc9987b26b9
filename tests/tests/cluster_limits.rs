//! What is too large is refused with its numbers, what is too much with a time to come back; nothing waits for ever.

use std::time::{Duration, Instant};

use futures::{
    StreamExt,
    future::{join_all, try_join_all},
};
use longreach_proto::worker::DecodeClient;
use longreach_tests::{
    cluster::{
        PATIENCE, TestCluster, ask::Ask, cluster_config, eventually, model::ServedModel, report, tiny_engine,
    },
    parts::Parts,
    tiny::Error,
};
use tonic::{Code, transport::Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

/// VAL-9: a request larger than all KV would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_larger_than_the_pool_is_refused_with_the_numbers() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(1, 1);
    // 16 blocks of 4 positions: 3 layers x 2 heads x 2 x 16 numbers x 4 bytes for each position.
    engine.kv_bytes = 16 * 4 * 768;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    assert_eq!(cluster.decode.info().max_seq_len, 64);
    for (prompt_len, max_tokens) in [(64, 1), (65, 1), (40, 25), (500, 4)] {
        let ask = Ask::tokens(vec![5; prompt_len]).max_tokens(max_tokens);
        let status = ask.output(&cluster).await.err().ok_or("it was not refused")?;
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        let message = status.message();
        assert!(message.contains("64") && message.contains(&prompt_len.to_string()), "{message}");
        let answer = cluster.http.post("/v1/completions", &ask.body()).await?;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json().await?["error"]["code"], "context_length_exceeded");
    }
    // The largest that fits is served, and all of them at once are, one after the other.
    let largest = Ask::tokens(vec![5; 40]).max_tokens(24);
    let outputs = tokio::time::timeout(PATIENCE, join_all((0..6).map(|_| largest.output(&cluster)))).await?;
    for output in outputs {
        assert_eq!(output?.tokens.len(), 24);
    }
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_says_so_at_once_and_when_to_come_back() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(1, 1);
    engine.sched.max_seqs = 1;
    engine.sched.max_waiting = 2;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let ask = Ask::tokens([1, 2, 3]).max_tokens(480);
    let mut running = ask.open(&cluster).await?;
    running.next().await.ok_or("no event")??;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (mut client, request) = (cluster.inference(), ask.stream_request());
        waiting.spawn(async move { client.generate_stream(request).await });
    }
    assert!(eventually(async || cluster.decode.info().stats.n_waiting == 2).await);
    let status = ask.output(&cluster).await.err().ok_or("the queue took a third")?;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    let pushback = status.metadata().get("grpc-retry-pushback-ms").ok_or("no pushback")?.to_str()?;
    assert!(pushback.parse::<u64>()? > 0);
    let answer = cluster.http.post("/v1/completions", &ask.body()).await?;
    assert_eq!(answer.status, 429);
    let retry_after = answer.headers.get("retry-after").ok_or("no retry-after")?;
    assert!(retry_after.parse::<u64>()? > 0);
    assert_eq!(answer.json().await?["error"]["type"], "rate_limit_error");
    drop(running);
    // Whoever waited is served, now that there is room.
    while let Some(opened) = waiting.join_next().await {
        let mut events = opened??.into_inner();
        assert!(events.next().await.ok_or("no event")?.is_ok());
    }
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_with_too_many_outputs_in_the_making_refuses_more() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let mut config = cluster_config(tiny_engine(1, 1));
    config.router.limits.max_choices = 2;
    config.router.limits.max_inflight = 2;
    let cluster = TestCluster::start(&model, config).await?;
    let mut ask = Ask::tokens([1, 2, 3]).max_tokens(480);
    ask.options.n = Some(2);
    let mut running = ask.open(&cluster).await?;
    running.next().await.ok_or("no event")??;
    let status = ask.output(&cluster).await.err().ok_or("a third was taken")?;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.metadata().get("grpc-retry-pushback-ms").is_some());
    drop(running);
    let served = async || Ask::tokens([1, 2, 3]).max_tokens(2).output(&cluster).await.is_ok();
    assert!(eventually(served).await);
    cluster.stop().await
}

/// NET-10: a router has one connection to a worker and as many calls on it as it has outputs there. However many stand
/// open on it, one more is answered; and calls that never end by themselves do not hold up the worker's end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_idle_streams_keep_out_no_call_and_hold_up_no_drain() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", None)?)?;
    let mut rank = parts.rank("a", 0, tiny_engine(1, 1)).await?;
    rank.serves().await?;
    let channel = Endpoint::from_shared(rank.endpoint.clone())?.connect().await?;
    let (health, decode) = (HealthClient::new(channel.clone()), DecodeClient::new(channel));
    let watch = async || {
        let mut stream = health.clone().watch(HealthCheckRequest::default()).await?.into_inner();
        stream.message().await?.ok_or("the watch ended")?;
        Ok::<_, Error>(stream)
    };
    let mut idle = Vec::new();
    for n_streams in [101, 1000, 10_000] {
        while idle.len() < n_streams {
            let batch = (n_streams - idle.len()).min(100);
            let opened = try_join_all((0..batch).map(|_| watch()));
            idle.extend(tokio::time::timeout(PATIENCE, opened).await??);
        }
        let start = Instant::now();
        let group = tokio::time::timeout(PATIENCE, decode.group()).await??;
        report(&format!("{n_streams} idle streams: another call is answered in {:?}", start.elapsed()));
        assert_eq!(group.group_id, "a");
    }
    let start = Instant::now();
    rank.part.drain().await?;
    report(&format!("{} idle streams: drained in {:?}", idle.len(), start.elapsed()));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    Ok(())
}
