//! `longreach`: one command for people. Configuration, build, serve, drain; the work is in the libraries.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to people on the terminal")]

mod advice;
mod args;
mod chat;
mod error;
mod generate;
mod model;
mod ranks;
mod signals;
mod up;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Cli, Command},
    error::CliError,
};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            eprint!("{error}");
            return ExitCode::from(CliError::USAGE);
        }
        // Help and version are no errors.
        Err(text) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("longreach: {error}");
            error.exit_code()
        }
    }
}

fn run(cli: Cli) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::Start(format!("the async runtime could not start: {error}")))?;
    runtime.block_on(async {
        match cli.command {
            Command::Up(args) => up::run(args).await,
            Command::Chat(args) => chat::run(args).await,
            Command::Generate(args) => generate::run(args).await,
            Command::Rank(args) => ranks::run_child(args).await,
        }
    })
}
