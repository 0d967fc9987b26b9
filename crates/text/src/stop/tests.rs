use proptest::prelude::*;

use super::*;

fn matcher(stops: &[&str], include_stop: bool) -> StopMatcher {
    let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
    StopMatcher::new(&stops, include_stop).unwrap()
}

/// Everything that comes out, and the match.
fn run(mut matcher: StopMatcher, pieces: &[&str]) -> (String, Option<usize>) {
    let mut text = String::new();
    for piece in pieces {
        let step = matcher.push(piece);
        text.push_str(&step.text);
        if step.matched.is_some() {
            assert_eq!(matcher.push("more"), StopStep::default());
            assert_eq!(matcher.finish(), StopStep::default());
            return (text, step.matched);
        }
    }
    let step = matcher.finish();
    (text + &step.text, step.matched)
}

/// The definition, on the whole text: leftmost start, then the order of the list.
fn naive(stops: &[String], include_stop: bool, text: &str) -> (String, Option<usize>) {
    let starts = stops.iter().enumerate().filter_map(|(idx, stop)| Some((text.find(stop)?, idx)));
    match starts.min() {
        None => (text.to_owned(), None),
        Some((start, idx)) => {
            let end = if include_stop { start + stops[idx].len() } else { start };
            (text[..end].to_owned(), Some(idx))
        }
    }
}

/// The longest tail that is a proper prefix of a stop.
fn naive_held(stops: &[String], text: &str) -> usize {
    let open = |len: &usize| {
        let tail = &text.as_bytes()[text.len() - len..];
        stops.iter().any(|stop| stop.len() > *len && stop.as_bytes().starts_with(tail))
    };
    (1..=text.len()).rev().find(open).unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// STP-1, STP-2: a small alphabet makes stops overlap in every way.
    #[test]
    fn any_split_gives_what_the_definition_says(
        stops in prop::collection::vec("[abé]{1,5}", 1..5),
        pieces in prop::collection::vec("[abé]{0,6}", 0..12),
        include_stop: bool,
    ) {
        let text = pieces.concat();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let matcher = StopMatcher::new(&stops, include_stop).unwrap();
        prop_assert_eq!(run(matcher, &pieces), naive(&stops, include_stop, &text));
    }

    /// STP-2: nothing is delayed that is not an open prefix.
    #[test]
    fn only_open_prefixes_are_held(
        stops in prop::collection::vec("[ab]{2,40}", 1..4),
        pieces in prop::collection::vec("[abc]{0,6}", 0..12),
    ) {
        let mut matcher = StopMatcher::new(&stops, false).unwrap();
        let mut text = String::new();
        for piece in &pieces {
            text.push_str(piece);
            if naive(&stops, false, &text).1.is_some() {
                break;
            }
            matcher.push(piece);
            prop_assert_eq!(matcher.held_bytes(), naive_held(&stops, &text));
        }
    }
}

#[test]
fn a_stop_over_two_pieces_leaves_nothing_behind() {
    let mut matcher = matcher(&["\nUser:", "beta gamma"], false);
    assert_eq!(matcher.push("hello\nUser").text, "hello");
    assert_eq!(matcher.push(":"), StopStep { text: String::new(), matched: Some(0) });
}

#[test]
fn unrelated_text_passes_a_long_stop_at_once() {
    let mut matcher = matcher(&["X", &"y".repeat(40)], false);
    for piece in ["some ", "text ", "that ", "goes ", "on"] {
        assert_eq!(matcher.push(piece).text, piece);
    }
}

#[test]
fn the_end_releases_an_open_prefix_and_decides_an_open_match() {
    assert_eq!(run(matcher(&["<|end|>"], false), &["a<|end"]), ("a<|end".to_owned(), None));
    assert_eq!(run(matcher(&["abcd", "bc"], false), &["xabc"]), ("xa".to_owned(), Some(1)));
    assert_eq!(run(matcher(&["abcd", "bc"], false), &["xabc", "d"]), ("x".to_owned(), Some(0)));
    assert_eq!(run(matcher(&["bc", "b"], true), &["ab", "d"]), ("ab".to_owned(), Some(1)));
}

#[test]
fn stops_are_checked() {
    let new = |stops: &[String]| StopMatcher::new(stops, false).map(|_| ()).map_err(|e| e.to_string());
    assert_eq!(new(&[]), Ok(()));
    let ok = vec!["x".repeat(MAX_STOP_BYTES); MAX_STOPS];
    assert_eq!(new(&ok), Ok(()));
    assert_eq!(
        new(&["a".to_owned(), String::new()]).unwrap_err(),
        "stop[1] is not valid: it has 0 bytes; a stop string has from 1 to 1024"
    );
    assert!(new(&["x".repeat(MAX_STOP_BYTES + 1)]).unwrap_err().contains("1025 bytes"));
    assert!(new(&vec!["x".to_owned(); MAX_STOPS + 1]).unwrap_err().contains("17 stop strings"));
}

/// A self-similar stop over self-similar text is where a matcher that starts again would be quadratic.
#[test]
fn work_is_linear_in_the_text() {
    let stop = format!("{}b", "a".repeat(MAX_STOP_BYTES - 1));
    let text = "a".repeat(2_000_000);
    let (out, matched) = run(matcher(&[&stop], false), &[&text]);
    assert_eq!((out.len(), matched), (text.len(), None));
}
