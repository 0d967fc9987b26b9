//! Damaged safetensors files and configurations: refused or read, never worse.

use std::fs;

use longreach_model::{config::ModelConfig, files::ModelFiles};
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use crate::fixture::*;

fn small() -> Tensors {
    [("a".to_owned(), vec![3, 2]), ("b".to_owned(), vec![4])].into()
}

/// Opens `bytes` as the one weight file of a model, in a directory that is used again.
fn open(dir: &TempDir, bytes: &[u8]) -> Result<ModelFiles, longreach_model::files::OpenError> {
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    ModelFiles::open(dir.path())
}

#[test]
fn every_truncation_is_refused_by_file_name() {
    let dir = model_dir(&base_config(), &small());
    let bytes = safetensors(&small());
    for len in 0..bytes.len() {
        let message = open(&dir, &bytes[..len]).unwrap_err().to_string();
        assert!(message.contains("model.safetensors"), "{message}");
    }
}

#[test]
fn every_single_bit_flip_is_survived() {
    let dir = model_dir(&base_config(), &small());
    let path = dir.path().join("model.safetensors");
    for bit in 0..fs::read(&path).unwrap().len() * 8 {
        with_changed_byte(&path, bit / 8, 1 << (bit % 8), || {
            if let Ok(files) = ModelFiles::open(dir.path()) {
                let n_bytes: usize = files.tensors().map(|tensor| tensor.bytes.len()).sum();
                assert_eq!(n_bytes, 40, "the data is covered whatever the names are");
            }
        });
    }
}

/// A header of exactly the limit is read, and one byte more is refused by the limit, not by the file's end.
#[test]
fn the_header_limit_is_exact() {
    let dir = model_dir(&base_config(), &small());
    let at = |len: u64| open(&dir, &len.to_le_bytes()).unwrap_err().to_string();
    assert_words(&at(100_000_000), &["header: needs 100000000 bytes but only 0"]);
    assert_words(&at(100_000_001), &["the format's limit is 100000000"]);
    // The header may end where the file ends, when no tensor has bytes.
    let empty =
        safetensors_of(&json!({ "w": { "dtype": "F16", "shape": [0, 4], "data_offsets": [0, 0] } }), &[]);
    assert_eq!(open(&dir, &empty).unwrap().tensor("w").unwrap().shape, [0, 4]);
}

/// Every byte of the header of a GGUF model, one bit of it changed: keys, values, names, shapes and places.
#[test]
fn every_changed_byte_of_a_gguf_header_is_survived() {
    let whole = gguf_tensors(gguf_keys("llama"), &tensors());
    let n_data: usize = tensors().values().map(|shape| shape.iter().product::<usize>() * 4).sum();
    let (_dir, path) = gguf_file(whole);
    let n_header = fs::read(&path).unwrap().len() - n_data;
    for at in 0..n_header {
        with_changed_byte(&path, at, 1 << (at % 8), || {
            let Ok(files) = ModelFiles::open(&path) else { return };
            let Ok(config) = ModelConfig::from_files(&files) else { return };
            let (cos, sin) = longreach_model::config::rope::tables(&config.rope, 2);
            assert!(cos.iter().chain(&sin).all(|value| value.is_finite()), "byte {at}");
        });
    }
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|value| json!(value)),
        any::<i64>().prop_map(|value| json!(value)),
        any::<u64>().prop_map(|value| json!(value)),
        any::<f64>().prop_map(|value| json!(value)),
        (-2i32..40).prop_map(|value| json!(value)),
        "[a-z]{0,8}".prop_map(|value| json!(value)),
        Just(json!([])),
        Just(json!([2, 3])),
        Just(json!({})),
        Just(json!({ "rope_type": "yarn", "factor": 1e-300 })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// Any value under any key is refused or read, in no time and with no panic.
    #[test]
    fn any_value_under_any_key_is_survived(key in 0usize..24, value in any_json()) {
        const MORE: [&str; 10] = [
            "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "attention_bias",
            "tie_word_embeddings", "partial_rotary_factor", "max_window_layers", "use_sliding_window",
        ];
        let mut changed = base_config();
        let keys: Vec<String> =
            changed.as_object().unwrap().keys().cloned().chain(MORE.map(str::to_owned)).collect();
        changed[&keys[key % keys.len()]] = value;
        let dir = model_dir(&changed, &tensors());
        if let Ok(config) = ModelConfig::from_files(&ModelFiles::open(dir.path()).unwrap()) {
            let (cos, sin) = longreach_model::config::rope::tables(&config.rope, 4);
            prop_assert_eq!(cos.len(), 2 * config.rope.rot_dim);
            prop_assert!(cos.iter().chain(&sin).all(|value| value.is_finite()));
        }
    }
}
