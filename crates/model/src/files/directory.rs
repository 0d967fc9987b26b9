//! Model directories as Hugging Face lays them out: `config.json` beside one safetensors file or several with
//! an index. A directory with one GGUF model in it is opened as that.
//!
//! With an index, its `weight_map` is followed and file names mean nothing; it can never lead out of the directory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Component, Path, PathBuf},
};

use longreach_gguf::{MappedFile, split_name};
use serde::Deserialize;

use super::{
    ConfigSource, IndexProblem, ModelFiles, OpenError, SafetensorsFault, StoredTensor, gguf, safetensors,
    unique::Unique,
};

pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

/// Opens the model in directory `dir`.
pub(super) fn open(dir: &Path) -> Result<ModelFiles, OpenError> {
    let has = |name: &str| dir.join(name).is_file();
    if has(CONFIG) && (has(SINGLE) || has(INDEX)) {
        return open_safetensors(dir);
    }
    let names = list(dir)?;
    match gguf_models(&names).as_slice() {
        [only] => gguf::open(&dir.join(only)).map(|files| ModelFiles { path: dir.to_path_buf(), ..files }),
        models => Err(OpenError::NoModel { path: dir.to_path_buf(), found: describe(&names, models) }),
    }
}

/// The files that the index at `path` names, each a plain name, and the file of each tensor.
pub(super) fn read_index(path: &Path) -> Result<BTreeMap<String, String>, OpenError> {
    let index: Index = parse_json(path)?;
    let problem = |problem| OpenError::Index { path: path.to_path_buf(), problem };
    if index.weight_map.0.is_empty() {
        return Err(problem(IndexProblem::Empty));
    }
    match index.weight_map.0.iter().find(|(_, file)| !is_plain_name(file)) {
        Some((tensor, file)) => {
            Err(problem(IndexProblem::FileName { tensor: tensor.clone(), file: file.clone() }))
        }
        None => Ok(index.weight_map.0),
    }
}

/// Whether `name` is one component that stays in its directory, on any platform.
pub(super) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    one && !name.contains(['/', '\\', ':', '\0'])
}

fn open_safetensors(dir: &Path) -> Result<ModelFiles, OpenError> {
    let config_path = dir.join(CONFIG);
    let config = parse_json(&config_path)?;
    let generation_path = dir.join(GENERATION_CONFIG);
    let generation = if generation_path.is_file() { Some(parse_json(&generation_path)?) } else { None };
    // A single file wins over an index, as for the reference implementation.
    let (tensors, files) = match dir.join(SINGLE) {
        single if single.is_file() => {
            let (file, tensors) = open_shard(&single, 0)?;
            (tensors, vec![file])
        }
        _ => open_sharded(dir)?,
    };
    let source = ConfigSource::Json { path: config_path, config, generation };
    Ok(ModelFiles { path: dir.to_path_buf(), source, tensors, files })
}

fn open_sharded(dir: &Path) -> Result<(BTreeMap<String, StoredTensor>, Vec<MappedFile>), OpenError> {
    let index_path = dir.join(INDEX);
    let weight_map = read_index(&index_path)?;
    let problem = |problem| OpenError::Index { path: index_path.clone(), problem };
    let names: BTreeSet<&String> = weight_map.values().collect();
    let missing: Vec<String> =
        names.iter().filter(|name| !dir.join(name).is_file()).map(|name| (*name).clone()).collect();
    if !missing.is_empty() {
        return Err(problem(IndexProblem::MissingFiles { n_files: names.len(), missing }));
    }
    let mut files = Vec::new();
    let mut shards = BTreeMap::new();
    for (i, name) in names.iter().enumerate() {
        let (file, tensors) = open_shard(&dir.join(name), i)?;
        files.push(file);
        shards.insert((*name).clone(), tensors);
    }
    let mut tensors = BTreeMap::new();
    for (tensor, file) in weight_map {
        match shards.get_mut(&file).and_then(|shard| shard.remove(&tensor)) {
            Some(stored) => tensors.insert(tensor, stored),
            None => return Err(problem(IndexProblem::NotInFile { tensor, file })),
        };
    }
    Ok((tensors, files))
}

fn open_shard(path: &Path, file: usize) -> Result<(MappedFile, BTreeMap<String, StoredTensor>), OpenError> {
    let map = MappedFile::open(path).map_err(|source| io_error(path, source))?;
    let tensors = safetensors::parse(map.bytes(), file)
        .map_err(|fault: SafetensorsFault| OpenError::Safetensors { path: path.to_path_buf(), fault })?;
    Ok((map, tensors))
}

fn parse_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, OpenError> {
    let text = fs::read(path).map_err(|source| io_error(path, source))?;
    serde_json::from_slice(&text).map_err(|source| OpenError::Json { path: path.to_path_buf(), source })
}

fn list(dir: &Path) -> Result<Vec<String>, OpenError> {
    let entries = fs::read_dir(dir).map_err(|source| io_error(dir, source))?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

/// GGUF models among sorted file names: a split set counts once, by its first file there.
pub(super) fn gguf_models(names: &[String]) -> Vec<&String> {
    let mut sets = BTreeSet::new();
    let mut is_new = |name: &str| match split_name(Path::new(name)) {
        Some((prefix, _, count)) => sets.insert((prefix.to_owned(), count)),
        None => true,
    };
    names.iter().filter(|name| name.ends_with(".gguf") && is_new(name)).collect()
}

fn describe(names: &[String], models: &[&String]) -> String {
    let has = |suffix: &str| names.iter().any(|name| name.ends_with(suffix));
    if !models.is_empty() {
        let models: Vec<&str> = models.iter().map(|name| name.as_str()).collect();
        return format!("there are several GGUF models, name one of them: {}", models.join(", "));
    }
    if has(".bin") || has(".pt") || has(".pth") {
        return "there are PyTorch weights, which need converting to safetensors".to_owned();
    }
    match (has(".safetensors"), names.iter().any(|name| name == CONFIG)) {
        (true, false) => "there are safetensors files but no config.json".to_owned(),
        (true, true) => "there are safetensors files of other names, and no index for them".to_owned(),
        (false, true) => "there is a config.json but no weights".to_owned(),
        (false, false) => "there is neither".to_owned(),
    }
}

fn io_error(path: &Path, source: io::Error) -> OpenError {
    OpenError::Io { path: PathBuf::from(path), source }
}
