//! The parsers of outside bytes under libFuzzer.
//!
//! Every CI run tries them on the stable toolchain already, as a test of `crates/fuzz`. This needs a nightly toolchain
//! and a C++ compiler for libFuzzer, and builds the product once more under a sanitizer; where the toolchain is not
//! there, it says so.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::failure::Failure;
use crate::process;
use crate::workspace::Workspace;

/// How long each target runs when nothing is said.
const DEFAULT_SECONDS: u64 = 60;

/// The most memory that an input of a few kilobytes may make a parser use.
const RSS_LIMIT_MB: usize = 2048;

/// How long one input may take, in seconds.
const INPUT_LIMIT: u32 = 10;

/// Runs the targets that the command line names, or all, for as long as it says.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let all = names(workspace)?;
    let Job { seconds, targets } = Job::parse(std::env::args().skip(2), &all)?;
    if let Some(obstacle) = obstacle() {
        return Err(broken(obstacle.to_owned()));
    }
    install()?;
    let began = Instant::now();
    let corpus = workspace.root.join("fuzz/corpus");
    process::run(process::cargo(&["run", "--quiet", "--package", "longreach-fuzz", "--"]).arg(&corpus))?;
    copy_lock_file(workspace)?;
    process::run(&mut cargo_fuzz(workspace, &["build"]))?;
    println!("targets are built after {:.0} s", began.elapsed().as_secs_f64());
    for name in &targets {
        println!("\n--- {name}");
        run_target(workspace, name, seconds)?;
    }
    Ok(())
}

/// What is to be run.
#[derive(Debug, PartialEq, Eq)]
struct Job {
    seconds: u64,
    targets: Vec<String>,
}

impl Job {
    fn parse(mut words: impl Iterator<Item = String>, all: &[String]) -> Result<Self, Failure> {
        let mut job = Self { seconds: DEFAULT_SECONDS, targets: Vec::new() };
        while let Some(word) = words.next() {
            if word == "--seconds" {
                let seconds = words.next().and_then(|word| word.parse().ok()).filter(|&seconds| seconds > 0);
                job.seconds =
                    seconds.ok_or_else(|| broken("--seconds wants a whole number above 0".to_owned()))?;
            } else if all.contains(&word) {
                job.targets.push(word);
            } else {
                return Err(broken(format!("there is no target {word}; there are {}", all.join(", "))));
            }
        }
        if job.targets.is_empty() {
            job.targets = all.to_vec();
        }
        Ok(job)
    }
}

/// Why fuzzing cannot be done here, if it cannot.
fn obstacle() -> Option<&'static str> {
    if !process::succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "--version"])) {
        return Some("no nightly toolchain is installed: `rustup toolchain install nightly`");
    }
    let has_compiler = process::succeeds(Command::new("c++").arg("--version"));
    (!has_compiler).then_some("libFuzzer is built by a C++ compiler, and there is no `c++`")
}

fn broken(line: String) -> Failure {
    Failure::Broken { rules: "fuzz", lines: vec![line] }
}

fn run_target(workspace: &Workspace, name: &str, seconds: u64) -> Result<(), Failure> {
    let mut command = cargo_fuzz(workspace, &["run", name]);
    command.arg(format!("corpus/{name}"));
    let regressions = format!("regressions/{name}");
    if workspace.root.join("fuzz").join(&regressions).is_dir() {
        command.arg(regressions);
    }
    command.args(["--", "-print_final_stats=1"]);
    command.arg(format!("-max_total_time={}", seconds));
    command.arg(format!("-rss_limit_mb={RSS_LIMIT_MB}"));
    command.arg(format!("-timeout={}", INPUT_LIMIT));
    process::run(&mut command)
}

/// `cargo fuzz` in its own folder, where `rust-toolchain.toml` names the toolchain. The one that runs this program set
/// the environment of its own, which would win.
fn cargo_fuzz(workspace: &Workspace, args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(workspace.root.join("fuzz")).args(["+nightly", "fuzz"]).args(args);
    for name in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTDOC"] {
        command.env_remove(name);
    }
    command
}

/// What is fuzzed is of the versions that are built: a lock file of its own would fall behind.
fn copy_lock_file(workspace: &Workspace) -> Result<(), Failure> {
    let (from, to) = (workspace.root.join("Cargo.lock"), workspace.root.join("fuzz/Cargo.lock"));
    fs::copy(&from, &to).map(drop).map_err(|source| Failure::File { path: to, source })
}

/// cargo-fuzz is a small program, half a minute to build.
fn install() -> Result<(), Failure> {
    if process::succeeds(&mut process::cargo(&["fuzz", "--version"])) {
        return Ok(());
    }
    process::run(&mut process::cargo(&["install", "cargo-fuzz", "--locked"]))
}

/// The targets, as `fuzz/fuzz_targets` has them.
fn names(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let folder = workspace.root.join("fuzz/fuzz_targets");
    let entries = fs::read_dir(&folder).map_err(|source| Failure::File { path: folder, source })?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let stem = |path: &Path| Some(path.file_stem()?.to_str()?.to_owned());
    let mut names: Vec<_> = paths.filter_map(|path| stem(&path)).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_not_there_is_named_with_those_that_are() {
        let all = ["a".to_owned(), "b".to_owned()];
        let parse = |words: &[&str]| Job::parse(words.iter().map(|word| (*word).to_owned()), &all);
        let job = |seconds, targets: &[String]| Job { seconds, targets: targets.to_vec() };
        assert_eq!(parse(&[]).unwrap(), job(DEFAULT_SECONDS, &all));
        assert_eq!(parse(&["b", "--seconds", "5"]).unwrap(), job(5, &all[1..]));
        assert!(parse(&["c"]).unwrap_err().to_string().contains("no target c; there are a, b"));
        assert!(parse(&["--seconds", "0"]).unwrap_err().to_string().contains("--seconds"));
    }
}
