//! GGF-11: sets of several files. Any file opens the set; sets that do not belong together are refused.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{fs, path::PathBuf};

use longreach_gguf::{GgmlType, Gguf, GgufBuilder};
use tempfile::TempDir;

struct Part {
    number: u32,
    split_no: u32,
    split_count: u32,
    total: u32,
    tensor: &'static str,
}

fn part(number: u32, tensor: &'static str) -> Part {
    Part { number, split_no: number - 1, split_count: 2, total: 2, tensor }
}

fn write(dir: &TempDir, parts: &[Part]) -> Vec<PathBuf> {
    let ty = GgmlType::from_name("F32").unwrap();
    parts
        .iter()
        .map(|part| {
            let builder = match part.number {
                1 => GgufBuilder::new("llama"),
                _ => GgufBuilder::default(),
            };
            let bytes = builder
                .u32("split.no", part.split_no)
                .u32("split.count", part.split_count)
                .u32("split.tensors.count", part.total)
                .tensor(part.tensor, ty, &[4], &[part.number as u8; 16])
                .build();
            let path = dir.path().join(format!("m-{:05}-of-00002.gguf", part.number));
            fs::write(&path, bytes).unwrap();
            path
        })
        .collect()
}

fn refusal(parts: &[Part]) -> String {
    let dir = TempDir::new().unwrap();
    let paths = write(&dir, parts);
    Gguf::open(&paths[0]).unwrap_err().to_string()
}

#[test]
fn any_file_opens_the_whole_set() {
    let dir = TempDir::new().unwrap();
    for path in write(&dir, &[part(1, "a"), part(2, "b")]) {
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.metadata().str("general.architecture").unwrap(), Some("llama"));
        let contents: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|tensor| (tensor.name.as_str(), gguf.tensor_bytes(tensor)[0]))
            .collect();
        assert_eq!(contents, [("a", 1), ("b", 2)]);
    }
}

#[test]
fn a_missing_file_is_named() {
    assert!(refusal(&[part(1, "a")]).contains("m-00002-of-00002.gguf"));
}

#[test]
fn sets_that_do_not_belong_together_are_refused() {
    let swapped = [Part { split_no: 1, ..part(1, "a") }, Part { split_no: 0, ..part(2, "b") }];
    assert!(refusal(&swapped).contains("split.no: is 1, expected 0"));
    let counts = [part(1, "a"), Part { split_count: 3, ..part(2, "b") }];
    assert!(refusal(&counts).contains("split.count: is 3, expected 2"));
    let name = [Part { split_count: 3, ..part(1, "a") }];
    assert!(refusal(&name).contains("split.count: is 3, expected 2 as in the file name"));
    let total = [Part { total: 3, ..part(1, "a") }, part(2, "b")];
    assert!(refusal(&total).contains("split.tensors.count: is 3, expected 2"));
    let twice = [part(1, "a"), part(2, "a")];
    assert!(refusal(&twice).contains("tensor \"a\": appears twice"));
}

#[test]
fn a_renamed_file_of_a_set_is_refused_with_the_name_it_needs() {
    let dir = TempDir::new().unwrap();
    let paths = write(&dir, &[part(1, "a"), part(2, "b")]);
    let renamed = dir.path().join("model.gguf");
    fs::rename(&paths[0], &renamed).unwrap();
    assert!(Gguf::open(&renamed).unwrap_err().to_string().contains("-00001-of-00002.gguf"));
}
