//! The default model against Hugging Face transformers in f32: its tokenizer, its template, its logits, its tokens.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot build its fixture has failed")]

use std::{path::PathBuf, sync::LazyLock};

use longreach_kernels::Isa;
use longreach_model::{
    config::ModelConfig,
    files::{ModelFiles, Resolver},
};
use longreach_tests::tiny::{
    TinyModel,
    ranks::{self, Feed, GroupConfig, Outcome, Room, Script},
};
use longreach_text::{ChatMessage, ChatOptions, TextModel};
use longreach_types::{GroupShape, KvDtype, WeightForm};
use serde::Deserialize;

/// Accepted difference of a logit, relative to it.
const TOLERANCE: f32 = 1e-3;

/// A gap between the best two logits that f32 sums in another order can close. Only one step of the file has a gap
/// below this; the next smallest there is ten times as wide.
const F32_TIE: f32 = 2e-3;

/// One prompt and what the reference makes of it.
#[derive(Deserialize)]
struct Golden {
    kind: String,
    prompt: serde_json::Value,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    top1_minus_top2: Vec<f32>,
    first_logits_top5: Vec<(u32, f32)>,
}

static GOLDEN: LazyLock<Vec<Golden>> = LazyLock::new(|| {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/smollm2-greedy-f32.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
});

/// The quantised file of the PyPI wheel, which the reference values are of. Where the hub can be reached the default
/// would be its bf16 original, another model to the last digit, so the hub is left out.
static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
    let none = tempfile::tempdir().unwrap();
    let hub_cache = none.path().to_path_buf();
    let resolver = Resolver { hub_cache, offline: true, ..Resolver::from_env().unwrap() };
    resolver.resolve(None).unwrap().path
});

static MODEL: LazyLock<TinyModel> =
    LazyLock::new(|| TinyModel::at("SmolLM2", ModelFiles::open(&PATH).unwrap()).unwrap());

fn config(shape: (usize, usize)) -> GroupConfig {
    GroupConfig {
        shape: GroupShape::new(shape.0, shape.1).unwrap(),
        isa: Isa::best(),
        weights: WeightForm::F32,
        ..GroupConfig::reference(32, KvDtype::F32)
    }
}

/// All prompts with their outputs, `n_outputs` tokens each but the last one: prompts in one step of all, then
/// outputs in steps of `n_rows` rows a sequence.
fn forced(n_outputs: usize, n_rows: usize) -> Script {
    let tokens = |golden: &Golden| [&golden.prompt_ids, &golden.greedy_ids[..n_outputs - 1]].concat();
    let feed = |seq: usize, start: usize, end: usize, n_logits| {
        let tokens = tokens(&GOLDEN[seq])[start..end].to_vec();
        Feed { seq, start, tokens, n_logits }
    };
    let n_prompts = GOLDEN.len();
    let prompts = (0..n_prompts).map(|seq| feed(seq, 0, GOLDEN[seq].prompt_ids.len(), 1));
    let mut steps = vec![prompts.collect::<Vec<_>>()];
    for start in (0..n_outputs - 1).step_by(n_rows) {
        let n = n_rows.min(n_outputs - 1 - start);
        let rows = (0..n_prompts).map(|seq| {
            let first = GOLDEN[seq].prompt_ids.len() + start;
            feed(seq, first, first + n, n)
        });
        steps.push(rows.collect());
    }
    let rooms = GOLDEN.iter().map(|golden| Room { len: tokens(golden).len(), shared: None }).collect();
    Script { rooms, steps, fill: 0xff, seed: 11 }
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap()
}

/// Each output token is the best after those before it, so a run that chooses for itself takes the same path.
fn check(outcome: &Outcome, n_outputs: usize) {
    for (golden, rows) in GOLDEN.iter().zip(outcome) {
        let n_prompt = golden.prompt_ids.len();
        for &(token, want) in &golden.first_logits_top5 {
            let got = rows[n_prompt - 1][token as usize];
            let error = (got - want).abs() / want.abs();
            assert!(error <= TOLERANCE, "{}: first logit of {token} is {got}, not {want}", golden.prompt);
        }
        for i in 0..n_outputs {
            let logits = &rows[n_prompt - 1 + i];
            let (best, want) = (argmax(logits), golden.greedy_ids[i] as usize);
            let lead = logits[best] - logits[want];
            let is_tie = golden.top1_minus_top2[i] <= F32_TIE && lead <= F32_TIE;
            assert!(best == want || is_tie, "{}: output {i} is {best}, not {want}, by {lead}", golden.prompt);
            // The runner-up is behind by as much as it was there.
            let second = logits
                .iter()
                .enumerate()
                .filter(|(i, _)| *i != want)
                .map(|(_, x)| *x)
                .fold(f32::MIN, f32::max);
            let (gap, want_gap) = (logits[want] - second, golden.top1_minus_top2[i]);
            let allowed = TOLERANCE * logits[want].abs();
            assert!((gap - want_gap).abs() <= allowed, "{}: gap {i} is {gap}, not {want_gap}", golden.prompt);
        }
    }
}

#[test]
fn prompt_ids_are_those_of_the_reference() {
    let text = TextModel::load(&PATH).unwrap();
    for golden in GOLDEN.iter() {
        let ids = match golden.kind.as_str() {
            "raw" => text.encode_prompt(golden.prompt.as_str().unwrap()).unwrap(),
            "chat" => {
                let messages: Vec<ChatMessage> = serde_json::from_value(golden.prompt.clone()).unwrap();
                text.render_chat(&messages, &ChatOptions::default()).unwrap()
            }
            other => panic!("prompt of unknown kind {other}"),
        };
        assert_eq!(ids.iter().map(|id| id.0).collect::<Vec<_>>(), golden.prompt_ids, "{}", golden.prompt);
    }
    let config = ModelConfig::from_files(&MODEL.files).unwrap();
    assert!(config.bos.is_some() && !config.eos.is_empty());
}

#[test]
fn greedy_tokens_are_those_of_the_reference_on_one_rank_and_on_two() {
    let n_all = GOLDEN.iter().map(|golden| golden.greedy_ids.len()).min().unwrap();
    assert_eq!(n_all, 64);
    let one = ranks::run(&MODEL, &config((1, 1)), &[forced(n_all, 64)]).unwrap().remove(0);
    check(&one, n_all);
    // Token by token, as a decode group runs them.
    let n_some = 24;
    let two = ranks::run(&MODEL, &config((2, 2)), &[forced(n_some, 1)]).unwrap().remove(0);
    check(&two, n_some);
    for (seq, rows) in two.iter().enumerate() {
        for (pos, row) in rows.iter().enumerate().filter(|(_, row)| !row.is_empty()) {
            let is_same = row.iter().zip(&one[seq][pos]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(is_same, "prompt {seq}, position {pos}: two ranks give other bits than one");
        }
    }
}
