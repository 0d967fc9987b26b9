//! Files of models: weights, configurations, tokenizers, templates.

use std::path::Path;

use longreach_gguf::{GgmlType, GgufBuilder, Header};
use longreach_model::{
    config::ModelConfig,
    files::{ModelFiles, fingerprint},
};
use longreach_text::{ChatMessage, ChatOptions, ChatTemplate, Role, Specials, TextModel};
use longreach_types::TokenId;
use serde_json::{Map, Value, json};

use crate::parts::{self, Folder};

/// Text with what tokenizers treat unlike plain words.
const TEXT: &str = "Hi <s> 42\u{e9}\u{65e5}\u{1f44b} \n\tit's";

/// A whole GGUF file, as the workers and the router open it.
pub(super) fn gguf(bytes: &[u8]) -> bool {
    static FOLDER: Folder = Folder::new();
    // Most inputs end here; only those that parse are worth a file.
    if Header::parse(Path::new("fuzzed.gguf"), bytes).is_err() {
        return false;
    }
    let path = FOLDER.fill(&[("model.gguf", Some(bytes))]).join("model.gguf");
    let has_weights = open_model(&path);
    let has_text = TextModel::load(&path).is_ok_and(|text| use_text(&text));
    has_weights || has_text
}

/// Two models: one of every kind of metadata, one that has weights and a tokenizer.
pub(super) fn gguf_seeds() -> Vec<Vec<u8>> {
    let tokens: Vec<String> = ["<unk>", "<s>", "</s>", "\u{2581}", "H", "i", "\u{2581}H"]
        .map(str::to_owned)
        .into_iter()
        .chain((0..=255).map(|byte| format!("<0x{byte:02X}>")))
        .collect();
    let types: Vec<i32> =
        (0..tokens.len()).map(|id| [2, 3, 3, 1, 1, 1, 1].get(id).copied().unwrap_or(6)).collect();
    let spellings: Vec<&[u8]> = tokens.iter().map(|token| token.as_bytes()).collect();
    let words = gguf_keys(tokens.len())
        .string("tokenizer.ggml.model", b"llama")
        .strings("tokenizer.ggml.tokens", &spellings)
        .f32s("tokenizer.ggml.scores", &vec![-1.0; tokens.len()])
        .i32s("tokenizer.ggml.token_type", &types)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .string("tokenizer.chat_template", TEMPLATE.as_bytes())
        .build();
    let bytes: Vec<String> = (0..=255).map(|byte| spelling(byte).to_string()).collect();
    let spellings: Vec<&[u8]> = bytes.iter().map(|token| token.as_bytes()).collect();
    let merges: [&[u8]; 2] = [b"H i", b"i t"];
    let all: Vec<&[u8]> = spellings.iter().copied().chain([&b"Hi"[..], b"it", b"<end>"]).collect();
    let types: Vec<i32> = (0..all.len()).map(|id| if id == 258 { 3 } else { 1 }).collect();
    let merged = gguf_weights(gguf_keys(all.len()), all.len())
        .string("tokenizer.ggml.model", b"gpt2")
        .string("tokenizer.ggml.pre", b"smollm")
        .strings("tokenizer.ggml.tokens", &all)
        .i32s("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &merges)
        .u32("tokenizer.ggml.eos_token_id", 258)
        .bool("tokenizer.ggml.add_bos_token", false)
        .build();
    vec![words, merged]
}

fn gguf_keys(vocab_size: usize) -> GgufBuilder {
    let mut keys = GgufBuilder::new("llama");
    for (name, value) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 2),
        ("attention.value_length", 2),
        ("vocab_size", vocab_size as u32),
    ] {
        keys = keys.u32(&format!("llama.{name}"), value);
    }
    keys.f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
}

fn gguf_weights(mut keys: GgufBuilder, vocab_size: usize) -> GgufBuilder {
    let f16 = GgmlType::from_name("F16").expect("the format has this type");
    let f32 = GgmlType::from_name("F32").expect("the format has this type");
    for (name, ty, shape) in [
        ("token_embd", f16, &[vocab_size, 4][..]),
        ("output_norm", f32, &[4]),
        ("blk.0.attn_norm", f32, &[4]),
        ("blk.0.attn_q", f16, &[4, 4]),
        ("blk.0.attn_k", f16, &[2, 4]),
        ("blk.0.attn_v", f16, &[2, 4]),
        ("blk.0.attn_output", f16, &[4, 4]),
        ("blk.0.ffn_norm", f32, &[4]),
        ("blk.0.ffn_gate", f16, &[4, 4]),
        ("blk.0.ffn_up", f16, &[4, 4]),
        ("blk.0.ffn_down", f16, &[4, 4]),
    ] {
        let n_bytes = shape.iter().product::<usize>() * if ty == f16 { 2 } else { 4 };
        keys = keys.tensor(&format!("{name}.weight"), ty, shape, &vec![0; n_bytes]);
    }
    keys
}

/// A model folder: the files of these names, those that are empty left out.
pub(super) fn safetensors(bytes: &[u8]) -> bool {
    static FOLDER: Folder = Folder::new();
    const NAMES: [&str; 6] = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "one.safetensors",
        "other.safetensors",
        "generation_config.json",
    ];
    let mut parts = parts::split(bytes).into_iter();
    let files = NAMES.map(|name| (name, parts.next().filter(|part| !part.is_empty())));
    open_model(&FOLDER.fill(&files))
}

/// A model in one file, and one in two.
pub(super) fn safetensors_seeds() -> Vec<Vec<u8>> {
    let config = json!({
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 4, "vocab_size": 6,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": [2, 3],
        "bos_token_id": 1, "tie_word_embeddings": true,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    });
    let config = config.to_string().into_bytes();
    let tensors: [(&str, &[usize]); 11] = [
        ("model.embed_tokens.weight", &[6, 4]),
        ("model.norm.weight", &[4]),
        ("model.layers.0.input_layernorm.weight", &[4]),
        ("model.layers.0.self_attn.q_proj.weight", &[4, 4]),
        ("model.layers.0.self_attn.k_proj.weight", &[2, 4]),
        ("model.layers.0.self_attn.v_proj.weight", &[2, 4]),
        ("model.layers.0.self_attn.o_proj.weight", &[4, 4]),
        ("model.layers.0.post_attention_layernorm.weight", &[4]),
        ("model.layers.0.mlp.gate_proj.weight", &[4, 4]),
        ("model.layers.0.mlp.up_proj.weight", &[4, 4]),
        ("model.layers.0.mlp.down_proj.weight", &[4, 4]),
    ];
    let map: Map<String, Value> = tensors
        .iter()
        .enumerate()
        .map(|(idx, (name, _))| {
            ((*name).to_owned(), json!(["one.safetensors", "other.safetensors"][idx / 6]))
        })
        .collect();
    let index = json!({"metadata": {"total_size": 400}, "weight_map": map}).to_string().into_bytes();
    let generation = br#"{"eos_token_id": 2, "bos_token_id": 1}"#.to_vec();
    let one = parts::join(&[config.clone(), safetensors_file(&tensors)]);
    let (first, second) = tensors.split_at(6);
    let two = parts::join(&[
        config,
        Vec::new(),
        index,
        safetensors_file(first),
        safetensors_file(second),
        generation,
    ]);
    vec![one, two]
}

fn safetensors_file(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let mut header = Map::new();
    let mut len = 0;
    for (name, shape) in tensors {
        let end = len + 2 * shape.iter().product::<usize>();
        header
            .insert((*name).to_owned(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [len, end]}));
        len = end;
    }
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let header = Value::Object(header).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; len]].concat()
}

/// Opens a model and reads what there is to read before weights are loaded.
fn open_model(path: &Path) -> bool {
    let Ok(files) = ModelFiles::open(path) else { return false };
    let n_bytes: u64 = files.tensors().map(|tensor| tensor.bytes.len() as u64).sum();
    assert_eq!(n_bytes, files.weight_bytes(), "tensors are not of the length that was checked");
    let Ok(config) = ModelConfig::from_files(&files) else { return false };
    fingerprint(&files, &config);
    true
}

/// A tokenizer folder: `tokenizer.json`, `tokenizer_config.json`, and a text to encode.
pub(super) fn tokenizer(bytes: &[u8]) -> bool {
    static FOLDER: Folder = Folder::new();
    let parts = parts::split(bytes);
    let part = |idx: usize| parts.get(idx).copied();
    let dir = FOLDER.fill(&[("tokenizer.json", part(0)), ("tokenizer_config.json", part(1))]);
    let Ok(text) = TextModel::load(&dir) else { return false };
    if let Some(written) = part(2) {
        round_trip(&text, &String::from_utf8_lossy(written));
    }
    use_text(&text)
}

/// One tokenizer of each kind of model.
pub(super) fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let config = json!({"eos_token": "<end>", "chat_template": TEMPLATE}).to_string();
    let added = json!([{"id": 258, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}]);
    let mut vocab: Map<String, Value> =
        (0..=255).map(|byte| (spelling(byte).to_string(), json!(byte))).collect();
    vocab.insert("Hi".to_owned(), json!(256));
    vocab.insert("it".to_owned(), json!(257));
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let bytes = json!({
        "version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level,
        "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["H", "i"], ["i", "t"]]},
    });
    let pieces: Vec<Value> = ["<unk>", "\u{2581}", "H", "i", "\u{2581}H", "t"]
        .iter()
        .enumerate()
        .map(|(idx, piece)| json!([piece, -(idx as f32)]))
        .collect();
    let meta =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": false});
    let unigram = json!({
        "version": "1.0", "added_tokens": [{"id": 6, "content": "<end>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "pre_tokenizer": meta, "post_processor": null, "decoder": meta,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false},
    });
    [bytes, unigram]
        .iter()
        .map(|json| parts::join(&[json.to_string().as_str(), &config, "Hi it's <end>\u{e9}"]))
        .collect()
}

/// A template, and a message.
pub(super) fn chat_template(bytes: &[u8]) -> bool {
    let parts = parts::split(bytes);
    let text = |idx: usize| {
        parts.get(idx).map(|part| String::from_utf8_lossy(part).into_owned()).unwrap_or_default()
    };
    let globals = [("bos_token".to_owned(), json!("<s>")), ("eos_token".to_owned(), json!("</s>"))];
    let template = ChatTemplate::new(&Value::String(text(0)), "fuzzed", globals.into_iter().collect());
    let Ok(template) = template else { return false };
    let messages = [ChatMessage::text(Role::System, "be brief"), ChatMessage::text(Role::User, text(1))];
    template.render(&messages[1..], &ChatOptions::default()).is_ok()
        | template.render(&messages, &ChatOptions::default()).is_ok()
}

/// The usual form, and one with what templates of newer models use.
pub(super) fn chat_template_seeds() -> Vec<Vec<u8>> {
    let newer = "{%- macro show(m) -%}{{ m.role | upper }}: {{ (m['content'] | trim)[:64] }}{%- endmacro -%}\
        {%- set ns = namespace(n=0) -%}{%- for m in messages if m.content is string -%}\
        {%- set ns.n = ns.n + 1 -%}{{ show(m) }}{{ '\\n' * (ns.n % 3) }}{%- else -%}none{%- endfor -%}\
        {%- if tools is defined and tools -%}{{ tools | tojson(indent=2) }}{%- endif -%}\
        {{ messages[0]['content'].split(' ')[-1].startswith('x') }}{{ strftime_now('%Y') }}\
        {%- if ns.n > 9 -%}{{ raise_exception('too many') }}{%- endif -%}";
    [TEMPLATE, newer].iter().map(|template| parts::join(&[*template, "Hi, <s> you"])).collect()
}

const TEMPLATE: &str = "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}\
    {% if add_generation_prompt %}<s>assistant\n{% endif %}";

/// Uses a text side as the router does.
fn use_text(text: &TextModel) -> bool {
    round_trip(text, TEXT);
    let chat = text.render_chat(&[ChatMessage::text(Role::User, TEXT)], &ChatOptions::default());
    let tokenizer = text.tokenizer();
    let tokens: Vec<TokenId> = (0..tokenizer.vocab_size().min(64) as u32 + 2).map(TokenId).collect();
    let _unknown = tokenizer.decode(&tokens, false);
    let mut stream = text.detokenizer(&[], true);
    for token in tokens {
        let _unknown = stream.push(token);
    }
    stream.finish().is_ok() | chat.is_ok()
}

fn round_trip(text: &TextModel, written: &str) {
    let tokenizer = text.tokenizer();
    for specials in [Specials::Literal, Specials::Parse] {
        if let Ok(ids) = tokenizer.encode(written, specials) {
            let known = ids.iter().all(|id| (id.0 as usize) < tokenizer.vocab_size());
            assert!(known, "an encoded text has a token that the vocabulary lacks");
            let _lossy = tokenizer.decode(&ids, true);
        }
    }
}

/// How byte-level vocabularies spell a byte.
pub(super) fn spelling(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(0x100 + nth).expect("the first 68 characters after Latin-1 exist")
}
