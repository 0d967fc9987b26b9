//! How the command fails: a sentence for people, and an exit code for scripts.

use longreach_service::{Exit, sentence};

/// Why the command ended without doing what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// What was asked cannot be; nothing was started. Exit code 64 (`EX_USAGE`).
    #[error("{0}")]
    Usage(String),
    /// It could be, but something failed. Exit code 1.
    #[error("{0}")]
    Start(String),
}

impl CliError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) => Exit::BadConfig,
            Self::Start(_) => Exit::Failed,
        }
    }

    /// A failure with all its causes in one sentence.
    pub(crate) fn start(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Start(sentence(error))
    }
}
