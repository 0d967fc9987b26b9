//! A decode group whose epoch ends forms again by itself, and its streams go on where they were.

use longreach_engine::EngineHandle;
use longreach_tests::{
    cluster::{
        PATIENCE, TestCluster,
        ask::{Ask, Output},
        cluster_config,
        model::ServedModel,
        tiny_engine,
    },
    tiny::Error,
};
use tokio::{sync::watch, task::JoinSet};

/// Long enough that every epoch of the test ends in the middle.
const N_TOKENS: u32 = 1200;

/// Greedy and seeded, with and without a hand-off of many blocks.
fn asks() -> Vec<Ask> {
    let prompt = |i: u32| (0..20 + 90 * i).map(|j| (7 * i + j) % 250).collect::<Vec<_>>();
    let ask = |i: u32| {
        let ask = Ask::tokens(prompt(i)).max_tokens(N_TOKENS);
        if i.is_multiple_of(2) { ask } else { ask.sampled(u64::from(i)) }
    };
    (0..6).map(ask).collect()
}

async fn engine_after(
    life: &mut watch::Receiver<Option<EngineHandle>>,
    epoch: u64,
) -> Result<EngineHandle, Error> {
    let is_later = |life: &Option<EngineHandle>| life.as_ref().is_some_and(|it| it.info().epoch.0 > epoch);
    let later = tokio::time::timeout(PATIENCE, life.wait_for(is_later)).await??;
    Ok(later.clone().ok_or("no life")?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_the_epochs_of_their_group() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(8192))?;
    let mut engine = tiny_engine(2, 2);
    engine.kv_bytes = 32 << 20;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let mut undisturbed = Vec::new();
    for ask in asks() {
        undisturbed.push(ask.output_tokens(&cluster).await?);
    }
    let mut running = JoinSet::new();
    for (i, ask) in asks().into_iter().enumerate() {
        let mut client = cluster.lone_inference()?;
        running.spawn(async move {
            let events = client.generate_stream(ask.stream_request()).await?.into_inner();
            Ok::<_, tonic::Status>((i, events))
        });
    }
    let mut streams = Vec::new();
    while let Some(opened) = running.join_next().await {
        streams.push(opened??);
    }
    let mut life = cluster.life.clone();
    for _ in 0..2 {
        let engine = life.borrow().clone().ok_or("no life")?;
        // In the middle of decoding, as far as can be known from here.
        assert!(engine.wait_for(|info| info.stats.n_running > 0).await);
        let epoch = engine.info().epoch.0;
        engine.stop().await;
        engine_after(&mut life, epoch).await?;
    }
    for (i, stream) in streams {
        let output = Output::of(stream).await?;
        assert_eq!(output.tokens, undisturbed[i], "stream {i}");
        assert!(output.finish.is_some());
    }
    cluster.stop().await
}
