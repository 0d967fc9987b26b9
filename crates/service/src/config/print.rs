//! A configuration as a file for people: every setting with what it is for, those that are not set as comments.

use std::fmt::Write as _;

use toml::{Table, Value};

use super::Key;

/// The document. Keys without a section come first, as TOML wants it.
pub(super) fn document(keys: &[Key], values: &Table) -> String {
    let mut out = String::new();
    let section_of = |key: &Key| key.name.rsplit_once('.').map(|(section, _)| section.to_owned());
    let mut sections: Vec<Option<String>> = vec![None];
    for key in keys {
        if !sections.contains(&section_of(key)) {
            sections.push(section_of(key));
        }
    }
    for section in sections {
        if let Some(section) = &section {
            // Writing to a string cannot fail.
            let _infallible = writeln!(out, "[{section}]");
        }
        for key in keys.iter().filter(|key| section_of(key) == section) {
            setting(&mut out, key, find(values, &key.name));
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn setting(out: &mut String, key: &Key, value: Option<&Value>) {
    let name = key.name.rsplit('.').next().unwrap_or(&key.name);
    for line in key.help.lines() {
        let _infallible = writeln!(out, "# {line}");
    }
    let _infallible = match value {
        Some(value) => writeln!(out, "{name} = {value}"),
        None => writeln!(out, "#{name} ="),
    };
}

fn find<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((section, rest)) => find(table.get(section)?.as_table()?, rest),
        None => table.get(key),
    }
}
