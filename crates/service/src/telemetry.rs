//! Logs: compact lines on standard error, so that standard output stays what a command was asked for.

use std::io::{self, IsTerminal};

use thiserror::Error;
use tracing_subscriber::{EnvFilter, filter::ParseError, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// The environment variable that commands without a configuration read.
const FILTER_VARIABLE: &str = "LONGREACH_LOG";

/// What is logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// A filter in the syntax of `tracing-subscriber`, `info,longreach_router=debug` for example.
    pub filter: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { filter: "info".to_owned() }
    }
}

impl LogConfig {
    /// The filter of the variable `LONGREACH_LOG`, or else `filter`. Roles have a setting of that variable instead.
    pub fn from_env_or(filter: &str) -> Self {
        Self { filter: std::env::var(FILTER_VARIABLE).unwrap_or_else(|_| filter.to_owned()) }
    }
}

/// Why logging was not set up.
#[derive(Debug, Error)]
pub enum LogError {
    /// The filter is not one.
    #[error("log filter {filter:?} cannot be read")]
    Filter {
        /// The text.
        filter: String,
        /// Why.
        #[source]
        source: ParseError,
    },
    /// The process logs already.
    #[error("logging is set up twice")]
    Twice,
}

/// Sets up logging for the process. Colours are used on a terminal only.
pub fn init_tracing(config: &LogConfig) -> Result<(), LogError> {
    let filter = filter(config.filter.clone())?;
    let lines = fmt::layer().compact().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry().with(filter).with(lines).try_init().map_err(|_| LogError::Twice)
}

fn filter(text: String) -> Result<EnvFilter, LogError> {
    EnvFilter::builder().parse(&text).map_err(|source| LogError::Filter { filter: text, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read_or_refused_with_their_text() {
        assert_eq!(
            filter("info,longreach_router=debug".into()).unwrap().to_string(),
            "longreach_router=debug,info"
        );
        let err = filter("info,=,".into()).unwrap_err();
        assert!(matches!(&err, LogError::Filter { filter, .. } if filter == "info,=,"), "{err}");
    }
}
