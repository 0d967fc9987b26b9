//! The etcd server that tests start, from the system's packages.
//!
//! A download of a release was the alternative: it would need a place that is reachable from every machine, and sums
//! to check. Where the packages have no etcd, or this is not root, the step says what to install and ends.

use std::process::Command;

use crate::failure::Failure;
use crate::process;

const PACKAGE: &str = "etcd-server";

/// Makes sure that there is an `etcd` to run.
pub(crate) fn install() -> Result<(), Failure> {
    if is_there() {
        println!("etcd is there");
        return Ok(());
    }
    if !process::succeeds(Command::new("apt-get").arg("--version")) || !is_root()? {
        return Err(missing());
    }
    process::run(Command::new("apt-get").args(["--quiet", "update"]))?;
    let install = ["--quiet", "--yes", "--no-install-recommends", "install", PACKAGE];
    // In run level 1 a package does not start its service: tests start their own, with data that they delete.
    process::run(
        Command::new("apt-get").args(install).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1"),
    )?;
    if is_there() { Ok(()) } else { Err(missing()) }
}

fn is_there() -> bool {
    process::succeeds(Command::new("etcd").arg("--version"))
}

fn is_root() -> Result<bool, Failure> {
    Ok(process::capture(Command::new("id").arg("-u"))?.trim() == "0")
}

fn missing() -> Failure {
    Failure::Missing {
        program: "etcd",
        how: "install it (as root: `apt-get install etcd-server`; or a release of etcd-io/etcd on GitHub) so that it \
              is on the PATH",
    }
}
