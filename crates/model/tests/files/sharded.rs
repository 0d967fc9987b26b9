//! Models over several files, and directories that are none.

use std::{fs, path::Path};

use longreach_gguf::GgufBuilder;
use longreach_model::{
    config::ModelConfig,
    files::{ModelFiles, fingerprint},
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::fixture::*;

/// A directory whose tensors are dealt out over three files.
fn sharded_dir() -> TempDir {
    let dir = TempDir::new().unwrap();
    write_json(&dir.path().join("config.json"), &base_config());
    let mut weight_map = Map::new();
    let mut shards = [Tensors::new(), Tensors::new(), Tensors::new()];
    for (i, (name, shape)) in tensors().into_iter().enumerate() {
        weight_map.insert(name.clone(), Value::from(format!("part-{}.safetensors", i % 3)));
        shards[i % 3].insert(name, shape);
    }
    for (i, shard) in shards.iter().enumerate() {
        fs::write(dir.path().join(format!("part-{i}.safetensors")), safetensors(shard)).unwrap();
    }
    let index = json!({ "metadata": { "total_size": 1 }, "weight_map": weight_map });
    write_json(&dir.path().join("model.safetensors.index.json"), &index);
    dir
}

#[test]
fn a_sharded_model_is_the_same_model() {
    let (sharded, single) = (sharded_dir(), model_dir(&base_config(), &tensors()));
    let print = |dir: &TempDir| {
        let files = ModelFiles::open(dir.path()).unwrap();
        for tensor in files.tensors() {
            assert_eq!(tensor.bytes, contents(tensor.name, tensor.shape.iter().product()));
        }
        fingerprint(&files, &ModelConfig::from_files(&files).unwrap())
    };
    assert_eq!(print(&sharded), print(&single));
    assert_eq!(ModelFiles::open(sharded.path()).unwrap().paths().count(), 3);
}

/// SFT-5: an interrupted download names the file, and what it has and needs.
#[test]
fn a_short_shard_is_named() {
    let dir = sharded_dir();
    let path = dir.path().join("part-1.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let message = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert_words(&message, &["part-1.safetensors", "bytes are there", "is the download complete?"]);
}

#[test]
fn an_index_with_a_name_twice_is_refused() {
    let dir = sharded_dir();
    let index = r#"{"weight_map": {"a": "part-0.safetensors", "a": "part-1.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let message = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert_words(&message, &["model.safetensors.index.json", "\"a\" appears twice"]);
}

#[test]
fn directories_that_are_no_model_say_what_is_there() {
    for (files, words) in [
        (&[][..], &["no model here", "neither"][..]),
        (&["config.json"], &["config.json but no weights"]),
        (&["config.json", "pytorch_model.bin"], &["PyTorch"]),
        (&["model.safetensors"], &["no config.json"]),
        (&["config.json", "consolidated.safetensors"], &["other names"]),
        (&["a.gguf", "b.gguf"], &["several GGUF models", "a.gguf, b.gguf"]),
    ] {
        let dir = TempDir::new().unwrap();
        for file in files {
            fs::write(dir.path().join(file), "{}").unwrap();
        }
        assert_words(&ModelFiles::open(dir.path()).unwrap_err().to_string(), words);
    }
    let dir = model_dir(&base_config(), &tensors());
    let message = ModelFiles::open(&dir.path().join("model.safetensors")).unwrap_err().to_string();
    assert_words(&message, &["give the directory"]);
    assert!(ModelFiles::open(&dir.path().join("absent")).unwrap_err().to_string().contains("absent"));
}

/// GGF-11: any file of a split set, or their directory, is the whole model.
#[test]
fn a_split_gguf_model_opens_by_any_of_its_files() {
    let dir = TempDir::new().unwrap();
    let mut halves = [Tensors::new(), Tensors::new()];
    for (i, (name, shape)) in tensors().into_iter().enumerate() {
        halves[i % 2].insert(name, shape);
    }
    let n_tensors = tensors().len() as u32;
    let paths = [1, 2].map(|number: u32| dir.path().join(format!("m-{number:05}-of-00002.gguf")));
    for (i, path) in paths.iter().enumerate() {
        let keys = if i == 0 { gguf_keys("llama") } else { GgufBuilder::default() };
        let keys = keys.u32("split.no", i as u32).u32("split.count", 2).u32("split.tensors.count", n_tensors);
        fs::write(path, gguf_tensors(keys, &halves[i]).build()).unwrap();
    }
    let (_dir, single) = gguf_file(gguf_tensors(gguf_keys("llama"), &tensors()));
    let print = |path: &Path| {
        let files = ModelFiles::open(path).unwrap();
        fingerprint(&files, &ModelConfig::from_files(&files).unwrap())
    };
    let whole = print(&single);
    assert_eq!([&paths[0], &paths[1], &dir.path().to_path_buf()].map(|path| print(path)), [whole; 3]);
}

#[test]
fn a_directory_with_one_gguf_model_is_that_model() {
    let (dir, path) = gguf_file(gguf_tensors(gguf_keys("llama"), &tensors()));
    assert_eq!(load(dir.path()).unwrap(), load(&path).unwrap());
}
