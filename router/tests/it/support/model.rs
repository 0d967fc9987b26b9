//! A tokenizer small enough to be read: one token for each byte, and three control tokens.

use std::fs;

use longreach_text::TextModel;
use serde_json::{Map, Value, json};

/// The token that ends an output.
pub(crate) const EOS: u32 = 258;

/// The first and second control tokens: end of text, start of a turn.
const CONTROLS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The usual form of a conversation.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The model of all tests.
pub(crate) fn text_model() -> TextModel {
    let dir = tempfile::tempdir().unwrap();
    let vocabulary: Map<String, Value> =
        (0..=255).map(|byte| (spelling(byte).to_string(), json!(byte))).collect();
    let controls: Vec<Value> = CONTROLS
        .iter()
        .enumerate()
        .map(|(idx, content)| {
            json!({"id": 256 + idx, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": controls, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
            "merges": []},
    });
    let config = json!({"eos_token": CONTROLS[2], "chat_template": TEMPLATE});
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    TextModel::load(dir.path()).unwrap()
}

/// The tokens of a text.
pub(crate) fn tokens_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The text of tokens, control tokens spelled out.
pub(crate) fn text_of(tokens: impl IntoIterator<Item = u32>) -> String {
    let mut bytes = Vec::new();
    for token in tokens {
        match u8::try_from(token) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend_from_slice(CONTROLS[token as usize - 256].as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// How byte-level vocabularies spell a byte.
fn spelling(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(0x100 + nth).unwrap()
}
