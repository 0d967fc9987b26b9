//! The reference models: families that are computed open with the right values, the others are refused by name.

use std::path::{Path, PathBuf};

use longreach_kernels::RopeStyle;
use longreach_model::config::{Architecture, ModelConfig, RopeScaling};
use longreach_types::TokenId;

use crate::fixture::load;

const SUPPORTED: [&str; 4] = ["llama", "llama3-rope", "mistral", "qwen2"];

fn golden() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden/tiny")).to_path_buf()
}

#[test]
fn reference_models_open_or_are_refused_by_name() {
    let mut n_opened = 0;
    for entry in std::fs::read_dir(golden()).unwrap() {
        let path = entry.unwrap().path();
        let family = path.file_name().unwrap().to_str().unwrap().to_owned();
        match load(&path) {
            Ok(_) => {
                assert!(SUPPORTED.contains(&family.as_str()), "{family} was accepted");
                n_opened += 1;
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!SUPPORTED.contains(&family.as_str()), "{message}");
                assert!(message.contains("supported are llama"), "{message}");
                let start = family.replace('-', "_");
                let start = start.split("_yarn").next().unwrap().split("_qlora").next().unwrap();
                assert!(message.contains(start), "{family}: {message}");
            }
        }
    }
    assert_eq!(n_opened, SUPPORTED.len());
}

#[test]
fn values_of_the_llama_model() {
    let config = load(&golden().join("llama")).unwrap();
    let ModelConfig { n_layers, hidden, n_q_heads, n_kv_heads, head_dim, ffn, vocab_size, .. } = config;
    assert_eq!(
        [n_layers, hidden, n_q_heads, n_kv_heads, head_dim, ffn, vocab_size],
        [3, 64, 4, 2, 16, 128, 320]
    );
    assert_eq!((config.architecture, config.max_position, config.rms_eps), (Architecture::Llama, 512, 1e-6));
    assert_eq!((config.tied_head, config.qkv_bias, config.o_bias), (false, false, false));
    assert_eq!((config.eos, config.bos), (vec![TokenId(2)], Some(TokenId(1))));
    assert_eq!(config.sliding_window, [None; 3]);
    let rope = config.rope;
    assert_eq!((rope.theta, rope.style, rope.rot_dim), (1e4, RopeStyle::Half, 16));
    assert_eq!((rope.scaling, rope.freq_factors), (RopeScaling::None, None));
}

#[test]
fn what_sets_the_other_families_apart() {
    let llama3 = load(&golden().join("llama3-rope")).unwrap();
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max: 64 };
    assert_eq!((llama3.rope.theta, llama3.rope.scaling), (5e5, scaling));
    assert_eq!(load(&golden().join("mistral")).unwrap().sliding_window, [Some(8); 3]);
    let qwen2 = load(&golden().join("qwen2")).unwrap();
    assert_eq!((qwen2.qkv_bias, qwen2.o_bias, qwen2.sliding_window), (true, false, vec![None; 3]));
}
