//! Tasks of the workspace, one command for each: `cargo xtask ci`, `tidy`, `arrows`, `etcd`, `fuzz`, `interop`, `chaos`.
//!
//! Shell scripts were the obvious alternative; this is Rust so that the rules have types and tests of their own and
//! need nothing but the toolchain. It builds and publishes nothing: that is cargo's work.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command for people: the terminal is its output"
)]

mod arrows;
mod chaos;
mod ci;
mod etcd;
mod failure;
mod fuzz;
mod interop;
mod process;
mod python;
mod tidy;
mod workspace;

use std::process::ExitCode;

use crate::ci::Scope;
use crate::failure::Failure;
use crate::workspace::Workspace;

const USAGE: &str = "\
usage: cargo xtask <task>

  ci            everything that must hold before a change goes in
  ci --quick    the part of it that needs only the toolchain: format, lints, tidy, arrows, unit tests
  tidy          house rules: sizes, words, docs, manifests, where unsafe may be
  arrows        crate dependencies against the table in ARCHITECTURE.md
  etcd          installs the etcd server that tests start, where it is missing
  interop       a cluster on this machine against the Python clients of tests/python
  fuzz [--seconds N] [TARGET…]
                the parsers of outside bytes under libFuzzer, each for N seconds (60); needs a nightly toolchain
  chaos [--release]
                the failure table with real processes; see `cargo xtask chaos --help`";

/// Exit code of a command line that cannot be understood (`EX_USAGE`).
const EXIT_USAGE: u8 = 64;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let task: fn(&Workspace) -> Result<(), Failure> = match args.as_slice() {
        ["ci"] => |workspace| ci::run(workspace, Scope::Full),
        ["ci", "--quick"] => |workspace| ci::run(workspace, Scope::Quick),
        ["tidy"] => tidy::run,
        ["arrows"] => arrows::run,
        ["etcd"] => |_| etcd::install(),
        ["interop"] => ci::interop,
        ["fuzz", ..] => fuzz::run,
        ["chaos", ..] => chaos::run,
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match Workspace::load().and_then(|workspace| task(&workspace)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}
