//! The lives of a group, as one of its processes lives them.
//!
//! ```text
//!             all ranks registered              every rank joined,
//!             and fit together                  self-check passed
//!  ┌─────────┐ ─────────────────► ┌─────────┐ ─────────────────► ┌─────────┐
//!  │ waiting │                    │ forming │                    │ serving │
//!  └─────────┘ ◄───────────────── └─────────┘                    └─────────┘
//!       ▲         a rank did not come in time                         │
//!       └─────────────────────────────────────────────────────────────┘
//!         a rank died, stalled, disagreed or drains; a newer epoch was raised
//! ```
//!
//! The store is asked only on the way from waiting to serving. What ends a life is the group's own business: links,
//! bounds and plans. So trouble with the store, or a lost lease, never ends a group that works; it only keeps the next
//! one from forming. Ranks that are in the view and not alive cost one attempt with its bound; the next attempt is a new
//! epoch, and nothing of the last one can reach into it.

use std::{collections::BTreeMap, convert::Infallible, io, time::Duration};

use futures::future::join_all;
use longreach_cluster::{
    Backoff, DecodeRegistration, EpochError, EpochRecord, GroupId, ReadyRecord, RegistrationState,
    publish_ready, raise_epoch, withdraw_ready,
};
use longreach_engine::{
    EngineHandle,
    serve::{Drained, drain},
};
use longreach_service::sentence;
use longreach_types::{Epoch, Incarnation};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    Cluster,
    ranks::{Followed, Led, Ranks, Stuck},
    view::{Fit, GroupView},
};

/// How long another group may take to say that it could go on with this group's sequences.
const HEIR_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a life must last for its end to count as a first failure.
const LIVED: Duration = Duration::from_secs(10);

/// How long the store may take to forget that a group was ready; routers also find out by themselves.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(1);

/// How a group comes together again and again.
#[derive(Clone, Copy, Debug)]
pub struct FormationConfig {
    /// How long the ranks of an epoch may take to find each other. All have their weights loaded by then. Longer bears
    /// slow networks; shorter tries again sooner when a rank is registered but gone.
    pub connect_timeout: Duration,
    /// Time of a registration's lease. Longer survives longer trouble of the store without a change of membership;
    /// shorter forgets a dead process sooner, which stream ends and links notice anyway.
    pub lease_ttl: Duration,
}

impl Default for FormationConfig {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(10), lease_ttl: Duration::from_secs(30) }
    }
}

/// One process's part in its group.
pub(crate) struct Formation<R> {
    pub(crate) cluster: Cluster,
    pub(crate) group: GroupId,
    pub(crate) fit: Fit,
    pub(crate) ranks: R,
    pub(crate) drain_grace: Duration,
    /// How long ranks of this process may go on computing for a life that the others have left.
    pub(crate) stuck_timeout: Duration,
    pub(crate) view: watch::Receiver<GroupView>,
    /// The registration of each hosted rank, by rank.
    pub(crate) registrations: BTreeMap<usize, watch::Receiver<RegistrationState>>,
    /// Where the leader's service finds the engine of the current life.
    pub(crate) life: watch::Sender<Option<EngineHandle>>,
    /// Whether the group lives, for health checks.
    pub(crate) is_serving: watch::Sender<bool>,
    pub(crate) backoff: Backoff,
    /// The latest epoch that this process has tried or seen; the next one is higher, whatever the store says.
    pub(crate) seen: Epoch,
}

/// Why a life ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// This process drains.
    Shutdown,
    /// Another rank's process drains.
    Leaving(usize),
    /// The engine failed.
    Failed(String),
    /// The group has a newer life, without this process as its leader.
    Fenced(Epoch),
    /// Another rank has left, and the engine has not noticed in all the time it may take.
    Stuck,
}

/// Why there is no life.
#[derive(Debug, thiserror::Error)]
enum FormError<E: std::error::Error> {
    #[error(transparent)]
    Epoch(#[from] EpochError),
    #[error("cannot make the group's secret: {0}")]
    Secret(io::Error),
    #[error(transparent)]
    Ranks(E),
}

impl<R: Ranks> Formation<R> {
    /// Lives until `shutdown`, then drains. `leave` takes this process out of the membership.
    pub(crate) async fn run(
        mut self,
        shutdown: &CancellationToken,
        leave: &CancellationToken,
    ) -> Result<Drained, Stuck> {
        if self.ranks.has_leader() {
            self.lead(shutdown, leave).await
        } else {
            self.follow(shutdown, leave).await
        }
    }

    async fn lead(
        &mut self,
        shutdown: &CancellationToken,
        leave: &CancellationToken,
    ) -> Result<Drained, Stuck> {
        loop {
            // Biased, as every choice here, so that a simulated run is repeated by its seed. Both arms only wait.
            let members = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                members = self.complete() => members,
            };
            let begun = match shutdown.run_until_cancelled(self.raise(members)).await {
                None => break,
                Some(Err(error)) => Err(error),
                Some(Ok(record)) => self.begin(&record, shutdown).await.map(|life| (record, life)),
            };
            let (record, life) = match begun {
                Ok(begun) => begun,
                Err(error) => {
                    self.failed(&error, shutdown).await;
                    continue;
                }
            };
            let since = Instant::now();
            let end = self.serve(&record, &life, shutdown).await;
            let drained = self.end_life(&record, life, &end, leave).await?;
            if end == End::Shutdown {
                return Ok(drained);
            }
            self.rest(since, shutdown).await;
        }
        Ok(Drained::Finished)
    }

    /// Waits until every rank is there.
    async fn complete(&mut self) -> Vec<DecodeRegistration> {
        let mut told = None;
        loop {
            let own = self.own_lives();
            let members = self.view.borrow_and_update().complete(&self.fit, &own);
            if let Some(members) = members {
                return members;
            }
            let missing = self.view.borrow().missing(&self.fit, &own);
            if told.as_ref() != Some(&missing) {
                let n_ranks = self.fit.shape.n_ranks();
                info!(group = self.group.0, n_ranks, ?missing, "waiting for the ranks of the group");
                told = Some(missing);
            }
            self.changed().await;
        }
    }

    /// Waits for news of the cluster or of this process's registrations.
    async fn changed(&mut self) {
        let mut states: Vec<_> = self.registrations.values().cloned().collect();
        let registrations = states.iter_mut().map(|state| Box::pin(state.changed()));
        // Both arms only wait; whoever is told looks at everything again.
        tokio::select! {
            biased;
            _gone = self.view.changed() => {}
            _gone = futures::future::select_all(registrations) => {}
        }
    }

    /// The lives under which this process is registered now.
    fn own_lives(&mut self) -> BTreeMap<usize, Incarnation> {
        let life = |state: &mut watch::Receiver<RegistrationState>| match *state.borrow_and_update() {
            RegistrationState::Registered { incarnation, .. }
            | RegistrationState::Unconfirmed { incarnation, .. } => incarnation,
            // No life: nothing that is registered is ours.
            _ => Incarnation(u64::MAX),
        };
        self.registrations.iter_mut().map(|(rank, state)| (*rank, life(state))).collect()
    }

    async fn raise(&mut self, members: Vec<DecodeRegistration>) -> Result<EpochRecord, FormError<R::Error>> {
        let secret = self.ranks.secret().map_err(FormError::Secret)?;
        let make = |epoch: Epoch| EpochRecord { epoch, secret, members };
        let Cluster { coordinator, keys } = &self.cluster;
        let record = raise_epoch(&**coordinator, keys, (&self.group, self.seen), make).await?;
        self.seen = self.seen.max(record.epoch);
        info!(group = self.group.0, epoch = %record.epoch, "epoch raised");
        Ok(record)
    }

    /// Starts the engine of a life: every rank has joined and the self-check has passed when it returns.
    async fn begin(
        &self,
        record: &EpochRecord,
        shutdown: &CancellationToken,
    ) -> Result<R::Led, FormError<R::Error>> {
        let moot = CancellationToken::new();
        self.meet(self.ranks.lead(record, &moot), &moot, (record, shutdown)).await
    }

    /// Waits for ranks that meet, for as long as all of them may still come.
    async fn meet<T>(
        &self,
        meeting: impl Future<Output = Result<T, R::Error>>,
        moot: &CancellationToken,
        (record, shutdown): (&EpochRecord, &CancellationToken),
    ) -> Result<T, FormError<R::Error>> {
        let mut view = self.view.clone();
        tokio::pin!(meeting);
        // Biased: what has been reached counts. The other arms only wait.
        tokio::select! {
            biased;
            met = &mut meeting => return met.map_err(FormError::Ranks),
            () = shutdown.cancelled() => {}
            _moot = view.wait_for(|view| view.is_moot(record)) => {}
        }
        moot.cancel();
        meeting.await.map_err(FormError::Ranks)
    }

    /// Serves one life until something ends it.
    async fn serve(&mut self, record: &EpochRecord, life: &R::Led, shutdown: &CancellationToken) -> End {
        let engine = life.engine();
        self.life.send_replace(Some(engine.clone()));
        let ready = self.ready(record, engine.info().max_seq_len);
        let registration = self.registrations.values().next().cloned();
        let announcing =
            announce(self.cluster.clone(), (self.group.clone(), ready), registration, self.backoff.clone());
        let mut view = self.view.clone();
        // All arms only wait, and the announcement begins again in the next life.
        tokio::select! {
            biased;
            () = shutdown.cancelled() => End::Shutdown,
            _stopped = engine.wait_for(|info| info.failure.is_some() || info.leaving.is_some()) => {
                let info = engine.info();
                match (info.failure, info.leaving) {
                    (None, Some(rank)) => End::Leaving(rank),
                    (failure, _) => End::Failed(failure.unwrap_or_else(|| "the engine has stopped".to_owned())),
                }
            }
            newer = async {
                let newer = view.wait_for(|view| view.last_epoch() > record.epoch).await;
                let newer = newer.map(|view| view.last_epoch());
                // Without a view nothing newer is known.
                match newer {
                    Ok(newer) => newer,
                    Err(_) => std::future::pending().await,
                }
            } => End::Fenced(newer),
            () = overdue(life.deserted(), self.stuck_timeout) => End::Stuck,
            never = announcing => match never {},
            never = self.known(record) => match never {},
        }
    }

    /// The group serves once the store says so, where those look who send it work, and then for as long as it lives: trouble
    /// of the store is none of the group's.
    async fn known(&self, record: &EpochRecord) -> Infallible {
        let mut view = self.view.clone();
        let is_known =
            |view: &GroupView| view.ready.get(&self.group).is_some_and(|r| r.epoch == record.epoch);
        if view.wait_for(is_known).await.is_ok() {
            self.is_serving.send_replace(true);
        }
        std::future::pending().await
    }

    fn ready(&self, record: &EpochRecord, max_seq_len: usize) -> ReadyRecord {
        ReadyRecord {
            epoch: record.epoch,
            endpoint: record.members[0].endpoint.clone(),
            n_ranks: self.fit.shape.n_ranks(),
            dcp_size: self.fit.shape.dcp_size(),
            layout_hash: self.fit.layout_hash.clone(),
            max_seq_len,
        }
    }

    /// Takes back that the group is ready. Whether the store knows it now.
    async fn withdraw(&self, epoch: Epoch) -> bool {
        let Cluster { coordinator, keys } = &self.cluster;
        let withdrawn = withdraw_ready(&**coordinator, keys, (&self.group, epoch));
        matches!(timeout(WITHDRAW_TIMEOUT, withdrawn).await, Ok(Ok(())))
    }

    /// Ends a life: not ready, nothing new, what is in flight finished or handed over, all ranks told.
    async fn end_life(
        &mut self,
        record: &EpochRecord,
        life: R::Led,
        end: &End,
        leave: &CancellationToken,
    ) -> Result<Drained, Stuck> {
        let (group, epoch) = (&self.group.0, record.epoch);
        match end {
            End::Shutdown => info!(group, %epoch, "the group drains"),
            End::Leaving(rank) => info!(group, %epoch, rank, "a rank drains, the group ends its epoch"),
            End::Failed(failure) => warn!(group, %epoch, failure, "the group has failed, it will form again"),
            End::Fenced(newer) => warn!(group, %epoch, %newer, "the group has a newer life"),
            End::Stuck => {
                error!(group, %epoch, "the group has left, and this process's rank has not noticed")
            }
        }
        self.is_serving.send_replace(false);
        self.life.send_replace(None);
        let mut is_told = self.withdraw(epoch).await;
        if *end == End::Shutdown {
            leave.cancel();
        }
        let drained = match end {
            End::Shutdown | End::Leaving(_) => {
                let drained = self.settle(life.engine()).await;
                // That may have taken long enough for a store that was away to come back.
                is_told = is_told || self.withdraw(epoch).await;
                drained
            }
            End::Failed(_) | End::Fenced(_) | End::Stuck => Drained::Finished,
        };
        if !is_told {
            info!(group, %epoch, "the store was not told that the group is gone; it ends with its lease");
        }
        self.ranks.close_doors();
        let stuck = Stuck { epoch: record.epoch, after: self.stuck_timeout };
        if *end == End::Stuck {
            return Err(stuck);
        }
        tokio::select! {
            biased;
            () = life.stop() => Ok(drained),
            () = awake(self.stuck_timeout) => Err(stuck),
        }
    }

    /// Lets sequences go: over to another group at once if there is one that can take them, else when they are done or the
    /// grace is over.
    async fn settle(&self, engine: &EngineHandle) -> Drained {
        let heirs = self.view.borrow().heirs(&self.group, &self.fit, engine.info().max_seq_len);
        let serves = heirs.iter().map(|endpoint| timeout(HEIR_TIMEOUT, self.ranks.serves(endpoint)));
        let has_heir = join_all(serves).await.contains(&Ok(true));
        if has_heir {
            // An engine that hangs may not even take this in.
            let _or_not = timeout(self.drain_grace, engine.hand_over()).await;
        }
        drain(engine, self.drain_grace).await
    }

    async fn follow(
        &mut self,
        shutdown: &CancellationToken,
        leave: &CancellationToken,
    ) -> Result<Drained, Stuck> {
        let mut last = None;
        loop {
            // Both arms only wait.
            let record = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                record = self.called(last.as_ref()) => record,
            };
            last = Some(record.clone());
            let moot = CancellationToken::new();
            let joining = self.meet(self.ranks.follow(&record, &moot), &moot, (&record, shutdown));
            let life = match joining.await {
                Ok(life) => life,
                Err(error) => {
                    // The leader has given the epoch up too; its next one is worth the next attempt.
                    let error = sentence(&error);
                    warn!(group = self.group.0, epoch = %record.epoch, error, "the group did not form");
                    self.ranks.close_doors();
                    continue;
                }
            };
            info!(group = self.group.0, epoch = %record.epoch, "joined the group");
            let end = self.obey(&record, life, shutdown, leave).await;
            self.is_serving.send_replace(false);
            self.ranks.close_doors();
            if let Err(failure) = end? {
                warn!(group = self.group.0, epoch = %record.epoch, failure, "left the group");
            }
        }
        leave.cancel();
        Ok(Drained::Finished)
    }

    /// Waits for another epoch than the `last`, which counts on this process. It need not be a higher one: a store that has
    /// lost its data begins again. An old one cannot come back, because it does not know this process's present life.
    async fn called(&mut self, last: Option<&EpochRecord>) -> EpochRecord {
        loop {
            let own = self.own_lives();
            let counts_on_us = |record: &&EpochRecord| {
                own.iter().all(|(rank, life)| {
                    record.members.get(*rank).is_some_and(|member| member.incarnation == *life)
                })
            };
            let view = self.view.borrow_and_update().clone();
            let record = view.epoch.as_ref().filter(|record| last != Some(*record));
            if let Some(record) = record.filter(counts_on_us) {
                return record.clone();
            }
            self.changed().await;
        }
    }

    /// Follows until the leader ends the epoch or is gone. A process that drains asks it to.
    async fn obey(
        &self,
        record: &EpochRecord,
        life: R::Followed,
        shutdown: &CancellationToken,
        leave: &CancellationToken,
    ) -> Result<Result<(), String>, Stuck> {
        let leaver = life.leaver();
        let stuck = Stuck { epoch: record.epoch, after: self.stuck_timeout };
        let overdue = overdue(life.deserted(), self.stuck_timeout);
        let ended = life.ended();
        tokio::pin!(ended, overdue);
        // Biased to save a farewell from a rank whose group is gone already.
        tokio::select! {
            biased;
            end = &mut ended => return Ok(end),
            () = &mut overdue => return Err(stuck),
            () = shutdown.cancelled() => {}
            never = self.known(record) => match never {},
        }
        // Out of the membership first, so that the leader does not count on this rank again.
        leave.cancel();
        leaver();
        tokio::select! {
            biased;
            end = ended => Ok(end),
            () = overdue => Err(stuck),
            () = sleep(self.drain_grace) => {
                warn!(group = self.group.0, "the leader has not ended the epoch within the grace; leaving it");
                Ok(Ok(()))
            }
        }
    }

    /// Says why a group did not form, and waits before the next attempt.
    async fn failed(&mut self, error: &FormError<R::Error>, shutdown: &CancellationToken) {
        self.ranks.close_doors();
        let pause = self.backoff.pause();
        warn!(group = self.group.0, error = sentence(error), ?pause, "the group did not form, trying again");
        let _or_shutdown = shutdown.run_until_cancelled(sleep(pause)).await;
    }

    /// A group that fails as soon as it serves must not do so in a busy loop.
    async fn rest(&mut self, since: Instant, shutdown: &CancellationToken) {
        if since.elapsed() >= LIVED {
            self.backoff.reset();
        } else {
            let pause = self.backoff.pause();
            let _or_shutdown = shutdown.run_until_cancelled(sleep(pause)).await;
        }
    }
}

/// Keeps the store knowing that the group serves, under the leader's lease, as often as that changes.
async fn announce(
    Cluster { coordinator, keys }: Cluster,
    (group, ready): (GroupId, ReadyRecord),
    registration: Option<watch::Receiver<RegistrationState>>,
    mut backoff: Backoff,
) -> Infallible {
    let Some(mut state) = registration else { return std::future::pending().await };
    loop {
        let now = *state.borrow_and_update();
        if let RegistrationState::Registered { lease, .. } = now {
            match publish_ready(&*coordinator, &keys, (&group, &ready), lease).await {
                Ok(_) => {
                    backoff.reset();
                    info!(group = group.0, epoch = %ready.epoch, "group is ready");
                }
                Err(error) => {
                    let error = sentence(&error);
                    warn!(group = group.0, error, "group could not be announced, trying again");
                    sleep(backoff.pause()).await;
                    continue;
                }
            }
        }
        if state.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Resolves when ranks had `bound` to come back from a life that the others have left.
async fn overdue(deserted: CancellationToken, bound: Duration) {
    deserted.cancelled().await;
    awake(bound).await;
}

/// Resolves when this process has had `bound` to do something in. Where all of it stands still (stopped, or a machine that
/// is moved), its ranks have not had that time, and are given it when it goes on.
async fn awake(bound: Duration) {
    const N_PARTS: u32 = 20;
    for _ in 0..N_PARTS {
        sleep(bound / N_PARTS).await;
    }
}

#[cfg(test)]
mod tests;
