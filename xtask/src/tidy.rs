//! House rules that no compiler checks: sizes, words, docs, manifests, and where `unsafe` may stand.
//!
//! The rules are pure functions of one file's path and text. They read text, not syntax trees: a parser would be
//! the largest dependency of the workspace and would find hardly more. Layout and lints are rustfmt's and clippy's.

mod manifest;
mod rules;
mod source;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::process::Command;

use crate::failure::Failure;
use crate::process;
use crate::workspace::Workspace;

/// One broken rule at one place.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// Counted from 1; 0 for the file as a whole.
    line_number: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line_number, self.message)
    }
}

/// Checks every text file that git knows or would take.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let mut git = Command::new("git");
    git.current_dir(&workspace.root).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]);
    let listing = process::capture(&mut git)?;
    let mut n_files = 0;
    let mut lines = Vec::new();
    for path in listing.lines() {
        // Deleted but still in the index, or not text: nothing to check.
        let Some(text) =
            fs::read(workspace.root.join(path)).ok().and_then(|bytes| String::from_utf8(bytes).ok())
        else {
            continue;
        };
        n_files += 1;
        lines.extend(check(path, &text).iter().map(Finding::to_string));
    }
    if lines.is_empty() {
        println!("{n_files} files are tidy");
        return Ok(());
    }
    Err(Failure::Broken { rules: "house rules", lines })
}

/// Everything that is wrong with one file.
fn check(path: &str, text: &str) -> Vec<Finding> {
    // Written by cargo, full of what would be wrong elsewhere.
    if path.ends_with("Cargo.lock") {
        return Vec::new();
    }
    let mut found = rules::any_text(path, text);
    if path.ends_with(".rs") {
        found.extend(rules::rust(path, text));
    }
    // `fuzz` is a workspace of its own: what it cannot inherit, it must say.
    if path.ends_with("/Cargo.toml") && path != "fuzz/Cargo.toml" {
        found.extend(manifest::member(text));
    }
    let finding = |(line_number, message)| Finding { path: path.to_owned(), line_number, message };
    found.into_iter().map(finding).collect()
}
