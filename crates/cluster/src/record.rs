//! The values of the keys: JSON objects with the version of their form.
//!
//! A reader ignores fields that it does not know, so a field may be added at any time; a change that an old reader
//! would misunderstand takes a new version, which the old reader refuses by name.

use std::time::Duration;

use longreach_types::{Epoch, GroupSecret, Incarnation, WorkerId};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{
    backoff::Backoff,
    keys::{GroupId, Key, KeyError, KeySpace},
    registration::RegistrationSpec,
};

/// The version of all records that this build writes and reads.
const VERSION: u32 = 1;

/// A value that is no record of the expected kind.
#[derive(Debug, Error)]
pub enum RecordError {
    /// Not JSON, or not with the fields of this kind.
    #[error("not a readable record")]
    Form(#[from] serde_json::Error),
    /// Written in a form that this build does not know.
    #[error("record of version {got}, this build knows {VERSION}: upgrade this process")]
    Version {
        /// The version in the record.
        got: u32,
    },
    /// Written under a key that names somebody else: a reader who believed either name would act on the wrong one.
    #[error("the record is of {record}, its key of {key}")]
    Misplaced {
        /// Whom the record names.
        record: String,
        /// Whom the key names.
        key: String,
    },
}

/// A value of one key.
pub trait Record: Serialize + DeserializeOwned {
    /// The bytes to store.
    fn encode(&self) -> Vec<u8> {
        let versioned = Versioned { version: VERSION, record: self };
        serde_json::to_vec(&versioned).expect("records hold strings and numbers, which JSON can always say")
    }

    /// Reads stored bytes.
    fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let Version { version: got } = serde_json::from_slice(bytes)?;
        if got != VERSION {
            return Err(RecordError::Version { got });
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[derive(Serialize)]
struct Versioned<'a, R> {
    version: u32,
    #[serde(flatten)]
    record: &'a R,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A prefill worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillRegistration {
    /// Its stable name, as in its key.
    #[serde(with = "worker_id")]
    pub id: WorkerId,
    /// This life of it.
    #[serde(with = "incarnation")]
    pub incarnation: Incarnation,
    /// Where its services are, `http://host:port`.
    pub endpoint: String,
    /// The layout of the KV that it sends, in words. Compared; readers who know the words can say what differs.
    pub layout_hash: String,
}

/// One rank of a decode group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeRegistration {
    /// Stable name of the process.
    #[serde(with = "worker_id")]
    pub id: WorkerId,
    /// This life of it.
    #[serde(with = "incarnation")]
    pub incarnation: Incarnation,
    /// Its rank, as in its key.
    pub rank: usize,
    /// N, the ranks that it expects.
    pub n_ranks: usize,
    /// D, the ranks that share positions.
    pub dcp_size: usize,
    /// Where its services are, `http://host:port`.
    pub endpoint: String,
    /// Where it listens for its peers, `host:port`.
    pub peer_addr: String,
    /// Model and layout, in words; all ranks of a group have the same.
    pub layout_hash: String,
}

/// One life of a decode group: which lives of which processes form it, and where they find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// Its number.
    #[serde(with = "epoch")]
    pub epoch: Epoch,
    /// What the members prove to know when they connect. Who can read the store knows it too.
    #[serde(with = "secret")]
    pub secret: GroupSecret,
    /// The members, in rank order.
    pub members: Vec<DecodeRegistration>,
}

/// A decode group that serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyRecord {
    /// Its life.
    #[serde(with = "epoch")]
    pub epoch: Epoch,
    /// Where its leader is, `http://host:port`.
    pub endpoint: String,
    /// N.
    pub n_ranks: usize,
    /// D.
    pub dcp_size: usize,
    /// Model and layout, in words.
    pub layout_hash: String,
    /// The longest sequence; 0 where the record does not say.
    #[serde(default)]
    pub max_seq_len: usize,
}

/// What all registrations have in common: whose life it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    /// Stable name of the process.
    #[serde(with = "worker_id")]
    pub(crate) id: WorkerId,
    /// This life of it.
    #[serde(with = "incarnation")]
    pub(crate) incarnation: Incarnation,
}

impl PrefillRegistration {
    /// How the worker stays registered under its name, each life of it as an incarnation of its own.
    pub fn spec(
        self,
        keys: &KeySpace,
        ttl: Duration,
    ) -> Result<RegistrationSpec<impl Fn(Incarnation) -> Vec<u8> + Send + Sync + use<>>, KeyError> {
        let key = keys.encode(&Key::Prefill(self.id.clone()))?;
        let value = move |incarnation| Self { incarnation, ..self.clone() }.encode();
        let backoff = Backoff::of(&key);
        Ok(RegistrationSpec { key, value, ttl, backoff })
    }

    /// Whether it may be under the key of `id`.
    pub(crate) fn check_place(&self, id: &WorkerId) -> Result<(), RecordError> {
        check_name(&self.id.0, &id.0)
    }
}

impl DecodeRegistration {
    /// The name under which a rank of a group registers.
    pub fn id_of(group: &GroupId, rank: usize) -> WorkerId {
        WorkerId(format!("{group}-{rank}"))
    }

    /// How the rank stays registered in `group`, each life of its process as an incarnation of its own.
    pub fn spec(
        self,
        keys: &KeySpace,
        group: &GroupId,
        ttl: Duration,
    ) -> Result<RegistrationSpec<impl Fn(Incarnation) -> Vec<u8> + Send + Sync + use<>>, KeyError> {
        let key = keys.encode(&Key::Rank { group: group.clone(), rank: self.rank })?;
        let value = move |incarnation| Self { incarnation, ..self.clone() }.encode();
        let backoff = Backoff::of(&key);
        Ok(RegistrationSpec { key, value, ttl, backoff })
    }

    /// Whether it may be under the key of `rank` of `group`, or at its place in an epoch of the group.
    pub(crate) fn check_place(&self, group: &GroupId, rank: usize) -> Result<(), RecordError> {
        check_name(&self.id.0, &Self::id_of(group, rank).0)?;
        check_name(&format!("rank {}", self.rank), &format!("rank {rank}"))
    }
}

impl EpochRecord {
    /// Whether it may be under the key of `group`.
    pub(crate) fn check_place(&self, group: &GroupId) -> Result<(), RecordError> {
        self.members.iter().enumerate().try_for_each(|(rank, member)| member.check_place(group, rank))
    }
}

impl Record for Holder {}
impl Record for PrefillRegistration {}
impl Record for DecodeRegistration {}
impl Record for EpochRecord {}
impl Record for ReadyRecord {}

fn check_name(record: &str, key: &str) -> Result<(), RecordError> {
    let misplaced = || RecordError::Misplaced { record: record.to_owned(), key: key.to_owned() };
    if record == key { Ok(()) } else { Err(misplaced()) }
}

/// The types crate has no dependencies, so its newtypes are taken apart and put together here.
macro_rules! as_inner {
    ($module:ident, $type:ident, $inner:ty) => {
        mod $module {
            use longreach_types::$type;
            use serde::{Deserialize, Deserializer, Serialize, Serializer};

            pub(super) fn serialize<S: Serializer>(value: &$type, to: S) -> Result<S::Ok, S::Error> {
                value.0.serialize(to)
            }

            pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<$type, D::Error> {
                <$inner>::deserialize(from).map($type)
            }
        }
    };
}

as_inner!(worker_id, WorkerId, String);
as_inner!(incarnation, Incarnation, u64);
as_inner!(epoch, Epoch, u64);

mod secret {
    use longreach_types::GroupSecret;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &GroupSecret, to: S) -> Result<S::Ok, S::Error> {
        value.to_hex().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<GroupSecret, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill() -> PrefillRegistration {
        PrefillRegistration {
            id: WorkerId("p0".into()),
            incarnation: Incarnation(u64::MAX),
            endpoint: "http://10.0.0.1:7000".into(),
            layout_hash: "00ff".into(),
        }
    }

    #[test]
    fn records_are_plain_json_with_a_version() {
        let text = r#"{"version":1,"id":"p0","incarnation":18446744073709551615,"endpoint":"http://10.0.0.1:7000","layout_hash":"00ff"}"#;
        assert_eq!(String::from_utf8(prefill().encode()).unwrap(), text);
        assert_eq!(PrefillRegistration::decode(text.as_bytes()).unwrap(), prefill());
        let added = text.replace("\"id\"", "\"zone\":\"b\",\"id\"");
        assert_eq!(PrefillRegistration::decode(added.as_bytes()).unwrap(), prefill());
    }

    #[test]
    fn other_versions_and_other_kinds_are_refused() {
        let newer = String::from_utf8(prefill().encode()).unwrap().replace("\"version\":1", "\"version\":2");
        assert!(matches!(
            PrefillRegistration::decode(newer.as_bytes()),
            Err(RecordError::Version { got: 2 })
        ));
        for bytes in [&b""[..], b"{}", b"[1]", b"\xff", &prefill().encode()] {
            assert!(matches!(ReadyRecord::decode(bytes), Err(RecordError::Form(_))));
        }
    }

    #[test]
    fn an_epoch_keeps_its_members() {
        let member = |rank| DecodeRegistration {
            id: WorkerId(format!("d{rank}")),
            incarnation: Incarnation(9),
            rank,
            n_ranks: 2,
            dcp_size: 2,
            endpoint: "http://[::1]:7000".into(),
            peer_addr: "[::1]:7100".into(),
            layout_hash: "ab".into(),
        };
        let record = EpochRecord {
            epoch: Epoch(4),
            secret: GroupSecret::new([5; 32]),
            members: vec![member(0), member(1)],
        };
        assert_eq!(EpochRecord::decode(&record.encode()).unwrap(), record);
    }
}
