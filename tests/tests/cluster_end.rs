//! How streams end when parts of the cluster do: finished within the grace, or with an error that says what happened.
//! Never with what looks like the end of an output.

use std::{
    error::Error as _,
    time::{Duration, Instant},
};

use futures::StreamExt;
use longreach_proto::inference::GenerateStreamResponse;
use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output, is_length},
        cluster_config,
        model::ServedModel,
        report, tiny_engine,
    },
    tiny::Error,
};
use tonic::{Code, Status, Streaming};

/// Opens `n` streams, and reads the first token of each.
async fn streams(
    cluster: &TestCluster,
    n: u32,
    n_tokens: u32,
) -> Result<Vec<(Output, Streaming<GenerateStreamResponse>)>, Error> {
    let mut streams = Vec::new();
    for i in 0..n {
        let ask = Ask::tokens(vec![i + 1; 20]).max_tokens(n_tokens);
        let (mut output, mut events) = (Output::default(), ask.open(cluster).await?);
        while output.tokens.is_empty() {
            output.take(events.next().await.ok_or("a stream ended without a token")??);
        }
        streams.push((output, events));
    }
    Ok(streams)
}

/// Reads a stream to its end.
async fn finish(
    (mut output, mut events): (Output, Streaming<GenerateStreamResponse>),
) -> (Output, Option<Status>) {
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => output.take(event),
            Err(status) => return (output, Some(status)),
        }
    }
    (output, None)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_finishes_streams_and_takes_no_new_ones() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let cluster = TestCluster::start(&model, cluster_config(tiny_engine(2, 2))).await?;
    let streams = streams(&cluster, 4, 450).await?;
    let mut late = cluster.lone_inference()?;
    // Its connection is there before the end begins.
    late.generate(Ask::tokens([1]).max_tokens(1).request()).await?;
    let start = Instant::now();
    cluster.begin_shutdown();
    let refused = loop {
        match late.generate(Ask::tokens([1]).max_tokens(1).request()).await {
            // The client's own word for a connection that was closed before the call was sent on it.
            Err(status) if status.code() == Code::Cancelled && status.source().is_some() => {}
            Err(status) => break status,
            Ok(_) => {}
        }
    };
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    for stream in streams {
        let (output, error) = finish(stream).await;
        assert!(error.is_none(), "{error:?}");
        assert!(is_length(&output.finish) && output.tokens.len() == 450, "{:?}", output.finish);
    }
    cluster.ended().await??;
    report(&format!("drained with 4 streams in flight in {:?}", start.elapsed()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_outlast_the_grace_end_with_an_error() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(16384))?;
    let mut engine = tiny_engine(1, 1);
    engine.kv_bytes = 32 << 20;
    let mut config = cluster_config(engine);
    config.router.serving.drain_grace = Duration::from_millis(100);
    let cluster = TestCluster::start(&model, config).await?;
    let streams = streams(&cluster, 2, 16_000).await?;
    cluster.begin_shutdown();
    for stream in streams {
        let (output, error) = finish(stream).await;
        let status = error.ok_or("a stream that was cut off looks finished")?;
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(output.finish.is_none());
    }
    cluster.ended().await??;
    Ok(())
}

/// A prefill worker whose engine has ended is gone for good: its process is to be started again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_engine_that_stops_ends_its_requests_with_an_error() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(8192))?;
    let mut engine = tiny_engine(2, 2);
    engine.kv_bytes = 16 << 20;
    engine.sched.max_chunk_len = 64;
    let mut config = cluster_config(engine);
    config.router.recovery.recovery_window = Duration::from_secs(1);
    let cluster = TestCluster::start(&model, config).await?;
    let prompt: Vec<u32> = (0..7000).map(|i| i % 251).collect();
    let (mut client, request) = (cluster.inference(), Ask::tokens(prompt).stream_request());
    let mut computing = tokio::task::JoinSet::new();
    computing.spawn(async move {
        let events = client.generate_stream(request).await?.into_inner();
        let (output, error) = finish((Output::default(), events)).await;
        assert!(output.finish.is_none());
        error.map_or(Ok(()), Err)
    });
    assert!(cluster.prefills[0].wait_for(|info| info.stats.n_running == 1).await);
    cluster.prefills[0].stop().await;
    let computed = computing.join_next().await.ok_or("no task")??;
    let status = computed.err().ok_or("a prompt that was lost looks answered")?;
    assert!(matches!(status.code(), Code::Unavailable | Code::Aborted), "{status:?}");
    drop(cluster);
    Ok(())
}
