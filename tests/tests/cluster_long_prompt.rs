//! Long prompts: many chunks, hand-offs in messages of a mebibyte, whole prefix hits, and outputs of one token.

use std::time::Instant;

use futures::future::try_join_all;
use longreach_engine::{BuildError, EnginePair};
use longreach_proto::worker::MAX_CELL_BYTES;
use longreach_tests::{
    cluster::{TestCluster, ask::Ask, cluster_config, model::ServedModel, report, tiny_engine},
    tiny::Error,
};
use longreach_types::{Prompt, RequestId, SamplingParams, TokenId};
use tokio::runtime::Handle;

const PROMPT_LEN: u32 = 8000;

fn prompt(n_tokens: u32, salt: u32) -> Vec<u32> {
    (0..n_tokens).map(|i| (i * 7919 + i * i % 101 + salt) % 251).collect()
}

/// Steps of 4096 tokens, so that a layer's share of one exceeds a mebibyte and is cut into messages of that size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_thousand_tokens_pass_in_large_messages_beside_other_clients() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(16384))?;
    let mut engine = tiny_engine(2, 1);
    engine.block_size = 32;
    engine.kv_bytes = 64 << 20;
    engine.sched.max_batch_tokens = 8192;
    engine.sched.max_chunk_len = 4096;
    let mut config = cluster_config(engine);
    config.n_prefills = 2;
    let cluster = TestCluster::start(&model, config).await?;
    let short: Vec<Ask> =
        (0..3).map(|i| Ask::tokens(prompt(40, i)).sampled(i.into()).max_tokens(30)).collect();
    let alone = try_join_all(short.iter().map(|ask| ask.output(&cluster))).await?;
    let long = Ask::tokens(prompt(PROMPT_LEN, 9)).max_tokens(12);

    let start = Instant::now();
    let timed = async {
        let output = long.output(&cluster).await?;
        Ok::<_, tonic::Status>((output, start.elapsed()))
    };
    let beside = async {
        // Until the long one has been answered, and at least once each.
        let outputs = try_join_all(short.iter().map(|ask| ask.output(&cluster))).await?;
        Ok((outputs, start.elapsed()))
    };
    let ((output, took), (together, others_took)) = tokio::try_join!(timed, beside)?;
    report(&format!(
        "a prompt of {PROMPT_LEN} tokens and 12 more in {took:?}; 3 clients beside it in {others_took:?}"
    ));
    let usage = output.usage();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (PROMPT_LEN, 12, 0));
    for (together, alone) in together.iter().zip(&alone) {
        assert_eq!((&together.tokens, together.usage().completion_tokens), (&alone.tokens, 30));
    }

    // 8,000 is a multiple of the block: all of it is cached, and one position is computed again for its logits.
    let again = long.output(&cluster).await?;
    assert_eq!(again.tokens, output.tokens);
    let cached = again.usage().cached_tokens;
    assert!((PROMPT_LEN - 32..PROMPT_LEN).contains(&cached), "{cached}");

    let one = long.clone().max_tokens(1).output(&cluster).await?;
    assert_eq!((one.tokens.as_slice(), one.usage().completion_tokens), (&output.tokens[..1], 1));
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// A hand-off may take as long as its prompt does, if only it moves: the time it may stand still is no bound on prompts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_may_take_longer_than_its_hand_off_may_stand_still() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(8192))?;
    let ask = Ask::tokens(prompt(5000, 2)).max_tokens(4);
    let mut engine = tiny_engine(2, 2);
    engine.kv_bytes = 16 << 20;
    engine.sched.max_chunk_len = 64;
    let mut usual = None;
    for _ in 0..2 {
        if let Some((_, took)) = usual {
            // Some thirty of the eighty steps that the prompt takes: far more than any one of them, far less than all.
            engine.handoff_timeout = took * 3 / 8;
        }
        let cluster = TestCluster::start(&model, cluster_config(engine.clone())).await?;
        let n_accepted = |cluster: &TestCluster| cluster.prefills[0].info().stats.totals.accepted;
        let (n_before, start) = (n_accepted(&cluster), Instant::now());
        let tokens = ask.output_tokens(&cluster).await?;
        let (want, _) = usual.get_or_insert((tokens.clone(), start.elapsed()));
        assert_eq!(tokens, *want);
        assert_eq!(n_accepted(&cluster), n_before + 1, "the hand-off was given up and begun again");
        cluster.assert_pools_whole().await?;
        cluster.stop().await?;
    }
    Ok(())
}

/// NET-1: the largest block whose layers each fit a message is served; with one position more no engine is built, so
/// that nothing is found to be too large only when it is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_block_that_a_message_can_carry_is_handed_off_and_no_larger_is_accepted()
-> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let ask = Ask::tokens(prompt(40, 5)).max_tokens(20);
    let mut engine = tiny_engine(2, 2);
    let small = TestCluster::start(&model, cluster_config(engine.clone())).await?;
    let want = ask.output_tokens(&small).await?;
    small.stop().await?;

    let layout = model.model.kv_layout(&engine);
    let largest = MAX_CELL_BYTES / (layout.n_kv_heads * 2 * layout.head_dim * layout.kv_dtype.bytes());
    engine.kv_bytes = 16 * layout.n_layers * MAX_CELL_BYTES;
    for too_large in [largest + 1, usize::MAX] {
        engine.block_size = too_large;
        let refused = model.model.max_seq_len(&engine);
        assert!(
            matches!(refused, Err(BuildError::CellSize { block_size, max }) if (block_size, max) == (too_large, largest)),
            "{refused:?}"
        );
    }
    engine.block_size = largest;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    assert_eq!(ask.output_tokens(&cluster).await?, want);
    assert!(cluster.prefills[0].info().stats.totals.accepted > 0, "nothing was handed off");
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// An output of one token ends on the prefill worker: nothing is handed off, and nothing is held for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_of_one_token_is_one_token() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let cluster = TestCluster::start(&model, cluster_config(tiny_engine(2, 2))).await?;
    let full = Ask::tokens(prompt(64, 1)).max_tokens(3).output(&cluster).await?;
    for salt in [1, 2] {
        let one = Ask::tokens(prompt(64, salt)).max_tokens(1).output(&cluster).await?;
        assert_eq!((one.tokens.len(), one.usage().completion_tokens, one.usage().prompt_tokens), (1, 1, 64));
        assert!(salt != 1 || one.tokens == full.tokens[..1]);
    }
    // The same where the model ends it: the first token is the end of the output.
    let mut eos = Ask::tokens(prompt(64, 3));
    eos.options.stop_token_ids = Ask::tokens(prompt(64, 3)).max_tokens(1).output_tokens(&cluster).await?;
    let ended = eos.output(&cluster).await?;
    assert_eq!((ended.tokens.len(), ended.usage().completion_tokens), (1, 1));
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// KVX-8: a range that is read before it is written spoils only what lies in it, so there is a needle in each chunk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_chunk_of_a_handed_off_prompt_counts_as_in_one_process() -> Result<(), Error> {
    const CHUNK_LEN: usize = 16;
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(4, 4);
    engine.sched.max_chunk_len = CHUNK_LEN;
    let cluster = TestCluster::start(&model, cluster_config(engine.clone())).await?;
    let mut whole = engine.clone();
    // The reference computes the prompt in one step on the group itself.
    whole.sched.local_prefill_max = usize::MAX;
    whole.sched.max_chunk_len = 512;
    let runtime = Handle::current();
    let loading = model.model.clone();
    let pair =
        tokio::task::spawn_blocking(move || EnginePair::start(&loading, &whole, 1, &runtime, &|_, _| {}));
    let pair = pair.await??;
    let mut seen = Vec::new();
    for chunk in 0..10 {
        let mut tokens = prompt(160, 4);
        // One digit of the needle in the middle of the chunk, on no block's border.
        tokens[chunk * CHUNK_LEN + 9] = 48 + chunk as u32;
        let got = Ask::tokens(tokens.clone()).max_tokens(10).logprobs(2).output(&cluster).await?;
        let prompt = Prompt { tokens: tokens.into_iter().map(TokenId).collect(), ..Prompt::default() };
        let sampling = SamplingParams {
            temperature: 0.0,
            max_tokens: 10,
            ignore_eos: true,
            top_logprobs: Some(2),
            ..SamplingParams::default()
        };
        let id = RequestId(format!("needle {chunk}"));
        let want = pair.generate(id, prompt, sampling, |_| {}).await?;
        assert!(!want.is_handed_off);
        let entries = want.tokens.iter().filter_map(|token| token.logprobs.as_ref());
        let entries =
            entries.flat_map(|entry| std::iter::once(entry.sampled).chain(entry.top.iter().copied()));
        let bits: Vec<u32> = entries.flat_map(|entry| [entry.token.0, entry.logprob.to_bits()]).collect();
        assert_eq!(
            got.tokens,
            want.tokens.iter().map(|token| token.token.0).collect::<Vec<_>>(),
            "chunk {chunk}"
        );
        assert_eq!(got.logprobs, bits, "chunk {chunk}");
        seen.push(bits);
    }
    seen.dedup();
    assert_eq!(seen.len(), 10, "a needle that changes nothing tests nothing");
    pair.stop().await?;
    cluster.stop().await
}
