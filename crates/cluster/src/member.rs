//! What the keys of a cluster mean: who came, who left.
//!
//! Above [`View`]: the same differences, read as members. A registration whose incarnation changes is one process
//! leaving and another coming, not a change of a process. A value that cannot be read, or that names another
//! than its key does, is reported once and treated as absent: one bad writer must not hide the rest of the cluster.

use std::sync::Arc;

use longreach_types::{Incarnation, WorkerId};

use crate::{
    coordinator::Entry,
    keys::{GroupId, Key, KeySpace},
    record::{DecodeRegistration, EpochRecord, PrefillRegistration, ReadyRecord, Record, RecordError},
    view::{Delta, View},
    watcher::WatchEvent,
};

/// One change of the membership. Those that come from one watch event begin with all departures.
#[derive(Clone, Debug)]
pub enum MemberEvent {
    /// A prefill worker is gone.
    PrefillLeft {
        /// Its name.
        id: WorkerId,
        /// The life that ended.
        incarnation: Incarnation,
    },
    /// A rank is gone.
    RankLeft {
        /// Its group.
        group: GroupId,
        /// What it was.
        rank: DecodeRegistration,
    },
    /// A group no longer serves.
    GroupUnready {
        /// The group.
        group: GroupId,
        /// What it was.
        ready: ReadyRecord,
    },
    /// A prefill worker is there.
    PrefillJoined(PrefillRegistration),
    /// A rank is there.
    RankJoined {
        /// Its group.
        group: GroupId,
        /// What it is.
        rank: DecodeRegistration,
    },
    /// A group has a new life.
    EpochRaised {
        /// The group.
        group: GroupId,
        /// Its life.
        record: EpochRecord,
    },
    /// A group serves.
    GroupReady {
        /// The group.
        group: GroupId,
        /// Where.
        ready: ReadyRecord,
    },
    /// A key or value of the cluster that this build cannot read, or a value under somebody else's key. It is treated as
    /// absent.
    Unreadable {
        /// The key.
        key: String,
        /// Why; none if it is the key that is unknown.
        error: Option<Arc<RecordError>>,
    },
    /// Nothing is known to have changed, but from now on changes may be missed, until [`MemberEvent::Current`].
    Interrupted,
    /// The membership is that of a fresh snapshot.
    Current,
}

/// The members of a cluster, or of a part of it.
#[derive(Clone, Debug)]
pub struct Membership {
    keys: KeySpace,
    view: View,
}

/// A value that was understood.
enum Member {
    Prefill(PrefillRegistration),
    Rank(GroupId, DecodeRegistration),
    Epoch(GroupId, EpochRecord),
    Ready(GroupId, ReadyRecord),
}

impl Membership {
    /// Nobody yet.
    pub fn new(keys: KeySpace) -> Self {
        Self { keys, view: View::default() }
    }

    /// What the store holds, as far as known.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Takes what a watcher brought.
    pub fn apply(&mut self, event: WatchEvent) -> Vec<MemberEvent> {
        match event {
            WatchEvent::Interrupted => vec![MemberEvent::Interrupted],
            WatchEvent::Changes(batch) => {
                let deltas = self.view.apply_batch(batch);
                self.read_all(deltas)
            }
            WatchEvent::Snapshot(snapshot) => {
                let deltas = self.view.apply_snapshot(snapshot);
                let mut events = self.read_all(deltas);
                events.push(MemberEvent::Current);
                events
            }
        }
    }

    fn read_all(&self, deltas: Vec<Delta>) -> Vec<MemberEvent> {
        let (mut left, mut joined) = (Vec::new(), Vec::new());
        for delta in deltas {
            let (old, new) = match delta {
                Delta::Removed(old) => (Some(old), None),
                Delta::Changed { old, new } => (Some(old), Some(new)),
                Delta::Added(new) => (None, Some(new)),
            };
            // What could not be read was never reported as there.
            left.extend(old.and_then(|old| self.read(&old).ok()).and_then(Member::left));
            joined.extend(new.map(|new| match self.read(&new) {
                Ok(member) => member.joined(),
                Err(error) => MemberEvent::Unreadable { key: new.key, error: error.map(Arc::new) },
            }));
        }
        left.append(&mut joined);
        left
    }

    /// The member that an entry describes; otherwise why not, or none where it is the key that is unknown.
    fn read(&self, entry: &Entry) -> Result<Member, Option<RecordError>> {
        let value = &entry.value;
        Ok(match self.keys.parse(&entry.key).ok_or(None)? {
            Key::Prefill(id) => {
                let registration = PrefillRegistration::decode(value)?;
                registration.check_place(&id)?;
                Member::Prefill(registration)
            }
            Key::Rank { group, rank } => {
                let registration = DecodeRegistration::decode(value)?;
                registration.check_place(&group, rank)?;
                Member::Rank(group, registration)
            }
            Key::Epoch(group) => {
                let record = EpochRecord::decode(value)?;
                record.check_place(&group)?;
                Member::Epoch(group, record)
            }
            // Names nobody.
            Key::Ready(group) => Member::Ready(group, ReadyRecord::decode(value)?),
        })
    }
}

impl Member {
    fn left(self) -> Option<MemberEvent> {
        match self {
            Self::Prefill(PrefillRegistration { id, incarnation, .. }) => {
                Some(MemberEvent::PrefillLeft { id, incarnation })
            }
            Self::Rank(group, rank) => Some(MemberEvent::RankLeft { group, rank }),
            Self::Ready(group, ready) => Some(MemberEvent::GroupUnready { group, ready }),
            // A life ends by the next one, or by its ranks leaving.
            Self::Epoch(..) => None,
        }
    }

    fn joined(self) -> MemberEvent {
        match self {
            Self::Prefill(registration) => MemberEvent::PrefillJoined(registration),
            Self::Rank(group, rank) => MemberEvent::RankJoined { group, rank },
            Self::Epoch(group, record) => MemberEvent::EpochRaised { group, record },
            Self::Ready(group, ready) => MemberEvent::GroupReady { group, ready },
        }
    }
}
