//! JSON objects whose keys must be unique.
//!
//! The usual maps keep the last of two equal keys, so that two readers of one file may see two models.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

/// A JSON object with unique keys; errors in a value name its key.
pub(super) struct Unique<T>(pub(super) BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Unique<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueVisitor<T> {
    type Value = Unique<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key()? {
            take_unique(&mut map, key, &mut access)?;
        }
        Ok(Unique(map))
    }
}

/// Reads the value of `key` into `map`, which must not have one.
pub(super) fn take_unique<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    map: &mut BTreeMap<String, T>,
    key: String,
    access: &mut A,
) -> Result<(), A::Error> {
    let value = access.next_value().map_err(|error| A::Error::custom(format!("{key:?}: {error}")))?;
    if map.contains_key(&key) {
        return Err(A::Error::custom(format!("{key:?} appears twice")));
    }
    map.insert(key, value);
    Ok(())
}
