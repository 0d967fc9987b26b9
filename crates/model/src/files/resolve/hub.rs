//! Models on the Hugging Face hub and in the cache that its clients share.
//!
//! The `hf-hub` crate does the transfers. It has no limit on how long a connection may hang, so the first contact
//! happens on a thread of its own that is waited for so long and no longer.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use hf_hub::{
    Cache, Repo,
    api::sync::{ApiBuilder, ApiError, ApiRepo},
};
use thiserror::Error;

use super::{Resolver, lock};
use crate::files::{
    OpenError,
    directory::{CONFIG, GENERATION_CONFIG, INDEX, SINGLE, gguf_models, is_plain_name, read_index},
};

/// What is fetched beside the weights, where the repository has it: for the router.
const TEXT_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
];

/// `org/name`, or `org/name/file.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubName {
    repo: String,
    file: Option<String>,
}

/// Why the hub gave no model.
#[derive(Debug, Error)]
pub enum HubError {
    /// Told not to ask.
    #[error("HF_HUB_OFFLINE is set")]
    Offline,
    /// No answer in time.
    #[error("{endpoint} did not answer within {timeout:?}")]
    NoAnswer {
        /// The hub.
        endpoint: String,
        /// How long it was waited for.
        timeout: Duration,
    },
    /// The hub, or the way to it, refused.
    #[error("{endpoint}: {source}")]
    Api {
        /// The hub.
        endpoint: String,
        /// What the client says.
        #[source]
        source: Box<ApiError>,
    },
    /// The client library gave up in a way that it should not.
    #[error("the hub's client library failed on the answer of {endpoint}")]
    Client {
        /// The hub.
        endpoint: String,
    },
    /// The repository has no weights that can be loaded.
    #[error("the repository has neither safetensors weights nor one GGUF model{}", choices(.0))]
    NoWeights(Vec<String>),
    /// The repository's index is at fault.
    #[error(transparent)]
    Index(Box<OpenError>),
    /// The cache cannot be written.
    #[error("cache: {0}")]
    Cache(#[from] io::Error),
}

fn choices(models: &[String]) -> String {
    if models.is_empty() {
        String::new()
    } else {
        format!(", but several: name one of {}", models.join(", "))
    }
}

impl HubName {
    /// Reads a name; none if `text` cannot be one.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let is_part = |part: &&str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && part.len() <= 96 && part.chars().all(allowed) && !part.starts_with('.')
        };
        if !parts.iter().all(is_part) {
            return None;
        }
        match parts[..] {
            [org, name] => Some(Self { repo: format!("{org}/{name}"), file: None }),
            [org, name, file] if file.ends_with(".gguf") => {
                Some(Self { repo: format!("{org}/{name}"), file: Some(file.to_owned()) })
            }
            _ => None,
        }
    }

    /// The name without the organisation.
    pub(super) fn short(&self) -> String {
        self.repo.rsplit('/').next().unwrap_or(&self.repo).to_owned()
    }

    fn repo(&self) -> Repo {
        Repo::model(self.repo.clone())
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

/// The model in the cache, if it is whole.
pub(super) fn cached(cache: &Path, name: &HubName) -> Option<PathBuf> {
    let folder = cache.join(name.repo().folder_name());
    let commit = fs::read_to_string(folder.join("refs").join(name.repo().revision())).ok()?;
    if !is_plain_name(commit.trim()) {
        return None;
    }
    let snapshot = folder.join("snapshots").join(commit.trim());
    if let Some(file) = &name.file {
        return Some(snapshot.join(file)).filter(|path| path.is_file());
    }
    let has = |name: &str| snapshot.join(name).is_file();
    let has_shards =
        || read_index(&snapshot.join(INDEX)).is_ok_and(|map| map.values().all(|shard| has(shard)));
    if has(CONFIG) && (has(SINGLE) || has_shards()) {
        return Some(snapshot);
    }
    let mut names: Vec<String> = fs::read_dir(&snapshot)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    match gguf_models(&names)[..] {
        [only] => Some(snapshot.join(only)),
        _ => None,
    }
}

/// Fetches the model into the cache.
pub(super) fn fetch(resolver: &Resolver, name: &HubName) -> Result<PathBuf, HubError> {
    if resolver.offline {
        return Err(HubError::Offline);
    }
    let endpoint = resolver.endpoint.clone();
    let (contact, contacted) = mpsc::channel();
    let job = {
        let (resolver, name) = (resolver.clone(), name.clone());
        thread::spawn(move || download(&resolver, &name, &contact))
    };
    // The channel closes without a message when the job ended before contact; its result says why.
    if let Err(mpsc::RecvTimeoutError::Timeout) = contacted.recv_timeout(resolver.contact_timeout) {
        return Err(HubError::NoAnswer { endpoint, timeout: resolver.contact_timeout });
    }
    job.join().unwrap_or(Err(HubError::Client { endpoint }))
}

/// Runs on its own thread; says so on `contact` as soon as the hub has answered, and ends if nobody listens any more.
fn download(resolver: &Resolver, name: &HubName, contact: &mpsc::Sender<()>) -> Result<PathBuf, HubError> {
    let api_error = |source| HubError::Api { endpoint: resolver.endpoint.clone(), source: Box::new(source) };
    let repo = ApiBuilder::from_cache(Cache::new(resolver.hub_cache.clone()))
        .with_endpoint(resolver.endpoint.clone())
        .with_token(resolver.token.as_ref().map(|token| token.trim().to_owned()))
        .with_user_agent("longreach", env!("CARGO_PKG_VERSION"))
        .build()
        .map_err(api_error)?
        .repo(name.repo());
    let info = repo.info().map_err(api_error)?;
    if contact.send(()).is_err() {
        return Err(HubError::NoAnswer {
            endpoint: resolver.endpoint.clone(),
            timeout: resolver.contact_timeout,
        });
    }
    let _lock = lock(&resolver.model_cache, &name.repo().folder_name())?;
    let mut names: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
    names.retain(|name| is_plain_name(name));
    names.sort();
    match &name.file {
        Some(file) => repo.get(file).map_err(api_error),
        None => download_files(&repo, &names, &api_error),
    }
}

fn download_files(
    repo: &ApiRepo,
    names: &[String],
    api_error: &dyn Fn(ApiError) -> HubError,
) -> Result<PathBuf, HubError> {
    let has = |name: &str| names.iter().any(|other| other == name);
    let get = |name: &str| repo.get(name).map_err(api_error);
    if !has(CONFIG) || !(has(SINGLE) || has(INDEX)) {
        return match gguf_models(names)[..] {
            [only] => download_gguf(names, only, &get),
            ref models => Err(HubError::NoWeights(models.iter().map(|name| (*name).clone()).collect())),
        };
    }
    let config = get(CONFIG)?;
    for name in TEXT_FILES.into_iter().filter(|name| has(name)) {
        get(name)?;
    }
    if has(SINGLE) {
        get(SINGLE)?;
    } else {
        let index = read_index(&get(INDEX)?).map_err(|error| HubError::Index(Box::new(error)))?;
        for shard in index.values().collect::<BTreeSet<_>>() {
            get(shard)?;
        }
    }
    Ok(config.with_file_name(""))
}

/// One GGUF file, or all of the split set that it begins.
fn download_gguf(
    names: &[String],
    first: &str,
    get: &dyn Fn(&str) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, HubError> {
    let set =
        |name: &str| longreach_gguf::split_name(Path::new(name)).map(|(prefix, _, n)| (prefix.to_owned(), n));
    for name in names.iter().filter(|name| set(name).is_some() && set(name) == set(first)) {
        get(name)?;
    }
    get(first)
}
