use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::testing::*;

/// The pieces that come out, the last one at the end.
fn pieces(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer, &ids(prompt), skip);
    let mut pieces: Vec<String> = tokens.iter().map(|&id| detokenizer.push(TokenId(id)).unwrap()).collect();
    pieces.push(detokenizer.finish().unwrap());
    pieces
}

fn spm(pieces: &[&str]) -> Tokenizer {
    Tokenizer::from_gguf(&sentence_piece_gguf(pieces)).unwrap()
}

/// A tokenizer whose decoder is not a rule on bytes: the library decodes, in windows.
fn windowed() -> Tokenizer {
    let vocab = ["[UNK]", "hello", "##ing", "wor", "##ld", ".", ",", "'", "s", "{", "!"];
    let vocab: serde_json::Map<String, Value> =
        vocab.iter().enumerate().map(|(id, piece)| ((*piece).to_owned(), json!(id))).collect();
    tokenizer(&json!({
        "version": "1.0",
        "added_tokens": added(&["[UNK]"], 0, true),
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]",
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// DTK-1, -2, -7, -8: any tokens, also such as cut or break characters, from a byte vocabulary.
    #[test]
    fn deltas_add_up_to_the_full_decode(
        tokens in prop::collection::vec(prop_oneof![
            any::<u8>().prop_map(u32::from),
            prop::sample::select(vec![0xf0, 0x9f, 0xab, 0xa0, 0xe6, 0x97, 0xa5, 0xc4, 0x8f, 0x20]),
            256..265_u32,
        ], 0..24),
        skip: bool,
    ) {
        let tokenizer = byte_level();
        let full = tokenizer.decode(&ids(&tokens), skip).unwrap();
        prop_assert_eq!(pieces(&tokenizer, &[], &tokens, skip).concat(), full);
    }

    /// The same with byte fallback, leading spaces and control tokens of SentencePiece.
    #[test]
    fn deltas_add_up_for_sentence_piece(
        tokens in prop::collection::vec(prop_oneof![0..5_u32, 5..261_u32, 261..265_u32], 0..16),
        skip: bool,
    ) {
        let tokenizer = sentence_piece();
        let full = tokenizer.decode(&ids(&tokens), skip).unwrap();
        prop_assert_eq!(pieces(&tokenizer, &[], &tokens, skip).concat(), full);
    }

    /// What follows a prompt is what the whole has more than the prompt.
    #[test]
    fn a_stream_continues_its_prompt(
        prompt in prop::collection::vec(prop_oneof![1..5_u32, 261..265_u32], 0..4),
        tokens in prop::collection::vec(prop_oneof![1..5_u32, 261..265_u32], 0..8),
    ) {
        let tokenizer = sentence_piece();
        let before = tokenizer.decode(&ids(&prompt), true).unwrap();
        let whole = tokenizer.decode(&ids(&[prompt.as_slice(), &tokens].concat()), true).unwrap();
        // A prompt of nothing but spaces loses one of them, and its continuation must not lose another.
        prop_assert_eq!(before + &pieces(&tokenizer, &prompt, &tokens, true).concat(), whole);
    }
}

/// DTK-1, DTK-2: the bytes of a character wait for each other.
#[test]
fn a_character_comes_out_when_it_is_whole() {
    let tokenizer = byte_level();
    assert_eq!(pieces(&tokenizer, &[], &[0xc4, 0x8f], true), ["", "ď", ""]);
    for character in ['\u{1fae0}', '\u{1f979}', '龜', '😀', '日'] {
        let bytes: Vec<u32> = character.to_string().bytes().map(u32::from).collect();
        let mut expected = vec![String::new(); bytes.len() - 1];
        expected.extend([character.to_string(), String::new()]);
        assert_eq!(pieces(&tokenizer, &[], &bytes, true), expected);
    }
}

/// DTK-8: each invalid sequence is one U+FFFD, when it is known to be invalid.
#[test]
fn invalid_bytes_are_replaced() {
    let tokenizer = byte_level();
    let out =
        |bytes: &[u8]| pieces(&tokenizer, &[], &bytes.iter().map(|&b| b.into()).collect::<Vec<_>>(), true);
    assert_eq!(out(&[0xff, b'a']), ["\u{fffd}", "a", ""]);
    assert_eq!(out(&[0xc0, 0x80]), ["\u{fffd}", "\u{fffd}", ""]);
    assert_eq!(out(&[0xed, 0xa0, 0x80]), ["", "\u{fffd}\u{fffd}", "\u{fffd}", ""]);
    assert_eq!(out(&[0x80]), ["\u{fffd}", ""]);
}

/// DTK-10: cut at the end is not invalid in the middle.
#[test]
fn a_cut_character_is_held_and_a_broken_one_is_not() {
    let mut json = byte_level_json(&[("a", " a")], &[]);
    json["model"]["vocab"]["ðŁ"] = json!(257);
    json["model"]["vocab"]["«ł"] = json!(258);
    json["model"]["vocab"]["Ġa"] = json!(259);
    let tokenizer = tokenizer(&json);
    assert_eq!(tokenizer.token_bytes(TokenId(257)).unwrap(), [0xf0, 0x9f]);
    assert_eq!(pieces(&tokenizer, &[], &[257, 259], true), ["", "\u{fffd} a", ""]);
    assert_eq!(pieces(&tokenizer, &[], &[257, 258, 259], true), ["", "\u{1fae0}", " a", ""]);
    assert_eq!(pieces(&tokenizer, &[], &[257], true), ["", "\u{fffd}"]);
}

/// DTK-7: byte fallback, then text.
#[test]
fn byte_fallback_makes_characters() {
    let tokenizer = spm(&["▁", "b"]);
    let bytes = [0xe6, 0x97, 0xa5].map(|byte: u32| byte + 5);
    assert_eq!(
        pieces(&tokenizer, &[262], &[bytes[0], bytes[1], bytes[2], 262], true),
        ["", "", "日", "b", ""]
    );
}

#[test]
fn the_first_token_keeps_its_space_behind_a_prompt() {
    let tokenizer = spm(&["▁", "b", "▁b"]);
    assert_eq!(pieces(&tokenizer, &[1, 262], &[263], true), [" b", ""]);
    assert_eq!(pieces(&tokenizer, &[1], &[263], true), ["b", ""]);
    assert_eq!(pieces(&tokenizer, &[1], &[263], false), [" b", ""]);
}

#[test]
fn a_prompt_that_ends_inside_a_character_is_continued() {
    assert_eq!(pieces(&byte_level(), &[97, 0xf0, 0x9f], &[0xab, 0xa0], true), ["", "\u{1fae0}", ""]);
    assert_eq!(pieces(&byte_level(), &[97, 0x9f, 264], &[98], true), ["b", ""]);
}

#[test]
fn control_tokens_are_skipped_or_spelled() {
    assert_eq!(pieces(&byte_level(), &[], &[97, 264, 98], true), ["a", "", "b", ""]);
    assert_eq!(pieces(&byte_level(), &[], &[97, 264, 98], false), ["a", "<|im_end|>", "b", ""]);
}

/// DTK-5: no error and no growth of the work for each token, for both kinds of decoder.
#[test]
fn ten_thousand_tokens_stream() {
    let text = "a. , b's [x](y) {{ '…' }} 日本 😀 ".repeat(500);
    let tokenizer = byte_level();
    let tokens = numbers(&tokenizer.encode(&text, crate::Specials::Literal).unwrap());
    assert!(tokens.len() > 10_000);
    assert_eq!(pieces(&tokenizer, &[], &tokens, true).concat(), text);

    let windowed = windowed();
    let tokens: Vec<u32> = [1, 2, 5, 3, 4, 6, 7, 8, 9, 10].repeat(1_000);
    let full = windowed.decode(&ids(&tokens), true).unwrap();
    let start = std::time::Instant::now();
    assert_eq!(pieces(&windowed, &[], &tokens, true).concat(), full);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

/// DTK-4: a decoder that takes back what it said.
#[test]
fn new_text_begins_behind_the_common_prefix() {
    assert_eq!(common_prefix_len("abcde", "abcd😀"), 4);
    assert_eq!(common_prefix_len("é", "è"), 0);
    assert_eq!(common_prefix_len("ab", "a"), 1);
}

#[test]
fn a_token_outside_the_vocabulary_gives_no_text() {
    assert_eq!(pieces(&byte_level(), &[], &[97, 100_000, 98], true).concat(), "ab");
    assert_eq!(pieces(&windowed(), &[], &[1, 100_000, 2], true).concat(), "helloing");
}
