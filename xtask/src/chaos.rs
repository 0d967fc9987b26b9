//! Builds the roles and the program that attacks a cluster of them, and runs it.
//!
//! The program is not part of this one: it needs the product's crates, and tasks must build in seconds.

use std::process::Command;

use crate::failure::Failure;
use crate::process;
use crate::workspace::Workspace;

/// Packages with programs that are needed: the roles, and the attacker itself.
const PACKAGES: [&str; 4] = ["longreach-router", "longreach-prefill", "longreach-decode", "longreach-tests"];

/// Said to this task, which has the programs optimised: two hundred streams leave a small machine little to spare, and
/// bounds in seconds are about the cluster only where it is not starved.
const RELEASE: &str = "--release";

/// Runs the rows that the command line asks for.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let (release, args): (Vec<_>, Vec<_>) = std::env::args().skip(2).partition(|arg| arg == RELEASE);
    let mut build = process::cargo(&["build", "--locked", "--bins"]);
    build.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    if !release.is_empty() {
        build.arg(RELEASE);
    }
    process::run(&mut build)?;
    let programs = workspace.target.join(if release.is_empty() { "debug" } else { "release" });
    let mut chaos = Command::new(programs.join("chaos"));
    process::run(chaos.current_dir(&workspace.root).arg("--programs").arg(programs).args(args))
}
