//! The forward pass against Hugging Face transformers: tiny random models of every supported family.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{path::PathBuf, sync::Arc};

use longreach_collective::{CommConfig, Communicator, local_group};
use longreach_kernels::{Exec, Isa};
use longreach_model::{
    Backend, Comms, CpuBackend, LoadOptions, ModelShard, files::ModelFiles, forward::Scratch,
};
use longreach_types::{
    BlockId, Epoch, GroupShape, KvDtype, MergeForm, QueryForm, SeqId, SeqStep, StepId, StepPlan, TokenId,
    WeightForm,
};
use serde::Deserialize;

/// Accepted difference, relative to the standard deviation of the reference's logits.
const TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Golden {
    input_ids: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy16: Vec<u32>,
}

fn golden_dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/tiny").join(name)
}

/// One rank that holds the whole model.
struct Single {
    shard: ModelShard<CpuBackend>,
    kv: <CpuBackend as Backend>::Kv,
    comms: Comms<Box<dyn Communicator<[f32]>>>,
    scratch: Scratch<<CpuBackend as Backend>::Tensor>,
    n_steps: u64,
}

impl Single {
    fn load(name: &str) -> Self {
        let files = Arc::new(ModelFiles::open(&golden_dir(name)).unwrap());
        let options = LoadOptions {
            shape: GroupShape::SINGLE,
            rank: 0,
            weights: WeightForm::AsStored,
            query_form: QueryForm::Replicate,
            merge_form: MergeForm::A2a,
            kv_dtype: KvDtype::F32,
            block_size: 32,
            n_blocks: 4,
            max_seq_len: None,
        };
        let backend = CpuBackend::new(Exec::new(Isa::best(), 1).unwrap());
        let shard = ModelShard::load(backend, &files, &options, &|_, _| {}).unwrap();
        let kv = shard.backend.kv(&shard.kv_shape);
        let comm =
            || Box::new(local_group(1, CommConfig::default()).remove(0)) as Box<dyn Communicator<[f32]>>;
        let comms = Comms { world: comm(), head_group: comm() };
        Self { shard, kv, comms, scratch: Scratch::default(), n_steps: 0 }
    }

    /// Runs `tokens` at positions from `context_len` on; logits of every row.
    fn run(&mut self, context_len: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
        let seq = SeqStep {
            seq: SeqId(1),
            context_len,
            tokens: tokens.iter().copied().map(TokenId).collect(),
            n_logits: tokens.len(),
            tables: vec![(0..4).map(BlockId).collect()],
        };
        let plan = StepPlan { step: StepId(self.n_steps), epoch: Epoch(1), seqs: vec![seq] };
        self.n_steps += 1;
        let logits = self
            .shard
            .forward(&plan, &mut self.kv, &mut self.comms, &mut self.scratch, &mut |_, _, _| {})
            .unwrap();
        logits.chunks_exact(self.shard.config.vocab_size).map(<[f32]>::to_vec).collect()
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.unwrap() as u32
}

fn check(name: &str) {
    let golden: Golden =
        serde_json::from_slice(&std::fs::read(golden_dir(name).join("golden.json")).unwrap()).unwrap();
    let mut single = Single::load(name);
    let logits = single.run(0, &golden.input_ids);
    let all: Vec<f32> = golden.logits.concat();
    let mean = all.iter().sum::<f32>() / all.len() as f32;
    let std = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt();
    for (pos, (got, want)) in logits.iter().zip(&golden.logits).enumerate() {
        for (token, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (got - want).abs() / std;
            assert!(error <= TOLERANCE, "{name}: position {pos}, token {token}: {got} against {want}");
        }
    }
    let mut last = logits.last().unwrap().clone();
    for (i, &want) in golden.greedy16.iter().enumerate() {
        let token = argmax(&last);
        let gap = last[token as usize] - last[want as usize];
        assert!(token == want || gap <= TOLERANCE * std, "{name}: output {i} is {token}, not {want}");
        last = single.run(golden.input_ids.len() + i, &[want]).remove(0);
    }
}

#[test]
fn logits_equal_the_reference_for_llama() {
    check("llama");
}

#[test]
fn logits_equal_the_reference_for_llama_with_stretched_positions() {
    check("llama3-rope");
}

#[test]
fn logits_equal_the_reference_for_mistral_beyond_its_window() {
    check("mistral");
}

#[test]
fn logits_equal_the_reference_for_qwen2_with_biases() {
    check("qwen2");
}
