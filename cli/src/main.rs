//! `longreach`: one command for people. Configuration, build, serve, drain; the work is in the libraries.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to people on the terminal")]

mod advice;
mod args;
mod chat;
mod error;
mod generate;
mod model;
mod processes;
mod ranks;
mod up;

use longreach_service::{Exit, LogConfig, init_tracing, parse_args};

use crate::{
    args::{Cli, Command, OwnCommand},
    error::CliError,
};

fn main() -> Exit {
    let cli: Cli = match parse_args() {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    let command = match cli.command {
        Command::Role(role) => return role.run(),
        Command::Own(command) => command,
    };
    let outcome = init_tracing(&LogConfig::from_env_or("warn"))
        .map_err(|error| CliError::Usage(error.to_string()))
        .and_then(|()| run(command));
    match outcome {
        Ok(()) => Exit::Clean,
        Err(error) => {
            eprintln!("longreach: {error}");
            error.exit()
        }
    }
}

fn run(command: OwnCommand) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::Start(format!("the async runtime could not start: {error}")))?;
    runtime.block_on(async {
        match command {
            OwnCommand::Up(args) if args.processes => processes::run(args).await,
            OwnCommand::Up(args) => up::run(args).await,
            OwnCommand::Chat(args) => chat::run(args).await,
            OwnCommand::Generate(args) => generate::run(args).await,
            OwnCommand::Certs(args) => args.run(),
            OwnCommand::Rank(args) => ranks::run_child(args).await,
        }
    })
}
