//! Small models, put together tensor by tensor.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

use longreach_gguf::{GgmlType, GgufBuilder};
use longreach_model::{
    config::{ConfigError, ModelConfig},
    files::ModelFiles,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tensors of a model: name and shape.
pub(crate) type Tensors = BTreeMap<String, Vec<usize>>;

/// Two layers, 4 query heads and 2 key-value heads of width 8 over a hidden size of 20: `head_dim` is not
/// `hidden / n_q_heads` (ATT-1).
pub(crate) fn base_config() -> Value {
    json!({
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": 10,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
    })
}

/// [`base_config`] with some keys changed; null takes a key away.
pub(crate) fn config_with(changes: Value) -> Value {
    let mut config = base_config();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    config
}

/// The tensors of [`base_config`], by the names of Hugging Face, with a head of its own.
pub(crate) fn tensors() -> Tensors {
    let mut tensors = Tensors::new();
    let mut add = |name: String, shape: &[usize]| tensors.insert(name, shape.to_vec());
    add("model.embed_tokens.weight".to_owned(), &[10, 20]);
    add("lm_head.weight".to_owned(), &[10, 20]);
    add("model.norm.weight".to_owned(), &[20]);
    for layer in 0..2 {
        for (part, shape) in LAYER {
            add(format!("model.layers.{layer}.{part}.weight"), shape);
        }
    }
    tensors
}

const LAYER: [(&str, &[usize]); 9] = [
    ("input_layernorm", &[20]),
    ("self_attn.q_proj", &[32, 20]),
    ("self_attn.k_proj", &[16, 20]),
    ("self_attn.v_proj", &[16, 20]),
    ("self_attn.o_proj", &[20, 32]),
    ("post_attention_layernorm", &[20]),
    ("mlp.gate_proj", &[24, 20]),
    ("mlp.up_proj", &[24, 20]),
    ("mlp.down_proj", &[20, 24]),
];

/// Adds biases of the query, key and value projections.
pub(crate) fn with_qkv_biases(mut tensors: Tensors) -> Tensors {
    for layer in 0..2 {
        for (part, len) in [("q_proj", 32), ("k_proj", 16), ("v_proj", 16)] {
            tensors.insert(format!("model.layers.{layer}.self_attn.{part}.bias"), vec![len]);
        }
    }
    tensors
}

/// Adds biases of the output projections.
pub(crate) fn with_o_biases(mut tensors: Tensors) -> Tensors {
    for layer in 0..2 {
        tensors.insert(format!("model.layers.{layer}.self_attn.o_proj.bias"), vec![20]);
    }
    tensors
}

/// Stored numbers that differ from tensor to tensor and from place to place.
pub(crate) fn contents(name: &str, n: usize) -> Vec<u8> {
    let salt = name.bytes().fold(7u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    (0..n as u32).flat_map(|i| ((salt % 1000 + i % 977) as f32 / 64.0).to_le_bytes()).collect()
}

/// A safetensors file of F32 tensors.
pub(crate) fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, shape) in tensors {
        let start = data.len();
        data.extend(contents(name, shape.iter().product()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    safetensors_of(&Value::Object(header), &data)
}

/// A safetensors file of the given header and data.
pub(crate) fn safetensors_of(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = serde_json::to_vec(header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

/// A model directory with one safetensors file.
pub(crate) fn model_dir(config: &Value, tensors: &Tensors) -> TempDir {
    let dir = TempDir::new().unwrap();
    write_json(&dir.path().join("config.json"), config);
    fs::write(dir.path().join("model.safetensors"), safetensors(tensors)).unwrap();
    dir
}

pub(crate) fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_vec(value).unwrap()).unwrap();
}

/// The configuration of the model at `path`, whose files must open.
pub(crate) fn load(path: &Path) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_files(&ModelFiles::open(path).unwrap())
}

/// The configuration of a model of the given parts.
pub(crate) fn load_parts(config: &Value, tensors: &Tensors) -> Result<ModelConfig, String> {
    let dir = model_dir(config, tensors);
    load(dir.path()).map_err(|error| error.to_string())
}

/// The keys of [`base_config`] in a GGUF file.
pub(crate) fn gguf_keys(architecture: &str) -> GgufBuilder {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufBuilder::new(architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("context_length"), 64)
        .u32(&key("embedding_length"), 20)
        .u32(&key("feed_forward_length"), 24)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .u32(&key("attention.key_length"), 8)
        .u32(&key("attention.value_length"), 8)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
}

/// Adds tensors to a GGUF file, under its names for them.
pub(crate) fn gguf_tensors(builder: GgufBuilder, tensors: &Tensors) -> GgufBuilder {
    const NAMES: [(&str, &str); 13] = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let ty = GgmlType::from_name("F32").unwrap();
    tensors.iter().fold(builder, |builder, (name, shape)| {
        let bytes = contents(name, shape.iter().product());
        let name = NAMES.iter().fold(name.clone(), |name, (from, to)| name.replace(from, to));
        builder.tensor(&name, ty, shape, &bytes)
    })
}

/// A GGUF file in a directory of its own.
pub(crate) fn gguf_file(builder: GgufBuilder) -> (TempDir, std::path::PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, builder.build()).unwrap();
    (dir, path)
}

/// Calls `look` with one byte of the file at `path` changed by `mask`, and changes it back.
pub(crate) fn with_changed_byte(path: &Path, at: usize, mask: u8, look: impl FnOnce()) {
    let mut file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut flip = || {
        let mut byte = [0];
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte[0] ^ mask]).unwrap();
    };
    flip();
    look();
    flip();
}

/// Asserts that `message` holds every one of `words`.
pub(crate) fn assert_words(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}
