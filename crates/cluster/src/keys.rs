//! The keys of a cluster, built and parsed in one place.
//!
//! ```text
//! /longreach/v1/{cluster}/prefill/{id}
//! /longreach/v1/{cluster}/decode/{group}/epoch
//! /longreach/v1/{cluster}/decode/{group}/rank/{r}
//! /longreach/v1/{cluster}/decode/{group}/ready
//! ```
//! Names hold no `/`, so a name cannot reach into another's subtree; a [`Prefix`] ends at one, so cluster `a` does
//! not see the keys of cluster `ab`.

use std::{fmt, str::FromStr};

use longreach_types::WorkerId;
use thiserror::Error;

const ROOT: &str = "/longreach/v1";
const MAX_NAME_LEN: usize = 128;

/// A decode group's stable name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub String);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a key names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A prefill worker's registration.
    Prefill(WorkerId),
    /// A group's life, raised by its rank 0.
    Epoch(GroupId),
    /// The registration of one rank of a group.
    Rank {
        /// The group.
        group: GroupId,
        /// The rank.
        rank: usize,
    },
    /// Says that the group serves.
    Ready(GroupId),
}

/// A name that cannot be part of a key.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{name:?} cannot be a name: use 1 to {MAX_NAME_LEN} of the characters A-Z a-z 0-9 . _ -")]
pub struct KeyError {
    /// The name.
    pub name: String,
}

/// The start of the keys of a subtree. It ends at a `/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix(String);

impl Prefix {
    /// The text, `/` included.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The subtree that `key` is directly in.
    pub(crate) fn parent_of(key: &str) -> Self {
        Self(key[..key.rfind('/').map_or(0, |slash| slash + 1)].to_owned())
    }

    /// Whether `key` is in the subtree.
    pub fn contains(&self, key: &str) -> bool {
        key.starts_with(&self.0)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The keys of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySpace {
    all: Prefix,
}

impl KeySpace {
    /// The keys of the cluster named `cluster`.
    pub fn new(cluster: &str) -> Result<Self, KeyError> {
        Ok(Self { all: Prefix(format!("{ROOT}/{}/", checked(cluster)?)) })
    }

    /// Every key of the cluster.
    pub fn all(&self) -> &Prefix {
        &self.all
    }

    /// The prefill workers.
    pub fn prefills(&self) -> Prefix {
        Prefix(format!("{}prefill/", self.all))
    }

    /// All keys of one decode group.
    pub fn group(&self, group: &GroupId) -> Result<Prefix, KeyError> {
        Ok(Prefix(format!("{}decode/{}/", self.all, checked(&group.0)?)))
    }

    /// The text of `key`.
    pub fn encode(&self, key: &Key) -> Result<String, KeyError> {
        Ok(match key {
            Key::Prefill(id) => format!("{}{}", self.prefills(), checked(&id.0)?),
            Key::Epoch(group) => format!("{}epoch", self.group(group)?),
            Key::Rank { group, rank } => format!("{}rank/{rank}", self.group(group)?),
            Key::Ready(group) => format!("{}ready", self.group(group)?),
        })
    }

    /// What `text` names, if it is a key of this cluster in the one form that [`KeySpace::encode`] gives.
    pub fn parse(&self, text: &str) -> Option<Key> {
        let mut parts = text.strip_prefix(self.all.as_str())?.split('/');
        let kind = parts.next()?;
        let name = checked(parts.next()?).ok()?.to_owned();
        let rest: Vec<&str> = parts.collect();
        match (kind, rest.as_slice()) {
            ("prefill", []) => Some(Key::Prefill(WorkerId(name))),
            ("decode", ["epoch"]) => Some(Key::Epoch(GroupId(name))),
            ("decode", ["ready"]) => Some(Key::Ready(GroupId(name))),
            ("decode", ["rank", rank]) => {
                let parsed = usize::from_str(rank).ok()?;
                // "+1" and "01" parse too, but are not what we write.
                (parsed.to_string() == *rank).then_some(Key::Rank { group: GroupId(name), rank: parsed })
            }
            _ => None,
        }
    }
}

fn checked(name: &str) -> Result<&str, KeyError> {
    let fits = (1..=MAX_NAME_LEN).contains(&name.len());
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fits && plain { Ok(name) } else { Err(KeyError { name: name.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = Key> {
        let name = "[A-Za-z0-9._-]{1,12}";
        prop_oneof![
            name.prop_map(|id| Key::Prefill(WorkerId(id))),
            name.prop_map(|group| Key::Epoch(GroupId(group))),
            name.prop_map(|group| Key::Ready(GroupId(group))),
            (name, any::<usize>()).prop_map(|(group, rank)| Key::Rank { group: GroupId(group), rank }),
        ]
    }

    proptest! {
        #[test]
        fn keys_read_back_as_what_they_name(key in key()) {
            let keys = KeySpace::new("prod").unwrap();
            let text = keys.encode(&key).unwrap();
            prop_assert!(keys.all().contains(&text));
            prop_assert_eq!(keys.parse(&text), Some(key));
        }

        #[test]
        fn a_text_that_reads_as_a_key_is_the_text_of_that_key(
            tail in "(prefill|decode|x)(/[a-z0-9+./]{0,3}){0,2}(/(epoch|ready|rank|rank/[0-9+]{1,3}))?",
        ) {
            let keys = KeySpace::new("prod").unwrap();
            let text = format!("{}{tail}", keys.all());
            if let Some(key) = keys.parse(&text) {
                prop_assert_eq!(keys.encode(&key).unwrap(), text);
            }
        }
    }

    #[test]
    fn the_layout_of_keys_is_the_published_one() {
        let keys = KeySpace::new("prod").unwrap();
        let group = GroupId("g0".into());
        let text = |key| keys.encode(&key).unwrap();
        assert_eq!(text(Key::Prefill(WorkerId("p1".into()))), "/longreach/v1/prod/prefill/p1");
        assert_eq!(text(Key::Epoch(group.clone())), "/longreach/v1/prod/decode/g0/epoch");
        assert_eq!(text(Key::Rank { group: group.clone(), rank: 3 }), "/longreach/v1/prod/decode/g0/rank/3");
        assert_eq!(text(Key::Ready(group)), "/longreach/v1/prod/decode/g0/ready");
    }

    #[test]
    fn a_name_cannot_reach_into_another_subtree() {
        let keys = KeySpace::new("a").unwrap();
        for name in ["", "x/y", "..\u{e9}", " ", &"n".repeat(129)] {
            let refused = Err(KeyError { name: name.to_owned() });
            assert_eq!(keys.encode(&Key::Prefill(WorkerId(name.to_owned()))), refused);
        }
        let other = KeySpace::new("ab").unwrap().encode(&Key::Prefill(WorkerId("p".into()))).unwrap();
        assert!(!keys.all().contains(&other));
        assert_eq!(keys.parse(&other), None);
    }
}
