//! A prompt through prefill, hand-off and decode group gives the tokens that the reference gives.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::path::PathBuf;

use longreach_engine::{BuildError, EngineConfig, EnginePair, Model, Rank};
use longreach_model::files::ModelFiles;
use longreach_types::{FinishReason, GroupShape, KvDtype, Prompt, RequestId, SamplingParams, TokenId};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    input_ids: Vec<u32>,
    greedy16: Vec<u32>,
}

fn golden_dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/tiny").join(name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_pass_through_both_engines_in_any_group_shape() {
    let golden: Golden =
        serde_json::from_slice(&std::fs::read(golden_dir("llama").join("golden.json")).unwrap()).unwrap();
    let model = Model::open(ModelFiles::open(&golden_dir("llama")).unwrap()).unwrap();
    for (n_ranks, dcp_size) in [(1, 1), (2, 2), (2, 1), (4, 2), (8, 8), (3, 3)] {
        let mut config = EngineConfig {
            shape: GroupShape::new(n_ranks, dcp_size).unwrap(),
            kv_dtype: KvDtype::F32,
            block_size: 4,
            kv_bytes: 4 << 20,
            ..EngineConfig::default()
        };
        config.sched.local_prefill_max = 0;
        let runtime = tokio::runtime::Handle::current();
        let pair = EnginePair::start(&model, &config, 1, &runtime, &|_, _| {}).unwrap();
        let prompt =
            Prompt { tokens: golden.input_ids.iter().map(|&id| TokenId(id)).collect(), ..Prompt::default() };
        let sampling = SamplingParams {
            temperature: 0.0,
            max_tokens: 16,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        let id = RequestId(format!("{n_ranks}x{dcp_size}"));
        let generated = pair.generate(id, prompt, sampling, |_| {}).await.unwrap();
        let tokens: Vec<_> = generated.tokens.iter().map(|token| token.token.0).collect();
        assert_eq!(tokens, golden.greedy16, "N = {n_ranks}, D = {dcp_size}");
        assert!(generated.is_handed_off);
        assert_eq!(generated.finish, FinishReason::Length);
        assert!(pair.prefill.handle.wait_for(|info| info.is_idle()).await);
        assert!(pair.decode.handle.wait_for(|info| info.is_idle()).await);
        pair.stop().await.unwrap();
    }
}

/// A slip in a unit is said, before anything is loaded and before the cluster knows of the rank.
#[test]
fn more_memory_than_there_is_is_refused() {
    let model = Model::open(ModelFiles::open(&golden_dir("llama")).unwrap()).unwrap();
    for kv_bytes in [1 << 50, usize::MAX] {
        let config = EngineConfig { kv_bytes, ..EngineConfig::default() };
        let refused = Rank::load(&model, &config, 0, &|_, _| {}).map(drop);
        // Blocks are counted in 32 bits, so what is asked for may be less.
        let is_refused = matches!(&refused, Err(BuildError::KvMemory { bytes, .. }) if *bytes > 1 << 40);
        assert!(is_refused, "{kv_bytes}: {refused:?}");
    }
}
