//! How a process ends, as its supervisor sees it.

use std::process::{ExitCode, Termination};

use crate::lifecycle::{DrainEnd, DrainReport};

/// The end of a process. Return it from `main`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It ended as asked: code 0. Work that was cut off when its grace ended was cut off by configuration.
    Clean,
    /// It could not start, or a part of it failed: code 1. Starting it again may help.
    Failed,
    /// Its configuration makes no sense: code 64 (`EX_USAGE`). Starting it again does not help.
    BadConfig,
}

impl From<DrainReport> for Exit {
    fn from(report: DrainReport) -> Self {
        match report.end {
            DrainEnd::Finished | DrainEnd::GraceOver | DrainEnd::Forced if report.reason.is_asked() => {
                Self::Clean
            }
            _ => Self::Failed,
        }
    }
}

impl Exit {
    /// The exit status.
    pub const fn code(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::Failed => 1,
            Self::BadConfig => 64,
        }
    }
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        ExitCode::from(self.code())
    }
}

/// Reads the command line. `Err` is the end of the process: help that was asked for, or a mistake, told on the
/// terminal.
pub fn parse_args<A: clap::Parser>() -> Result<A, Exit> {
    A::try_parse().map_err(|error| {
        // If nobody reads it there is nobody to tell.
        let _unread = error.print();
        if error.use_stderr() { Exit::BadConfig } else { Exit::Clean }
    })
}
