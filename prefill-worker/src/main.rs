//! One prefill worker as a process: configuration, build, serve, drain.

use clap::Parser;
use longreach_prefill::PrefillSettings;
use longreach_service::{Exit, RoleArgs, parse_args, run_role};

/// Computes prompts, and sends their KV to decode groups.
#[derive(Debug, Parser)]
#[command(name = "longreach-prefill", version)]
struct Command {
    #[command(flatten)]
    args: RoleArgs<PrefillSettings>,
}

fn main() -> Exit {
    match parse_args::<Command>() {
        Ok(command) => run_role(command.args, longreach_prefill::run),
        Err(exit) => exit,
    }
}
