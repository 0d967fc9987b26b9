//! A child process that does not outlive its owner.
//!
//! Dropping a [`Process`] kills it and waits until it is gone, so that its ports and files are free again. Should this
//! process be killed itself and drop nothing, the kernel kills the child: on Linux it is started through `setpriv
//! --pdeathsig`, where there is one, which becomes the child and keeps its number. The system call has no safe form in
//! Rust that runs in the child.
//!
//! A child is in a process group of its own: Ctrl-C at a terminal reaches its owner only, which ends its children in
//! the order that it wants.

use std::{
    env,
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::{
        OnceLock,
        mpsc::{self, SyncSender},
    },
    thread,
    time::Duration,
};

use rustix::process::{Pid, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::{
    process::{Child, ChildStdout, Command},
    runtime::Handle,
    time,
};

/// Signals for [`Process::signal`].
pub use rustix::process::Signal;

/// A running child, or what is left of it.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts a program, by its path or its name on the PATH; `configure` adds arguments, environment and where the
    /// output goes. It belongs to the runtime in which this is called.
    pub fn start(program: impl AsRef<OsStr>, configure: impl FnOnce(&mut Command)) -> io::Result<Self> {
        let program = find(program.as_ref())?;
        let mut command = match find("setpriv".as_ref()) {
            Ok(setpriv) if cfg!(target_os = "linux") => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL", "--"]).arg(program);
                command
            }
            _ => Command::new(program),
        };
        configure(&mut command);
        command.process_group(0);
        Ok(Self { child: start(command)? })
    }

    /// Its number, until it has ended and was waited for.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// The end of its output, if that was piped and is not taken yet.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Sends a signal; to a process that has ended it is lost, which is no error.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match self.pid() {
            // Not waited for, so the number is still its own.
            Some(pid) => Ok(kill_process(pid, signal)?),
            None => Ok(()),
        }
    }

    /// Waits for its end.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Kills it, whatever it does, and waits until it is gone.
    pub async fn kill(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL)?;
        self.wait().await
    }

    /// Asks it to end, and kills it if it has not within `grace`.
    pub async fn terminate(&mut self, grace: Duration) -> io::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        match time::timeout(grace, self.wait()).await {
            Ok(ended) => ended,
            Err(_) => self.kill().await,
        }
    }

    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let Some(pid) = self.pid() else { return };
        // A process that is killed ends in milliseconds, stopped or not, so waiting for it in place is no harm. It is
        // left to be reaped by the runtime, which does not expect others to do so.
        if kill_process(pid, Signal::KILL).is_ok() {
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            let _ = self.child.try_wait();
        }
    }
}

/// Where a program is. The kernel would say so too, but of `setpriv` only.
fn find(program: &OsStr) -> io::Result<PathBuf> {
    let is_path = Path::new(program).components().count() > 1;
    let folders = if is_path {
        Vec::new()
    } else {
        env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect()
    };
    let mut places = folders.iter().map(|folder| folder.join(program)).chain(is_path.then(|| program.into()));
    places.find(|place| place.is_file()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no program {}", program.display()))
    })
}

/// A command to start, the runtime that the child is to belong to, and where the child goes.
type Order = (Command, Handle, SyncSender<io::Result<Child>>);

/// Starts a command from a thread that lives as long as this process: the kernel counts the end of the *thread* that
/// started a child as the end of its parent.
fn start(command: Command) -> io::Result<Child> {
    static NURSERY: OnceLock<SyncSender<Order>> = OnceLock::new();
    let nursery = match NURSERY.get() {
        Some(nursery) => nursery,
        None => {
            let (orders, taken) = mpsc::sync_channel::<Order>(0);
            thread::Builder::new().name("nursery".to_owned()).spawn(move || {
                for (mut command, runtime, reply) in taken {
                    let _context = runtime.enter();
                    // Who gave the order waits for the child.
                    let _ = reply.send(command.spawn());
                }
            })?;
            // Of two that came at once one keeps its thread, and the other's ends as its orders are dropped.
            NURSERY.get_or_init(|| orders)
        }
    };
    let gone = |_| io::Error::other("the thread that starts children has ended");
    let (reply, child) = mpsc::sync_channel(1);
    nursery.send((command, Handle::current(), reply)).map_err(|_| gone(()))?;
    child.recv().map_err(|_| gone(()))?
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    fn is_there(id: u32) -> bool {
        let pid = Pid::from_raw(id.cast_signed()).unwrap();
        rustix::process::test_kill_process(pid).is_ok()
    }

    fn sleeper() -> Process {
        Process::start("sleep", |command| {
            command.arg("600").stdout(Stdio::null());
        })
        .unwrap()
    }

    #[tokio::test]
    async fn a_dropped_process_is_gone_even_when_it_was_stopped() {
        let process = sleeper();
        let id = process.id().unwrap();
        process.signal(Signal::STOP).unwrap();
        assert!(is_there(id));
        drop(process);
        assert!(!is_there(id));
    }

    #[tokio::test]
    async fn a_process_that_does_not_end_when_asked_is_killed() {
        let mut stubborn = Process::start("sh", |command| {
            command.args(["-c", "trap '' TERM; echo ready; exec sleep 600"]).stdout(Stdio::piped());
        })
        .unwrap();
        let mut line = [0; 6];
        let mut output = stubborn.take_stdout().unwrap();
        tokio::io::AsyncReadExt::read_exact(&mut output, &mut line).await.unwrap();
        let status = stubborn.terminate(Duration::from_millis(50)).await.unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        // A signal to what is gone reaches nobody.
        stubborn.signal(Signal::TERM).unwrap();
    }

    /// The child of a child: its parent is killed and can drop nothing.
    #[tokio::test]
    async fn a_process_does_not_outlive_a_killed_owner() {
        let mut owner = Process::start("sh", |command| {
            command
                .args(["-c", "setpriv --pdeathsig KILL -- sh -c 'echo ready; exec sleep 600' & wait"])
                .stdout(Stdio::piped());
        })
        .unwrap();
        let mut output = owner.take_stdout().unwrap();
        let mut line = [0; 6];
        tokio::io::AsyncReadExt::read_exact(&mut output, &mut line).await.unwrap();
        owner.kill().await.unwrap();
        // Its end of the pipe closes with the last process that holds it.
        let mut rest = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut output, &mut rest).await.unwrap();
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        for program in ["no-such-program", "./no-such-program"] {
            let error = Process::start(program, |_| {}).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
            assert!(error.to_string().ends_with(program), "{error}");
        }
    }
}
