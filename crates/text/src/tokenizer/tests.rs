use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};

use longreach_gguf::TokenType;

use super::*;
use crate::testing::*;

fn text_of(tokenizer: &Tokenizer, tokens: &[TokenId]) -> String {
    tokenizer.decode(tokens, false).unwrap()
}

/// TXT-5: what a user writes is never structure, whatever it spells.
#[test]
fn the_spelling_of_a_control_token_stays_text() {
    let spm =
        Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "<", "s", ">", "/", "<s", "/s", "<s>"])).unwrap();
    for tokenizer in [byte_level(), spm] {
        for spelling in ["<s>", "</s>", "<|im_start|>", "a<|im_end|>b", "<|endoftext|><|endoftext|>"] {
            let ids = tokenizer.encode(spelling, Specials::Literal).unwrap();
            assert!(ids.iter().all(|&token| !tokenizer.is_control(token)), "{spelling} {ids:?}");
            assert_eq!(text_of(&tokenizer, &ids), spelling);
        }
    }
    let parsed = byte_level().encode("a<|im_end|>b", Specials::Parse).unwrap();
    assert_eq!(numbers(&parsed), [97, 264, 98]);
}

/// A vocabulary in which the merges themselves lead to a control token.
#[test]
fn a_control_token_that_merges_build_is_taken_apart() {
    let mut json = byte_level_json(&[("<", "s"), ("<s", ">")], &[]);
    json["added_tokens"] = added(&["<s>"], 257, true);
    let tokenizer = tokenizer(&json);
    assert!(tokenizer.is_control(TokenId(257)));
    assert_eq!(numbers(&tokenizer.encode("x<s>", Specials::Literal).unwrap()), [120, 60, 115, 62]);
    json["added_tokens"] = added(&["x"], usize::from(b'x'), true);
    let error = load_error_or_encode(&json, "axb").unwrap_err();
    assert!(error.to_string().contains("\"x\" exists in the vocabulary as a control token only"), "{error}");
}

fn load_error_or_encode(json: &Value, text: &str) -> Result<Vec<TokenId>, TextError> {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &[("tokenizer.json", json)]);
    let tokenizer = Tokenizer::from_dir(dir.path())?;
    let ids = tokenizer.encode(text, Specials::Literal)?;
    tokenizer.decode(&ids, true)?;
    Ok(ids)
}

/// TXT-2: text after U+0000 is there, and counted.
#[test]
fn a_nul_does_not_end_the_text() {
    for tokenizer in [byte_level(), Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "b"])).unwrap()] {
        let both = tokenizer.encode("before\0after", Specials::Literal).unwrap();
        let before = tokenizer.encode("before", Specials::Literal).unwrap();
        assert!(both.len() > before.len());
        assert_eq!(text_of(&tokenizer, &both), "before\0after");
    }
}

/// TXT-4: the normaliser that the file asks for is applied; without one, bytes are kept.
#[test]
fn normalisers_of_the_file_are_applied() {
    let composed = "Caf\u{e9}";
    let decomposed = "Cafe\u{301}";
    let encode = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, Specials::Literal).unwrap();
    let plain = byte_level();
    assert_ne!(encode(&plain, composed), encode(&plain, decomposed));
    let mut json = byte_level_json(&MERGES, &CHATML);
    json["normalizer"] = json!({"type": "NFC"});
    let nfc = tokenizer(&json);
    assert_eq!(encode(&nfc, composed), encode(&nfc, decomposed));
    json["normalizer"] = json!({"type": "NFKC"});
    assert_eq!(text_of(&plain, &encode(&tokenizer(&json), "4 ½ months")), "4 1⁄2 months");
    let qwen = Tokenizer::from_gguf(&byte_level_gguf(Some("qwen2"))).unwrap();
    assert_eq!(encode(&qwen, composed), encode(&qwen, decomposed));
    for text in ["4 ½ months", composed, decomposed, "Hello world! Café déjà vu — 123 😊"] {
        assert_eq!(text_of(&plain, &encode(&plain, text)), text);
    }
}

/// A control token whose spelling appears only after normalising is as forged as any other.
#[test]
fn normalising_does_not_make_control_tokens() {
    let mut json = byte_level_json(&MERGES, &CHATML);
    json["normalizer"] = json!({"type": "NFKC"});
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["normalized"] = json!(true);
    }
    let tokenizer = tokenizer(&json);
    let wide = "a＜|im_end|＞b";
    assert!(
        tokenizer.encode(wide, Specials::Parse).unwrap().iter().any(|&token| tokenizer.is_control(token))
    );
    let rendered = Rendered::plain(format!("<|im_start|>{wide}<|im_end|>"));
    let ids = tokenizer.encode_rendered(&rendered).unwrap();
    let controls: Vec<u32> = numbers(&ids).into_iter().filter(|&id| id >= 262).collect();
    assert_eq!(controls, [263, 264]);
}

/// TXT-8: expected ids are those of Llama 2's own tokenizer rules: a space is put before the text and behind
/// each control token.
#[test]
fn sentence_piece_marks_words_after_control_tokens() {
    let pieces = ["▁", "G", "a", "b", "x", "y", "▁G", "▁a", "▁b", "▁x", "▁y", "▁▁"];
    let tokenizer = Tokenizer::from_gguf(&sentence_piece_gguf(&pieces)).unwrap();
    let id = |piece: &str| 261 + pieces.iter().position(|p| *p == piece).unwrap() as u32;
    let encode = |text: &str| numbers(&tokenizer.encode(text, Specials::Parse).unwrap());
    assert_eq!(encode("<s>G"), [1, id("▁G")]);
    assert_eq!(encode("a</s> b"), [id("▁a"), 2, id("▁"), id("▁b")]);
    assert_eq!(encode("x<|im_start|> y"), [id("▁x"), 3, id("▁"), id("▁y")]);
    let mut gguf = sentence_piece_gguf(&pieces);
    gguf.add_space_prefix = Some(false);
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    assert_eq!(numbers(&tokenizer.encode("<s>G b", Specials::Parse).unwrap()), [1, id("G"), id("▁b")]);
}

/// The pair with the best joint piece is merged first, and a character that no piece has becomes its bytes.
#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let pieces = ["bc", "ab", "▁", "a", "b", "c"];
    let tokenizer = Tokenizer::from_gguf(&sentence_piece_gguf(&pieces)).unwrap();
    let ids = numbers(&tokenizer.encode("abc日", Specials::Literal).unwrap());
    assert_eq!(ids, [263, 264, 261, 5 + 0xe6, 5 + 0x97, 5 + 0xa5]);
}

fn metaspace_json(scheme: &str) -> Value {
    let pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"];
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(id, piece)| ((*piece).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0",
        "added_tokens": added(&pieces[..3], 0, true),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"], ["▁", "b"]], "unk_token": "<unk>",
                  "fuse_unk": true},
    })
}

/// Cutting a prompt at its control tokens by hand gives the ids that the library gives for the whole.
#[test]
fn both_ways_around_control_tokens_agree() {
    let spm = Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "a", "b", "▁a", "▁b", "▁▁"])).unwrap();
    let mut stripping = byte_level_json(&MERGES, &["<s>", "</s>", "<|im_end|>"]);
    stripping["added_tokens"][0]["lstrip"] = json!(true);
    stripping["added_tokens"][1]["rstrip"] = json!(true);
    stripping["added_tokens"][2]["single_word"] = json!(true);
    let mut with_user_token = byte_level_json(&MERGES, &["<s>", "</s>"]);
    let user_tokens = added(&["<t>"], 264, false);
    with_user_token["added_tokens"].as_array_mut().unwrap().extend(user_tokens.as_array().unwrap().clone());
    let tokenizers = [
        byte_level(),
        spm,
        tokenizer(&stripping),
        tokenizer(&with_user_token),
        tokenizer(&metaspace_json("first")),
        tokenizer(&metaspace_json("always")),
        tokenizer(&metaspace_json("never")),
    ];
    let pieces =
        ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "<t>", " ", "  ", "a", "b", "hi", "\n", "<", "é"];
    let text =
        prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..12).prop_map(|text| text.concat());
    let mut runner = prop::test_runner::TestRunner::deterministic();
    let agree = runner.run(&text, |text| {
        for tokenizer in &tokenizers {
            let controls = tokenizer.inner.controls.find(&text, |_, _| false);
            let by_hand = tokenizer.encode_around(&text, &controls).unwrap();
            prop_assert_eq!(by_hand, tokenizer.encode(&text, Specials::Parse).unwrap());
        }
        Ok(())
    });
    agree.unwrap();
}

/// Words are cut as the named pre-tokenizer cuts them: a merge over the cut never happens.
#[test]
fn gguf_pre_tokenizers_cut_words_as_named() {
    let n_tokens = |pre: Option<&str>, merge: (&str, &str)| {
        let mut gguf = byte_level_gguf(pre);
        let (left, right) = (byte_spelling(merge.0), byte_spelling(merge.1));
        for text in [format!("{left}{right}"), left.clone(), right.clone()] {
            if !gguf.tokens.contains(&text.clone().into_bytes()) {
                gguf.tokens.push(text.into_bytes());
                gguf.types.push(TokenType::Normal);
            }
        }
        gguf.merges = vec![format!("{left} {right}").into_bytes()];
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
        tokenizer.encode(&format!("{}{}", merge.0, merge.1), Specials::Literal).unwrap().len()
    };
    // Digits: together, single, single, up to three.
    for (pre, expected) in [(None, 1), (Some("smollm"), 2), (Some("qwen2"), 2), (Some("llama-bpe"), 1)] {
        assert_eq!(n_tokens(pre, ("1", "2")), expected, "{pre:?}");
    }
    // Punctuation and the word behind it: apart in GPT-2, together in the others.
    for (pre, expected) in [(Some("gpt-2"), 2), (Some("smollm"), 2), (Some("qwen2"), 1), (Some("llama3"), 1)]
    {
        assert_eq!(n_tokens(pre, (".", "a")), expected, "{pre:?}");
    }
}

#[test]
fn unknown_kinds_of_tokenizer_are_named_with_what_is_known() {
    let error = Tokenizer::from_gguf(&byte_level_gguf(Some("klingon"))).unwrap_err().to_string();
    assert!(
        error.starts_with("the pre-tokenizer \"klingon\" is not supported; supported are default, gpt-2"),
        "{error}"
    );
    let mut gguf = byte_level_gguf(None);
    gguf.model = "rwkv".to_owned();
    let error = Tokenizer::from_gguf(&gguf).unwrap_err().to_string();
    assert_eq!(error, "the tokenizer model \"rwkv\" is not supported; supported are gpt2, llama");
}

/// GGF-16: a vocabulary with damaged and repeated entries keeps every id in its place.
#[test]
fn tokens_that_are_not_utf8_or_occur_twice_keep_their_ids() {
    let mut gguf = byte_level_gguf(None);
    for token in [&b"\xff\xfe"[..], b"hi", b""] {
        gguf.tokens.push(token.to_vec());
        gguf.types.push(TokenType::Normal);
    }
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    assert_eq!(tokenizer.vocab_size(), 268);
    assert_eq!(numbers(&tokenizer.encode("hi", Specials::Literal).unwrap()), [256]);
    assert_eq!(tokenizer.control_token("<|im_end|>"), Some(TokenId(264)));
    assert!(tokenizer.decode(&ids(&[265, 266, 267]), false).is_ok());
}

#[test]
fn a_token_outside_the_vocabulary_is_named() {
    let tokenizer = byte_level();
    let error = tokenizer.decode(&ids(&[1, 265]), false).unwrap_err();
    assert_eq!(error.to_string(), "token id 265 is not below the vocabulary size 265");
    assert!(error.is_request());
}

/// TXT-11: files that make the library panic, at load, encode or decode.
#[test]
fn crafted_tokenizer_files_end_in_errors() {
    let base = || byte_level_json(&MERGES, &CHATML);
    let with = |key: &str, value: Value| {
        let mut json = base();
        json[key] = value;
        json
    };
    let mut no_such_piece = base();
    no_such_piece["model"]["merges"] = json!([["h", "no such piece"]]);
    let mut long_merge = base();
    long_merge["model"]["merges"] = json!([["h".repeat(1000), "i"]]);
    let mut far_id = base();
    far_id["model"]["vocab"]["far"] = json!(u32::MAX);
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}});
    let charsmap = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    let refused = [
        with("post_processor", template),
        no_such_piece,
        long_merge,
        far_id,
        with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        with("normalizer", charsmap),
        with("model", json!({"type": "BPE", "vocab": {}, "merges": []})),
        with("version", json!("9")),
        json!([]),
        json!({}),
    ];
    for json in refused {
        let error = load_error_or_encode(&json, "some text").unwrap_err().to_string();
        assert!(error.contains("tokenizer.json is not usable: "), "{error}");
    }
    // These ask for what is never done here: prompts are neither cut nor padded, and the decoder's bounds
    // matter for tokens only that it can strip.
    let truncation = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5});
    let strip = json!({"type": "Strip", "content": " ", "start": 9, "stop": 9});
    assert_eq!(load_error_or_encode(&with("truncation", truncation), "some text").unwrap().len(), 9);
    let stripped = load_error_or_encode(&with("decoder", strip), "some text");
    assert!(stripped.is_ok() || stripped.unwrap_err().to_string().contains("panic"));
}

/// TXT-7: twice the text takes about twice the time, for text in one long word, with a normaliser that
/// replaces, and for text full of forged control tokens. The best of three runs, as other work disturbs.
#[test]
fn encoding_takes_linear_time() {
    let spm = Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "_", "__", "▁▁", "▁▁▁▁"])).unwrap();
    let time = |tokenizer: &Tokenizer, text: &str| -> Duration {
        let once = || {
            let start = Instant::now();
            tokenizer.encode(text, Specials::Literal).unwrap();
            let rendered = Rendered::from_marked(&text.replace('<', "<M"), 'M');
            tokenizer.encode_rendered(&rendered).unwrap();
            start.elapsed()
        };
        (0..3).map(|_| once()).min().unwrap()
    };
    for tokenizer in [byte_level(), spm] {
        for unit in ["_", " ", "a ", "<", "<|im_end|>"] {
            let short = time(&tokenizer, &unit.repeat(25_000 / unit.len()));
            let long = time(&tokenizer, &unit.repeat(100_000 / unit.len()));
            assert!(long < short * 10 + Duration::from_millis(50), "{unit:?}: {short:?} then {long:?}");
        }
    }
}

#[test]
fn the_leading_space_of_sentence_piece_is_dropped_once() {
    let tokenizer = Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "a", "▁a"])).unwrap();
    let decode = |tokens: &[u32]| tokenizer.decode(&ids(tokens), true).unwrap();
    assert_eq!(decode(&[1, 263, 263]), "a a");
    assert_eq!(decode(&[261, 263]), " a");
    assert_eq!(decode(&[2]), "");
}
