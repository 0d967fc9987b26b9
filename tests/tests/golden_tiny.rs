//! Tiny random models of every supported architecture against Hugging Face transformers in f32, in groups.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use longreach_kernels::Isa;
use longreach_tests::tiny::{
    GOLDEN, TinyModel, golden_dir,
    ranks::{self, Feed, GroupConfig, Room, Script},
};
use longreach_types::{GroupShape, KvDtype, MergeForm, QueryForm, WeightForm};
use serde::Deserialize;

/// Accepted difference, relative to the standard deviation of the reference's logits.
const TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Golden {
    input_ids: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy16: Vec<u32>,
}

/// The prompt in one step, then its greedy output token by token.
fn script(golden: &Golden) -> Script {
    let n_prompt = golden.input_ids.len();
    let prompt = Feed { seq: 0, start: 0, tokens: golden.input_ids.clone(), n_logits: n_prompt };
    let outputs = golden.greedy16.iter().enumerate();
    let outputs = outputs
        .map(|(i, &token)| vec![Feed { seq: 0, start: n_prompt + i, tokens: vec![token], n_logits: 1 }]);
    let len = n_prompt + golden.greedy16.len();
    let steps = std::iter::once(vec![prompt]).chain(outputs).collect();
    Script { rooms: vec![Room { len, shared: None }], steps, fill: 0xff, seed: 5 }
}

fn check(name: &'static str, config: &GroupConfig) {
    let file = std::fs::read(golden_dir(name).join("golden.json")).unwrap();
    let golden: Golden = serde_json::from_slice(&file).unwrap();
    let model = TinyModel::golden(name).unwrap();
    let rows = ranks::run(&model, config, &[script(&golden)]).unwrap().remove(0).remove(0);
    let all: Vec<f32> = golden.logits.concat();
    let mean = all.iter().sum::<f32>() / all.len() as f32;
    let std = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt();
    for (pos, (got, want)) in rows.iter().zip(&golden.logits).enumerate() {
        for (token, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (got - want).abs() / std;
            assert!(
                error <= TOLERANCE,
                "{name} {config:?}: position {pos}, token {token}: {got}, not {want}"
            );
        }
    }
    for (row, &want) in rows[golden.input_ids.len() - 1..].iter().zip(&golden.greedy16) {
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        // The smallest gap of some models is as wide as the tolerance.
        let lead = best - row[want as usize];
        assert!(lead <= TOLERANCE * std, "{name} {config:?}: {want} is behind by {lead}");
    }
}

#[test]
fn logits_and_tokens_are_those_of_the_reference_in_any_group() {
    let shapes = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (7, 1), (8, 8), (8, 1)];
    for name in GOLDEN {
        for (i, (n_ranks, dcp_size)) in shapes.into_iter().enumerate() {
            check(
                name,
                &GroupConfig {
                    shape: GroupShape::new(n_ranks, dcp_size).unwrap(),
                    isa: Isa::best(),
                    merge_form: [MergeForm::A2a, MergeForm::AgRs][i % 2],
                    query_form: [QueryForm::Replicate, QueryForm::Gather][i / 2 % 2],
                    weights: [WeightForm::AsStored, WeightForm::F32][i / 4 % 2],
                    ..GroupConfig::reference(4, KvDtype::F32)
                },
            );
        }
    }
}
