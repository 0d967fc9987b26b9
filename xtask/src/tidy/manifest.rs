//! The rules for the manifest of a member of the workspace: versions and lints live in the root manifest only.

use super::rules::Broken;

/// Keys that say where a dependency comes from.
const ORIGINS: &[&str] = &["version", "path", "git"];

/// Checks a member's Cargo.toml.
pub(super) fn member(text: &str) -> Vec<Broken> {
    let mut found = Vec::new();
    let mut section = "";
    let mut inherits_lints = false;
    for (idx, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
            continue;
        }
        inherits_lints |= section == "lints" && line == "workspace = true";
        if let Some(message) = wrong_line(section, line) {
            found.push((idx + 1, message));
        }
    }
    if !inherits_lints {
        found.push((0, "inherit the lints: `[lints]` with `workspace = true`".to_owned()));
    }
    found
}

fn wrong_line(section: &str, line: &str) -> Option<String> {
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    if section == "package" && key == "version" {
        return Some("take the version from the workspace: `version.workspace = true`".to_owned());
    }
    let (is_table, is_one) = dependency_section(section);
    let inherits = key.ends_with(".workspace") || value.contains("workspace = true");
    if is_table && !inherits || is_one && ORIGINS.contains(&key) {
        return Some(format!(
            "`{key}`: name versions and paths in [workspace.dependencies] of the root manifest"
        ));
    }
    None
}

/// Whether the section is a table of dependencies, and whether it is the table of a single one.
fn dependency_section(section: &str) -> (bool, bool) {
    let is_table = section.ends_with("dependencies");
    (is_table, !is_table && section.contains("dependencies."))
}
