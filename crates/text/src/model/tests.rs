use longreach_gguf::GgufBuilder;
use serde_json::json;

use super::*;
use crate::Role;
use crate::testing::*;

fn chat(text: &str) -> Vec<ChatMessage> {
    vec![ChatMessage::text(Role::User, text)]
}

fn render(model: &TextModel) -> String {
    model.template().unwrap().render(&chat("x"), &ChatOptions::default()).unwrap()
}

/// TPL-5: the operator's, the template file's, the configuration's.
#[test]
fn templates_are_found_in_order() {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &[("tokenizer.json", &byte_level_json(&MERGES, &CHATML))]);
    let model = TextModel::load(dir.path()).unwrap();
    assert!(matches!(model.render_chat(&chat("x"), &ChatOptions::default()), Err(TextError::NoTemplate)));

    write_dir(dir.path(), &[("tokenizer_config.json", &json!({"chat_template": "from the configuration"}))]);
    assert_eq!(render(&TextModel::load(dir.path()).unwrap()), "from the configuration");

    std::fs::write(dir.path().join(TEMPLATE_FILE), "from the file").unwrap();
    assert_eq!(render(&TextModel::load(dir.path()).unwrap()), "from the file");

    let explicit = dir.path().join("mine");
    std::fs::write(&explicit, "from the operator").unwrap();
    let options = LoadOptions { chat_template: Some(explicit) };
    assert_eq!(render(&TextModel::load_with(dir.path(), &options).unwrap()), "from the operator");
}

/// TPL-8: the same model in both formats is the same.
#[test]
fn a_gguf_file_carries_everything() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"chat_template": CHATML_TEMPLATE, "eos_token": "<|im_end|>"});
    write_dir(
        dir.path(),
        &[("tokenizer.json", &byte_level_json(&MERGES, &CHATML)), ("tokenizer_config.json", &config)],
    );
    let vocabulary = byte_level_gguf(None);
    let refs = |strings: &[Vec<u8>]| strings.to_vec();
    let (tokens, merges) = (refs(&vocabulary.tokens), refs(&vocabulary.merges));
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 262 { 1 } else { 3 }).collect();
    let file = GgufBuilder::new("llama")
        .string("tokenizer.ggml.model", b"gpt2")
        .strings("tokenizer.ggml.tokens", &tokens.iter().map(Vec::as_slice).collect::<Vec<_>>())
        .strings("tokenizer.ggml.merges", &merges.iter().map(Vec::as_slice).collect::<Vec<_>>())
        .i32s("tokenizer.ggml.token_type", &types)
        .u32("tokenizer.ggml.eos_token_id", 264)
        .string("tokenizer.chat_template", CHATML_TEMPLATE.as_bytes())
        .build();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file).unwrap();
    let (from_dir, from_gguf) = (TextModel::load(dir.path()).unwrap(), TextModel::load(&path).unwrap());
    assert_eq!(from_dir.tokenizer().special(), from_gguf.tokenizer().special());
    assert_eq!(from_gguf.tokenizer().special().stop, [TokenId(264)]);
    for text in ["hi<|im_end|> ok", "a b 12 é", "<|im_start|>"] {
        let options = ChatOptions::default();
        assert_eq!(
            from_dir.render_chat(&chat(text), &options).unwrap(),
            from_gguf.render_chat(&chat(text), &options).unwrap()
        );
        assert_eq!(from_dir.encode_prompt(text).unwrap(), from_gguf.encode_prompt(text).unwrap());
    }
}

/// TXT-10: one beginning-of-text token if the template or the tokenizer or both ask for it, else none.
#[test]
fn there_is_one_bos_if_anything_asks_for_it() {
    for has_bos in [true, false] {
        for (in_template, by_tokenizer) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut gguf = sentence_piece_gguf(&["▁", "x"]);
            gguf.bos = has_bos.then_some(1);
            gguf.add_bos = Some(by_tokenizer);
            let source = format!("{}{CHATML_TEMPLATE}", if in_template { "{{ bos_token }}" } else { "" });
            let model = model(Tokenizer::from_gguf(&gguf).unwrap(), &source);
            let count = |ids: Vec<TokenId>| ids.into_iter().filter(|id| id.0 == 1).count();
            let expected = usize::from(has_bos && (in_template || by_tokenizer));
            assert_eq!(count(model.render_chat(&chat("x"), &ChatOptions::default()).unwrap()), expected);
            assert_eq!(count(model.encode_prompt("x").unwrap()), usize::from(has_bos && by_tokenizer));
        }
    }
}

/// The same from a tokenizer.json, with its post-processor and the class that overrides it.
#[test]
fn the_prefix_is_what_the_post_processor_puts_first() {
    let mut json = byte_level_json(&MERGES, &["<s>", "</s>"]);
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [262], "tokens": ["<s>"]},
                           "</s>": {"id": "</s>", "ids": [263], "tokens": ["</s>"]}},
    });
    let load = |config: Value| {
        let dir = tempfile::tempdir().unwrap();
        write_dir(dir.path(), &[("tokenizer.json", &json), ("tokenizer_config.json", &config)]);
        TextModel::load(dir.path()).unwrap()
    };
    assert_eq!(numbers(&load(json!({})).encode_prompt("ab").unwrap()), [262, 97, 98]);
    let config = json!({"bos_token": {"content": "<s>"}, "add_bos_token": false, "tokenizer_class": "LlamaTokenizerFast"});
    assert_eq!(numbers(&load(config).encode_prompt("ab").unwrap()), [97, 98]);
    let config =
        json!({"bos_token": "<s>", "add_bos_token": false, "tokenizer_class": "PreTrainedTokenizerFast"});
    assert_eq!(numbers(&load(config).encode_prompt("ab").unwrap()), [262, 97, 98]);
}

#[test]
fn end_tokens_come_from_every_file_that_names_some() {
    let dir = tempfile::tempdir().unwrap();
    write_dir(
        dir.path(),
        &[
            ("tokenizer.json", &byte_level_json(&MERGES, &CHATML)),
            ("special_tokens_map.json", &json!({"eos_token": {"content": "<|im_end|>"}})),
            ("generation_config.json", &json!({"eos_token_id": [262, 264]})),
            ("config.json", &json!({"eos_token_id": 7})),
        ],
    );
    let model = TextModel::load(dir.path()).unwrap();
    assert_eq!(model.tokenizer().special().stop, ids(&[7, 262, 264]));
    assert_eq!(model.tokenizer().special().eos, Some(TokenId(264)));
}

/// TXT-5 for repositories that list their turn tokens as ordinary added tokens.
#[test]
fn tokens_that_frame_texts_are_control_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let mut tokenizer = byte_level_json(&MERGES, &[]);
    tokenizer["added_tokens"] = added(&CHATML, 262, false);
    let config =
        json!({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", {"content": "\n"}]});
    write_dir(
        dir.path(),
        &[
            ("tokenizer.json", &tokenizer),
            ("tokenizer_config.json", &config),
            ("generation_config.json", &json!({"eos_token_id": [262, 10]})),
        ],
    );
    let model = TextModel::load(dir.path()).unwrap();
    let ids = model.encode_prompt("<|im_start|>\n<|im_end|><|endoftext|>").unwrap();
    assert!(numbers(&ids).iter().all(|&id| id < 262));
    let controls = CHATML.map(|spelling| model.tokenizer().control_token(spelling));
    assert_eq!(controls, [262, 263, 264].map(|id| Some(TokenId(id))));
    assert!(!model.tokenizer().is_control(TokenId(10)));
}

#[test]
fn files_that_are_missing_or_damaged_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = TextModel::load(dir.path()).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("tokenizer.json"), "{error}");
    std::fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
    let error = TextModel::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json is not usable: EOF"), "{error}");
    let gguf = dir.path().join("x.gguf");
    std::fs::write(&gguf, GgufBuilder::new("llama").build()).unwrap();
    let error = TextModel::load(&gguf).unwrap_err().to_string();
    assert!(error.contains("x.gguf is not usable: it has no tokenizer"), "{error}");
}

#[test]
fn a_model_can_be_shared_between_threads() {
    fn check<T: Send + Sync + Clone>() {}
    check::<TextModel>();
    check::<Tokenizer>();
}
