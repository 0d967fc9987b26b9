//! A process of a decode group without its services, for the simulation of the whole cluster: its view of the cluster
//! and its part in the lives of its group, over any [`Ranks`] and any store.
//!
//! It adds no behaviour. What it leaves out is loading, listening and health, which have tests of their own.

use std::{collections::BTreeMap, time::Duration};

use longreach_cluster::{Backoff, DecodeRegistration, GroupId, RegistrationState};
use longreach_engine::EngineHandle;
pub use longreach_engine::serve::Drained;
use longreach_types::{Epoch, GroupShape};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    Cluster,
    formation::Formation,
    ranks::{Ranks, Stuck},
    view::{self, Fit, GroupView},
};

/// One process of a group.
pub struct SimProcess<R> {
    /// The cluster it belongs to.
    pub cluster: Cluster,
    /// Its group.
    pub group: GroupId,
    /// The shape of the group.
    pub shape: GroupShape,
    /// The layout of the KV that it holds, as registered.
    pub layout_hash: String,
    /// Its ranks.
    pub ranks: R,
    /// The registration of each of them.
    pub registrations: BTreeMap<usize, watch::Receiver<RegistrationState>>,
    /// How long a drain waits for sequences in flight.
    pub drain_grace: Duration,
    /// How long its ranks may go on computing for a life that the others have left.
    pub stuck_timeout: Duration,
}

impl<R: Ranks> SimProcess<R> {
    /// Lives until `shutdown`, then drains. `life` tells of the engine of the current life, on the process that leads.
    /// `leave` takes the process out of the membership.
    pub async fn live(
        self,
        life: watch::Sender<Option<EngineHandle>>,
        shutdown: &CancellationToken,
        leave: &CancellationToken,
    ) -> Result<Drained, Stuck> {
        let Self { cluster, group, shape, layout_hash, ranks, .. } = self;
        let fit = Fit { shape, layout_hash };
        let (view_in, view) = watch::channel(GroupView::default());
        let first_rank = self.registrations.keys().next().copied().unwrap_or(0);
        let backoff = Backoff::of(&DecodeRegistration::id_of(&group, first_rank).0);
        let Cluster { coordinator, keys } = cluster.clone();
        let following =
            view::follow(coordinator, keys, (group.clone(), fit.clone()), (view_in, backoff.clone()));
        let formation = Formation {
            cluster,
            group,
            fit,
            ranks,
            drain_grace: self.drain_grace,
            stuck_timeout: self.stuck_timeout,
            view,
            registrations: self.registrations,
            life,
            is_serving: watch::Sender::new(false),
            backoff,
            seen: Epoch(0),
        };
        // Both arms only wait; biased, so that a run is repeated by its seed.
        tokio::select! {
            biased;
            drained = formation.run(shutdown, leave) => drained,
            () = following => std::future::pending().await,
        }
    }
}
