//! Running other programs and waiting for them.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use crate::failure::Failure;

/// How long a background program may take to end after it was asked to.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// The cargo that runs this program.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.args(args);
    command
}

/// Runs a program to its end, its output going to the terminal.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    let status = command.status().map_err(|source| start_failure(command, source))?;
    expect_success(command, status)
}

/// Runs a program to its end and gives what it printed.
pub(crate) fn capture(command: &mut Command) -> Result<String, Failure> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|source| start_failure(command, source))?;
    expect_success(command, output.status)?;
    String::from_utf8(output.stdout)
        .map_err(|error| Failure::Output { command: line_of(command), reason: error.to_string() })
}

/// Runs a program to its end, showing its output and giving each line of it to `on_line`.
pub(crate) fn run_watched(command: &mut Command, mut on_line: impl FnMut(&str)) -> Result<(), Failure> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|source| start_failure(command, source))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            println!("{line}");
            on_line(&line);
        }
    }
    let status = child.wait().map_err(|source| start_failure(command, source))?;
    expect_success(command, status)
}

/// Whether a program can be run and says yes; what it prints is not shown.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn expect_success(command: &Command, status: ExitStatus) -> Result<(), Failure> {
    if status.success() {
        return Ok(());
    }
    Err(Failure::Exit { command: line_of(command), status })
}

fn start_failure(command: &Command, source: std::io::Error) -> Failure {
    Failure::Start { command: line_of(command), source }
}

fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// A program in the background. It never outlives this value: dropping it ends the program.
pub(crate) struct Background {
    command: String,
    pid: u32,
    ended: Receiver<ExitStatus>,
    running: bool,
}

impl Background {
    /// Starts the program.
    pub(crate) fn start(command: &mut Command) -> Result<Self, Failure> {
        let child = command.spawn().map_err(|source| start_failure(command, source))?;
        let pid = child.id();
        Ok(Self { command: line_of(command), pid, ended: watch(child), running: true })
    }

    /// Waits up to `limit` for the program to end: `None` if it still runs.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>, Failure> {
        match self.ended.recv_timeout(limit) {
            Ok(status) => {
                self.running = false;
                Ok(Some(status))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                self.running = false;
                Err(Failure::Output { command: self.command.clone(), reason: "its exit was lost".to_owned() })
            }
        }
    }

    /// Asks the program to end, as Ctrl-C does, and requires that it ends well and soon.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        self.signal("INT");
        match self.wait(STOP_LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Failure::Exit { command: self.command.clone(), status }),
            None => {
                Err(Failure::TimedOut { what: format!("stopping `{}`", self.command), limit: STOP_LIMIT })
            }
        }
    }

    /// Sends a signal. The program has not been reaped while `running`, so its number is still its own, unless
    /// it ends in this very moment; then there is nobody to receive the signal.
    fn signal(&self, name: &str) {
        send_signal(name, self.pid);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if self.running {
            self.signal("KILL");
            let _status = self.ended.recv_timeout(STOP_LIMIT);
        }
    }
}

/// Sends a signal by the shell's own `kill`, since small systems have no such program. Says whether it was sent.
fn send_signal(name: &str, pid: u32) -> bool {
    succeeds(Command::new("sh").args(["-c", r#"kill -"$0" "$1""#, name]).arg(pid.to_string()))
}

/// A thread that waits for the child, so that others can wait for its end with a time limit.
fn watch(mut child: Child) -> Receiver<ExitStatus> {
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        if let Ok(status) = child.wait() {
            let _nobody_waits = sender.send(status);
        }
    });
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_program_is_named_with_its_arguments() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "`sh -c exit 3` failed: exit status: 3");
    }

    /// A shell that answers the signal of [`Background::stop`] with `exit_code`, ready to be stopped.
    fn start_shell(exit_code: u8) -> Background {
        let marker = std::env::temp_dir().join(format!("xtask-{}-{exit_code}", std::process::id()));
        let script = format!("trap 'exit {exit_code}' INT; : > \"$0\"; while :; do sleep 0.05; done");
        let mut command = Command::new("sh");
        let mut background = Background::start(command.args(["-c", &script]).arg(&marker)).unwrap();
        while !marker.exists() {
            assert!(background.wait(Duration::from_millis(20)).unwrap().is_none());
        }
        std::fs::remove_file(marker).unwrap();
        background
    }

    #[test]
    fn stopping_is_a_request_that_must_be_answered_with_success() {
        start_shell(0).stop().unwrap();
        let outcome = start_shell(7).stop();
        assert!(matches!(outcome, Err(Failure::Exit { status, .. }) if status.code() == Some(7)));
    }

    #[test]
    fn a_dropped_program_is_gone() {
        let background = Background::start(Command::new("sleep").arg("60")).unwrap();
        let pid = background.pid;
        assert!(send_signal("0", pid));
        drop(background);
        assert!(!send_signal("0", pid));
    }
}
