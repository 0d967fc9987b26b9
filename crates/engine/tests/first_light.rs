//! A prompt through prefill, hand-off and decode group gives the tokens that the reference gives.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::path::PathBuf;

use longreach_engine::{EngineConfig, EnginePair, Model};
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
