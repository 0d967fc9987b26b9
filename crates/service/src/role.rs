//! A role as a process: configuration, logs, signals, serve, exit code. The same whether the role has a binary of its own
//! or is a subcommand.

use std::{
    error::Error,
    io::{self, Write},
};

use crate::{
    config::{ConfigError, RoleArgs, Settings},
    exit::Exit,
    signals::Signals,
    telemetry::{LogConfig, init_tracing},
};

/// Threads for work that blocks: tokenising, loading, joining. More wait for less; but a burst of requests starts them all,
/// each with a stack. What waits for one is bounded by what a role admits.
const MAX_BLOCKING_THREADS: usize = 32;

/// Why a role's process ended before it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// Its configuration cannot be. Exit code 64.
    #[error(transparent)]
    Config(Box<dyn Error + Send + Sync>),
    /// It could not start, or failed. Exit code 1.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

impl From<ConfigError> for RoleError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl RoleError {
    /// A configuration that cannot be.
    pub fn config(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Config(error.into())
    }

    /// A start or a service that failed.
    pub fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Failed(error.into())
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Config(_) => Exit::BadConfig,
            Self::Failed(_) => Exit::Failed,
        }
    }
}

/// Runs a role's process from its command line to its end. `serve` gets the configuration and the signals that end it.
pub fn run_role<S: Settings, F>(args: RoleArgs<S>, serve: impl FnOnce(S, Signals) -> F) -> Exit
where
    F: Future<Output = Result<Exit, RoleError>>,
{
    if args.prints_config() {
        return print_config(&args);
    }
    match start(args, serve) {
        Ok(exit) => exit,
        Err(error) => {
            // Logs may be filtered, or not set up yet: what ends a process is said in any case.
            say(&format!("longreach: {}", sentence(&error)));
            error.exit()
        }
    }
}

fn start<S: Settings, F>(args: RoleArgs<S>, serve: impl FnOnce(S, Signals) -> F) -> Result<Exit, RoleError>
where
    F: Future<Output = Result<Exit, RoleError>>,
{
    let settings = args.load()?;
    init_tracing(&LogConfig { filter: settings.log().to_owned() }).map_err(ConfigError::Log)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.max_blocking_threads(MAX_BLOCKING_THREADS).enable_all().build();
    let runtime = runtime.map_err(RoleError::failed)?;
    let outcome = runtime.block_on(async {
        let signals = Signals::install().map_err(RoleError::failed)?;
        serve(settings, signals).await
    });
    // A service that ends in good order leaves nothing behind. One that does not may leave a thread that never ends, and
    // its process must end all the same.
    runtime.shutdown_background();
    outcome
}

fn print_config<S: Settings>(args: &RoleArgs<S>) -> Exit {
    match args.to_toml() {
        Ok(text) => {
            // If nobody reads it there is nobody to tell.
            let _unread = io::stdout().write_all(text.as_bytes());
            Exit::Clean
        }
        Err(error) => {
            say(&format!("longreach: {}", sentence(&error)));
            Exit::BadConfig
        }
    }
}

fn say(line: &str) {
    let _unread = writeln!(io::stderr(), "{line}");
}

/// A failure with all its causes in one sentence.
pub fn sentence(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let cause = error.to_string();
        next = error.source();
        // An error that shows its cause in its own words would say it twice.
        if !text.ends_with(&cause) && !text.contains(&format!("{cause};")) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&cause);
        }
    }
    text
}
