//! Builds the roles and the program that attacks a cluster of them, and runs it.
//!
//! The program is not part of this one: it needs the product's crates, and tasks must build in seconds.

use std::process::Command;

use crate::failure::Failure;
use crate::process;
use crate::workspace::Workspace;

/// Packages with programs that are needed: the roles, and the attacker itself.
const PACKAGES: [&str; 4] = ["longreach-router", "longreach-prefill", "longreach-decode", "longreach-tests"];

/// Runs the rows that the command line asks for.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let mut build = process::cargo(&["build", "--locked", "--bins"]);
    process::run(build.args(PACKAGES.iter().flat_map(|package| ["--package", package])))?;
    let programs = workspace.target.join("debug");
    let mut chaos = Command::new(programs.join("chaos"));
    process::run(
        chaos.current_dir(&workspace.root).arg("--programs").arg(programs).args(std::env::args().skip(2)),
    )
}
