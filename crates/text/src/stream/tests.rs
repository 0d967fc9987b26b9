use super::*;
use crate::testing::*;

fn run(options: StreamOptions, tokens: &[u32]) -> (String, Option<usize>) {
    let model = model(byte_level(), CHATML_TEMPLATE);
    let mut stream = TextStream::new(&model, &[], options).unwrap();
    let mut text = String::new();
    for &token in tokens {
        let step = stream.push(TokenId(token)).unwrap();
        text.push_str(&step.text);
        if step.matched.is_some() {
            assert_eq!(stream.push(TokenId(97)).unwrap(), StopStep::default());
            assert_eq!(stream.finish().unwrap(), StopStep::default());
            return (text, step.matched);
        }
    }
    let step = stream.finish().unwrap();
    (text + &step.text, step.matched)
}

fn options(stop: &[&str]) -> StreamOptions {
    StreamOptions { stop: stop.iter().map(|&stop| stop.to_owned()).collect(), ..StreamOptions::default() }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// STP-7: control tokens are not in the text, and still stop it.
#[test]
fn the_spelling_of_a_control_token_stops_by_id() {
    let tokens = [97, 0xf0, 264, 98];
    assert_eq!(run(options(&["x", "<|im_end|>"]), &tokens), ("a\u{fffd}".to_owned(), Some(1)));
    let include = StreamOptions { include_stop: true, ..options(&["<|im_end|>"]) };
    assert_eq!(run(include, &[97, 264]), ("a<|im_end|>".to_owned(), Some(0)));
    let visible = StreamOptions { skip_special: false, ..options(&["<|im_end|>"]) };
    assert_eq!(run(visible, &[97, 264]), ("a".to_owned(), Some(0)));
    let model = model(byte_level(), CHATML_TEMPLATE);
    let stream = TextStream::new(&model, &[], options(&["x", "<|im_end|>"])).unwrap();
    assert_eq!(stream.stop_tokens().collect::<Vec<_>>(), [TokenId(264)]);
    assert_eq!(run(options(&["<|im_end|>"]), &bytes("a<|im_end|>b")), ("a".to_owned(), Some(0)));
}

/// STP-1 over tokens that split the stop's characters.
#[test]
fn a_stop_is_found_across_tokens_and_bytes() {
    assert_eq!(run(options(&["é!"]), &bytes("aéé!b")), ("aé".to_owned(), Some(0)));
    assert_eq!(run(options(&["é!"]), &bytes("aé")), ("aé".to_owned(), None));
}

/// STP-2: the end goes through the matcher too.
#[test]
fn a_stop_in_the_last_held_bytes_is_found() {
    assert_eq!(run(options(&["\u{fffd}"]), &[97, 0xf0, 0x9f]), ("a".to_owned(), Some(0)));
    assert_eq!(run(options(&["zz", "a\u{fffd}b"]), &[97, 0xf0]), ("a\u{fffd}".to_owned(), None));
}

/// STP-4.
#[test]
fn an_empty_stop_is_refused() {
    let model = model(byte_level(), CHATML_TEMPLATE);
    assert!(TextStream::new(&model, &[], options(&[""])).unwrap_err().is_request());
}
