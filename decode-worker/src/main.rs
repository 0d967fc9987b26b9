//! One process of a decode group: configuration, build, serve, drain.

use clap::Parser;
use longreach_decode::DecodeSettings;
use longreach_service::{Exit, RoleArgs, parse_args, run_role};

/// Makes output, with all ranks of a decode group or with one of them.
#[derive(Debug, Parser)]
#[command(name = "longreach-decode", version)]
struct Command {
    #[command(flatten)]
    args: RoleArgs<DecodeSettings>,
}

fn main() -> Exit {
    match parse_args::<Command>() {
        Ok(command) => run_role(command.args, longreach_decode::run),
        Err(exit) => exit,
    }
}
