//! Keeps a worker registered.
//!
//! One future, to be run on a thread of its own, away from the work that could starve it: a lease is renewed at
//! half of its *remaining* time. Its loss is a state that others can watch. The process serves on; when the store
//! answers again the worker registers anew, as a new incarnation, because others may have seen it leave.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use longreach_types::Incarnation;
use tokio::{
    sync::watch,
    time::{self, Instant},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    backoff::Backoff,
    coordinator::{Coordinator, CoordinatorError, Lease, LeaseId},
};

/// How long a leaving worker tries to take its key with it; otherwise the lease does that later.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(2);

/// What to register, and how.
pub struct RegistrationSpec<F> {
    /// The key.
    pub key: String,
    /// Its value for an incarnation.
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
    /// Stopped, as asked.
    Left,
}

/// Registers a key, keeps it registered until `cancel`, then takes it away.
pub async fn register<F>(
    coordinator: Arc<dyn Coordinator>,
    spec: RegistrationSpec<F>,
    state: watch::Sender<RegistrationState>,
    cancel: CancellationToken,
) where
    F: Fn(Incarnation) -> Vec<u8> + Send + Sync,
{
    let mut hasher = DefaultHasher::new();
    spec.key.hash(&mut hasher);
    let mut registrar = Registrar {
        coordinator,
        backoff: spec.backoff.clone().seeded(hasher.finish()),
        spec,
        state,
        lease: None,
    };
    // Cancel-safe: a lease that is known is revoked below, and one whose grant was cut off expires, holding nothing.
    // Biased, so that a simulated run is repeated by its seed.
    tokio::select! {
        biased;
        () = registrar.run() => {}
        () = cancel.cancelled() => {}
    }
    registrar.leave().await;
}

struct Registrar<F> {
    coordinator: Arc<dyn Coordinator>,
    spec: RegistrationSpec<F>,
    backoff: Backoff,
    state: watch::Sender<RegistrationState>,
    lease: Option<LeaseId>,
}

impl<F: Fn(Incarnation) -> Vec<u8> + Send + Sync> Registrar<F> {
    /// Lives after lives; it ends only by being dropped.
    async fn run(&mut self) {
        loop {
            match self.enter().await {
                Ok((lease, incarnation)) => {
                    self.backoff.reset();
                    self.stay(lease, incarnation).await;
                }
                Err(error) => {
                    self.explain(&error);
                    // The lease of a failed attempt must not hold anything.
                    self.revoke().await;
                    time::sleep(self.backoff.pause()).await;
                }
            }
        }
    }

    async fn enter(&mut self) -> Result<(Lease, Incarnation), CoordinatorError> {
        let lease = self.coordinator.grant_lease(self.spec.ttl).await?;
        self.lease = Some(lease.id);
        let incarnation = Incarnation(lease.revision.0);
        let value = (self.spec.value)(incarnation);
        self.coordinator.put_if_absent(self.spec.key.clone(), value, lease.id).await?;
        info!(key = %self.spec.key, %incarnation, lease = %lease.id, "registered");
        self.state.send_replace(RegistrationState::Registered { incarnation, lease: lease.id });
        Ok((lease, incarnation))
    }

    /// Renews the lease until it is lost.
    async fn stay(&mut self, lease: Lease, incarnation: Incarnation) {
        let Lease { id, ttl, .. } = lease;
        let mut expires = Instant::now() + ttl;
        let mut pause = ttl / 2;
        loop {
            time::sleep(pause).await;
            match self.coordinator.keep_alive(id).await {
                Ok(ttl) => {
                    self.backoff.reset();
                    expires = Instant::now() + ttl;
                    pause = ttl / 2;
                    self.set(RegistrationState::Registered { incarnation, lease: id });
                }
                Err(CoordinatorError::LeaseLost(_)) => {
                    warn!(key = %self.spec.key, %incarnation, "lease is lost, registering as a new incarnation");
                    self.lease = None;
                    self.state.send_replace(RegistrationState::Lost { incarnation });
                    return;
                }
                Err(error) => {
                    debug!(key = %self.spec.key, %error, "lease was not renewed, trying again");
                    let left = expires.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        self.set(RegistrationState::Unconfirmed { incarnation, lease: id });
                        pause = self.backoff.pause();
                    } else {
                        pause = self.backoff.pause().min(left);
                    }
                }
            }
        }
    }

    fn set(&self, next: RegistrationState) {
        self.state.send_if_modified(|state| std::mem::replace(state, next) != next);
    }

    fn explain(&self, error: &CoordinatorError) {
        match error {
            CoordinatorError::Conflict { .. } => {
                // The usual case is an earlier life of this worker whose lease has not ended yet.
                info!(key = %self.spec.key, %error, "another process is registered, waiting for its lease to end");
            }
            _ => info!(key = %self.spec.key, %error, "cannot register yet"),
        }
    }

    async fn leave(mut self) {
        if time::timeout(FAREWELL_TIMEOUT, self.revoke()).await.is_err() {
            info!(key = %self.spec.key, "the coordinator does not answer; the registration ends with its lease");
        }
        self.state.send_replace(RegistrationState::Left);
    }

    async fn revoke(&mut self) {
        if let Some(lease) = self.lease.take()
            && let Err(error) = self.coordinator.revoke(lease).await
        {
            debug!(key = %self.spec.key, %lease, %error, "lease was not revoked; it will expire");
        }
    }
}

#[cfg(test)]
mod tests;
