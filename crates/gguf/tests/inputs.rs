//! The hostile files of the case collection, GGF-1 to GGF-16: each is accepted or refused as its table says,
//! with a message that names the file and the field, at once.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use longreach_gguf::{Gguf, GgufTokenizer};

/// File, and a word of the refusal; `None` where the parser must accept.
const EXPECTED: [(&str, Option<&str>); 29] = [
    ("g00_ok_tiny", None),
    ("g01_empty", Some("magic")),
    ("g03_old_magic", Some("GGJT")),
    ("g04_version0", Some("version 0")),
    ("g06_nkv_2p60", Some("metadata count")),
    ("g07_ntensors_2p63", Some("tensor count")),
    ("g09_key_len_2p40", Some("key 0")),
    ("g10_key_len_0", Some("key 0: the name is empty")),
    ("g12_array_len_2p60", Some("tokenizer.ggml.tokens")),
    ("g13_array_nested_depth", Some("nested")),
    ("g15_ndims_u32max", Some("4294967295 dimensions")),
    ("g16_dim_0", Some("dimension 0 is 0")),
    ("g18_nbytes_2p64_minus16", Some("tensor \"b\"")),
    ("g19_offset_past_eof", Some("tensor \"w\"")),
    ("g21_offset_unaligned", Some("offset 5")),
    ("g22_truncated_data", Some("token_embd.weight")),
    ("g24_alignment_3", Some("general.alignment: is 3")),
    ("g25_alignment_wrong_type", Some("general.alignment: has type signed integer")),
    ("g27_block_count_missing", None),
    ("g28_ctx_len_u64_not_u32", None),
    ("g29_token_type_shorter", None),
    ("g30_token_type_u32", None),
    ("g31_eos_id_out_of_vocab", None),
    ("g33_token_invalid_utf8", None),
    ("g34_dup_key", Some("general.architecture: appears twice")),
    ("g36_unknown_ggml_type", Some("unknown tensor type number 255")),
    ("g37_unknown_kv_type", Some("unknown value type 77")),
    ("g39_bool_value_2", None),
    ("g40_rope_freqs_zero", None),
];

fn inputs() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/cases/inputs/gguf")).to_path_buf()
}

#[test]
fn every_input_is_accepted_or_refused_by_name_at_once() {
    for (name, refusal) in EXPECTED {
        let path = inputs().join(format!("{name}.gguf"));
        let start = Instant::now();
        let opened = Gguf::open(&path);
        assert!(start.elapsed() < Duration::from_secs(1), "{name} took {:?}", start.elapsed());
        match (opened, refusal) {
            (Ok(_), None) => {}
            (Err(error), Some(word)) => {
                let message = error.to_string();
                assert!(message.contains(word) && message.contains(name), "{name}: {message}");
            }
            (Ok(_), Some(word)) => panic!("{name} was accepted, expected a refusal with {word:?}"),
            (Err(error), None) => panic!("{name} was refused: {error}"),
        }
    }
}

#[test]
fn the_table_covers_every_input_there_is() {
    let mut found: Vec<String> = std::fs::read_dir(inputs())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(".gguf").map(str::to_owned))
        .collect();
    found.sort();
    assert_eq!(found, EXPECTED.map(|(name, _)| name.to_owned()));
}

#[test]
fn tokenizer_faults_name_the_key() {
    for (name, key) in [
        ("g29_token_type_shorter", "tokenizer.ggml.token_type: has 1 entries"),
        ("g31_eos_id_out_of_vocab", "tokenizer.ggml.eos_token_id: is 999"),
    ] {
        let gguf = Gguf::open(&inputs().join(format!("{name}.gguf"))).unwrap();
        let message = GgufTokenizer::read(gguf.metadata()).unwrap_err().to_string();
        assert!(message.contains(key), "{message}");
    }
}

#[test]
fn odd_but_legal_values_are_read() {
    let open = |name: &str| Gguf::open(&inputs().join(name)).unwrap();
    let context = open("g28_ctx_len_u64_not_u32.gguf").metadata().uint("llama.context_length").unwrap();
    assert_eq!(context, Some(8192));
    let add_bos = open("g39_bool_value_2.gguf").metadata().bool("tokenizer.ggml.add_bos_token").unwrap();
    assert_eq!(add_bos, Some(true));
    let types = open("g30_token_type_u32.gguf").metadata().ints("tokenizer.ggml.token_type").unwrap();
    assert_eq!(types, Some(vec![1]));
    let gguf = open("g33_token_invalid_utf8.gguf");
    let tokens = gguf.metadata().strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens, [&b"\xff\xfe"[..], b"a\0b"]);
}
