//! One router process: configuration, build, serve, drain.

use clap::Parser;
use longreach_router::RouterSettings;
use longreach_service::{Exit, RoleArgs, parse_args, run_role};

/// Serves a model to clients, with the workers that it finds in its cluster or is given.
#[derive(Debug, Parser)]
#[command(name = "longreach-router", version)]
struct Command {
    #[command(flatten)]
    args: RoleArgs<RouterSettings>,
}

fn main() -> Exit {
    match parse_args::<Command>() {
        Ok(command) => run_role(command.args, longreach_router::run),
        Err(exit) => exit,
    }
}
