//! The hostile files of the case collection (GGF, SFT): each gives what their table says, with a message that names
//! the file and the field, at once.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use longreach_gguf::{Gguf, GgufTokenizer};
use longreach_model::{config::ModelConfig, files::ModelFiles};

use crate::fixture::*;

fn inputs(kind: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/cases/inputs")).join(kind)
}

/// What opening the model at `path` and reading its configuration and tokenizer says.
fn outcome(path: &Path) -> Result<(), String> {
    let start = Instant::now();
    let files = ModelFiles::open(path).map_err(|error| error.to_string());
    let config = files.and_then(|files| ModelConfig::from_files(&files).map_err(|error| error.to_string()));
    assert!(start.elapsed() < Duration::from_secs(1), "{} took {:?}", path.display(), start.elapsed());
    config.map(drop)
}

/// What the parser accepts the model loader refuses, by the key or tensor that is at fault.
#[test]
fn gguf_inputs_that_parse_are_refused_by_key() {
    for (name, word) in [
        ("g00_ok_tiny", "llama.block_count: is missing"),
        ("g27_block_count_missing", "llama.block_count: is missing"),
        ("g28_ctx_len_u64_not_u32", "llama.block_count: is missing"),
        ("g30_token_type_u32", "llama.block_count: is missing"),
        ("g33_token_invalid_utf8", "llama.block_count: is missing"),
        ("g39_bool_value_2", "llama.block_count: is missing"),
        ("g40_rope_freqs_zero", "tensor rope_freqs.weight holds 0 at 0"),
    ] {
        let path = inputs("gguf").join(format!("{name}.gguf"));
        assert_words(&outcome(&path).unwrap_err(), &[name, word]);
    }
    for (name, word) in [
        ("g29_token_type_shorter", "tokenizer.ggml.token_type: has 1 entries"),
        ("g31_eos_id_out_of_vocab", "tokenizer.ggml.eos_token_id: is 999"),
    ] {
        let gguf = Gguf::open(&inputs("gguf").join(format!("{name}.gguf"))).unwrap();
        assert_words(&GgufTokenizer::read(gguf.metadata()).unwrap_err().to_string(), &[name, word]);
    }
}

/// No GGUF input gets through to a model, and none takes long.
#[test]
fn no_gguf_input_is_a_model() {
    for entry in fs::read_dir(inputs("gguf")).unwrap() {
        let path = entry.unwrap().path();
        let message = outcome(&path).unwrap_err();
        assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
    }
}

#[test]
fn safetensors_inputs_are_opened_or_refused_by_field() {
    let expected = [
        ("s00_ok", None),
        ("s01_empty", Some("header length: needs 8 bytes but only 0")),
        (
            "s03_len_u64max",
            Some("header length: 18446744073709551615 bytes, the format's limit is 100000000"),
        ),
        ("s04_len_past_eof", Some("header: needs 1000000 bytes but only 61")),
        ("s06_not_json", Some("header: expected value")),
        ("s07_array_header", Some("a JSON object of tensors")),
        ("s09_overlap", Some("tensor \"b\": data_offsets begin at 4, expected 8")),
        ("s10_hole", Some("tensor \"b\": data_offsets begin at 8, expected 4")),
        ("s12_dup_key", Some("\"w\" appears twice")),
        ("s13_shape_product_overflow", Some("tensor \"w\": data_offsets 0..0 do not hold shape")),
        ("s15_unknown_dtype", Some("tensor \"w\": dtype \"F4_MX\" is not supported")),
        ("s16_trailing_bytes", Some("data: 9 bytes are there, the tensors need 4")),
        ("s18_end_past_eof", Some("data: 8 bytes are there, the tensors need 16; is the download complete?")),
        ("s19_metadata_not_string", Some("__metadata__")),
        ("s21_header_deep_json", Some("a JSON object of tensors")),
        ("s22_lfs_pointer", Some("git lfs pull")),
    ];
    for (name, refusal) in expected {
        let dir = model_dir(&base_config(), &tensors());
        let file = inputs("safetensors").join(format!("{name}.safetensors"));
        fs::copy(file, dir.path().join("model.safetensors")).unwrap();
        let start = Instant::now();
        let opened = ModelFiles::open(dir.path());
        assert!(start.elapsed() < Duration::from_secs(1), "{name}");
        match (opened, refusal) {
            (Ok(files), None) => assert_eq!(files.tensor("w").unwrap().shape, [2, 2]),
            (Err(error), Some(word)) => assert_words(&error.to_string(), &["model.safetensors", word]),
            (Ok(_), Some(word)) => panic!("{name} was accepted, expected a refusal with {word:?}"),
            (Err(error), None) => panic!("{name} was refused: {error}"),
        }
    }
    let n_inputs = fs::read_dir(inputs("safetensors"))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension().unwrap() == "safetensors")
        .count();
    assert_eq!(n_inputs, expected.len());
}

#[test]
fn index_inputs_are_followed_or_refused_by_name() {
    let s00 = inputs("safetensors").join("s00_ok.safetensors");
    for (name, shards, refusal) in [
        ("idx_odd_shard_name", &["model.safetensors-00001-of-00002.safetensors"][..], None),
        ("idx_empty_map", &[], Some("weight_map is empty")),
        ("idx_path_traversal", &[], Some("\"../../etc/passwd\", which is not a plain file name")),
        ("idx_absolute_path", &[], Some("\"/etc/passwd\", which is not a plain file name")),
        (
            "idx_missing_shard",
            &["model-00001-of-00002.safetensors"],
            Some("1 of the 2 files it names are missing: model-00002-of-00002.safetensors"),
        ),
        (
            "idx_tensor_not_in_named_shard",
            &["s00_ok.safetensors"],
            Some("tensor \"zzz\" is in s00_ok.safetensors, but that file does not hold it"),
        ),
    ] {
        let dir = model_dir(&base_config(), &tensors());
        fs::remove_file(dir.path().join("model.safetensors")).unwrap();
        for shard in shards {
            fs::copy(&s00, dir.path().join(shard)).unwrap();
        }
        let index = inputs("safetensors").join(format!("{name}.index.json"));
        fs::copy(index, dir.path().join("model.safetensors.index.json")).unwrap();
        match (ModelFiles::open(dir.path()), refusal) {
            (Ok(files), None) => assert_eq!(files.tensor("w").unwrap().shape, [2, 2]),
            (Err(error), Some(word)) => {
                assert_words(&error.to_string(), &["model.safetensors.index.json", word]);
            }
            (Ok(_), Some(word)) => panic!("{name} was accepted, expected a refusal with {word:?}"),
            (Err(error), None) => panic!("{name} was refused: {error}"),
        }
    }
}
