//! Crate dependencies against the table in ARCHITECTURE.md: the document is the rule, not a picture of it.
//!
//! The table is ordered: a crate may be built only with crates of earlier rows, so arrows go one way and a cycle of
//! meaning shows before cargo sees one. Dependencies on other people's crates are cargo-deny's business, not ours.

use std::fs;

use crate::failure::Failure;
use crate::workspace::{Crate, Workspace};

const DOCUMENT: &str = "ARCHITECTURE.md";
const BEGIN: &str = "<!-- arrows: begin -->";
const END: &str = "<!-- arrows: end -->";
/// Rows of the table that are not crates: its head and the rule under it.
const HEAD_ROWS: usize = 2;
const NONE: &str = "–";

/// Compares the workspace with the table.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let path = workspace.root.join(DOCUMENT);
    let text = fs::read_to_string(&path).map_err(|source| Failure::File { path, source })?;
    let lines = check(&text, &workspace.crates);
    if lines.is_empty() {
        println!("{} crates are as the table says", workspace.crates.len());
        return Ok(());
    }
    Err(Failure::Broken { rules: "crate arrows", lines })
}

/// One row: a crate as the document wants it.
struct Row {
    line_number: usize,
    wanted: Crate,
}

/// What is to be changed, one message for each wrong or missing row.
fn check(text: &str, crates: &[Crate]) -> Vec<String> {
    let rows = parse(text);
    let order: Vec<&str> = rows.iter().map(|row| row.wanted.name.as_str()).collect();
    let position = |name: &str| order.iter().position(|row| *row == name);
    let mut messages = Vec::new();
    for row in &rows {
        let Row { line_number, wanted } = row;
        match crates.iter().find(|found| found.name == wanted.name) {
            None => messages.push(format!("{DOCUMENT}:{line_number}: there is no crate {}: remove the line", wanted.name)),
            Some(found) if differs(found, wanted) => messages.push(format!(
                "{DOCUMENT}:{line_number}: {} has other arrows than the table; remove them from its Cargo.toml or, where they are meant, write:\n    {}",
                found.name,
                render(found, position)
            )),
            Some(_) => {}
        }
        for target in wanted.depends.iter().filter(|target| position(target) >= position(&wanted.name)) {
            messages.push(format!(
                "{DOCUMENT}:{line_number}: {} depends on {target}, which is not above it in the table",
                wanted.name
            ));
        }
    }
    let missing = crates.iter().filter(|found| position(&found.name).is_none());
    messages.extend(missing.map(|found| {
        format!("{DOCUMENT}: crate {} is not in the table: add\n    {}", found.name, render(found, position))
    }));
    messages
}

fn differs(found: &Crate, wanted: &Crate) -> bool {
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort();
        names
    };
    sorted(&found.depends) != sorted(&wanted.depends) || sorted(&found.in_tests) != sorted(&wanted.in_tests)
}

/// The row that describes `found`, its arrows in the order of the table.
fn render(found: &Crate, position: impl Fn(&str) -> Option<usize>) -> String {
    let cell = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort_by_key(|name| (position(name).unwrap_or(usize::MAX), name.clone()));
        if names.is_empty() { NONE.to_owned() } else { names.join(", ") }
    };
    format!("| {} | {} | {} |", found.name, cell(&found.depends), cell(&found.in_tests))
}

fn parse(text: &str) -> Vec<Row> {
    let numbered = text.lines().enumerate();
    let table =
        numbered.skip_while(|(_, line)| line.trim() != BEGIN).take_while(|(_, line)| line.trim() != END);
    let rows = table.filter(|(_, line)| line.starts_with('|')).skip(HEAD_ROWS);
    rows.map(|(line_idx, line)| Row { line_number: line_idx + 1, wanted: parse_row(line) }).collect()
}

fn parse_row(line: &str) -> Crate {
    let mut cells = line.trim_matches('|').split('|').map(str::trim);
    let name = cells.next().unwrap_or_default().to_owned();
    let mut names = || {
        let cell = cells.next().unwrap_or_default();
        cell.split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty() && *name != NONE)
            .map(str::to_owned)
            .collect()
    };
    let depends = names();
    Crate { name, depends, in_tests: names() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
# A document
| not | this | table |
<!-- arrows: begin -->
| crate | is built with | and in tests |
|---|---|---|
| types | – | – |
| kv | types | – |
| engine | types, kv | model |
<!-- arrows: end -->
";

    fn make(name: &str, depends: &[&str], in_tests: &[&str]) -> Crate {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Crate { name: name.to_owned(), depends: owned(depends), in_tests: owned(in_tests) }
    }

    fn agreeing() -> Vec<Crate> {
        vec![
            make("types", &[], &[]),
            make("engine", &["kv", "types"], &["model"]),
            make("kv", &["types"], &[]),
        ]
    }

    #[test]
    fn agreement_is_silent_whatever_the_order_of_names() {
        assert_eq!(check(TABLE, &agreeing()), [""; 0]);
    }

    #[test]
    fn a_new_arrow_names_the_line_and_what_to_write() {
        let mut crates = agreeing();
        crates[2] = make("kv", &["engine", "types"], &[]);
        let messages = check(TABLE, &crates);
        assert_eq!(messages.len(), 1);
        assert!(messages[0].starts_with("ARCHITECTURE.md:7: kv has other arrows"), "{messages:?}");
        assert!(messages[0].ends_with("\n    | kv | types, engine | – |"), "{messages:?}");
    }

    #[test]
    fn a_lost_arrow_of_the_tests_is_a_difference_too() {
        let mut crates = agreeing();
        crates[1].in_tests.clear();
        assert!(check(TABLE, &crates)[0].ends_with("| engine | types, kv | – |"));
    }

    #[test]
    fn crates_without_a_row_and_rows_without_a_crate_are_named() {
        let mut crates = agreeing();
        crates[2].name = "cache".to_owned();
        let messages = check(TABLE, &crates);
        assert_eq!(messages[0], "ARCHITECTURE.md:7: there is no crate kv: remove the line");
        assert_eq!(
            messages[1],
            "ARCHITECTURE.md: crate cache is not in the table: add\n    | cache | types | – |"
        );
    }

    #[test]
    fn an_arrow_that_goes_up_is_refused_even_when_document_and_manifest_agree() {
        let table = TABLE.replace("| types | – | – |", "| types | kv | – |");
        let mut crates = agreeing();
        crates[0].depends.push("kv".to_owned());
        let expected = "ARCHITECTURE.md:6: types depends on kv, which is not above it in the table";
        assert_eq!(check(&table, &crates), [expected]);
    }
}
