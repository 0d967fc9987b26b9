//! Keys and values, with typed access.
//!
//! Every accessor returns `Ok(None)` for an absent key and an error, never a default, for a value of the wrong
//! kind.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    error::{GgufError, Problem},
    value::{Array, Value},
};

/// The metadata of a file.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    entries: BTreeMap<String, Value>,
}

impl Metadata {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), entries: BTreeMap::new() }
    }

    /// Adds an entry; false when the key was there already.
    pub(crate) fn insert(&mut self, key: &str, value: Value) -> bool {
        self.entries.insert(key.to_owned(), value).is_none()
    }

    /// The file that the metadata was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value as it was stored.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// An integer that is not negative, stored in any width.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Unsigned(value)) => Ok(Some(value)),
            Some(&Value::Signed(value)) => match u64::try_from(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(self.error(key, Problem::range(value, "no negative number"))),
            },
            Some(other) => Err(self.error(key, Problem::wrong_type("an integer", other.kind()))),
        }
    }

    /// A number, stored as any type of number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Float(value)) => Ok(Some(value)),
            Some(&Value::Unsigned(value)) => Ok(Some(value as f64)),
            Some(&Value::Signed(value)) => Ok(Some(value as f64)),
            Some(other) => Err(self.error(key, Problem::wrong_type("a number", other.kind()))),
        }
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.error(key, Problem::wrong_type("a bool", other.kind()))),
        }
    }

    /// A string, which must be UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(bytes)) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.error(key, Problem::NotUtf8)),
            },
            Some(other) => Err(self.error(key, Problem::wrong_type("a string", other.kind()))),
        }
    }

    /// An array of strings, of any bytes.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&[u8]>>, GgufError> {
        self.array_as(key, "an array of strings", Array::strings)
    }

    /// An array of integers.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.array_as(key, "an array of integers", Array::ints)
    }

    /// An array of numbers.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, GgufError> {
        self.array_as(key, "an array of numbers", Array::floats)
    }

    /// The error for a required key that is absent.
    pub fn missing(&self, key: &str) -> GgufError {
        self.error(key, Problem::Missing)
    }

    /// An error about `key`.
    pub fn error(&self, key: &str, problem: Problem) -> GgufError {
        GgufError::field(&self.path, key, problem)
    }

    fn array_as<'a, T>(
        &'a self,
        key: &str,
        want: &'static str,
        convert: impl Fn(&'a Array) -> Option<Vec<T>>,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let found = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => match convert(array) {
                Some(elements) => return Ok(Some(elements)),
                None => format!("array of {}", array.elem().name()),
            },
            Some(other) => other.kind().to_owned(),
        };
        Err(self.error(key, Problem::WrongType { want, found }))
    }
}
