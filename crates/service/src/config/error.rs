//! What can be wrong with a configuration: each error is one sentence that says where, and what to do.

use std::{fmt, io, path::PathBuf};

use super::HowToSet;

/// A configuration that cannot be used. A process that meets one ends with code 64.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is not there, or not readable.
    #[error("cannot read {}: {source}; give another file with --config", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no TOML.
    #[error("{place} is no TOML: {reason}")]
    Syntax {
        /// Where.
        place: Place,
        /// What is wrong there.
        reason: String,
    },
    /// The file sets what does not exist.
    #[error("{place}: there is no setting {key}; {}", Choices(.known))]
    UnknownKey {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// What there is in its place.
        known: Vec<String>,
    },
    /// A value is of the wrong type, or is not one of those that can be.
    #[error("{}{key}: {reason}", AtFile(.file.as_ref()))]
    BadValue {
        /// Where, if a file set it.
        file: Option<Place>,
        /// The setting.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting that has no default is not set.
    #[error("{key} is not set: {}", HowToSet(.key))]
    Missing {
        /// The setting.
        key: &'static str,
    },
    /// Settings contradict each other, or one cannot be.
    #[error("{key} is {value}; it must be {must}")]
    Contradiction {
        /// The setting.
        key: String,
        /// Its value.
        value: String,
        /// What it must be.
        must: String,
    },
    /// The log filter is not one.
    #[error(transparent)]
    Log(#[from] crate::telemetry::LogError),
    /// The settings of this build cannot be written as TOML.
    #[error("settings cannot be written as TOML: {0}")]
    Unwritable(#[source] toml::ser::Error),
}

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub(super) path: PathBuf,
    pub(super) line: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

struct AtFile<'a>(Option<&'a Place>);

impl fmt::Display for AtFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |place| write!(f, "{place}: "))
    }
}

struct Choices<'a>(&'a [String]);

impl fmt::Display for Choices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "did you mean {one}?"),
            many => write!(f, "there are {}", many.join(", ")),
        }
    }
}
