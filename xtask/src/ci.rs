//! Everything that must hold before a change goes in, as a list of steps.
//!
//! The steps run in order and the first failure ends the run: cheap checks stand first. What each took is printed
//! at the end, the failed one last.

use std::time::Instant;

use crate::failure::Failure;
use crate::python::Python;
use crate::workspace::Workspace;
use crate::{arrows, etcd, interop, process, python, tidy};

/// How much of the list is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Every step.
    Full,
    /// The steps that need only the toolchain and little time.
    Quick,
}

/// One step of the list.
struct Step {
    name: &'static str,
    /// Runs under [`Scope::Quick`] too.
    in_quick: bool,
    run: fn(&Workspace, Scope) -> Result<Outcome, Failure>,
}

/// How a step ended when it did not fail.
enum Outcome {
    Passed,
    /// Left out, for this reason.
    Skipped(&'static str),
}

const STEPS: &[Step] = &[
    Step { name: "fmt", in_quick: true, run: |_, _| cargo(&["fmt", "--all", "--check"]) },
    Step { name: "tidy", in_quick: true, run: |workspace, _| tidy::run(workspace).map(passed) },
    Step { name: "arrows", in_quick: true, run: |workspace, _| arrows::run(workspace).map(passed) },
    Step { name: "deny", in_quick: false, run: |_, _| deny() },
    Step {
        name: "python",
        in_quick: false,
        run: |workspace, _| python::install(&workspace.root).map(passed),
    },
    Step { name: "etcd", in_quick: false, run: |_, _| etcd::install().map(passed) },
    Step { name: "buf lint", in_quick: false, run: |workspace, _| buf_lint(workspace) },
    Step { name: "clippy", in_quick: true, run: |_, _| clippy() },
    // What tests are built with: a plain build would unify features without their dependencies, and build all twice.
    Step {
        name: "build",
        in_quick: false,
        run: |_, _| cargo(&["test", "--workspace", "--locked", "--no-run"]),
    },
    Step { name: "test", in_quick: true, run: |_, scope| test(scope) },
    Step { name: "interop", in_quick: false, run: |workspace, _| interop::run(workspace).map(passed) },
];

/// Runs the list.
pub(crate) fn run(workspace: &Workspace, scope: Scope) -> Result<(), Failure> {
    let started = Instant::now();
    let mut report = Vec::new();
    let mut failure = None;
    for step in STEPS.iter().filter(|step| scope == Scope::Full || step.in_quick) {
        println!("\n=== {}", step.name);
        let began = Instant::now();
        let outcome = (step.run)(workspace, scope);
        let word = match &outcome {
            Ok(Outcome::Passed) => "ok".to_owned(),
            Ok(Outcome::Skipped(reason)) => format!("skipped: {reason}"),
            Err(_) => "FAILED".to_owned(),
        };
        let line = format!("{:<9} {:>7.1} s  {word}", step.name, began.elapsed().as_secs_f64());
        println!("{line}");
        report.push(line);
        if let Err(source) = outcome {
            failure = Some(Failure::Step { name: step.name, source: Box::new(source) });
            break;
        }
    }
    println!("\n=== {} steps in {:.1} s", report.len(), started.elapsed().as_secs_f64());
    report.iter().for_each(|line| println!("{line}"));
    failure.map_or(Ok(()), Err)
}

/// The interop step alone, with what it needs.
pub(crate) fn interop(workspace: &Workspace) -> Result<(), Failure> {
    python::install(&workspace.root)?;
    process::run(&mut process::cargo(&["build", "--package", "longreach", "--locked"]))?;
    interop::run(workspace)
}

fn passed((): ()) -> Outcome {
    Outcome::Passed
}

fn cargo(args: &[&str]) -> Result<Outcome, Failure> {
    process::run(&mut process::cargo(args)).map(passed)
}

fn clippy() -> Result<Outcome, Failure> {
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny", "warnings"])
}

/// Licences, advisories and duplicate versions. The tool takes longer to build than all our code, so it is used
/// where it is and not installed where it is not.
fn deny() -> Result<Outcome, Failure> {
    if !process::succeeds(&mut process::cargo(&["deny", "--version"])) {
        return Ok(Outcome::Skipped("cargo-deny is not installed"));
    }
    cargo(&["deny", "--offline", "check", "bans", "licenses", "sources"])
}

fn buf_lint(workspace: &Workspace) -> Result<Outcome, Failure> {
    let mut buf = Python::of(&workspace.root).program("buf");
    process::run(buf.current_dir(&workspace.root).args(["lint", "proto"])).map(passed)
}

/// Packages whose tests need more than the toolchain, or much time.
const NOT_QUICK: &[&str] = &["longreach-local", "longreach-tests"];

/// Under [`Scope::Quick`] the tests that need only the toolchain; otherwise all.
fn test(scope: Scope) -> Result<Outcome, Failure> {
    let mut command = process::cargo(&["test", "--workspace", "--locked"]);
    if scope == Scope::Quick {
        command.args(NOT_QUICK.iter().flat_map(|package| ["--exclude", package]));
    }
    let mut tally = Tally::default();
    let outcome = process::run_watched(&mut command, |line| tally.add(line));
    println!(
        "{} passed, {} failed, {} ignored in {} test programs",
        tally.passed, tally.failed, tally.ignored, tally.programs
    );
    outcome?;
    if tally.ignored > 0 {
        let lines = vec![format!("{} tests are ignored; a test that does not run is no test", tally.ignored)];
        return Err(Failure::Broken { rules: "tests", lines });
    }
    Ok(Outcome::Passed)
}

/// Sums of the closing lines of many test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    programs: usize,
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Tally {
    /// Adds `test result: ok. 12 passed; 0 failed; 1 ignored; …`; other lines count nothing.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        self.programs += 1;
        let words: Vec<&str> = result.split([' ', ';']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let count = pair[0].parse().unwrap_or(0);
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_all_programs_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s",
            "test a_name_with_3_passed ... ok",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1.00s",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { programs: 2, passed: 14, failed: 3, ignored: 1 });
    }

    #[test]
    fn quick_needs_nothing_but_the_toolchain() {
        let quick: Vec<_> = STEPS.iter().filter(|step| step.in_quick).map(|step| step.name).collect();
        assert_eq!(quick, ["fmt", "tidy", "arrows", "clippy", "test"]);
    }
}
