//! Damaged files: cut anywhere they are refused, with any byte changed they are refused or read, and neither
//! takes the process down.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::path::Path;

use longreach_gguf::{GgmlType, GgufBuilder, GgufTokenizer, Header, Value};
use proptest::prelude::*;

fn whole() -> Vec<u8> {
    let f32_ty = GgmlType::from_name("F32").unwrap();
    let q8 = GgmlType::from_name("Q8_0").unwrap();
    GgufBuilder::new("llama")
        .u32("llama.block_count", 1)
        .f32("llama.rope.freq_base", 1e4)
        .bool("tokenizer.ggml.add_bos_token", true)
        .string("tokenizer.ggml.model", b"gpt2")
        .strings("tokenizer.ggml.tokens", &[b"a", b"", b"\xff", b"bc"])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 6, 3])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.0, -2.0, 1.0])
        .u32("tokenizer.ggml.eos_token_id", 3)
        .tensor("token_embd.weight", q8, &[2, 32], &[7; 68])
        .tensor("output_norm.weight", f32_ty, &[5], &[9; 20])
        .build()
}

fn parse(bytes: &[u8]) -> Result<Header, longreach_gguf::GgufError> {
    Header::parse(Path::new("damaged.gguf"), bytes)
}

#[test]
fn the_whole_file_reads_back_as_built() {
    let bytes = whole();
    let header = parse(&bytes).unwrap();
    assert_eq!(header.metadata.get("llama.block_count"), Some(&Value::Unsigned(1)));
    let tokenizer = GgufTokenizer::read(&header.metadata).unwrap().unwrap();
    assert_eq!(tokenizer.tokens, [b"a".to_vec(), vec![], vec![0xff], b"bc".to_vec()]);
    assert_eq!((tokenizer.eos, tokenizer.add_bos), (Some(3), Some(true)));
    assert_eq!(tokenizer.scores, Some(vec![0.0, -1.0, -2.0, 1.0]));
    let shapes: Vec<_> = header.tensors.iter().map(|tensor| tensor.shape.clone()).collect();
    assert_eq!(shapes, [vec![2, 32], vec![5]]);
    let contents: Vec<&[u8]> =
        header.tensors.iter().map(|tensor| &bytes[tensor.start..tensor.start + tensor.len]).collect();
    assert_eq!(contents, [&[7; 68][..], &[9; 20]]);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = whole();
    for len in 0..bytes.len() {
        assert!(parse(&bytes[..len]).is_err(), "accepted with {len} of {} bytes", bytes.len());
    }
}

#[test]
fn every_single_bit_flip_is_survived() {
    let bytes = whole();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        if let Ok(header) = parse(&flipped) {
            let _ = GgufTokenizer::read(&header.metadata);
            assert!(header.tensors.iter().all(|tensor| tensor.start + tensor.len <= flipped.len()));
        }
    }
}

proptest! {
    #[test]
    fn any_scatter_of_bytes_is_survived(
        edits in prop::collection::vec((0usize..4096, any::<u8>()), 1..12),
        cut in 0usize..4096,
    ) {
        let mut bytes = whole();
        for (at, value) in edits {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut % 64);
        if let Ok(header) = parse(&bytes) {
            let _ = GgufTokenizer::read(&header.metadata);
            prop_assert!(header.tensors.iter().all(|tensor| tensor.start + tensor.len <= bytes.len()));
        }
    }
}

/// GGF-1, GGF-16, ATT: what the case inputs leave out.
#[test]
fn impossible_tensors_are_refused_by_name() {
    let f32_ty = GgmlType::from_name("F32").unwrap();
    let q4 = GgmlType::from_name("Q4_0").unwrap();
    let max = i64::MAX as usize;
    let build = |ty, shape: &[usize]| GgufBuilder::new("llama").tensor("w", ty, shape, &[0; 64]).build();
    for (bytes, word) in [
        (build(f32_ty, &[2, max]), "overflow"),
        (build(q4, &[2, 16]), "not whole blocks"),
        (build(f32_ty, &[1, 1, 1, 1, 1]), "5 dimensions"),
        (GgufBuilder::new("llama").tensor("", f32_ty, &[1], &[0; 4]).build(), "name is empty"),
        (GgufBuilder::new("llama").tensor("a\0b", f32_ty, &[1], &[0; 4]).build(), "NUL"),
        (
            GgufBuilder::new("llama")
                .tensor("w", f32_ty, &[1], &[0; 4])
                .tensor("w", f32_ty, &[1], &[0; 4])
                .build(),
            "appears twice",
        ),
        (
            GgufBuilder::new("llama")
                .tensor("w", f32_ty, &[16], &[0; 4])
                .tensor("v", f32_ty, &[8], &[0; 32])
                .build(),
            "overlaps tensor \"w\"",
        ),
    ] {
        let message = parse(&bytes).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn other_formats_are_refused_by_name() {
    let mut bytes = whole();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(parse(&bytes).unwrap_err().to_string().contains("big-endian"));
    bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
    assert!(parse(&bytes).unwrap_err().to_string().contains("version 1"));
    bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
    assert!(parse(&bytes).is_ok());
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert!(parse(pointer).unwrap_err().to_string().contains("git lfs pull"));
}

#[test]
fn integers_of_every_width_are_one_number() {
    let widths: [(u32, &[u8]); 8] = [
        (0, &[77]),
        (1, &[77]),
        (2, &[77, 0]),
        (3, &[77, 0]),
        (4, &[77, 0, 0, 0]),
        (5, &[77, 0, 0, 0]),
        (10, &[77, 0, 0, 0, 0, 0, 0, 0]),
        (11, &[77, 0, 0, 0, 0, 0, 0, 0]),
    ];
    for (ty, encoded) in widths {
        let header = parse(&GgufBuilder::new("llama").entry("n", ty, encoded).build()).unwrap();
        assert_eq!(header.metadata.uint("n").unwrap(), Some(77), "type {ty}");
    }
    let header = parse(&GgufBuilder::new("llama").entry("n", 5, &[0xff; 4]).f32("f", 1.0).build()).unwrap();
    for key in ["n", "f"] {
        let message = header.metadata.uint(key).unwrap_err().to_string();
        assert!(message.contains(&format!("damaged.gguf: {key}: ")), "{message}");
    }
}
