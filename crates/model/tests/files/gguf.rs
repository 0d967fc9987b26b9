//! Models in GGUF files: keys, names and types.

use longreach_gguf::{GgmlType, GgufBuilder};
use longreach_kernels::{RopeStyle, StoredType};
use longreach_model::{
    config::{Architecture, ModelConfig, RopeScaling},
    files::ModelFiles,
};
use longreach_types::TokenId;

use crate::fixture::*;

fn load_gguf(builder: GgufBuilder) -> Result<ModelConfig, String> {
    let (_dir, path) = gguf_file(builder);
    load(&path).map_err(|error| error.to_string())
}

fn llama() -> GgufBuilder {
    gguf_tensors(gguf_keys("llama"), &tensors())
}

#[test]
fn a_gguf_file_is_the_model_that_a_directory_is() {
    let (_dir, path) = gguf_file(llama());
    let files = ModelFiles::open(&path).unwrap();
    let names: Vec<_> = files.tensors().map(|tensor| tensor.name.to_owned()).collect();
    assert_eq!(names, tensors().into_keys().collect::<Vec<_>>());
    for (name, shape) in tensors() {
        let tensor = files.tensor(&name).unwrap();
        assert_eq!((tensor.ty, tensor.shape), (StoredType::F32, &shape[..]));
        assert_eq!(tensor.bytes, contents(&name, shape.iter().product()));
    }
    // Pairs are neighbours in the one and halves in the other; eos and bos are not in this file.
    let gguf = ModelConfig::from_files(&files).unwrap();
    let json = load_parts(&base_config(), &tensors()).unwrap();
    assert_eq!(gguf.rope.style, RopeStyle::Interleaved);
    assert_eq!((gguf.eos.len(), gguf.bos), (0, None));
    let style = RopeStyle::Half;
    let same = ModelConfig {
        rope: longreach_model::config::RopeConfig { style, ..gguf.rope.clone() },
        eos: json.eos.clone(),
        bos: json.bos,
        ..gguf
    };
    assert_eq!(same, json);
}

/// SFT-11 for GGUF: an absent head is a tied one.
#[test]
fn a_gguf_file_without_a_head_is_tied() {
    assert!(!load_gguf(llama()).unwrap().tied_head);
    let mut tensors = tensors();
    tensors.remove("lm_head.weight");
    assert!(load_gguf(gguf_tensors(gguf_keys("llama"), &tensors)).unwrap().tied_head);
}

#[test]
fn qwen2_has_biases_and_pairs_of_halves() {
    let config = load_gguf(gguf_tensors(gguf_keys("qwen2"), &with_qkv_biases(tensors()))).unwrap();
    assert_eq!((config.architecture, config.qkv_bias), (Architecture::Qwen2, true));
    assert_eq!(config.rope.style, RopeStyle::Half);
    let message = load_gguf(gguf_tensors(gguf_keys("qwen2"), &tensors())).unwrap_err();
    assert_words(&message, &["q_proj.bias is missing"]);
    let biased =
        load_gguf(gguf_tensors(gguf_keys("llama"), &with_o_biases(with_qkv_biases(tensors())))).unwrap();
    assert_eq!((biased.qkv_bias, biased.o_bias), (true, true));
}

/// GGF-13, GGF-14: what is not computed is refused by name.
#[test]
fn unknown_models_are_refused_by_name() {
    for architecture in ["gemma2", "gemma3", "qwen3", "mistral", "deepseek2", "gpt-oss"] {
        let message = load_gguf(gguf_tensors(gguf_keys(architecture), &tensors())).unwrap_err();
        assert_words(&message, &["model.gguf", architecture, "supported are llama"]);
    }
    let message = load_gguf(llama().u32("llama.expert_count", 8)).unwrap_err();
    assert_words(&message, &["llama.expert_count", "experts"]);
    let f32_ty = GgmlType::from_name("F32").unwrap();
    let experts = llama().tensor("blk.0.ffn_gate_exps.weight", f32_ty, &[2, 24, 20], &[0; 2 * 24 * 20 * 4]);
    assert_words(&load_gguf(experts).unwrap_err(), &["blk.0.ffn_gate_exps.weight", "no place"]);
    let unsupported = GgmlType::from_name("IQ2_XS").unwrap();
    let (_dir, path) = gguf_file(llama().tensor("blk.0.x.weight", unsupported, &[256], &[0; 74]));
    let message = ModelFiles::open(&path).unwrap_err().to_string();
    assert_words(&message, &["model.gguf", "blk.0.x.weight", "IQ2_XS", "Q4_K"]);
}

#[test]
fn every_required_key_is_missed_by_name() {
    let whole = [
        ("block_count", 2),
        ("embedding_length", 20),
        ("attention.head_count", 4),
        ("context_length", 64),
        ("feed_forward_length", 24),
    ];
    for (missing, _) in whole {
        let builder = whole
            .iter()
            .filter(|(key, _)| *key != missing)
            .fold(GgufBuilder::new("llama"), |builder, (key, value)| {
                builder.u32(&format!("llama.{key}"), *value)
            })
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        let message = load_gguf(gguf_tensors(builder, &tensors())).unwrap_err();
        assert_words(&message, &["model.gguf", &format!("llama.{missing}: is missing")]);
    }
}

#[test]
fn rope_scaling_of_gguf_keys() {
    let scaling = |builder: GgufBuilder| load_gguf(gguf_tensors(builder, &tensors())).map(|c| c.rope.scaling);
    let keys = || gguf_keys("llama");
    let typed = |name: &str| keys().string("llama.rope.scaling.type", name.as_bytes());
    assert_eq!(scaling(keys()), Ok(RopeScaling::None));
    assert_eq!(scaling(typed("none")), Ok(RopeScaling::None));
    let linear = Ok(RopeScaling::Linear { factor: 4.0 });
    assert_eq!(scaling(typed("linear").f32("llama.rope.scaling.factor", 4.0)), linear);
    assert_eq!(scaling(keys().f32("llama.rope.scale_linear", 4.0)), linear);
    let yarn = typed("yarn")
        .f32("llama.rope.scaling.factor", 4.0)
        .u32("llama.rope.scaling.original_context_length", 16)
        .f32("llama.rope.scaling.attn_factor", 0.5);
    let want = RopeScaling::Yarn {
        factor: 4.0,
        original_max: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: Some(0.5 * 1.138_629_436_111_989),
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    assert_eq!(scaling(yarn), Ok(want));
    assert_words(&scaling(typed("longrope")).unwrap_err(), &["\"longrope\"", "linear, llama3, yarn"]);
    assert_words(&scaling(typed("linear")).unwrap_err(), &["llama.rope.scaling.factor: is missing"]);
}

/// ATT-10.
#[test]
fn frequency_factors_are_read_and_checked() {
    let f32_ty = GgmlType::from_name("F32").unwrap();
    let with = |factors: &[f32]| {
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        load_gguf(llama().tensor("rope_freqs.weight", f32_ty, &[factors.len()], &bytes))
    };
    assert_eq!(load_gguf(llama()).unwrap().rope.freq_factors, None);
    assert_eq!(with(&[1.0, 2.0, 4.0, 8.0]).unwrap().rope.freq_factors, Some(vec![1.0, 2.0, 4.0, 8.0]));
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_words(&with(&[1.0, 1.0, bad, 1.0]).unwrap_err(), &["rope_freqs.weight", "at 2"]);
    }
    assert_words(&with(&[1.0; 5]).unwrap_err(), &["rope_freqs.weight", "[5]", "[4]"]);
}

#[test]
fn special_tokens_windows_and_vocabulary() {
    let builder = gguf_keys("llama")
        .u32("llama.attention.sliding_window", 16)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.eot_token_id", 3)
        .u32("tokenizer.ggml.eom_token_id", 2)
        .strings("tokenizer.ggml.tokens", &[b"a", b"b"]);
    let config = load_gguf(gguf_tensors(builder, &tensors())).unwrap();
    assert_eq!((config.eos, config.bos), (vec![TokenId(2), TokenId(3)], Some(TokenId(1))));
    assert_eq!(config.sliding_window, [Some(16); 2]);
    let eos = load_gguf(llama().u32("tokenizer.ggml.eos_token_id", 10)).unwrap_err();
    assert_words(&eos, &["special token id is 10"]);
    assert_words(
        &load_gguf(llama().u32("llama.vocab_size", 11)).unwrap_err(),
        &["vocab_size is 11", "token_embd"],
    );
    let tokens = llama().strings("tokenizer.ggml.tokens", &[b"x".as_slice(); 11]);
    assert_words(&load_gguf(tokens).unwrap_err(), &["token_embd.weight", "10 entries", "11"]);
    let values = gguf_tensors(gguf_keys("llama"), &tensors()).u32("llama.attention.sliding_window", u32::MAX);
    assert_words(&load_gguf(values).unwrap_err(), &["sliding_window is 4294967295"]);
}
