//! Why a task did not pass.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// Why a task did not pass. Nothing is decided by it; it is printed for the person who will repair it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A program could not be started.
    Start { command: String, source: io::Error },
    /// A program ran and said no.
    Exit { command: String, status: ExitStatus },
    /// A program that should have ended did not.
    TimedOut { what: String, limit: Duration },
    /// A program is needed that this task cannot install.
    Missing { program: &'static str, how: &'static str },
    /// A file could not be read or written.
    File { path: PathBuf, source: io::Error },
    /// What a program printed was not understood.
    Output { command: String, reason: String },
    /// Rules that do not hold, one line each.
    Broken { rules: &'static str, lines: Vec<String> },
    /// A step of `ci` failed.
    Step { name: &'static str, source: Box<Failure> },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { command, source } => write!(f, "cannot start `{command}`: {source}"),
            Self::Exit { command, status } => write!(f, "`{command}` failed: {status}"),
            Self::TimedOut { what, limit } => write!(f, "{what} took longer than {} s", limit.as_secs()),
            Self::Missing { program, how } => write!(f, "there is no {program}: {how}"),
            Self::File { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Output { command, reason } => {
                write!(f, "cannot understand what `{command}` printed: {reason}")
            }
            Self::Broken { rules, lines } => {
                write!(f, "{rules}: {} broken", lines.len())?;
                lines.iter().try_for_each(|line| write!(f, "\n  {line}"))
            }
            Self::Step { name, source } => write!(f, "step `{name}` failed: {source}"),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Start { source, .. } | Self::File { source, .. } => Some(source),
            Self::Step { source, .. } => Some(source),
            _ => None,
        }
    }
}
