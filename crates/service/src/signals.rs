//! The signals that end a process. PID 1 of a container gets no default handling from the kernel: without this,
//! SIGTERM would do nothing there.

use std::{fmt, io};

use tokio::signal::unix::{self, SignalKind};

/// A request from outside to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: a person pressed Ctrl-C.
    Interrupt,
    /// SIGTERM: a supervisor stops the process.
    Terminate,
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        })
    }
}

/// Listens for [`Signal`]s. From its creation on they no longer kill the process.
#[derive(Debug)]
pub struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
}

impl Signals {
    /// Starts to listen. Needs a tokio runtime.
    pub fn install() -> io::Result<Self> {
        Ok(Self {
            interrupt: unix::signal(SignalKind::interrupt())?,
            terminate: unix::signal(SignalKind::terminate())?,
        })
    }

    /// The next signal. Cancel-safe.
    pub async fn next(&mut self) -> Signal {
        // Both arms are cancel-safe by tokio's promise.
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        }
    }
}
