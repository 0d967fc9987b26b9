//! The requests of a chaos run and what must come of each: computed once, by an undisturbed cluster in one process.
//!
//! The cluster under attack has other group sizes, chunks and batches than the one that made the answers. By the numeric
//! contract that changes no bit, and so this also compares the two. Prompts are of every kind of path: short ones that
//! a decode group computes itself, middle ones that are handed off, long ones whose hand-off takes many chunks.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use longreach_engine::EngineConfig;

use crate::{
    cluster::{
        TestCluster,
        ask::{Ask, Output},
        cluster_config,
        model::{ServedModel, VOCAB_SIZE},
        tiny_engine,
    },
    tiny::{Error, Rng},
};

/// Requests that are answered at once while the answers are made.
const CONCURRENCY: usize = 32;

/// Room in the undisturbed engine: it must never have to preempt, so that nothing but the plain path is compared with.
const KV_BYTES: usize = 256 << 20;

/// One request and its undisturbed answer.
#[derive(Clone, Debug)]
pub struct Case {
    /// The request.
    pub ask: Ask,
    /// What must come of it.
    pub expected: Output,
}

/// How long prompts and outputs are.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// The longest of the long prompts.
    pub max_prompt_len: usize,
    /// The shortest output.
    pub min_output_len: usize,
    /// The longest output.
    pub max_output_len: usize,
}

/// Every case of a run.
pub type Catalogue = Arc<[Case]>;

/// `n_cases` random requests for `model` and their answers. The same `seed` gives the same ones.
pub async fn make(
    model: &ServedModel,
    lengths: Lengths,
    n_cases: usize,
    seed: u64,
) -> Result<Catalogue, Error> {
    let mut rng = Rng::new(seed);
    let asks: Vec<Ask> = (0..n_cases).map(|idx| random_ask(&mut rng, lengths, idx)).collect();
    let mut engine = tiny_engine(1, 1);
    engine.kv_bytes = KV_BYTES;
    // The size of a block is part of the numbers' order, so it is that of the cluster under attack.
    engine.block_size = EngineConfig::default().block_size;
    let cluster = TestCluster::start(model, cluster_config(engine)).await?;
    let answer = async |ask: Ask| {
        let expected = ask.output(&cluster).await?;
        Ok::<_, Error>(Case { ask, expected })
    };
    let cases: Vec<Case> = stream::iter(asks).map(answer).buffered(CONCURRENCY).try_collect().await?;
    cluster.stop().await?;
    Ok(cases.into())
}

/// Half greedy and half seeded, a quarter with log-probabilities, so that bits are compared and not only tokens.
fn random_ask(rng: &mut Rng, lengths: Lengths, idx: usize) -> Ask {
    let prompt_len = prompt_len(rng, lengths.max_prompt_len);
    let prompt: Vec<u32> = (0..prompt_len).map(|_| rng.below(VOCAB_SIZE as usize - 3) as u32).collect();
    let spread = lengths.max_output_len - lengths.min_output_len + 1;
    let ask = Ask::tokens(prompt).max_tokens((lengths.min_output_len + rng.below(spread)) as u32);
    let ask = if idx.is_multiple_of(2) { ask } else { ask.sampled(rng.bits()) };
    if idx % 4 < 2 { ask } else { ask.logprobs(1) }
}

/// Four of ten short, five of middle length, one long.
fn prompt_len(rng: &mut Rng, max_prompt_len: usize) -> usize {
    let (short, middle) = (30.min(max_prompt_len), 400.min(max_prompt_len));
    match rng.below(10) {
        0..4 => 1 + rng.below(short),
        4..9 => short + rng.below(middle - short + 1),
        _ => middle + rng.below(max_prompt_len - middle + 1),
    }
}
