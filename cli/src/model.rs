//! Finding and opening the model, with what was chosen and how far it is on the terminal.

use std::{path::PathBuf, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use longreach_engine::{BuildError, Model};
use longreach_model::files::{ModelFiles, resolve};
use longreach_text::TextModel;

use crate::error::CliError;

/// A model, ready for engines and for text.
pub(crate) struct OpenedModel {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) model: Model,
    pub(crate) text: TextModel,
}

/// Finds the model that `spec` asks for and opens it.
pub(crate) async fn open(spec: Option<String>) -> Result<OpenedModel, CliError> {
    let OpenedFiles { name, path, model } = open_files(spec, true).await?;
    let text = TextModel::load(&path).map_err(|error| CliError::start(&error))?;
    Ok(OpenedModel { name, path, model, text })
}

/// A model without its text: all that an engine needs.
pub(crate) struct OpenedFiles {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) model: Model,
}

/// Finds the model that `spec` asks for and opens its files. May ask the network, so it runs off the async threads.
/// Says what was chosen and why, unless a parent process has.
pub(crate) async fn open_files(spec: Option<String>, says_why: bool) -> Result<OpenedFiles, CliError> {
    let opening = move || {
        let resolved = resolve(spec.as_deref()).map_err(|error| CliError::start(&error))?;
        if says_why {
            eprintln!("model: {}", resolved.why);
        }
        let files = ModelFiles::open(&resolved.path).map_err(|error| CliError::start(&error))?;
        let model = Model::open(files).map_err(|error| CliError::start(&error))?;
        Ok(OpenedFiles { name: resolved.name, path: resolved.path, model })
    };
    tokio::task::spawn_blocking(opening).await.map_err(|error| CliError::start(&error))?
}

/// Runs what loads or connects off the async threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BuildError> + Send + 'static,
) -> Result<T, CliError> {
    let result = tokio::task::spawn_blocking(work).await.map_err(|error| CliError::start(&error))?;
    result.map_err(|error| CliError::start(&error))
}

/// A bar for layers that are being packed; silent where standard error is no terminal.
pub(crate) fn progress(what: &str) -> impl Fn(usize, usize) + Send + Sync + use<> {
    let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len} layers")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style).with_prefix(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    move |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        if done == all {
            bar.finish_and_clear();
        }
    }
}
