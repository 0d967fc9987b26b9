//! A stream that is cut anywhere and resumed by token ids goes on with the tokens it would have had.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use longreach_engine::{EngineConfig, EnginePair, Generated, Model};
use longreach_model::files::ModelFiles;
use longreach_proto::worker::OutputToken;
use longreach_tests::tiny::{Rng, golden_dir};
use longreach_types::{FinishReason, GroupShape, KvDtype, Prompt, RequestId, SamplingParams, TokenId};

/// Tokens of an output.
const OUTPUT_LEN: usize = 24;

/// Log-probabilities with each token: they show every bit of the logits behind it.
const N_LOGPROBS: usize = 5;

fn greedy() -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: OUTPUT_LEN,
        ignore_eos: true,
        top_logprobs: Some(N_LOGPROBS),
        ..SamplingParams::default()
    }
}

fn seeded() -> SamplingParams {
    SamplingParams {
        temperature: 1.3,
        top_p: 0.95,
        repetition_penalty: 1.2,
        presence_penalty: 0.5,
        frequency_penalty: 0.3,
        seed: 0x5eed,
        ..greedy()
    }
}

fn start(model: &Model, shape: (usize, usize), local_prefill_max: usize) -> EnginePair {
    let mut config = EngineConfig {
        shape: GroupShape::new(shape.0, shape.1).unwrap(),
        kv_dtype: KvDtype::F16,
        block_size: 4,
        kv_bytes: 4 << 20,
        ..EngineConfig::default()
    };
    config.sched.local_prefill_max = local_prefill_max;
    config.sched.reuse.handoff_latency = std::time::Duration::from_secs(3600);
    EnginePair::start(model, &config, 1, &tokio::runtime::Handle::current(), &|_, _| {}).unwrap()
}

/// Everything of a token that a client may see, floats as bits.
fn visible(token: &OutputToken) -> (usize, u32, Vec<(u32, u32)>) {
    let logprobs = token.logprobs.as_ref().expect("log-probabilities were asked for");
    let pairs = std::iter::once(&logprobs.sampled).chain(&logprobs.top);
    (token.output_idx, token.token.0, pairs.map(|pair| (pair.token.0, pair.logprob.to_bits())).collect())
}

struct Resume<'a> {
    prompt: &'a [u32],
    sampling: SamplingParams,
    /// Requests of different salts find nothing of each other in a prefix cache.
    salt: &'a str,
}

impl Resume<'_> {
    async fn run(&self, pair: &EnginePair, earlier: &[OutputToken]) -> Generated {
        let earlier_ids = earlier.iter().map(|token| token.token);
        let prompt = Prompt {
            tokens: self.prompt.iter().copied().map(TokenId).chain(earlier_ids).collect(),
            n_resumed: earlier.len(),
            cache_salt: self.salt.as_bytes().to_vec(),
        };
        let id = RequestId(format!("{}-{}", self.salt, earlier.len()));
        pair.generate(id, prompt, self.sampling.clone(), |_| {}).await.unwrap()
    }

    /// Cuts the output `whole` at every point and lets `pair` go on.
    async fn at_every_cut(&self, whole: &Generated, pair: &EnginePair) {
        for cut in 1..OUTPUT_LEN {
            let (earlier, later) = whole.tokens.split_at(cut);
            let resumed = self.run(pair, earlier).await;
            let [got, want] =
                [&resumed.tokens[..], later].map(|tokens| tokens.iter().map(visible).collect::<Vec<_>>());
            assert_eq!(got, want, "{} cut at {cut}", self.salt);
            assert_eq!(resumed.finish, FinishReason::Length);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_cut_anywhere_goes_on_with_the_same_tokens_on_the_same_and_on_another_group() {
    let model = Model::open(ModelFiles::open(&golden_dir("llama")).unwrap()).unwrap();
    let mut rng = Rng::new(7);
    let prompt: Vec<u32> = (0..21).map(|_| rng.below(model.config.vocab_size) as u32).collect();
    let (two, four) = (start(&model, (2, 2), 0), start(&model, (4, 4), 0));
    // Computes what little is missing itself, and splits heads besides positions.
    let local = start(&model, (4, 2), usize::MAX);
    let mut outputs = Vec::new();
    for (name, sampling) in [("greedy", greedy()), ("seeded", seeded())] {
        let cold = Resume { prompt: &prompt, sampling: sampling.clone(), salt: name };
        let whole = cold.run(&two, &[]).await;
        assert_eq!((whole.tokens.len(), whole.cached_len), (OUTPUT_LEN, 0));
        // With what the cut stream left in the caches, on a group that has never seen it, and with cold caches.
        cold.at_every_cut(&whole, &two).await;
        cold.at_every_cut(&whole, &four).await;
        cold.at_every_cut(&whole, &local).await;
        for cut in [1, 2, 12, 23] {
            let salt = format!("{name} after {cut}");
            let other = Resume { prompt: &prompt, sampling: sampling.clone(), salt: &salt };
            let resumed = other.run(&four, &whole.tokens[..cut]).await;
            assert_eq!(resumed.cached_len, 0);
            let [got, want] = [&resumed.tokens[..], &whole.tokens[cut..]]
                .map(|part| part.iter().map(visible).collect::<Vec<_>>());
            assert_eq!(got, want, "{salt}");
        }
        outputs.push(whole.tokens.iter().map(|token| token.token).collect::<Vec<_>>());
    }
    assert_ne!(outputs[0], outputs[1], "sampling must have an effect");
    for pair in [two, four, local] {
        pair.stop().await.unwrap();
    }
}
