//! A conversation whose prefill worker has forgotten it: the worker pulls what the group holds, over gRPC, and the
//! client sees nothing of it but the time.

use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output},
        cluster_config,
        model::ServedModel,
        tiny_engine,
    },
    tiny::Error,
};

/// Tokens of the first turn, those of an answer, and those that the user adds.
const PROMPT_LEN: usize = 150;
const OUTPUT_LEN: usize = 21;
const QUESTION_LEN: usize = 9;

async fn answer(cluster: &TestCluster, tokens: &[u32]) -> Result<Output, Error> {
    let ask = Ask::tokens(tokens).sampled(11).logprobs(2).max_tokens(OUTPUT_LEN as u32);
    Ok(ask.output(cluster).await?)
}

/// What the group has computed of a conversation of `len` tokens: whole blocks, and the last token never.
fn held(len: usize) -> usize {
    (len - 1) / 4 * 4
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_conversation_is_pulled_from_the_group() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    for (n_ranks, dcp_size) in [(2, 2), (4, 2)] {
        let cluster = TestCluster::start(&model, cluster_config(tiny_engine(n_ranks, dcp_size))).await?;
        let prefill = &cluster.prefills[0];
        let before = prefill.info().stats.totals;
        let mut tokens: Vec<u32> = (0..PROMPT_LEN as u32).map(|i| (i * i * 7 + i + 3) % 249).collect();
        let mut n_pulled = 0;
        for turn in 0..3 {
            let known = if turn == 0 { 0 } else { held(tokens.len() - QUESTION_LEN) };
            let got = answer(&cluster, &tokens).await?;
            assert_eq!(got.usage().prompt_tokens as usize, tokens.len());
            assert_eq!(got.usage().cached_tokens as usize, known, "turn {turn}");
            cluster.wait_idle().await;
            n_pulled += known as u64;
            let totals = prefill.info().stats.totals;
            assert_eq!(totals.pulls - before.pulls, turn);
            assert_eq!(totals.pulled_tokens - before.pulled_tokens, n_pulled);
            assert_eq!(totals.pull_fallbacks, before.pull_fallbacks);
            prefill.flush_cache().await?;
            tokens.extend(&got.tokens);
            tokens.extend((0..QUESTION_LEN as u32).map(|i| i * 31 % 251));

            // The same turn, with nothing to reuse anywhere.
            let cold_tokens = &tokens[..tokens.len() - QUESTION_LEN - OUTPUT_LEN];
            let cold = cold_answer(&model, (n_ranks, dcp_size), cold_tokens).await?;
            assert_eq!((&got.tokens, &got.logprobs), (&cold.tokens, &cold.logprobs), "turn {turn}");
        }
        cluster.assert_pools_whole().await?;
        cluster.stop().await?;
    }
    Ok(())
}

/// The answer of a cluster that has just started.
async fn cold_answer(model: &ServedModel, shape: (usize, usize), tokens: &[u32]) -> Result<Output, Error> {
    let cluster = TestCluster::start(model, cluster_config(tiny_engine(shape.0, shape.1))).await?;
    let output = answer(&cluster, tokens).await?;
    assert_eq!(output.usage().cached_tokens, 0);
    cluster.stop().await?;
    Ok(output)
}
