//! Decode groups whose ranks are processes: they find each other, form, and replace each other under load.

use std::net::TcpListener;

use futures::StreamExt;
use longreach_cluster::{Coordinator, Expect, GroupId, Key, KeySpace, ReadyRecord, Record, Swap};
use longreach_engine::EngineConfig;
use longreach_tests::{
    cluster::{
        ask::{Ask, Output},
        eventually,
        model::ServedModel,
        tiny_engine,
    },
    parts::{CLUSTER_NAME, Parts, RouterPart},
    tiny::Error,
};
use longreach_types::KvDtype;
use tokio::task::JoinSet;
use tonic_health::pb::health_check_response::ServingStatus;

const N_TOKENS: u32 = 1000;

fn asks() -> impl Iterator<Item = Ask> {
    (0..8_u32).map(|i| {
        let prompt: Vec<u32> = (0..10 + 40 * i).map(|j| (5 * i + j) % 250).collect();
        let ask = Ask::tokens(prompt).max_tokens(N_TOKENS);
        if i.is_multiple_of(2) { ask } else { ask.sampled(u64::from(i)) }
    })
}

/// Outputs of all requests, begun at once. `begun` resolves when each has given a token.
async fn outputs(router: &RouterPart, begun: &tokio::sync::Barrier) -> Result<Vec<Output>, Error> {
    let mut running = JoinSet::new();
    for (i, ask) in asks().enumerate() {
        let mut client = router.inference();
        running.spawn(async move {
            let mut events = client.generate_stream(ask.stream_request()).await?.into_inner();
            let mut output = Output::default();
            while output.tokens.is_empty() {
                output.take(events.next().await.ok_or_else(|| tonic::Status::internal("no token"))??);
            }
            Ok::<_, tonic::Status>((i, output, events))
        });
    }
    let mut streams = Vec::new();
    while let Some(stream) = running.join_next().await {
        streams.push(stream??);
    }
    begun.wait().await;
    streams.sort_by_key(|(i, ..)| *i);
    let mut outputs = Vec::new();
    for (_, mut output, mut events) in streams {
        while let Some(event) = events.next().await {
            output.take(event?);
        }
        assert!(output.finish.is_some());
        outputs.push(output);
    }
    Ok(outputs)
}

async fn undisturbed(router: &RouterPart) -> Result<Vec<Output>, Error> {
    outputs(router, &tokio::sync::Barrier::new(1)).await
}

fn tokens(outputs: Vec<Output>) -> Vec<Vec<u32>> {
    outputs.into_iter().map(|output| output.tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_drain_hand_their_streams_over_and_their_group_forms_again() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", Some(8192))?)?;
    let mut engine = tiny_engine(2, 2);
    engine.kv_bytes = 16 << 20;
    let router = parts.router().await?;
    let prefill = parts.prefill("p0", engine.clone()).await?;
    let mut a = [parts.rank("a", 0, engine.clone()).await?, parts.rank("a", 1, engine.clone()).await?];
    let b = [parts.rank("b", 0, engine.clone()).await?, parts.rank("b", 1, engine.clone()).await?];
    for rank in &mut a {
        rank.serves().await?;
    }
    assert!(eventually(async || undisturbed(&router).await.is_ok()).await, "no answer");
    let wanted = tokens(undisturbed(&router).await?);
    let [mut a0, a1] = a;
    let first_epoch = a0.life.borrow().as_ref().map(|engine| engine.info().epoch);

    // A follower leaves in the middle, then comes back; then the leader of the other group leaves.
    let begun = tokio::sync::Barrier::new(2);
    let replaced = async {
        begun.wait().await;
        a1.part.drain().await?;
        let mut a1 = parts.rank("a", 1, engine.clone()).await?;
        a1.serves().await?;
        a0.serves().await?;
        let [b0, b1] = b;
        b0.part.drain().await?;
        Ok::<_, Error>((a1, b1))
    };
    let (got, replaced) = tokio::join!(outputs(&router, &begun), replaced);
    assert_eq!(tokens(got?), wanted);
    let (a1, b1) = replaced?;
    assert!(router.metric("longreach_router_resumed_streams_total").await? >= 1.0, "nothing was handed over");
    let epoch = a0.life.borrow().as_ref().map(|engine| engine.info().epoch);
    assert!(epoch > first_epoch, "{epoch:?} after {first_epoch:?}");

    for part in [router.part, a1.part, a0.part, b1.part, prefill] {
        part.drain().await?;
    }
    Ok(())
}

/// Another group is no use if it is too small for what this one has, or if it died a moment ago and the store does not know
/// it yet: what cannot go on elsewhere is finished here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_drains_keeps_what_no_other_can_take() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", Some(8192))?)?;
    let mut engine = tiny_engine(1, 1);
    engine.kv_bytes = 16 << 20;
    let small = EngineConfig { max_seq_len: Some(200), ..engine.clone() };
    let router = parts.router().await?;
    let prefill = parts.prefill("p0", engine.clone()).await?;
    let mut a = parts.rank("a", 0, engine).await?;
    a.serves().await?;
    assert!(eventually(async || undisturbed(&router).await.is_ok()).await, "no answer");
    let wanted = tokens(undisturbed(&router).await?);

    let mut b = parts.rank("b", 0, small).await?;
    b.serves().await?;
    assert!(eventually(async || matches!(b.health().await, Ok(ServingStatus::Serving))).await);
    let key = |group: &str| KeySpace::new(CLUSTER_NAME)?.encode(&Key::Ready(GroupId(group.to_owned())));
    let alive = parts.store.get(&key("a")?).await?.ok_or("a group that serves is not in the store")?;
    // A port of which nobody answers.
    let nobody = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let dead = ReadyRecord { endpoint: format!("http://{nobody}"), ..ReadyRecord::decode(&alive.value)? };
    let (value, expect) = (Some(dead.encode()), Expect::Absent);
    parts.store.swap(Swap { key: key("dead")?, expect, value, lease: None }).await?;

    let begun = tokio::sync::Barrier::new(2);
    let drained = async {
        begun.wait().await;
        a.part.drain().await
    };
    let (got, drained) = tokio::join!(outputs(&router, &begun), drained);
    assert_eq!(tokens(got?), wanted);
    drained?;
    assert_eq!(router.metric("longreach_router_interrupted_streams_total").await?, 0.0);
    for part in [router.part, b.part, prefill] {
        part.drain().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_does_not_fit_is_kept_out_until_one_does() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", Some(512))?)?;
    let engine = tiny_engine(2, 2);
    let mut other = engine.clone();
    other.kv_dtype = KvDtype::F16;
    let mut leader = parts.rank("a", 0, engine.clone()).await?;
    let misfit = parts.rank("a", 1, other).await?;
    // The misfit comes and goes without a life.
    misfit.part.drain().await?;
    assert!(leader.life.borrow().is_none());
    assert_eq!(leader.health().await?, ServingStatus::NotServing);
    let fit = parts.rank("a", 1, engine).await?;
    leader.serves().await?;
    for rank in [&leader, &fit] {
        assert!(eventually(async || matches!(rank.health().await, Ok(ServingStatus::Serving))).await);
    }
    for part in [fit.part, leader.part] {
        part.drain().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_processes_with_one_name_the_older_ends_and_says_why() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", Some(512))?)?;
    let engine = tiny_engine(1, 1);
    let mut older = parts.rank("a", 0, engine.clone()).await?;
    older.serves().await?;
    let mut newer = parts.rank("a", 0, engine).await?;
    let error = older.part.ended().await?.err().ok_or("the older of two went on")?;
    assert!(error.contains("another process took"), "{error}");
    newer.serves().await?;
    newer.part.drain().await
}
