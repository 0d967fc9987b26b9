//! A configuration file, read twice: for its values, and for the lines on which they stand.

use std::{fs, path::PathBuf};

use toml::{
    Spanned, Table,
    de::{DeTable, DeValue},
};

use super::{
    Key,
    error::{ConfigError, Place},
};

/// A file that is TOML; its keys and values are not checked yet.
pub(super) struct ConfigFile {
    path: PathBuf,
    text: String,
}

impl ConfigFile {
    /// Reads the file.
    pub(super) fn read(path: PathBuf) -> Result<Self, ConfigError> {
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text }),
            Err(source) => Err(ConfigError::Unreadable { path, source }),
        }
    }

    /// Its values.
    pub(super) fn table(&self) -> Result<Table, ConfigError> {
        self.text.parse().map_err(|error| self.syntax(&error))
    }

    /// Refuses a key that is not one of `keys`.
    pub(super) fn check_keys(&self, keys: &[Key]) -> Result<(), ConfigError> {
        let document = DeTable::parse(&self.text).map_err(|error| self.syntax(&error))?;
        self.check_table(document.get_ref(), "", keys)
    }

    /// The error for a value at `key`.
    pub(super) fn bad_value(&self, key: String, reason: String) -> ConfigError {
        ConfigError::BadValue { file: Some(self.place(self.find(&key))), key, reason }
    }

    fn check_table(&self, table: &DeTable<'_>, section: &str, keys: &[Key]) -> Result<(), ConfigError> {
        for (name, value) in table {
            let key = format!("{section}{}", name.get_ref());
            let is_section = keys.iter().any(|known| is_within(&known.name, &key));
            match value.get_ref() {
                DeValue::Table(inner) if is_section => {
                    self.check_table(inner, &format!("{key}."), keys)?;
                }
                _ if keys.iter().any(|known| known.name == key) => {}
                _ if is_section => {
                    let reason = format!("it is a section: write [{key}] and its settings below");
                    return Err(self.bad_value(key, reason));
                }
                _ => {
                    let place = self.place(Some(name.span().start));
                    return Err(ConfigError::UnknownKey { place, known: neighbours(&key, keys), key });
                }
            }
        }
        Ok(())
    }

    /// Where the value of `key` stands.
    fn find(&self, key: &str) -> Option<usize> {
        let document = DeTable::parse(&self.text).ok()?;
        let mut parts = key.split(['.', '[']);
        let mut value: Spanned<DeValue<'_>> = document.get_ref().get(parts.next()?)?.clone();
        for part in parts {
            let Some(inner) = value.get_ref().get(part).cloned() else { break };
            value = inner;
        }
        Some(value.span().start)
    }

    fn syntax(&self, error: &toml::de::Error) -> ConfigError {
        let place = self.place(error.span().map(|span| span.start));
        ConfigError::Syntax { place, reason: error.message().replace('\n', ", ") }
    }

    fn place(&self, offset: Option<usize>) -> Place {
        let line = |offset| self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1;
        Place { path: self.path.clone(), line: offset.map(line) }
    }
}

/// Whether `key` is a setting of the section.
fn is_within(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'))
}

/// What may have been meant: the setting of the same name in another place, or else all of the same section; at the top,
/// sections too.
fn neighbours(key: &str, keys: &[Key]) -> Vec<String> {
    let last = |key: &str| key.rsplit('.').next().map(str::to_owned);
    let namesakes: Vec<_> = keys.iter().filter(|known| last(&known.name) == last(key)).collect();
    if let [one] = namesakes[..] {
        return vec![one.name.clone()];
    }
    let section = key.rsplit_once('.').map_or("", |(section, _)| section);
    let is_beside = |known: &&Key| known.name.rsplit_once('.').map_or("", |(of, _)| of) == section;
    let beside: Vec<_> = keys.iter().filter(is_beside).map(|known| known.name.clone()).collect();
    if section.is_empty() || beside.is_empty() {
        let sections = keys.iter().filter_map(|known| known.name.rsplit_once('.'));
        let mut sections: Vec<_> = sections.map(|(section, _)| format!("[{section}]")).collect();
        sections.dedup();
        return beside.into_iter().chain(sections).collect();
    }
    beside
}
