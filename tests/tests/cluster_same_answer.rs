//! The same request gives the same bits, however it is served: any group shape, any path through the cluster, any
//! company.

use futures::future::try_join_all;
use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output, is_length},
        cluster_config,
        model::ServedModel,
        tiny_engine,
    },
    tiny::{Error, golden_dir},
};
use serde_json::Value;

/// Every group shape whose rank count divides the eight canonical parts.
const SHAPES: [(usize, usize); 10] =
    [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)];

fn prompt(n_tokens: u32) -> Vec<u32> {
    (0..n_tokens).map(|i| (i * i * 3 + i * 17 + 5) % 251).collect()
}

/// A completion over HTTP, without what differs from answer to answer.
async fn over_http(cluster: &TestCluster, ask: &Ask) -> Result<Value, Error> {
    let answer = cluster.http.post("/v1/completions", &ask.body()).await?.json().await?;
    assert!(answer["choices"].is_array(), "{answer}");
    Ok(answer["choices"].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_group_shape_gives_the_tokens_of_the_reference_over_http() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let golden: Value = serde_json::from_slice(&std::fs::read(golden_dir("llama").join("golden.json"))?)?;
    let ids = |key: &str| serde_json::from_value::<Vec<u32>>(golden[key].clone());
    let ask = Ask::tokens(ids("input_ids")?).logprobs(3);
    let sampled = Ask::tokens(prompt(50)).sampled(7).max_tokens(24).logprobs(3);
    let spellings: Result<Vec<_>, _> = ids("greedy16")?.iter().map(|&id| model.spelling(id)).collect();
    let mut first: Option<(Value, Value)> = None;
    for (n_ranks, dcp_size) in SHAPES {
        let cluster = TestCluster::start(&model, cluster_config(tiny_engine(n_ranks, dcp_size))).await?;
        let response = ask.generate(&cluster).await?;
        let spelled =
            response.choices[0].logprobs.iter().map(|entry| entry.sampled.clone().unwrap_or_default());
        let spelled: Vec<_> = spelled.map(|sampled| sampled.spelling).collect();
        assert_eq!(
            &spelled,
            spellings.as_ref().map_err(ToString::to_string)?,
            "N = {n_ranks}, D = {dcp_size}"
        );
        assert_eq!(response.choices[0].token_ids, ids("greedy16")?);
        let answers = (over_http(&cluster, &ask).await?, over_http(&cluster, &sampled).await?);
        let first = first.get_or_insert_with(|| answers.clone());
        assert_eq!(*first, answers, "N = {n_ranks}, D = {dcp_size}");
        cluster.assert_pools_whole().await?;
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_hit_or_a_prefill_on_the_decode_group_changes_no_bit() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let asks = [Ask::tokens(prompt(100)).logprobs(2), Ask::tokens(prompt(103)).sampled(3).logprobs(2)];
    let mut first: Option<Vec<Output>> = None;
    for local_prefill_max in [0, 1000] {
        let mut engine = tiny_engine(2, 2);
        engine.sched.local_prefill_max = local_prefill_max;
        let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
        for is_hit in [false, true] {
            let mut outputs = Vec::new();
            for ask in &asks {
                let mut output = ask.output(&cluster).await?;
                let usage = output.usage.take().ok_or("no usage")?;
                // The second prompt begins with the whole of the first; 100 is a multiple of the block size.
                assert_eq!(usage.cached_tokens > 0, is_hit || ask.prompt != asks[0].prompt, "{usage:?}");
                assert!(usage.cached_tokens < usage.prompt_tokens, "{usage:?}");
                outputs.push(output);
            }
            assert_eq!(
                *first.get_or_insert_with(|| outputs.clone()),
                outputs,
                "{local_prefill_max} {is_hit}"
            );
        }
        let (n_steps, n_prefill_steps) =
            (cluster.decode.info().stats.totals.steps, steps_of_prefill(&cluster));
        assert!(n_steps > 0 && (n_prefill_steps > 3) == (local_prefill_max == 0), "{n_prefill_steps}");
        cluster.stop().await?;
    }
    Ok(())
}

fn steps_of_prefill(cluster: &TestCluster) -> u64 {
    cluster.prefills[0].info().stats.totals.steps
}

/// 44 requests at once, as the first of them alone: batch mates, waiting and preemption are not seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeded_sampling_is_repeatable_and_independent_of_batch_mates() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(2, 2);
    engine.sched.max_seqs = 24;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let asks: Vec<Ask> = (0..44)
        .map(|i| {
            let mut ask = Ask::tokens(prompt(5 + i * 3)).sampled(u64::from(i / 2)).max_tokens(20).logprobs(1);
            ask.options.top_p = Some(0.95);
            ask.options.frequency_penalty = Some(0.5);
            ask
        })
        .collect();
    let together = try_join_all(asks.iter().map(|ask| ask.output(&cluster))).await?;
    for engine in cluster.engines() {
        engine.flush_cache().await?;
    }
    for (ask, together) in asks.iter().zip(&together) {
        let alone = ask.output(&cluster).await?;
        assert_eq!(alone.tokens, together.tokens);
        assert_eq!(alone.logprobs, together.logprobs);
        assert!(is_length(&alone.finish));
    }
    assert_ne!(together[0].tokens, together[2].tokens, "another seed, another output");
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// What a client does itself after a failure: prompt and output so far are its next prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_greedy_output_goes_on_from_its_own_token_ids() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let cluster = TestCluster::start(&model, cluster_config(tiny_engine(4, 2))).await?;
    let prompt = prompt(37);
    let whole = Ask::tokens(prompt.clone()).max_tokens(40).output(&cluster).await?;
    for n_done in [1, 3, 7, 20, 39] {
        let so_far = [prompt.as_slice(), &whole.tokens[..n_done]].concat();
        let rest = Ask::tokens(so_far).max_tokens(40 - n_done as u32).output(&cluster).await?;
        assert_eq!(rest.tokens, whole.tokens[n_done..], "after {n_done}");
    }
    cluster.stop().await
}

/// A pool of a few blocks preempts; what is computed again gives the same tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preemption_changes_no_output() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let asks: Vec<Ask> =
        (0..12).map(|i| Ask::tokens(prompt(20 + i)).sampled(i.into()).max_tokens(60)).collect();
    let roomy = TestCluster::start(&model, cluster_config(tiny_engine(2, 2))).await?;
    let want = try_join_all(asks.iter().map(|ask| ask.output_tokens(&roomy))).await?;
    assert_eq!(roomy.n_preemptions(), 0);
    roomy.stop().await?;

    let mut engine = tiny_engine(2, 2);
    // One block takes 4 positions x 3 layers x 2 heads x 2 x 16 x 4 bytes on a rank of an undivided head group.
    engine.kv_bytes = 40 * 3072;
    engine.max_seq_len = Some(128);
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let got = try_join_all(asks.iter().map(|ask| ask.output_tokens(&cluster))).await?;
    assert!(cluster.n_preemptions() > 0, "the pool was large enough for all");
    assert_eq!(got, want);
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}
