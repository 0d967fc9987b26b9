//! What the kernel says about a process: memory, threads, open files.

use std::fs;

/// Figures of one process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Resident memory.
    pub rss_bytes: u64,
    /// Threads.
    pub n_threads: usize,
    /// Open files, sockets included.
    pub n_files: usize,
}

impl Figures {
    /// The figures of process `pid`, if it lives.
    pub fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let n_files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
        let rss_bytes = field(&status, "VmRSS:")? * 1024;
        Some(Self { rss_bytes, n_threads: field(&status, "Threads:")? as usize, n_files })
    }
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_lives_has_figures_and_another_has_none() {
        let own = Figures::of(std::process::id()).unwrap();
        assert!(own.rss_bytes > 1 << 20 && own.n_threads >= 1 && own.n_files >= 3, "{own:?}");
        assert_eq!(Figures::of(u32::MAX), None);
    }
}
