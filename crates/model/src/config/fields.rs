//! Typed access to a JSON object that a person or a converter wrote.
//!
//! `null` is the same as absence, as in the reference implementation. A value of the wrong type is an error, never
//! a default.

use std::path::Path;

use longreach_types::TokenId;
use serde_json::{Map, Value};

use super::{ConfigError, MAX_COUNT};

/// A JSON object in a file, with the key that led to it.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    path: &'a Path,
    parent: Option<&'a str>,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The object that the file at `path` consists of.
    pub(super) fn root(path: &'a Path, value: &'a Value) -> Result<Self, ConfigError> {
        let object = value
            .as_object()
            .ok_or_else(|| ConfigError::value(path, "the file", kind(value), "a JSON object"))?;
        Ok(Self { path, parent: None, object })
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be it with null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// The object under `key`.
    pub(super) fn object(&self, key: &'a str) -> Result<Option<Self>, ConfigError> {
        let as_object = |value: &'a Value| value.as_object();
        let object = self.typed(key, "an object", as_object)?;
        Ok(object.map(|object| Self { path: self.path, parent: Some(key), object }))
    }

    /// A size: a whole number of 1 to 2^31.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let as_count = |value: &Value| {
            value.as_u64().filter(|count| (1..=MAX_COUNT).contains(count)).map(|count| count as usize)
        };
        self.typed(key, "a whole number from 1 to 2^31", as_count)
    }

    /// A whole number from 0.
    pub(super) fn index(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "a whole number", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let positive = |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        self.typed(key, "a number above 0", positive)
    }

    /// A finite number.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let as_texts =
            |value: &'a Value| value.as_array().and_then(|items| items.iter().map(Value::as_str).collect());
        self.typed(key, "a list of strings", as_texts)
    }

    /// One token id or a list of them.
    pub(super) fn tokens(&self, key: &str) -> Result<Vec<TokenId>, ConfigError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId);
        let as_tokens = |value: &Value| match value {
            Value::Array(items) => items.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        Ok(self.typed(key, "a token id or a list of them", as_tokens)?.unwrap_or_default())
    }

    /// Turns an absent value into the error that says so.
    pub(super) fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| ConfigError::missing(self.path, self.full_key(key)))
    }

    /// The error for a value that this engine does not compute.
    pub(super) fn unsupported(&self, key: &str, why: &'static str) -> ConfigError {
        let value = self.get(key).map_or_else(|| "absent".to_owned(), print);
        ConfigError::Unsupported { path: self.path.to_path_buf(), key: self.full_key(key), value, why }
    }

    /// The error for a value that cannot be.
    pub(super) fn bad(&self, key: &str, want: impl Into<String>) -> ConfigError {
        let value = self.get(key).map_or_else(|| "absent".to_owned(), print);
        ConfigError::value(self.path, self.full_key(key), value, want)
    }

    fn typed<T>(
        &self,
        key: &str,
        want: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.bad(key, want)),
        }
    }

    fn full_key(&self, key: &str) -> String {
        self.parent.map_or_else(|| key.to_owned(), |parent| format!("{parent}.{key}"))
    }
}

/// A value for a message: short ones as they stand.
fn print(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 80 { text } else { kind(value).to_owned() }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a long string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
