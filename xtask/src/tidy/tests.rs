//! Each rule is broken once, in the smallest way, and must say so; and what is right must be silent.

use super::*;

const GOOD: &str = "//! A file.\n\nfn one() {}\n";

/// Messages for a file, with their lines.
fn complaints(path: &str, text: &str) -> Vec<(usize, String)> {
    check(path, text).into_iter().map(|finding| (finding.line_number, finding.message)).collect()
}

#[track_caller]
fn assert_one(path: &str, text: &str, line_number: usize, part: &str) {
    let found = complaints(path, text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, line_number, "{found:?}");
    assert!(found[0].1.contains(part), "{found:?}");
}

#[track_caller]
fn assert_fine(path: &str, text: &str) {
    assert_eq!(complaints(path, text), []);
}

fn function_of(n_lines: usize) -> String {
    format!("//! A file.\nfn long(\n) {{\n{}}}\n", "    step();\n".repeat(n_lines - 3))
}

#[test]
fn a_file_has_at_most_700_lines() {
    let of = |n_lines: usize| format!("//! A file.\n{}", "use a;\n".repeat(n_lines - 1));
    assert_fine("a/src/b.rs", &of(700));
    assert_one("a/src/b.rs", &of(701), 0, "701 lines");
    assert_fine("a/data.json", &of(701));
}

#[test]
fn a_function_has_at_most_70_lines_except_in_tests() {
    assert_fine("a/src/b.rs", &function_of(70));
    assert_one("a/src/b.rs", &function_of(71), 2, "`long` has 71 lines");
    for path in ["a/src/b/tests.rs", "a/tests/b.rs", "tests/src/lib.rs"] {
        assert_fine(path, &function_of(71));
    }
}

#[test]
fn braces_in_literals_and_comments_do_not_count() {
    for line in
        ["\"}\"", "\"\\\"}\"", "'}'", "'\\''; // }", "/* } /* } */ } */", "r#\"}\"}\"#", "b\"}\"", "&'a u8"]
    {
        let text = function_of(70).replacen("step();", line, 1);
        let longer = text.replacen("    step();\n", "    step();\n    step();\n", 1);
        assert_fine("a/src/b.rs", &text);
        assert_one("a/src/b.rs", &longer, 2, "71 lines");
    }
}

#[test]
fn declarations_and_pointers_are_not_functions() {
    let filler = "type A = u8;\n".repeat(80);
    let text = format!(
        "//! A file.\ntrait T {{\nfn f(&self, a: [u8; 4]);\n{filler}}}\nstruct S {{\nf: fn (u8),\n{filler}}}\n"
    );
    assert_fine("a/src/b.rs", &text);
}

#[test]
fn trailing_whitespace_and_ragged_ends_are_found_in_every_file() {
    assert_one("README.md", "a \nb\n", 1, "trailing");
    assert_one("a.yaml", "a\t\n", 1, "trailing");
    assert_one("a.py", "a\r\n", 1, "trailing");
    assert_one("a.py", "a", 1, "one line break");
    assert_one("a.py", "a\n\n", 2, "one line break");
    assert_fine("a.py", "");
}

#[test]
fn machine_folders_are_found_where_a_path_starts() {
    for folder in ["t*mp", "wo*rk", "ho*me", "ro*ot"].map(|folder| format!("/{}/", folder.replace('*', ""))) {
        assert_one("a/src/b.rs", &format!("{GOOD}// see \"{folder}x\"\n"), 4, &folder);
        assert_one("a.toml", &format!("a = '{folder}x'\n"), 1, &folder);
        assert_fine("a.md", &format!("a relative path: a{folder}x\n"));
    }
}

#[test]
fn registry_addresses_are_found() {
    let url = |rest: &str| format!("see <https{}//{rest}>\n", ':');
    for rest in ["mirror.example/x", "example.org/simple/x", "registry.example", "index.example/"] {
        assert_one("README.md", &url(rest), 1, "package registry");
    }
    assert_fine("README.md", &url("example.org/docs"));
}

#[test]
fn unfinished_work_is_found() {
    for mark in ["FIX*ME", "XX*X"].map(|mark| mark.replace('*', "")) {
        assert_one("a/src/b.rs", &format!("{GOOD}// {mark}: later\n"), 4, &mark);
        assert_one("a.proto", &format!("// {mark}\n"), 1, &mark);
        assert_fine("CONTRIBUTING.md", &format!("No {mark} in the tree.\n"));
    }
    for mark in ["to*do!", "unimple*mented!", "#[ig*nore"].map(|mark| mark.replace('*', "")) {
        assert_one("a/src/b.rs", &format!("{GOOD}{mark}\n"), 4, &mark);
        assert_fine("CONTRIBUTING.md", &format!("No {mark} in the tree.\n"));
    }
}

#[test]
fn every_module_starts_with_its_doc() {
    assert_one("crates/a/src/lib.rs", "fn one() {}\n", 1, "start with `//!`");
    assert_fine("crates/a/tests/b.rs", "fn one() {}\n");
}

#[test]
fn unsafe_stands_only_where_it_may() {
    let text = format!("{GOOD}unsafe fn two() {{}}\n");
    assert_one("crates/engine/src/lib.rs", &text, 4, "`unsafe` is allowed only in");
    assert_fine("crates/kernels/src/avx2.rs", &text);
    assert_fine(
        "crates/engine/src/lib.rs",
        &format!("{GOOD}// unsafe\n#![deny(unsafe_code)]\nconst A: &str = \"unsafe\";\n"),
    );
}

const MANIFEST: &str = "\
[package]
name = \"longreach-kv\"
version.workspace = true

[lints]
workspace = true

[dependencies]
longreach-types.workspace = true
tokio = { workspace = true, features = [\"fs\"] }
";

#[test]
fn versions_and_paths_stand_only_in_the_workspace_table() {
    assert_fine("crates/kv/Cargo.toml", MANIFEST);
    for line in ["serde = \"1\"", "serde = { version = \"1\" }", "kv = { path = \"../kv\" }"] {
        for section in ["", "[dev-dependencies]\n", "[target.'cfg(unix)'.dependencies]\n"] {
            let line_number = 11 + section.lines().count();
            assert_one(
                "crates/kv/Cargo.toml",
                &format!("{MANIFEST}{section}{line}\n"),
                line_number,
                "[workspace.dependencies]",
            );
        }
    }
    let single = format!("{MANIFEST}[dependencies.serde]\nversion = \"1\"\n");
    assert_one("crates/kv/Cargo.toml", &single, 12, "`version`");
    let versioned = MANIFEST.replace("version.workspace = true", "version = \"0.1.0\"");
    assert_one("crates/kv/Cargo.toml", &versioned, 3, "version.workspace");
    assert_fine("Cargo.toml", "[workspace.dependencies]\nserde = \"1\"\n");
}

#[test]
fn every_crate_inherits_the_lints() {
    let text = MANIFEST.replace("[lints]\nworkspace = true\n\n", "");
    assert_one("crates/kv/Cargo.toml", &text, 0, "inherit the lints");
}
