//! Small tokenizers for the tests of this crate.

use std::path::Path;
use std::sync::LazyLock;

use longreach_gguf::{GgufTokenizer, TokenType};
use longreach_types::TokenId;
use serde_json::{Value, json};

use crate::{TextModel, Tokenizer};

/// Spelling of a byte in GPT-2's alphabet.
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |byte: &u32| matches!(*byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(byte);
    if printable(&code) {
        return char::from(byte);
    }
    let n_before = (0..code).filter(|byte| !printable(byte)).count() as u32;
    char::from_u32(0x100 + n_before).unwrap()
}

/// The spelling of a text in GPT-2's alphabet.
pub(crate) fn byte_spelling(text: &str) -> String {
    text.bytes().map(byte_char).collect()
}

/// A tokenizer.json: byte-level BPE, ids 0..256 are the bytes, then the merges, then the control tokens.
pub(crate) fn byte_level_json(merges: &[(&str, &str)], controls: &[&str]) -> Value {
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255 {
        vocab.insert(byte_char(byte).to_string(), json!(byte));
    }
    let mut pairs = Vec::new();
    for (left, right) in merges {
        let (left, right) = (byte_spelling(left), byte_spelling(right));
        vocab.insert(format!("{left}{right}"), json!(vocab.len()));
        pairs.push(json!([left, right]));
    }
    let first = vocab.len();
    json!({
        "version": "1.0",
        "added_tokens": added(controls, first, true),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs},
    })
}

/// Entries of `added_tokens` with ids from `first` on.
pub(crate) fn added(contents: &[&str], first: usize, special: bool) -> Value {
    let entry = |(idx, content): (usize, &&str)| {
        json!({"id": first + idx, "content": content, "special": special, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    };
    contents.iter().enumerate().map(entry).collect()
}

/// The control tokens of ChatML.
pub(crate) const CHATML: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// ChatML as a template, without any default.
pub(crate) const CHATML_TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + \
    m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Merges that make a few words, one of them over the border between a template's text and content.
pub(crate) const MERGES: [(&str, &str); 6] =
    [("h", "i"), ("\n", "h"), ("l", "l"), ("o", "k"), (" ", "a"), ("<", "|")];

/// A model directory.
pub(crate) fn write_dir(dir: &Path, files: &[(&str, &Value)]) {
    for (name, value) in files {
        std::fs::write(dir.join(name), serde_json::to_vec(value).unwrap()).unwrap();
    }
}

/// Loads a tokenizer from the JSON of a tokenizer.json.
pub(crate) fn tokenizer(json: &Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &[("tokenizer.json", json)]);
    Tokenizer::from_dir(dir.path()).unwrap()
}

/// A byte-level model with the control tokens of ChatML.
pub(crate) fn byte_level() -> Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(&byte_level_json(&MERGES, &CHATML)));
    TOKENIZER.clone()
}

/// A SentencePiece model with few pieces, from id 261 on: `▁`, `a`, `▁a`, `▁▁`.
pub(crate) fn sentence_piece() -> Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> =
        LazyLock::new(|| Tokenizer::from_gguf(&sentence_piece_gguf(&["▁", "a", "▁a", "▁▁"])).unwrap());
    TOKENIZER.clone()
}

/// A model of a tokenizer and the source of a template.
pub(crate) fn model(tokenizer: Tokenizer, template: &str) -> TextModel {
    TextModel::new(tokenizer, Some((json!(template), "a test".to_owned()))).unwrap()
}

/// A SentencePiece vocabulary as in a GGUF file: `<unk>`, `<s>`, `</s>`, `<|im_start|>`, `<|im_end|>`, the bytes,
/// then the pieces, the earlier the better.
pub(crate) fn sentence_piece_gguf(pieces: &[&str]) -> GgufTokenizer {
    let specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"];
    let bytes = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>"));
    let texts: Vec<String> = specials.map(str::to_owned).into_iter().chain(bytes).collect();
    let mut types = vec![TokenType::Unknown];
    types.extend([TokenType::Control; 4]);
    types.extend([TokenType::Byte; 256]);
    types.extend(pieces.iter().map(|_| TokenType::Normal));
    let mut scores = vec![0.0; texts.len()];
    scores.extend((0..pieces.len()).map(|rank| -(rank as f32)));
    let tokens = texts.into_iter().map(String::into_bytes);
    GgufTokenizer {
        tokens: tokens.chain(pieces.iter().map(|piece| piece.as_bytes().to_vec())).collect(),
        types,
        scores: Some(scores),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..empty_gguf("llama")
    }
}

/// A byte-level vocabulary as in a GGUF file, the same as [`byte_level`].
pub(crate) fn byte_level_gguf(pre: Option<&str>) -> GgufTokenizer {
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
    let spelled = MERGES.map(|(left, right)| (byte_spelling(left), byte_spelling(right)));
    tokens.extend(spelled.iter().map(|(left, right)| format!("{left}{right}")));
    let mut types = vec![TokenType::Normal; tokens.len()];
    tokens.extend(CHATML.map(str::to_owned));
    types.extend([TokenType::Control; 3]);
    GgufTokenizer {
        tokens: tokens.into_iter().map(String::into_bytes).collect(),
        types,
        pre: pre.map(str::to_owned),
        merges: spelled.iter().map(|(left, right)| format!("{left} {right}").into_bytes()).collect(),
        eos: Some(264),
        ..empty_gguf("gpt2")
    }
}

fn empty_gguf(model: &str) -> GgufTokenizer {
    GgufTokenizer {
        model: model.to_owned(),
        pre: None,
        tokens: Vec::new(),
        types: Vec::new(),
        scores: None,
        merges: Vec::new(),
        bos: None,
        eos: None,
        eot: None,
        eom: None,
        unk: None,
        pad: None,
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
        chat_template: None,
    }
}

/// Ids as plain numbers.
pub(crate) fn numbers(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

/// Plain numbers as ids.
pub(crate) fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}
