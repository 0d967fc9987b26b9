//! Keeps a worker registered.
//!
//! One future, [`register`], to be run away from the work that could starve it: [`Registration`] gives it a thread, a
//! runtime and a connection of its own. A lease is renewed at half of its *remaining* time. Its loss is a state that
//! others can watch. The process serves on; when the store answers again the worker registers anew, as a new
//! incarnation, because others may have seen it leave.
//!
//! A name has one life at a time, and the newest wins. A process that starts while the key of its name is still held
//! takes it over: the process before it is dead and its lease is not, and waiting for the lease would keep the worker
//! away for its whole length. A process that was registered and finds its key taken over is the older of two that have
//! the same name; it stops registering and says so ([`RegistrationState::Superseded`]).

mod thread;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use longreach_types::{Incarnation, WorkerId};
use tokio::{
    sync::watch,
    time::{self, Instant},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use self::thread::Registration;
use crate::{
    backoff::Backoff,
    causes::Causes,
    coordinator::{Coordinator, CoordinatorError, Entry, Expect, Lease, LeaseId, Revision, Swap},
    record::{Holder, Record},
};

/// How long a leaving worker tries to take its key with it; otherwise the lease does that later.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the key is looked at between two renewals: a store that lost its data, or another process of the same name,
/// is noticed no later.
const LOOK_PERIOD: Duration = Duration::from_secs(5);
/// Incarnations of failed attempts that are remembered. An attempt whose answer was lost may yet be found to have
/// registered this process.
const MAX_ATTEMPTS: usize = 64;

/// What to register, and how.
pub struct RegistrationSpec<F> {
    /// The key.
    pub key: String,
    /// Its value for an incarnation: a record that names the worker.
    pub value: F,
    /// Time of the lease. Longer survives longer trouble of the store without a change of membership; shorter
    /// removes a dead worker sooner, which stream ends and health checks do anyway. 30 s or more.
    pub ttl: Duration,
    /// Pauses between attempts.
    pub backoff: Backoff,
}

/// How a registration stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not yet registered, or no more and not yet again.
    #[default]
    Pending,
    /// Registered; more keys may be put under the lease.
    Registered {
        /// This life.
        incarnation: Incarnation,
        /// Its lease.
        lease: LeaseId,
    },
    /// The store has not answered for as long as the lease lives; it may be lost. Serve on.
    Unconfirmed {
        /// This life.
        incarnation: Incarnation,
        /// Its lease.
        lease: LeaseId,
    },
    /// The lease is lost; peers may have seen this life end. The next life is being registered, and may be so before
    /// this state is seen: a new incarnation says that the one before was lost.
    Lost {
        /// The life that ended.
        incarnation: Incarnation,
    },
    /// Another process with this worker's name has registered since: this one stays out of the cluster. Whoever runs it
    /// gave one name twice.
    Superseded {
        /// The life that holds the name.
        by: Incarnation,
    },
    /// Stopped, as asked.
    Left,
}

/// Registers a key, keeps it registered until `cancel` or until another process registers under the same name, and
/// takes it away after `cancel`.
pub async fn register<F>(
    coordinator: Arc<dyn Coordinator>,
    spec: RegistrationSpec<F>,
    state: watch::Sender<RegistrationState>,
    cancel: CancellationToken,
) where
    F: Fn(Incarnation) -> Vec<u8> + Send + Sync,
{
    let mut registrar = Registrar {
        coordinator,
        backoff: spec.backoff.clone(),
        id: Holder::decode(&(spec.value)(Incarnation(0))).ok().map(|holder| holder.id),
        spec,
        state,
        lease: None,
        lives: Lives::default(),
    };
    // Cancel-safe: a lease that is known is revoked below, and one whose grant was cut off expires, holding nothing.
    // Biased, so that a simulated run is repeated by its seed.
    tokio::select! {
        biased;
        by = registrar.run() => registrar.step_aside(by).await,
        () = cancel.cancelled() => {}
    }
    // After stepping aside too: who watches the state waits for its changes.
    cancel.cancelled().await;
    registrar.leave().await;
}

/// Resolves with the life that took a worker's name over, if one ever does.
pub async fn superseded(mut state: watch::Receiver<RegistrationState>) -> Incarnation {
    loop {
        if let RegistrationState::Superseded { by } = *state.borrow_and_update() {
            return by;
        }
        if state.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

struct Registrar<F> {
    coordinator: Arc<dyn Coordinator>,
    spec: RegistrationSpec<F>,
    /// The name in the value; without one, no key is taken over.
    id: Option<WorkerId>,
    backoff: Backoff,
    state: watch::Sender<RegistrationState>,
    lease: Option<LeaseId>,
    lives: Lives,
}

/// The incarnations of this process.
#[derive(Default)]
struct Lives {
    /// Those that were tried since one was registered; an answer may have been lost.
    tried: BTreeSet<Incarnation>,
    /// The newest of all.
    last: Incarnation,
    /// The newest that was registered.
    registered: Option<Incarnation>,
}

/// A lease and how long it surely lasts.
struct Held {
    id: LeaseId,
    ttl: Duration,
    /// Counted from when the store was asked, not from its answer: the answer may have taken most of the lease's time.
    expires: Instant,
}

impl Held {
    /// When it is renewed: at half of the time that remains.
    fn due(&self) -> Instant {
        let now = Instant::now();
        now + self.expires.saturating_duration_since(now) / 2
    }
}

/// Whose key it is.
enum Claim {
    /// It is free.
    Nobody,
    /// An attempt of this process, or an earlier life of the worker: it is taken over.
    Own { last: Incarnation, at: Revision },
    /// A newer process of the same name.
    Newer(Incarnation),
    /// Another worker.
    Other,
}

/// Why a life ended.
enum Ended {
    Lost,
    Superseded(Incarnation),
}

impl<F: Fn(Incarnation) -> Vec<u8> + Send + Sync> Registrar<F> {
    /// Lives after lives, until another process has the name.
    async fn run(&mut self) -> Incarnation {
        loop {
            match self.enter().await {
                Ok((held, incarnation)) => {
                    self.backoff.reset();
                    match self.stay(held, incarnation).await {
                        Ended::Lost => self.revoke().await,
                        Ended::Superseded(by) => return by,
                    }
                }
                Err(error) => {
                    if let CoordinatorError::Conflict { current, .. } = &error
                        && let Claim::Newer(by) = self.claim(current.as_ref())
                    {
                        return by;
                    }
                    self.explain(&error);
                    // The lease of a failed attempt must not hold anything.
                    self.revoke().await;
                    time::sleep(self.backoff.pause()).await;
                }
            }
        }
    }

    async fn enter(&mut self) -> Result<(Held, Incarnation), CoordinatorError> {
        let asked = Instant::now();
        let lease = self.coordinator.grant_lease(self.spec.ttl).await?;
        self.lease = Some(lease.id);
        let incarnation = match self.put(Expect::Absent, Incarnation(0), lease).await {
            Err(CoordinatorError::Conflict { key, current }) => match self.claim(current.as_ref()) {
                Claim::Own { last, at } => {
                    info!(%key, earlier = %last, "taking over the key of an earlier life");
                    self.put(Expect::At(at), last, lease).await?
                }
                _ => return Err(CoordinatorError::Conflict { key, current }),
            },
            outcome => outcome?,
        };
        self.lives.tried.clear();
        self.lives.registered = Some(incarnation);
        info!(key = %self.spec.key, %incarnation, lease = %lease.id, "registered");
        self.state.send_replace(RegistrationState::Registered { incarnation, lease: lease.id });
        Ok((Held { id: lease.id, ttl: lease.ttl, expires: asked + lease.ttl }, incarnation))
    }

    /// Puts the key as a life that is newer than `earlier` and than every one of this process.
    async fn put(
        &mut self,
        expect: Expect,
        earlier: Incarnation,
        lease: Lease,
    ) -> Result<Incarnation, CoordinatorError> {
        // The store's count is newer, unless the store lost its data.
        let newest =
            lease.revision.0.max(earlier.0.saturating_add(1)).max(self.lives.last.0.saturating_add(1));
        let incarnation = Incarnation(newest);
        self.lives.last = incarnation;
        self.lives.tried.insert(incarnation);
        if self.lives.tried.len() > MAX_ATTEMPTS {
            self.lives.tried.pop_first();
        }
        let value = Some((self.spec.value)(incarnation));
        let swap = Swap { key: self.spec.key.clone(), expect, value, lease: Some(lease.id) };
        self.coordinator.swap(swap).await?;
        Ok(incarnation)
    }

    fn claim(&self, held: Option<&Entry>) -> Claim {
        let Some(held) = held else { return Claim::Nobody };
        let Some(Holder { incarnation, .. }) =
            Holder::decode(&held.value).ok().filter(|holder| Some(&holder.id) == self.id.as_ref())
        else {
            return Claim::Other;
        };
        // An older one is this process's own, or comes from a backup of the store.
        let is_later = self.lives.registered.is_some_and(|registered| incarnation > registered);
        if is_later && !self.lives.tried.contains(&incarnation) {
            return Claim::Newer(incarnation);
        }
        Claim::Own { last: incarnation, at: held.revision }
    }

    /// Renews the lease until it is lost, or the key is.
    async fn stay(&mut self, mut held: Held, incarnation: Incarnation) -> Ended {
        let Held { id, ttl, .. } = held;
        let mut due = held.due();
        loop {
            time::sleep_until(due.min(Instant::now() + LOOK_PERIOD)).await;
            if Instant::now() >= due {
                let asked = Instant::now();
                match self.coordinator.keep_alive(id).await {
                    Ok(ttl) => {
                        self.backoff.reset();
                        held.expires = asked + ttl;
                        due = held.due();
                        self.set(RegistrationState::Registered { incarnation, lease: id });
                    }
                    Err(CoordinatorError::LeaseLost(_)) => {
                        self.lease = None;
                        return self.lost(incarnation, "lease is lost");
                    }
                    Err(error) => {
                        debug!(key = %self.spec.key, error = %Causes(&error), "lease was not renewed, trying again");
                        due = Instant::now() + self.pause_before_retry(held.expires, (incarnation, id));
                        continue;
                    }
                }
            }
            // The next renewal does not wait long for this.
            if let Ok(Some(ended)) = time::timeout(ttl / 4, self.look(incarnation)).await {
                return ended;
            }
        }
    }

    fn pause_before_retry(
        &mut self,
        expires: Instant,
        (incarnation, lease): (Incarnation, LeaseId),
    ) -> Duration {
        let left = expires.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.set(RegistrationState::Unconfirmed { incarnation, lease });
            return self.backoff.pause();
        }
        self.backoff.pause().min(left)
    }

    /// Whether the key is still this life's.
    async fn look(&self, incarnation: Incarnation) -> Option<Ended> {
        let held = match self.coordinator.get(&self.spec.key).await {
            Ok(held) => held,
            Err(error) => {
                debug!(key = %self.spec.key, error = %Causes(&error), "key could not be read");
                return None;
            }
        };
        if held.as_ref().is_some_and(|held| held.value == (self.spec.value)(incarnation)) {
            return None;
        }
        Some(match self.claim(held.as_ref()) {
            Claim::Newer(by) => Ended::Superseded(by),
            _ => self.lost(incarnation, "key is gone"),
        })
    }

    fn lost(&self, incarnation: Incarnation, what: &'static str) -> Ended {
        warn!(key = %self.spec.key, %incarnation, "{what}, registering as a new incarnation");
        self.state.send_replace(RegistrationState::Lost { incarnation });
        Ended::Lost
    }

    fn set(&self, next: RegistrationState) {
        self.state.send_if_modified(|state| std::mem::replace(state, next) != next);
    }

    fn explain(&self, error: &CoordinatorError) {
        match error {
            CoordinatorError::Conflict { .. } => {
                info!(key = %self.spec.key, %error, "another worker holds the key, waiting for its lease to end");
            }
            _ => info!(key = %self.spec.key, error = %Causes(error), "cannot register yet"),
        }
    }

    /// Leaves the name to the process that has it now.
    async fn step_aside(&mut self, by: Incarnation) {
        warn!(key = %self.spec.key, %by, "another process has registered under this name; this one stays out");
        let _ = time::timeout(FAREWELL_TIMEOUT, self.revoke()).await;
        self.state.send_replace(RegistrationState::Superseded { by });
    }

    async fn leave(mut self) {
        if time::timeout(FAREWELL_TIMEOUT, self.revoke()).await.is_err() {
            info!(key = %self.spec.key, "the coordinator does not answer; the registration ends with its lease");
        }
        self.state.send_replace(RegistrationState::Left);
    }

    async fn revoke(&mut self) {
        let Some(lease) = self.lease else { return };
        let revoked = self.coordinator.revoke(lease).await;
        // Only now: whoever gives up waiting may try once more.
        self.lease = None;
        if let Err(error) = revoked {
            debug!(key = %self.spec.key, %lease, error = %Causes(&error), "lease was not revoked; it will expire");
        }
    }
}

#[cfg(test)]
mod tests;
