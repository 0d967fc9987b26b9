use longreach_types::{Prompt, SamplingParams, TokenId};
use proptest::prelude::*;

use super::*;

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

fn pick(logits: &[f32], params: &SamplingParams) -> TokenId {
    SamplerState::default().sample(&mut logits.to_vec(), params, &[]).unwrap().token
}

#[test]
fn greedy_takes_the_lowest_id_among_equals_also_at_tiny_and_negative_zero_temperatures() {
    for temperature in [0.0, -0.0, 1e-30, 9e-5] {
        let params = SamplingParams { temperature, ..Default::default() };
        assert_eq!(pick(&[1.0, 3.0, 3.0, f32::NEG_INFINITY], &params), TokenId(1));
    }
}

#[test]
fn broken_logits_are_an_error_and_never_a_token() {
    let params = SamplingParams::default();
    let state = SamplerState::default();
    assert_eq!(state.sample(&mut [0.0, f32::NAN], &params, &[]), Err(SampleError::Nan(TokenId(1))));
    assert_eq!(state.sample(&mut [f32::NEG_INFINITY; 3], &params, &[]), Err(SampleError::Empty));
}

#[test]
fn sampling_follows_the_softmax() {
    let logits = [2.0_f32, 1.0, 0.0, -1.0];
    let n = 40_000;
    let mut counts = [0_usize; 4];
    for seed in 0..n {
        counts[pick(&logits, &SamplingParams { seed, temperature: 0.8, ..Default::default() }).0 as usize] +=
            1;
    }
    let weights = logits.map(|logit| (f64::from(logit) / 0.8).exp());
    let total: f64 = weights.iter().sum();
    // Pearson's chi-squared with 3 degrees of freedom exceeds 27.9 by chance once in 250,000 runs.
    let chi2: f64 = counts
        .iter()
        .zip(weights)
        .map(|(&count, weight)| {
            let expected = n as f64 * weight / total;
            (count as f64 - expected).powi(2) / expected
        })
        .sum();
    assert!(chi2 < 27.9, "chi-squared {chi2}, counts {counts:?}");
}

#[test]
fn a_penalty_counts_a_repeated_id_once_and_frequency_counts_every_occurrence() {
    let mut state = SamplerState::new(&Prompt { tokens: tokens(&[7; 80]), ..Default::default() });
    let params = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..Default::default()
    };
    let mut logits = vec![4.0; 8];
    state.adjust(&mut logits, &params, &[]);
    assert_eq!(logits, [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0]);
    state.push(TokenId(7));
    state.push(TokenId(7));
    let mut logits = vec![-4.0; 8];
    state.adjust(&mut logits, &params, &[]);
    assert_eq!(logits[7], -8.0 - 0.25 - 1.0);
}

#[test]
fn end_tokens_wait_for_min_tokens() {
    let params = SamplingParams { temperature: 0.0, min_tokens: 1, ..Default::default() };
    let mut state = SamplerState::default();
    let next =
        |state: &SamplerState| state.sample(&mut [1.0, 9.0, 2.0], &params, &[TokenId(1)]).unwrap().token;
    assert_eq!(next(&state), TokenId(2));
    state.push(TokenId(2));
    assert_eq!(next(&state), TokenId(1));
}

proptest! {
    #[test]
    fn the_bound_on_noise_holds(bits in 0..1_u64 << 53) {
        prop_assert!(gumbel(bits) <= gumbel_bound(bits));
    }

    #[test]
    fn pruning_changes_no_choice(
        logits in prop::collection::vec(-8.0_f32..8.0, 1..300),
        seed: u64,
        temperature in 0.1_f32..3.0,
    ) {
        let key = mix(mix(seed));
        let score = |i: usize| f64::from(logits[i]) / f64::from(temperature) + gumbel(draw(key, TokenId(i as u32)));
        let naive = (0..logits.len()).max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap();
        let params = SamplingParams { seed, temperature, ..Default::default() };
        let got = pick(&logits, &params);
        prop_assert!((score(naive) - score(got.0 as usize)).abs() < 1e-9);
    }

    #[test]
    fn filters_keep_what_their_definitions_say(
        logits in prop::collection::vec(-6.0_f32..6.0, 1..600),
        top_k in 0_u32..700,
        top_p in 0.0_f32..1.0,
        min_p in 0.0_f32..1.0,
    ) {
        let params = SamplingParams { top_k, top_p, min_p, ..Default::default() };
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let kept = candidates(&logits, &params, top).unwrap();
        prop_assert!(!kept.is_empty());
        let mut order: Vec<TokenId> = (0..logits.len() as u32).map(TokenId).collect();
        order.sort_by(by_likelihood(&logits));
        prop_assert_eq!(&order[..kept.len()], &kept[..], "always a prefix by likelihood");
        if top_k > 0 { prop_assert!(kept.len() <= top_k as usize); }
    }

    #[test]
    fn a_resumed_state_equals_the_undisturbed_one(ids in prop::collection::vec(0_u32..50, 2..60), cut in 1_usize..59, seed: u64) {
        let cut = cut.min(ids.len() - 1);
        let mut running = SamplerState::new(&Prompt { tokens: tokens(&ids[..1]), ..Default::default() });
        ids[1..=cut].iter().for_each(|&id| running.push(TokenId(id)));
        let resumed = SamplerState::new(&Prompt { tokens: tokens(&ids[..=cut]), n_resumed: cut, ..Default::default() });
        let params = SamplingParams { seed, frequency_penalty: 0.3, repetition_penalty: 1.2, ..Default::default() };
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        prop_assert_eq!(
            running.sample(&mut logits.clone(), &params, &[]).unwrap(),
            resumed.sample(&mut logits.clone(), &params, &[]).unwrap()
        );
    }

    #[test]
    fn logprobs_sum_to_one(logits in prop::collection::vec(-6.0_f32..6.0, 1..20)) {
        let n = logits.len();
        let params = SamplingParams { top_logprobs: Some(n), temperature: 0.0, ..Default::default() };
        let sampled = SamplerState::default().sample(&mut logits.clone(), &params, &[]).unwrap();
        let logprobs = sampled.logprobs.unwrap();
        let sum: f64 = logprobs.top.iter().map(|entry| f64::from(entry.logprob).exp()).sum();
        prop_assert!((sum - 1.0).abs() < 1e-5);
        prop_assert_eq!(logprobs.top[0], logprobs.sampled);
    }
}
