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

/// Finds the model that `spec` asks for and opens its files. May ask the network, so it runs off the async threads.
pub(crate) async fn open(spec: Option<String>) -> Result<OpenedModel, CliError> {
    let opening = move || {
        let resolved = resolve(spec.as_deref()).map_err(|error| CliError::start(&error))?;
        eprintln!("model: {}", resolved.why);
        let files = ModelFiles::open(&resolved.path).map_err(|error| CliError::start(&error))?;
        let model = Model::open(files).map_err(|error| CliError::start(&error))?;
        let text = TextModel::load(&resolved.path).map_err(|error| CliError::start(&error))?;
        Ok(OpenedModel { name: resolved.name, path: resolved.path, model, text })
    };
    tokio::task::spawn_blocking(opening).await.map_err(|error| CliError::start(&error))?
}

/// The model without its text, for a process that sees only token ids. Says nothing: its parent has.
pub(crate) async fn open_files(spec: Option<String>) -> Result<Model, CliError> {
    let opening = move || {
        let resolved = resolve(spec.as_deref()).map_err(|error| CliError::start(&error))?;
        let files = ModelFiles::open(&resolved.path).map_err(|error| CliError::start(&error))?;
        Model::open(files).map_err(|error| CliError::start(&error))
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
