use proptest::prelude::*;

use super::*;
use crate::request::{ModelLimits, Options, RequestLimits};

#[path = "../../../tests/it/support/model.rs"]
mod model;

fn choice_text(stop: &[&str], include_stop: bool) -> ChoiceText {
    let limits = ModelLimits { max_context_len: 1000, vocab_size: 259 };
    let options = Options {
        stop: stop.iter().map(|stop| (*stop).to_owned()).collect(),
        include_stop,
        return_token_ids: true,
        ..Options::default()
    };
    let prompts = vec![vec![TokenId(u32::from(b'p'))]];
    let spec = GenerateSpec::check(prompts, options, limits, &RequestLimits::default()).unwrap();
    ChoiceText::new(&model::text_model(), &spec.prompts[0], &spec, Arc::from([TokenId(model::EOS)])).unwrap()
}

/// Every delta of an output of `tokens`, and the stop that ended it.
fn deltas(text: &mut ChoiceText, tokens: &[u32]) -> (Vec<Delta>, Option<String>) {
    let mut all = Vec::new();
    for (output_idx, &token) in tokens.iter().enumerate() {
        let token = OutputToken { output_idx, token: TokenId(token), logprobs: None };
        let (delta, stop) = text.push(token).unwrap();
        all.push(delta);
        if stop.is_some() {
            return (all, stop);
        }
    }
    let (delta, stop) = text.finish().unwrap();
    all.push(delta);
    (all, stop)
}

fn joined(deltas: &[Delta]) -> (String, String) {
    let tokens = deltas.iter().flat_map(|delta| &delta.tokens).map(|token| token.token.0);
    (deltas.iter().map(|delta| delta.text.as_str()).collect(), model::text_of(tokens))
}

#[test]
fn no_token_of_a_stop_string_is_reported() {
    let tokens = model::tokens_of("ABC DEFGHIJ");
    let (deltas, stop) = deltas(&mut choice_text(&["DEFGHIJ"], false), &tokens);
    assert_eq!(stop.as_deref(), Some("DEFGHIJ"));
    assert_eq!(joined(&deltas), ("ABC ".to_owned(), "ABC ".to_owned()));
}

#[test]
fn a_stop_string_that_is_kept_keeps_its_tokens() {
    let tokens = model::tokens_of("ABC DEF");
    let (deltas, _) = deltas(&mut choice_text(&["DEF"], true), &tokens);
    assert_eq!(joined(&deltas), ("ABC DEF".to_owned(), "ABC DEF".to_owned()));
}

#[test]
fn what_only_seemed_to_be_a_stop_comes_whole_when_it_is_decided() {
    let tokens = model::tokens_of("a END? b");
    let (deltas, stop) = deltas(&mut choice_text(&["END!"], false), &tokens);
    assert_eq!(stop, None);
    let texts: Vec<&str> = deltas.iter().map(|delta| delta.text.as_str()).collect();
    assert_eq!(texts, ["a", " ", "", "", "", "END?", " ", "b", ""]);
    assert_eq!(deltas[5].tokens.len(), 4, "with all its tokens");
}

#[test]
fn the_end_token_is_reported_and_has_no_text() {
    let (deltas, _) = deltas(&mut choice_text(&[], false), &[104, 105, model::EOS]);
    assert_eq!(joined(&deltas), ("hi".to_owned(), "hi<|im_end|>".to_owned()));
}

proptest! {
    #[test]
    fn without_a_stop_every_token_is_reported_in_order_and_no_sooner_than_its_text(
        tokens in prop::collection::vec(prop_oneof![Just(195), Just(169), 97_u32..100, Just(256)], 0..40),
    ) {
        let (deltas, stop) = deltas(&mut choice_text(&["aXb", "cc!"], false), &tokens);
        prop_assert_eq!(stop, None);
        let reported: Vec<u32> =
            deltas.iter().flat_map(|delta| &delta.tokens).map(|token| token.token.0).collect();
        prop_assert_eq!(&reported, &tokens);
        let mut n_chars = 0;
        let (all_but_last, _) = deltas.split_at(deltas.len() - 1);
        for delta in all_but_last {
            n_chars += delta.text.chars().count();
            for token in &delta.tokens {
                prop_assert!(token.text_offset <= n_chars);
            }
        }
    }

    #[test]
    fn with_a_stop_the_tokens_reported_spell_the_text(
        before in "[abé]{0,12}",
        after in "[abé]{0,4}",
    ) {
        let tokens = model::tokens_of(&format!("{before}XY{after}"));
        let (deltas, stop) = deltas(&mut choice_text(&["XY"], false), &tokens);
        prop_assert_eq!(stop.as_deref(), Some("XY"));
        prop_assert_eq!(joined(&deltas), (before.clone(), before));
    }
}
