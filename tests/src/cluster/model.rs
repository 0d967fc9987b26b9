//! Models with text: the golden ones, to which a tokenizer is added, and the default one.

use std::{fs, path::PathBuf};

use longreach_engine::Model;
use longreach_model::files::{ModelFiles, resolve};
use longreach_text::TextModel;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::tiny::{Error, golden_dir};

/// Entries of the golden models' vocabularies.
pub const VOCAB_SIZE: u32 = 320;

/// The token that ends an output of a golden model here. It is the last of the vocabulary.
pub const EOS: u32 = VOCAB_SIZE - 1;

/// Control tokens, the last entries of the vocabulary.
const CONTROLS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A model that a cluster can serve.
pub struct ServedModel {
    /// For engines.
    pub model: Model,
    /// For the router.
    pub text: TextModel,
    /// What it is called.
    pub name: String,
    /// Where its files lie.
    pub path: PathBuf,
    _dir: Option<TempDir>,
}

impl ServedModel {
    /// The golden model `name` with a tokenizer: one token for each byte, then pairs of letters, then control tokens.
    /// `context_len` replaces the model's own, for prompts that are longer than it was made for.
    pub fn golden(name: &str, context_len: Option<usize>) -> Result<Self, Error> {
        let (dir, golden) = (TempDir::new()?, golden_dir(name));
        let to = |file: &str| dir.path().join(file);
        let read = |file: &str| {
            let path = golden.join(file);
            fs::read(&path).map_err(|error| format!("golden model {}: {error}", path.display()))
        };
        fs::write(to("model.safetensors"), read("model.safetensors")?)?;
        let mut config: Value = serde_json::from_slice(&read("config.json")?)?;
        config["eos_token_id"] = json!(EOS);
        if let Some(context_len) = context_len {
            config["max_position_embeddings"] = json!(context_len);
        }
        fs::write(to("config.json"), config.to_string())?;
        fs::write(to("tokenizer.json"), tokenizer().to_string())?;
        let tokenizer_config = json!({"eos_token": CONTROLS[2], "chat_template": TEMPLATE});
        fs::write(to("tokenizer_config.json"), tokenizer_config.to_string())?;
        Self::open(name.to_owned(), dir.path().to_owned(), Some(dir))
    }

    /// SmolLM2-135M-Instruct, from wherever this machine has it.
    pub fn default_model() -> Result<Self, Error> {
        let resolved = resolve(None)?;
        Self::open(resolved.name, resolved.path, None)
    }

    fn open(name: String, path: PathBuf, dir: Option<TempDir>) -> Result<Self, Error> {
        let model = Model::open(ModelFiles::open(&path)?)?;
        let text = TextModel::load(&path)?;
        Ok(Self { model, text, name, path, _dir: dir })
    }

    /// What a token spells.
    pub fn spelling(&self, token: u32) -> Result<Vec<u8>, Error> {
        Ok(self.text.tokenizer().token_bytes(longreach_types::TokenId(token))?.to_vec())
    }
}

/// A byte-level tokenizer.json of [`VOCAB_SIZE`] entries.
fn tokenizer() -> Value {
    let mut vocabulary: Map<String, Value> =
        (0..=255).map(|byte| (spelling(byte).to_string(), json!(byte))).collect();
    let n_pairs = VOCAB_SIZE as usize - vocabulary.len() - CONTROLS.len();
    let letters = "etaoinsh";
    let pairs = letters.chars().flat_map(|left| letters.chars().map(move |right| (left, right)));
    let mut merges = Vec::new();
    for (left, right) in pairs.take(n_pairs) {
        vocabulary.insert(format!("{left}{right}"), json!(vocabulary.len()));
        merges.push(json!([left, right]));
    }
    let control = |(idx, content): (usize, &&str)| {
        json!({"id": vocabulary.len() + idx, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let controls: Vec<Value> = CONTROLS.iter().enumerate().map(control).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": controls, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
            "merges": merges},
    })
}

/// How byte-level vocabularies spell a byte.
fn spelling(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(0x100 + nth).unwrap_or(char::REPLACEMENT_CHARACTER)
}
