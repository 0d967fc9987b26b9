//! A process that another one started for itself ends with it, however that one ends.
//!
//! The parent says so in the environment, and the child asks the kernel (`PR_SET_PDEATHSIG`). The other way round, a
//! hook between fork and exec in the parent, cannot be written without `unsafe`. Only Linux has it; elsewhere a child
//! outlives a parent that was killed.
//!
//! The kernel means the *thread* that started the child: a parent starts such children from threads that live as long
//! as they should, a runtime's workers or its main thread.

use std::{env, io};

/// The variable by which a parent asks it; its value is the parent's process id.
pub const PARENT_VARIABLE: &str = "LONGREACH_PARENT";

/// Follows the parent to the end, if it asked for it.
pub(crate) fn follow() -> io::Result<()> {
    let Ok(parent) = env::var(PARENT_VARIABLE) else { return Ok(()) };
    let Ok(parent) = parent.parse::<u32>() else {
        return Err(io::Error::other(format!("{PARENT_VARIABLE} is {parent:?} and no process id")));
    };
    tie(parent)
}

#[cfg(target_os = "linux")]
fn tie(parent: u32) -> io::Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};

    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the kernel was asked.
    let now = getppid().map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now == parent { Ok(()) } else { Err(io::Error::other("the process that started this one has ended")) }
}

#[cfg(not(target_os = "linux"))]
fn tie(_parent: u32) -> io::Result<()> {
    Ok(())
}
