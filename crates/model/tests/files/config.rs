//! Configurations from `config.json`, accepted and refused, alone and against the tensors.

use longreach_model::{
    config::{ModelConfig, RopeScaling},
    files::{ModelFiles, fingerprint},
};
use longreach_types::TokenId;
use serde_json::{Value, json};

use crate::fixture::*;

fn accepted(changes: Value) -> ModelConfig {
    load_parts(&config_with(changes), &tensors()).unwrap()
}

fn refused(changes: Value) -> String {
    load_parts(&config_with(changes), &tensors()).unwrap_err()
}

/// ATT-1: the explicit value wins over `hidden / n_q_heads`, here 5.
#[test]
fn head_dim_is_what_the_file_says() {
    let config = accepted(json!({}));
    assert_eq!((config.head_dim, config.q_width(), config.kv_width()), (8, 32, 16));
}

/// ATT-2: a derived value that the tensors contradict is an error that names both.
#[test]
fn dropped_head_dim_is_caught_by_the_tensors() {
    let message = refused(json!({ "head_dim": null }));
    assert_words(
        &message,
        &["self_attn.q_proj.weight", "[32, 20]", "4 query heads of head_dim 5", "[20, 20]"],
    );
}

#[test]
fn odd_head_counts_are_accepted() {
    let changes = json!({
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 1,
    });
    let mut tensors = tensors();
    tensors.retain(|name, _| !name.contains("layers.1"));
    for (part, shape) in [("q", [36, 20]), ("k", [12, 20]), ("v", [12, 20]), ("o", [20, 36])] {
        tensors.insert(format!("model.layers.0.self_attn.{part}_proj.weight"), shape.to_vec());
    }
    let config = load_parts(&config_with(changes), &tensors).unwrap();
    assert_eq!((config.n_q_heads, config.n_kv_heads), (9, 3));
}

/// SFT-11: flag of the configuration × presence of the head.
#[test]
fn the_head_is_tied_only_if_config_and_files_agree() {
    let with_head = tensors();
    let mut without_head = tensors();
    without_head.remove("lm_head.weight");
    let (tied, untied) = (
        config_with(json!({ "tie_word_embeddings": true })),
        config_with(json!({ "tie_word_embeddings": false })),
    );
    assert!(!load_parts(&untied, &with_head).unwrap().tied_head);
    assert!(load_parts(&tied, &without_head).unwrap().tied_head);
    assert_words(
        &load_parts(&untied, &without_head).unwrap_err(),
        &["lm_head.weight is missing", "not tied"],
    );
    assert_words(&load_parts(&tied, &with_head).unwrap_err(), &["tie_word_embeddings", "lm_head.weight"]);
}

#[test]
fn a_tied_head_that_is_stored_twice_is_accepted() {
    let mut entries = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, shape) in tensors() {
        let start = data.len();
        let source = if name == "lm_head.weight" { "model.embed_tokens.weight" } else { &name };
        data.extend(contents(source, shape.iter().product()));
        entries.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let dir = model_dir(&config_with(json!({ "tie_word_embeddings": true })), &tensors());
    let file = safetensors_of(&Value::Object(entries), &data);
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    assert!(load(dir.path()).unwrap().tied_head);
}

#[test]
fn biases_are_there_when_the_configuration_says_so() {
    let qwen2 = config_with(json!({ "model_type": "qwen2" }));
    let config = load_parts(&qwen2, &with_qkv_biases(tensors())).unwrap();
    assert_eq!((config.qkv_bias, config.o_bias), (true, false));
    assert_words(&load_parts(&qwen2, &tensors()).unwrap_err(), &["q_proj.bias is missing"]);

    let biased = config_with(json!({ "attention_bias": true }));
    let config = load_parts(&biased, &with_o_biases(with_qkv_biases(tensors()))).unwrap();
    assert_eq!((config.qkv_bias, config.o_bias), (true, true));
    assert_words(&load_parts(&biased, &with_qkv_biases(tensors())).unwrap_err(), &["o_proj.bias is missing"]);

    let message = load_parts(&base_config(), &with_qkv_biases(tensors())).unwrap_err();
    assert_words(&message, &["layers.0.self_attn.k_proj.bias", "has no place in a llama model of 2 layers"]);
}

#[test]
fn tensors_that_nothing_reads_are_refused_but_buffers_are_not() {
    let mut extra = tensors();
    extra.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), vec![4]);
    assert!(load_parts(&base_config(), &extra).is_ok());
    extra.insert("model.layers.0.self_attn.q_norm.weight".to_owned(), vec![8]);
    assert_words(&load_parts(&base_config(), &extra).unwrap_err(), &["q_norm.weight", "no place"]);
    let message = refused(json!({ "num_hidden_layers": 1 }));
    assert_words(&message, &["model.layers.1.", "no place in a llama model of 1 layers"]);
    assert_words(
        &refused(json!({ "num_hidden_layers": 3 })),
        &["model.layers.2.input_layernorm.weight is missing"],
    );
}

#[test]
fn what_cannot_be_is_refused_by_key_and_value() {
    for (changes, words) in [
        (json!({ "model_type": "mixtral" }), &["\"mixtral\"", "supported are llama"][..]),
        (json!({ "model_type": null }), &["config.json: model_type is missing"]),
        (json!({ "hidden_act": "gelu" }), &["hidden_act", "gelu", "not supported"]),
        (json!({ "mlp_bias": true }), &["mlp_bias", "not supported"]),
        (json!({ "quantization_config": { "quant_method": "gptq" } }), &["quantization_config", "gptq"]),
        (json!({ "hidden_size": "20" }), &["hidden_size is \"20\"", "whole number"]),
        (json!({ "hidden_size": 0 }), &["hidden_size is 0"]),
        (json!({ "hidden_size": -1 }), &["hidden_size is -1"]),
        (json!({ "num_hidden_layers": 1_000_000 }), &["num_hidden_layers is 1000000", "at most"]),
        (json!({ "max_position_embeddings": 1 << 25 }), &["max_position_embeddings is 33554432", "at most"]),
        (json!({ "vocab_size": 11 }), &["embed_tokens.weight", "[10, 20]", "vocabulary 11"]),
        (json!({ "rms_norm_eps": null }), &["rms_norm_eps is missing"]),
        (json!({ "rms_norm_eps": 0.0 }), &["rms_norm_eps is 0"]),
        (json!({ "num_key_value_heads": 3 }), &["num_key_value_heads is 3", "num_attention_heads = 4"]),
        (json!({ "head_dim": 7 }), &["[32, 20]", "head_dim 7"]),
        (json!({ "rope_theta": 1 }), &["rope_theta", "is 1", "above 1"]),
        (json!({ "partial_rotary_factor": 0.4 }), &["rotary dimensions is 3", "even", "head_dim = 8"]),
        (json!({ "eos_token_id": [2, 10] }), &["special token id is 10", "vocabulary size 10"]),
        (json!({ "eos_token_id": "</s>" }), &["eos_token_id is \"</s>\""]),
        (json!({ "layer_types": ["full_attention"] }), &["layer_types", "num_hidden_layers = 2"]),
        (json!({ "layer_types": ["full_attention", "chunked"] }), &["layer_types", "sliding_attention"]),
    ] {
        assert_words(&refused(changes), words);
    }
}

#[test]
fn rope_scaling_is_read_in_both_spellings() {
    let linear = RopeScaling::Linear { factor: 4.0 };
    for changes in [
        json!({ "rope_scaling": { "type": "linear", "factor": 4 } }),
        json!({ "rope_scaling": { "rope_type": "linear", "factor": 4.0 } }),
        json!({ "rope_scaling": { "rope_type": "linear", "type": "linear", "factor": 4.0 } }),
        json!({ "rope_parameters": { "rope_type": "linear", "factor": 4.0 } }),
        json!({ "rope_parameters": { "type": "linear", "factor": 4.0, "rope_theta": 10000.0 } }),
    ] {
        let rope = accepted(changes).rope;
        assert_eq!((rope.theta, rope.scaling), (1e4, linear));
    }
    let llama3 = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    });
    let scaling =
        RopeScaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max: 32 };
    assert_eq!(accepted(json!({ "rope_scaling": llama3, "rope_theta": 5e5 })).rope.scaling, scaling);
    for none in [
        json!({}),
        json!({ "rope_scaling": { "type": "default" } }),
        json!({ "rope_parameters": { "rope_theta": 1e4 } }),
    ] {
        assert_eq!(accepted(none).rope.scaling, RopeScaling::None);
    }
    assert_eq!(accepted(json!({ "rope_theta": 500000 })).rope.theta, 5e5);
    assert_eq!(
        accepted(json!({ "rope_parameters": { "rope_theta": 7.0 }, "rope_theta": 5.0 })).rope.theta,
        7.0
    );
    assert_eq!(accepted(json!({ "partial_rotary_factor": 0.5 })).rope.rot_dim, 4);
}

#[test]
fn yarn_defaults_are_those_of_the_reference() {
    let yarn = |changes: Value| {
        let mut scaling = json!({ "rope_type": "yarn", "factor": 4.0 });
        changes.as_object().unwrap().iter().for_each(|(key, value)| scaling[key] = value.clone());
        accepted(json!({ "rope_scaling": scaling })).rope.scaling
    };
    let plain = RopeScaling::Yarn {
        factor: 4.0,
        original_max: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    assert_eq!(yarn(json!({})), plain);
    assert_eq!(yarn(json!({ "beta_fast": null, "beta_slow": 0, "truncate": true })), plain);
    let all = json!({
        "original_max_position_embeddings": 16, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5,
        "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": false,
    });
    assert_eq!(
        yarn(all),
        RopeScaling::Yarn {
            factor: 4.0,
            original_max: 16,
            beta_fast: 16.0,
            beta_slow: 2.0,
            attention_factor: Some(1.5),
            mscale: Some(0.7),
            mscale_all_dim: Some(1.2),
            truncate: false,
        }
    );
}

/// ATT-11: scalings whose frequencies depend on the length of a request are refused, not approximated.
#[test]
fn scalings_that_are_not_computed_are_refused_by_name() {
    for (scaling, words) in [
        (json!({ "rope_type": "longrope", "factor": 2.0 }), &["\"longrope\"", "linear, llama3, yarn"][..]),
        (json!({ "type": "dynamic", "factor": 2.0 }), &["\"dynamic\""]),
        (json!({ "type": "su" }), &["\"su\""]),
        (json!({ "type": "linear", "rope_type": "yarn", "factor": 2.0 }), &["rope_scaling.type", "yarn"]),
        (json!({ "type": "linear" }), &["rope_scaling.factor is missing"]),
        (json!({ "type": "linear", "factor": 0 }), &["rope_scaling.factor is 0"]),
        (json!({ "type": "linear", "factor": 1e-320 }), &["RoPE scaling factor is 0.0", "from 1"]),
        (json!({ "type": "yarn", "factor": 2.0, "attention_factor": 1e300 }), &["attention factor"]),
        (
            json!({ "type": "yarn", "factor": 2.0, "mscale": -1e3, "mscale_all_dim": 1.0 }),
            &["attention factor of RoPE scaling is -"],
        ),
        (
            json!({ "type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0 }),
            &["low_freq"],
        ),
        (json!({ "type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0 }), &["beta_fast"]),
        (json!({ "full_attention": { "rope_theta": 1e4 } }), &["full_attention", "alike"]),
        (json!("linear"), &["rope_scaling is \"linear\"", "an object"]),
    ] {
        assert_words(&refused(json!({ "rope_scaling": scaling })), words);
    }
    let twice =
        json!({ "rope_scaling": { "type": "default" }, "rope_parameters": { "rope_type": "default" } });
    assert_words(&refused(twice), &["rope_scaling", "rope_parameters"]);
}

#[test]
fn windows_are_per_layer_and_by_the_rules_of_the_architecture() {
    let windows = |changes: Value| {
        let biased = changes["model_type"] == "qwen2";
        let tensors = if biased { with_qkv_biases(tensors()) } else { tensors() };
        load_parts(&config_with(changes), &tensors).unwrap().sliding_window
    };
    let mistral = |window: Value| {
        let mut config = config_with(json!({ "model_type": "mistral" }));
        config["sliding_window"] = window;
        load_parts(&config, &tensors()).unwrap().sliding_window
    };
    assert_eq!(windows(json!({ "sliding_window": 16 })), [None, None]);
    assert_eq!(windows(json!({ "model_type": "mistral" })), [Some(4096); 2]);
    assert_eq!(mistral(json!(16)), [Some(16); 2]);
    assert_eq!(mistral(Value::Null), [None, None]);
    let qwen2 = |use_window: bool, first: usize| {
        windows(json!({
            "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": use_window,
            "max_window_layers": first,
        }))
    };
    assert_eq!(qwen2(false, 0), [None, None]);
    assert_eq!(qwen2(true, 1), [None, Some(16)]);
    assert_eq!(qwen2(true, 28), [None, None]);
    let types = json!({
        "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": true,
        "layer_types": ["sliding_attention", "full_attention"],
    });
    assert_eq!(windows(types), [Some(16), None]);
}

#[test]
fn end_tokens_come_from_both_files_each_once() {
    let dir = model_dir(&config_with(json!({ "eos_token_id": [2, 3] })), &tensors());
    write_json(
        &dir.path().join("generation_config.json"),
        &json!({ "eos_token_id": [4, 2], "bos_token_id": 5 }),
    );
    let config = load(dir.path()).unwrap();
    assert_eq!(config.eos, [4, 2, 3].map(TokenId));
    assert_eq!(config.bos, Some(TokenId(5)));
    write_json(&dir.path().join("generation_config.json"), &json!({ "eos_token_id": -1 }));
    assert_words(&load(dir.path()).unwrap_err().to_string(), &["generation_config.json: eos_token_id is -1"]);
}

#[test]
fn the_fingerprint_changes_with_anything_that_makes_the_model() {
    let print = |dir: &std::path::Path| {
        let files = ModelFiles::open(dir).unwrap();
        fingerprint(&files, &ModelConfig::from_files(&files).unwrap())
    };
    let base = model_dir(&base_config(), &tensors());
    let reference = print(base.path());
    assert_eq!(print(model_dir(&base_config(), &tensors()).path()), reference, "the place does not matter");
    let theta = model_dir(&config_with(json!({ "rope_theta": 5e5 })), &tensors());
    assert_ne!(print(theta.path()), reference);
    let path = base.path().join("model.safetensors");
    let data_start =
        std::fs::read(&path).unwrap().len() - ModelFiles::open(base.path()).unwrap().weight_bytes() as usize;
    let mut end = data_start;
    for shape in tensors().into_values() {
        let (start, len) = (end, shape.iter().product::<usize>() * 4);
        end += len;
        for at in [start, start + len / 2, end - 1] {
            with_changed_byte(&path, at, 1, || assert_ne!(print(base.path()), reference, "byte {at}"));
        }
    }
    assert_eq!(print(base.path()), reference);
}
