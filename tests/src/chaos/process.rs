//! One process of the cluster, with a life after its end: it is started again as it was started before.
//!
//! It never outlives its value. Its output goes to a file, which is kept when a row fails.

use std::{
    ffi::OsString,
    fs::OpenOptions,
    io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use longreach_local::{Process as Child, Signal};

use super::{procfs::Figures, world::Host};
use crate::tiny::Error;

/// How a process is started, again and again.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Its name, for messages and its log.
    pub name: String,
    /// Where it runs.
    pub host: Host,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Where its output goes.
    pub log: PathBuf,
}

/// A process that runs or has ended.
#[derive(Debug)]
pub struct Process {
    launch: Launch,
    child: Option<Child>,
}

impl Process {
    /// A process that does not run yet.
    pub fn new(launch: Launch) -> Self {
        Self { launch, child: None }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.launch.name
    }

    /// Where it runs.
    pub fn host(&self) -> &Host {
        &self.launch.host
    }

    /// Its log.
    pub fn log(&self) -> &Path {
        &self.launch.log
    }

    /// Gives it other arguments from the next start on.
    pub fn set_args(&mut self, args: Vec<OsString>) {
        self.launch.args = args;
    }

    /// Its number, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// What the kernel says about it, while it runs.
    pub fn figures(&self) -> Option<Figures> {
        Figures::of(self.pid()?)
    }

    /// Starts it. One that runs already is left alone.
    pub fn start(&mut self) -> Result<(), Error> {
        if self.child.is_some() {
            return Ok(());
        }
        let Launch { name, host, program, args, log } = &self.launch;
        let output = OpenOptions::new().create(true).append(true).open(log)?;
        let errors = output.try_clone()?;
        let (program, first) = host.program(program);
        let child = Child::start(program, |command| {
            command.args(first).args(args).env("NO_COLOR", "1");
            command.stdin(Stdio::null()).stdout(output).stderr(errors);
        });
        self.child = Some(child.map_err(|error| format!("{name}: {error}"))?);
        Ok(())
    }

    /// Ends it without a word, and waits until it is gone. One that is gone already is left alone.
    pub async fn kill(&mut self) -> Result<(), Error> {
        if let Some(mut child) = self.child.take() {
            child.kill().await?;
        }
        Ok(())
    }

    /// Asks it to end, and says how it did; `None` if it had to be killed after `grace`.
    pub async fn end(&mut self, grace: Duration) -> Result<Option<ExitStatus>, Error> {
        let mut child = self.child.take().ok_or_else(|| format!("{} does not run", self.launch.name))?;
        child.signal(Signal::TERM)?;
        match tokio::time::timeout(grace, child.wait()).await {
            Ok(ended) => Ok(Some(ended?)),
            Err(_) => Ok(child.kill().await.map(|_killed| None)?),
        }
    }

    /// Makes it stand still.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on.
    pub fn go_on(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        self.child.as_ref().map_or(Ok(()), |child| child.signal(signal))
    }

    /// How it ended, if it did so by itself.
    pub fn fell(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.ended().ok().flatten()
    }
}
