//! The lives of a decode group: rank 0 raises the number, and says when the group serves.
//!
//! The number is kept without a lease, so it never goes back; it is raised by compare-and-swap, so of two processes
//! that both believe to be rank 0 one fails and can see who won.

use longreach_types::Epoch;
use thiserror::Error;

use crate::{
    coordinator::{Coordinator, CoordinatorError, Expect, LeaseId, Revision, Swap},
    keys::{GroupId, Key, KeyError, KeySpace},
    record::{EpochRecord, ReadyRecord, Record, RecordError},
};

/// Why an epoch was not read, raised, or declared ready.
#[derive(Debug, Error)]
pub enum EpochError {
    /// The store refused: away, or another process was first.
    #[error(transparent)]
    Coordinator(#[from] CoordinatorError),
    /// The group's name cannot be part of a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The stored record cannot be read. Raising the epoch over it could repeat a number, so it is left alone.
    #[error("the stored epoch of group {group} cannot be read")]
    Record {
        /// The group.
        group: GroupId,
        /// Why.
        #[source]
        source: RecordError,
    },
    /// The stored number is the last one. Nobody counts that far: somebody else wrote it.
    #[error("the stored epoch of group {group} has no next number: delete its key")]
    Exhausted {
        /// The group.
        group: GroupId,
    },
}

/// The group's latest life, and the revision to expect when raising it.
pub async fn read_epoch(
    coordinator: &dyn Coordinator,
    keys: &KeySpace,
    group: &GroupId,
) -> Result<Option<(EpochRecord, Revision)>, EpochError> {
    let key = keys.encode(&Key::Epoch(group.clone()))?;
    let snapshot = coordinator.snapshot(&keys.group(group)?).await?;
    let Some(entry) = snapshot.entries.into_iter().find(|entry| entry.key == key) else { return Ok(None) };
    let record = EpochRecord::decode(&entry.value)
        .map_err(|source| EpochError::Record { group: group.clone(), source })?;
    Ok(Some((record, entry.revision)))
}

/// Begins the group's next life: the record that `make` gives for its number. Another process that was faster is a
/// [`CoordinatorError::Conflict`].
///
/// The number is above the stored one and above `floor`, the highest that this process has seen: a store that has lost
/// its data would otherwise count from 1 again, and messages of an earlier life would be taken for this one's. What a
/// process cannot know after its own restart, the record's random nonce tells apart.
pub async fn raise_epoch(
    coordinator: &dyn Coordinator,
    keys: &KeySpace,
    (group, floor): (&GroupId, Epoch),
    make: impl FnOnce(Epoch) -> EpochRecord + Send,
) -> Result<EpochRecord, EpochError> {
    let (last, expect) = match read_epoch(coordinator, keys, group).await? {
        Some((last, revision)) => (last.epoch, Expect::At(revision)),
        None => (Epoch(0), Expect::Absent),
    };
    let next = last.max(floor).0.checked_add(1).map(Epoch);
    let next = next.ok_or_else(|| EpochError::Exhausted { group: group.clone() })?;
    let record = EpochRecord { epoch: next, ..make(next) };
    let key = keys.encode(&Key::Epoch(group.clone()))?;
    coordinator.swap(Swap { key, expect, value: Some(record.encode()), lease: None }).await?;
    Ok(record)
}

/// Says that the group serves, under the leader's lease. The key of an earlier life is replaced.
pub async fn publish_ready(
    coordinator: &dyn Coordinator,
    keys: &KeySpace,
    (group, ready): (&GroupId, &ReadyRecord),
    lease: LeaseId,
) -> Result<Revision, EpochError> {
    let key = keys.encode(&Key::Ready(group.clone()))?;
    let snapshot = coordinator.snapshot(&keys.group(group)?).await?;
    let current = snapshot.entries.into_iter().find(|entry| entry.key == key);
    let expect = current.map_or(Expect::Absent, |entry| Expect::At(entry.revision));
    Ok(coordinator.swap(Swap { key, expect, value: Some(ready.encode()), lease: Some(lease) }).await?)
}

/// Takes back that the group serves, unless it does so in another life already.
pub async fn withdraw_ready(
    coordinator: &dyn Coordinator,
    keys: &KeySpace,
    (group, epoch): (&GroupId, Epoch),
) -> Result<(), EpochError> {
    let key = keys.encode(&Key::Ready(group.clone()))?;
    let snapshot = coordinator.snapshot(&keys.group(group)?).await?;
    let Some(entry) = snapshot.entries.into_iter().find(|entry| entry.key == key) else { return Ok(()) };
    if ReadyRecord::decode(&entry.value).is_ok_and(|ready| ready.epoch != epoch) {
        return Ok(());
    }
    coordinator.swap(Swap { key, expect: Expect::At(entry.revision), value: None, lease: None }).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use longreach_types::GroupSecret;

    use super::*;
    use crate::memory::MemoryCoordinator;

    fn secret(epoch: Epoch) -> GroupSecret {
        GroupSecret::new([epoch.0 as u8; 32])
    }

    fn record(epoch: Epoch) -> EpochRecord {
        EpochRecord { epoch, secret: secret(epoch), members: Vec::new() }
    }

    #[tokio::test]
    async fn epochs_only_go_up_and_one_of_two_leaders_wins() {
        let store = MemoryCoordinator::default();
        let (keys, group) = (KeySpace::new("c").unwrap(), GroupId("g".into()));
        for want in 1..4 {
            let raised = raise_epoch(&store, &keys, (&group, Epoch(0)), record).await.unwrap();
            assert_eq!((raised.epoch, raised.secret), (Epoch(want), secret(Epoch(want))));
        }
        // Both have read epoch 3 when the second writes.
        let (_, seen) = read_epoch(&store, &keys, &group).await.unwrap().unwrap();
        raise_epoch(&store, &keys, (&group, Epoch(0)), record).await.unwrap();
        let late = Swap {
            key: keys.encode(&Key::Epoch(group.clone())).unwrap(),
            expect: Expect::At(seen),
            value: Some(record(Epoch(4)).encode()),
            lease: None,
        };
        let conflict = store.swap(late).await.unwrap_err();
        let CoordinatorError::Conflict { current: Some(winner), .. } = conflict else { panic!("{conflict}") };
        assert_eq!(EpochRecord::decode(&winner.value).unwrap(), record(Epoch(4)));
    }

    #[tokio::test]
    async fn a_store_that_lost_its_data_repeats_no_epoch_of_a_process_that_lives() {
        let (keys, group) = (KeySpace::new("c").unwrap(), GroupId("g".into()));
        let mut seen = Epoch(0);
        for want in [1, 2, 3] {
            let wiped = MemoryCoordinator::default();
            seen = raise_epoch(&wiped, &keys, (&group, seen), record).await.unwrap().epoch;
            assert_eq!(seen, Epoch(want));
        }
        // One that has seen less does not go back either.
        let store = MemoryCoordinator::default();
        raise_epoch(&store, &keys, (&group, seen), record).await.unwrap();
        let next = raise_epoch(&store, &keys, (&group, Epoch(1)), record).await.unwrap();
        assert_eq!(next.epoch, Epoch(5));
    }

    #[tokio::test]
    async fn an_unreadable_epoch_is_not_overwritten() {
        let store = MemoryCoordinator::default();
        let (keys, group) = (KeySpace::new("c").unwrap(), GroupId("g".into()));
        let key = keys.encode(&Key::Epoch(group.clone())).unwrap();
        store
            .swap(Swap { key, expect: Expect::Absent, value: Some(b"{}".to_vec()), lease: None })
            .await
            .unwrap();
        let err = raise_epoch(&store, &keys, (&group, Epoch(0)), record).await.unwrap_err();
        assert!(matches!(err, EpochError::Record { .. }), "{err}");
        // Nor is one that nothing can follow.
        let last = Epoch(u64::MAX - 1);
        let other = GroupId("other".into());
        raise_epoch(&store, &keys, (&other, last), record).await.unwrap();
        let err = raise_epoch(&store, &keys, (&other, last), record).await.unwrap_err();
        assert!(matches!(err, EpochError::Exhausted { .. }), "{err}");
    }

    #[tokio::test(start_paused = true)]
    async fn ready_lives_as_long_as_the_leaders_lease_and_replaces_an_earlier_life() {
        let store = MemoryCoordinator::default();
        let (keys, group) = (KeySpace::new("c").unwrap(), GroupId("g".into()));
        let ready = |epoch| ReadyRecord {
            epoch: Epoch(epoch),
            endpoint: "http://h:1".into(),
            n_ranks: 2,
            dcp_size: 2,
            layout_hash: String::new(),
            max_seq_len: 100,
        };
        let ttl = Duration::from_secs(30);
        for epoch in 1..3 {
            let lease = store.grant_lease(ttl).await.unwrap().id;
            publish_ready(&store, &keys, (&group, &ready(epoch)), lease).await.unwrap();
            let held = store.snapshot(keys.all()).await.unwrap().entries;
            assert_eq!(held.len(), 1);
            assert_eq!(ReadyRecord::decode(&held[0].value).unwrap(), ready(epoch));
        }
        // A life that ended late does not take back what the next one said.
        withdraw_ready(&store, &keys, (&group, Epoch(1))).await.unwrap();
        assert_eq!(store.snapshot(keys.all()).await.unwrap().entries.len(), 1);
        withdraw_ready(&store, &keys, (&group, Epoch(2))).await.unwrap();
        assert_eq!(store.snapshot(keys.all()).await.unwrap().entries, []);
        let lease = store.grant_lease(ttl).await.unwrap().id;
        publish_ready(&store, &keys, (&group, &ready(3)), lease).await.unwrap();
        tokio::time::advance(ttl).await;
        assert_eq!(store.snapshot(keys.all()).await.unwrap().entries, []);
    }
}
