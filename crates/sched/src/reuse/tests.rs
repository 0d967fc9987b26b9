use proptest::prelude::*;

use super::*;

/// KV of the default model, f16: 30 layers, 3 heads of 64, keys and values.
const KV_TOKEN_BYTES: usize = 30 * 3 * 64 * 2 * 2;

fn costs() -> ReuseCosts {
    ReuseCosts { kv_token_bytes: KV_TOKEN_BYTES, ..ReuseCosts::default() }
}

fn at_group(prompt_len: usize, group_len: usize, n_decoding: usize) -> PromptReuse {
    let group = Some(GroupLoad { max_len: 64, pending_tokens: 0, n_decoding });
    PromptReuse { prompt_len, group_len, prefill_len: 0, group }
}

fn at_prefill(prompt_len: usize, group_len: usize, prefill_len: usize) -> PromptReuse {
    PromptReuse { prompt_len, group_len, prefill_len, group: None }
}

/// The decision, as a person would check it.
#[test]
fn the_choice_for_the_default_model() {
    use KvSource::{Local, Pull, Push};
    let table = [
        ("two tokens on an idle group", at_group(2, 0, 0), Local),
        ("the same while thirty streams decode", at_group(2, 0, 30), Push),
        ("a short prompt on an idle group", at_group(30, 0, 0), Local),
        ("the same while five streams decode", at_group(30, 0, 5), Push),
        ("a long prompt", at_group(2_000, 0, 0), Push),
        ("a long conversation and a short question", at_group(2_020, 2_000, 2), Local),
        ("... while forty streams decode", at_group(2_020, 2_000, 40), Pull),
        ("... and a longer one", at_group(2_060, 2_000, 2), Local),
        ("... while twenty streams decode", at_group(2_060, 2_000, 20), Pull),
        ("... and one that the group may not compute", at_group(2_065, 2_000, 0), Pull),
        ("the worker knows the whole prefix", at_prefill(2_500, 2_000, 2_000), Push),
        ("the worker knows more than the group", at_prefill(2_500, 2_000, 2_240), Push),
        ("the worker lacks the last answer", at_prefill(2_500, 2_000, 1_700), Pull),
        ("the worker lacks one block", at_prefill(500, 480, 448), Pull),
        ("the worker has forgotten all", at_prefill(2_500, 2_000, 0), Pull),
        ("the group knows nothing", at_prefill(2_500, 0, 0), Push),
    ];
    for (what, prompt, expected) in table {
        assert_eq!(costs().choose(&prompt), expected, "{what}");
    }
}

#[test]
fn a_slow_link_or_a_fast_worker_computes_again() {
    let prompt = at_prefill(2_500, 2_000, 0);
    let slow = ReuseCosts { link_bytes_per_s: 1e6, ..costs() };
    assert_eq!(slow.choose(&prompt), KvSource::Push);
    let fast = ReuseCosts { prefill_tokens_per_s: 100_000.0, ..costs() };
    assert_eq!(fast.choose(&prompt), KvSource::Push);
    let never = ReuseCosts { pull_latency: Duration::MAX, ..costs() };
    assert_eq!(never.choose(&prompt), KvSource::Push);
}

#[test]
fn patience_is_what_the_pull_was_to_save() {
    assert_eq!(costs().pull_patience(3), costs().min_pull_patience);
    let long = costs().pull_patience(3_000).as_secs_f64();
    assert!((long - 3_000.0 / costs().prefill_tokens_per_s).abs() < 1e-6, "{long}");
    // A moment that far away can still be told, whatever the settings are.
    let slow =
        ReuseCosts { prefill_tokens_per_s: f64::MIN_POSITIVE, min_pull_patience: Duration::MAX, ..costs() };
    assert!(std::time::Instant::now().checked_add(slow.pull_patience(usize::MAX)).is_some());
}

fn any_costs() -> impl Strategy<Value = ReuseCosts> {
    let rate = || 1.0..1e5_f64;
    (rate(), rate(), 1e3..1e11_f64, 0..100_000_u64, 0..100_000_u64, 0.0..2.0_f64, 0..1_000_000_usize)
        .prop_map(
            |(
                prefill_tokens_per_s,
                group_tokens_per_s,
                link_bytes_per_s,
                handoff,
                pull,
                stall_weight,
                bytes,
            )| {
                ReuseCosts {
                    prefill_tokens_per_s,
                    group_tokens_per_s,
                    link_bytes_per_s,
                    handoff_latency: Duration::from_micros(handoff),
                    pull_latency: Duration::from_micros(pull),
                    stall_weight,
                    kv_token_bytes: bytes,
                    ..ReuseCosts::default()
                }
            },
        )
}

fn any_prompt() -> impl Strategy<Value = PromptReuse> {
    let group = (0..500_usize, 0..10_000_usize, 0..64_usize)
        .prop_map(|(max_len, pending_tokens, n_decoding)| GroupLoad { max_len, pending_tokens, n_decoding });
    (1..20_000_usize, 0.0..1.0_f64, 0.0..1.0_f64, prop::option::of(group)).prop_map(
        |(prompt_len, group, prefill, load)| PromptReuse {
            prompt_len,
            group_len: (group * prompt_len as f64) as usize,
            prefill_len: (prefill * prompt_len as f64) as usize,
            group: load,
        },
    )
}

proptest! {
    /// What is possible at all, and that of it the cheapest is taken.
    #[test]
    fn the_cheapest_possible_source_is_taken(costs in any_costs(), prompt in any_prompt()) {
        let (local, pull) = (costs.local_cost(&prompt), costs.pull_cost(&prompt));
        let push = costs.push_cost(&prompt);
        let least = [local, pull].into_iter().flatten().fold(push, f64::min);
        let taken = match costs.choose(&prompt) {
            KvSource::Local => local,
            KvSource::Push => Some(push),
            KvSource::Pull => pull,
        };
        prop_assert_eq!(taken, Some(least));
        prop_assert_eq!(pull.is_some(), prompt.group_len > prompt.prefill_len);
        let may_be_local = prompt.group.is_some_and(|group| prompt.n_missing() <= group.max_len);
        prop_assert_eq!(local.is_some(), may_be_local);
    }

    /// Each cause moves the choice one way only.
    #[test]
    fn every_cause_moves_the_choice_one_way(
        costs in any_costs(), prompt in any_prompt(), factor in 1.0..100.0_f64, more in 1..100_usize,
    ) {
        let choice = costs.choose(&prompt);
        if choice == KvSource::Pull {
            let faster = ReuseCosts { link_bytes_per_s: costs.link_bytes_per_s * factor, ..costs };
            prop_assert_eq!(faster.choose(&PromptReuse { group: None, ..prompt }), KvSource::Pull, "a faster link");
        }
        if choice == KvSource::Local {
            let later = ReuseCosts { handoff_latency: costs.handoff_latency.mul_f64(factor), ..costs };
            prop_assert_eq!(later.choose(&prompt), KvSource::Local, "a dearer hand-off");
        } else if let Some(group) = prompt.group {
            let busier = GroupLoad { n_decoding: group.n_decoding + more, ..group };
            let prompt = PromptReuse { group: Some(busier), ..prompt };
            prop_assert_eq!(costs.choose(&prompt), choice, "a busier group");
        }
        // A worker that knows the prefix never pulls it, and knowing more never starts a pull.
        if choice == KvSource::Push {
            let known = PromptReuse { prefill_len: prompt.prefill_len.max(prompt.group_len), ..prompt };
            prop_assert_ne!(costs.choose(&known), KvSource::Pull);
        }
    }
}
