//! Trouble with the cluster's store is no trouble for requests.

use std::time::Duration;

use longreach_cluster::{Coordinator, KeySpace};
use longreach_tests::{
    cluster::{
        ask::{Ask, Output},
        eventually,
        model::ServedModel,
        tiny_engine,
    },
    parts::{Parts, RouterPart},
    tiny::Error,
};

async fn answer(router: &RouterPart) -> Result<Output, tonic::Status> {
    let ask = Ask::tokens((0..60).collect::<Vec<u32>>()).max_tokens(8);
    Output::of(router.inference().generate_stream(ask.stream_request()).await?.into_inner()).await
}

async fn n_registered(parts: &Parts) -> Result<usize, Error> {
    Ok(parts.store.snapshot(KeySpace::new("parts")?.all()).await?.entries.len())
}

/// Asks again and again while `trouble` lasts. Every answer must be there and be the same.
async fn asked_during(router: &RouterPart, wanted: &Output, trouble: impl Future<Output = ()>) {
    let asking = async {
        loop {
            let got = answer(router).await.map(|output| output.tokens);
            assert!(matches!(&got, Ok(tokens) if *tokens == wanted.tokens), "a request failed: {got:?}");
        }
    };
    tokio::select! {
        () = asking => {}
        () = trouble => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_or_forgets_everybody_fails_no_request() -> Result<(), Error> {
    let parts = Parts::new(ServedModel::golden("llama", Some(512))?)?;
    let engine = tiny_engine(1, 1);
    let router = parts.router().await?;
    let prefill = parts.prefill("p0", engine.clone()).await?;
    let mut rank = parts.rank("a", 0, engine.clone()).await?;
    rank.serves().await?;
    assert!(eventually(async || answer(&router).await.is_ok()).await, "no answer");
    // The prefill worker, the rank, the epoch and the group that is ready.
    assert!(eventually(async || n_registered(&parts).await.is_ok_and(|n| n == 4)).await);
    let wanted = answer(&router).await?;
    let epoch = rank.life.borrow().as_ref().map(|engine| engine.info().epoch);

    // Forgotten: only the epoch has no lease. All come back by themselves.
    parts.store.expire_leases();
    assert_eq!(n_registered(&parts).await?, 1);
    let back = async { assert!(eventually(async || n_registered(&parts).await.is_ok_and(|n| n == 4)).await) };
    asked_during(&router, &wanted, back).await;

    // Away, for longer than leases live.
    parts.store.set_available(false);
    asked_during(&router, &wanted, tokio::time::sleep(Duration::from_secs(3))).await;
    parts.store.set_available(true);
    let back = async { assert!(eventually(async || n_registered(&parts).await.is_ok_and(|n| n == 4)).await) };
    asked_during(&router, &wanted, back).await;

    // A group that works is not formed again for any of that.
    assert_eq!(rank.life.borrow().as_ref().map(|engine| engine.info().epoch), epoch);
    for part in [router.part, rank.part, prefill] {
        part.drain().await?;
    }
    assert_eq!(n_registered(&parts).await?, 1, "a part that left is still registered");
    Ok(())
}
