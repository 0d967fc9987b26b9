//! The end of a role's process. In a process of its own, because signals and logs are the process's.

use std::{sync::mpsc, time::Duration};

use clap::{Args, Parser};
use longreach_service::{ConfigError, Exit, RoleArgs, RoleError, Settings, run_role};
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Debug, Deserialize, Serialize)]
struct Nothing {}

impl Settings for Nothing {
    fn validate(&self) -> Result<(), ConfigError> {
        Ok(())
    }

    fn log(&self) -> &str {
        "info"
    }
}

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    args: RoleArgs<Nothing>,
}

#[test]
fn a_role_that_failed_ends_although_one_of_its_threads_does_not() {
    let command = Command::try_parse_from(["role"]).unwrap();
    let (hold, held) = mpsc::channel::<()>();
    let (begun_in, begun) = mpsc::channel();
    let (exit_in, exit) = mpsc::channel();
    let process = std::thread::spawn(move || {
        let exit = run_role(command.args, |_, _| async move {
            let _stuck = tokio::task::spawn_blocking(move || {
                begun_in.send(()).unwrap();
                held.recv()
            });
            begun.recv().unwrap();
            Err(RoleError::failed("its work does not end"))
        });
        exit_in.send(exit).unwrap();
    });
    // Far more than it takes, and the thread is held for all that time.
    assert_eq!(exit.recv_timeout(Duration::from_secs(20)), Ok(Exit::Failed));
    drop(hold);
    process.join().unwrap();
}
