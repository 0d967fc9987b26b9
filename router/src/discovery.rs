//! Where the router learns of workers: from the cluster's membership, or from a fixed list.
//!
//! The membership is followed for as long as the router runs. When its store is away, the last view stays: traffic
//! goes on, and workers that die meanwhile are noticed by the calls that fail.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longreach_cluster::{Backoff, Coordinator, GroupId, KeySpace, MemberEvent, Membership, Watcher};
use longreach_types::WorkerId;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::{config::ConfigError, dispatch::Dispatcher, workers::Address};

/// Pauses between attempts to reach the store: soon at first, then no more often than it can bear.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Where workers are found.
#[derive(Clone)]
pub enum WorkerSource {
    /// These, and no others.
    Fixed {
        /// Leaders of decode groups, `http://host:port`.
        decodes: Vec<String>,
        /// Prefill workers, `http://host:port`.
        prefills: Vec<String>,
    },
    /// Those that are registered in the cluster.
    Cluster {
        /// The store.
        coordinator: Arc<dyn Coordinator>,
        /// The cluster's keys in it.
        keys: KeySpace,
    },
}

impl WorkerSource {
    /// Whether prompts can be expected that need a prefill worker: in a cluster, unless they are `optional`; with a
    /// fixed list, if one is on it.
    pub(crate) fn needs_prefill(&self, optional: bool) -> bool {
        match self {
            Self::Fixed { prefills, .. } => !prefills.is_empty(),
            Self::Cluster { .. } => !optional,
        }
    }

    /// Checks the addresses of a fixed list; a cluster's are checked as they come.
    pub(crate) fn validate(&self, scheme: &str) -> Result<(), ConfigError> {
        let Self::Fixed { decodes, prefills } = self else { return Ok(()) };
        let all =
            decodes.iter().map(|uri| ("decode", uri)).chain(prefills.iter().map(|uri| ("prefill", uri)));
        for (field, uri) in all {
            // Without a scheme it would be taken for a path, and fail only when it is called.
            let has_scheme = uri.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://"));
            if !has_scheme || Endpoint::from_shared(uri.clone()).is_err() {
                let allowed = format!("{scheme}://host:port");
                return Err(ConfigError { field, value: format!("{uri:?}"), allowed });
            }
        }
        Ok(())
    }
}

/// The workers of a cluster, as its membership names them.
#[derive(Default)]
pub(crate) struct Roster {
    groups: BTreeMap<GroupId, Address>,
    prefills: BTreeMap<WorkerId, Address>,
}

/// Keeps the workers of `dispatcher` those of `source` until `cancel`.
pub(crate) async fn follow(source: WorkerSource, dispatcher: Arc<Dispatcher>, cancel: CancellationToken) {
    let (decodes, prefills) = (&dispatcher.decodes, &dispatcher.prefills);
    let (coordinator, keys) = match source {
        WorkerSource::Fixed { decodes: groups, prefills: workers } => {
            decodes.set_members(&fixed(groups));
            prefills.set_members(&fixed(workers));
            return;
        }
        WorkerSource::Cluster { coordinator, keys } => (coordinator, keys),
    };
    let backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE, dispatcher.random.next_u64());
    let mut watcher = Watcher::new(coordinator, keys.all().clone(), backoff);
    let mut membership = Membership::new(keys);
    let mut roster = Roster::default();
    while let Some(event) = cancel.run_until_cancelled(watcher.next()).await {
        for change in membership.apply(event) {
            roster.apply(change);
        }
        decodes.set_members(&roster.groups.values().cloned().collect::<Vec<_>>());
        prefills.set_members(&roster.prefills.values().cloned().collect::<Vec<_>>());
    }
}

/// A fixed worker is called by its address.
fn fixed(endpoints: Vec<String>) -> Vec<Address> {
    let address =
        |endpoint: String| Address { name: WorkerId(endpoint.clone()), life: 0, endpoint, layout: None };
    endpoints.into_iter().map(address).collect()
}

/// A layout that a registration says; the empty one says none.
fn in_words(layout: String) -> Option<String> {
    Some(layout).filter(|layout| !layout.is_empty())
}

impl Roster {
    /// Where the workers are.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = &String> {
        self.groups.values().chain(self.prefills.values()).map(|address| &address.endpoint)
    }

    /// Takes note of `change`.
    pub(crate) fn apply(&mut self, change: MemberEvent) {
        match change {
            MemberEvent::PrefillJoined(worker) => {
                let address = Address {
                    name: worker.id.clone(),
                    life: worker.incarnation.0,
                    endpoint: worker.endpoint,
                    layout: in_words(worker.layout_hash),
                };
                self.prefills.insert(worker.id, address);
            }
            MemberEvent::PrefillLeft { id, incarnation } => {
                if self.prefills.get(&id).is_some_and(|address| address.life == incarnation.0) {
                    self.prefills.remove(&id);
                }
            }
            MemberEvent::GroupReady { group, ready } => {
                let name = WorkerId(group.0.clone());
                let address = Address {
                    name,
                    life: ready.epoch.0,
                    endpoint: ready.endpoint,
                    layout: in_words(ready.layout_hash),
                };
                self.groups.insert(group, address);
            }
            MemberEvent::GroupUnready { group, ready } => {
                if self.groups.get(&group).is_some_and(|address| address.life == ready.epoch.0) {
                    self.groups.remove(&group);
                }
            }
            MemberEvent::Unreadable { key, error } => {
                let error = error.as_ref().map(tracing::field::display);
                tracing::warn!(key, error, "membership record is not readable; taken for absent");
            }
            MemberEvent::Interrupted => {
                tracing::info!("membership may be out of date; serving from the last view")
            }
            // Ranks are the business of their group; routers see a group when it is ready.
            MemberEvent::RankJoined { .. }
            | MemberEvent::RankLeft { .. }
            | MemberEvent::EpochRaised { .. }
            | MemberEvent::Current => {}
        }
    }
}
