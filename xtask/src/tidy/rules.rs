//! The rules for text files and for Rust sources.

use super::source;

/// A broken rule: line number (0 for the whole file) and what to do.
pub(super) type Broken = (usize, String);

const MAX_FILE_LINES: usize = 700;
const MAX_FUNCTION_LINES: usize = 70;

/// The only places where `unsafe` may stand: the kernels, and the memory map of model files.
const UNSAFE_PATHS: &[&str] = &["crates/kernels/", "crates/gguf/src/map.rs"];

// Spelled in two halves, so that this file keeps the rules it makes.

/// Folders of somebody's machine.
const MACHINE_FOLDERS: &[&str] =
    &[concat!("/t", "mp/"), concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/")];
/// Marks of work that was left for later, in any file but prose.
const UNFINISHED: &[&str] = &[concat!("FIX", "ME"), concat!("XX", "X")];
/// The same in Rust.
const UNFINISHED_RUST: &[&str] =
    &[concat!("to", "do!"), concat!("unimple", "mented!"), concat!("#[ig", "nore")];
/// What the address of a package registry or a mirror of one has in it.
const REGISTRY_WORDS: &[&str] = &["registry", "mirror", "index", "/simple"];

/// Rules for every text file.
pub(super) fn any_text(path: &str, text: &str) -> Vec<Broken> {
    let is_prose = path.ends_with(".md");
    let mut found = Vec::new();
    for (idx, line) in text.split('\n').enumerate() {
        let mut report = |message: String| found.push((idx + 1, message));
        if line.ends_with([' ', '\t', '\r']) {
            report("trailing whitespace: remove it".to_owned());
        }
        if let Some(folder) = MACHINE_FOLDERS.iter().find(|folder| names_folder(line, folder)) {
            report(format!(
                "`{folder}` is a folder of one machine: use a relative path or a temporary directory"
            ));
        }
        if let Some(url) = registry_url(line) {
            report(format!(
                "`{url}` looks like a package registry: which one is used is for the machine to say"
            ));
        }
        if let Some(mark) = UNFINISHED.iter().find(|mark| !is_prose && line.contains(**mark)) {
            report(format!("`{mark}`: finish it or open an issue"));
        }
    }
    if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
        found.push((text.lines().count(), "end the file with one line break".to_owned()));
    }
    found
}

/// Whether a path that starts with `folder` stands on the line, rather than one that has it inside.
fn names_folder(line: &str, folder: &str) -> bool {
    let opens =
        |before: &str| before.is_empty() || before.ends_with([' ', '"', '\'', '`', '(', '=', ':', '<']);
    line.match_indices(folder).any(|(at, _)| opens(&line[..at]))
}

fn registry_url(line: &str) -> Option<&str> {
    let start = line.find("https://").or_else(|| line.find("http://"))?;
    let url = line[start..].split([' ', '"', '\'', ')', '>', '`']).next()?;
    REGISTRY_WORDS.iter().any(|word| url.contains(word)).then_some(url)
}

/// Rules for Rust sources.
pub(super) fn rust(path: &str, text: &str) -> Vec<Broken> {
    let code = source::code_of(text);
    let mut found = unfinished(text);
    let n_lines = text.lines().count();
    if n_lines > MAX_FILE_LINES {
        found.push((0, format!("{n_lines} lines, {MAX_FILE_LINES} are allowed: find the second noun in it")));
    }
    if !is_test(path) {
        found.extend(long_functions(&code));
        if !text.starts_with("//!") {
            found.push((1, "start with `//!`: what it is, and what it is not".to_owned()));
        }
    }
    if !UNSAFE_PATHS.iter().any(|allowed| path.starts_with(allowed)) {
        let message = format!("`unsafe` is allowed only in {}", UNSAFE_PATHS.join(", "));
        found
            .extend(source::lines_with_word(&code, "unsafe").into_iter().map(|line| (line, message.clone())));
    }
    found
}

fn unfinished(text: &str) -> Vec<Broken> {
    let mark = |line: &str| UNFINISHED_RUST.iter().find(|mark| line.contains(**mark));
    let numbered = text.lines().enumerate();
    numbered
        .filter_map(|(idx, line)| Some((idx + 1, format!("`{}` in the tree: finish it", mark(line)?))))
        .collect()
}

fn long_functions(code: &str) -> Vec<Broken> {
    let long = source::functions(code).into_iter().filter(|function| function.n_lines > MAX_FUNCTION_LINES);
    long.map(|function| {
        let source::Function { line_number, name, n_lines } = function;
        (line_number, format!("function `{name}` has {n_lines} lines, {MAX_FUNCTION_LINES} are allowed"))
    })
    .collect()
}

/// Files that hold only tests: anything under a `tests` folder, and `tests.rs`.
fn is_test(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}
