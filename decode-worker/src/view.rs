//! What a member of a decode group knows of the cluster: who could form the group, its latest life, and which other
//! groups could take its sequences over.

use std::{collections::BTreeMap, sync::Arc};

use longreach_cluster::{
    Backoff, Coordinator, DecodeRegistration, EpochRecord, GroupId, KeySpace, MemberEvent, Membership,
    ReadyRecord, Watcher,
};
use longreach_service::sentence;
use longreach_types::{Epoch, GroupShape, Incarnation};
use tokio::sync::watch;
use tracing::{info, warn};

/// The cluster as one group sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupView {
    /// Registered ranks of this group.
    pub(crate) ranks: BTreeMap<usize, DecodeRegistration>,
    /// This group's latest life.
    pub(crate) epoch: Option<EpochRecord>,
    /// Groups that serve, this one included.
    pub(crate) ready: BTreeMap<GroupId, ReadyRecord>,
    /// Whether this is how things are, rather than how they were when the store was last heard of.
    pub(crate) is_current: bool,
}

/// What every rank of a group must be.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    pub(crate) shape: GroupShape,
    pub(crate) layout_hash: String,
}

impl GroupView {
    /// The latest life that is known.
    pub(crate) fn last_epoch(&self) -> Epoch {
        self.epoch.as_ref().map_or(Epoch(0), |record| record.epoch)
    }

    /// The members of the group's next life in rank order, if all are there and fit together. `own` says which lives
    /// are those of this process; a key that an earlier life has left behind is nobody.
    pub(crate) fn complete(
        &self,
        fit: &Fit,
        own: &BTreeMap<usize, Incarnation>,
    ) -> Option<Vec<DecodeRegistration>> {
        if !self.is_current {
            return None;
        }
        (0..fit.shape.n_ranks()).map(|rank| self.member(rank, fit, own).cloned()).collect()
    }

    /// The ranks that the group's next life lacks: not registered, or not as they must be.
    pub(crate) fn missing(&self, fit: &Fit, own: &BTreeMap<usize, Incarnation>) -> Vec<usize> {
        (0..fit.shape.n_ranks()).filter(|&rank| self.member(rank, fit, own).is_none()).collect()
    }

    fn member(
        &self,
        rank: usize,
        fit: &Fit,
        own: &BTreeMap<usize, Incarnation>,
    ) -> Option<&DecodeRegistration> {
        let member = self.ranks.get(&rank)?;
        let is_ours = own.get(&rank).is_none_or(|incarnation| *incarnation == member.incarnation);
        (is_ours && fit.misfit(member).is_none()).then_some(member)
    }

    /// Whether the life of `record` cannot come about any more: there is a newer one, or one of its members has left or
    /// begun a new life.
    pub(crate) fn is_moot(&self, record: &EpochRecord) -> bool {
        let is_there = |member: &DecodeRegistration| {
            self.ranks.get(&member.rank).is_some_and(|known| known.incarnation == member.incarnation)
        };
        self.last_epoch() > record.epoch || self.is_current && !record.members.iter().all(is_there)
    }

    /// The leaders of other groups that could go on with any sequence of this group, of at most `max_seq_len` tokens.
    pub(crate) fn heirs(&self, group: &GroupId, fit: &Fit, max_seq_len: usize) -> Vec<String> {
        let fits =
            |ready: &ReadyRecord| ready.layout_hash == fit.layout_hash && ready.max_seq_len >= max_seq_len;
        let others = self.ready.iter().filter(|&(name, ready)| name != group && fits(ready));
        others.map(|(_, ready)| ready.endpoint.clone()).collect()
    }
}

impl Fit {
    /// How a registered rank differs from this one: what, there, here.
    pub(crate) fn misfit(&self, member: &DecodeRegistration) -> Option<(&'static str, String, String)> {
        let Self { shape, layout_hash } = self;
        if member.layout_hash != *layout_hash {
            return Some(("layout", member.layout_hash.clone(), layout_hash.clone()));
        }
        let (theirs, ours) = ((member.n_ranks, member.dcp_size), (shape.n_ranks(), shape.dcp_size()));
        (theirs != ours).then(|| ("ranks and dcp", format!("{theirs:?}"), format!("{ours:?}")))
    }
}

/// Keeps `view` up to date for ever.
pub(crate) async fn follow(
    coordinator: Arc<dyn Coordinator>,
    keys: KeySpace,
    (group, fit): (GroupId, Fit),
    (view, backoff): (watch::Sender<GroupView>, Backoff),
) {
    let prefix = keys.all().clone();
    let own = keys.group(&group).ok();
    let mut membership = Membership::new(keys);
    let mut watcher = Watcher::new(coordinator, prefix, backoff);
    loop {
        let events = membership.apply(watcher.next().await);
        view.send_modify(|view| {
            for event in events {
                match event {
                    MemberEvent::Unreadable { key, error }
                        if own.as_ref().is_some_and(|own| own.contains(&key)) =>
                    {
                        let error = error.map(|error| sentence(&*error));
                        warn!(key, error, "a record of the group is not readable; taken for absent");
                    }
                    event => apply(view, &group, &fit, event),
                }
            }
        });
    }
}

fn apply(view: &mut GroupView, own: &GroupId, fit: &Fit, event: MemberEvent) {
    match event {
        MemberEvent::RankJoined { group, rank } if group == *own => {
            if let Some((what, theirs, ours)) = fit.misfit(&rank) {
                warn!(
                    rank = rank.rank,
                    endpoint = rank.endpoint,
                    what,
                    theirs,
                    ours,
                    "a rank does not fit and is refused: start it with this group's model and settings"
                );
            }
            view.ranks.insert(rank.rank, rank);
        }
        MemberEvent::RankLeft { group, rank } if group == *own => {
            if view.ranks.get(&rank.rank).is_some_and(|known| known.incarnation == rank.incarnation) {
                view.ranks.remove(&rank.rank);
            }
        }
        MemberEvent::EpochRaised { group, record } if group == *own => view.epoch = Some(record),
        MemberEvent::GroupReady { group, ready } => {
            view.ready.insert(group, ready);
        }
        MemberEvent::GroupUnready { group, ready } => {
            if view.ready.get(&group).is_some_and(|known| known.epoch == ready.epoch) {
                view.ready.remove(&group);
            }
        }
        MemberEvent::Interrupted => {
            info!(group = own.0, "membership may be out of date; the group stays as it is");
            view.is_current = false;
        }
        MemberEvent::Current => view.is_current = true,
        MemberEvent::RankJoined { .. }
        | MemberEvent::RankLeft { .. }
        | MemberEvent::EpochRaised { .. }
        | MemberEvent::PrefillJoined(_)
        | MemberEvent::PrefillLeft { .. }
        | MemberEvent::Unreadable { .. } => {}
    }
}
