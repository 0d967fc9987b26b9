//! Calls to whichever member of etcd answers.
//!
//! The client library has a channel over several endpoints, but it goes on choosing dead ones and repeats nothing: with
//! one member of three down, one call in five failed. Here each endpoint has a connection of its own. A call goes to
//! the endpoint that answered last, and on failure to the next, within a bound; so a dead member costs the first
//! call that meets it, and none after it.
//!
//! A connection that failed is dropped and not repaired: the next one reads the TLS files again and cannot hang on
//! what was half-open.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use etcd_client::{Channel, Client, ConnectOptions};
use thiserror::Error;
use tokio::time::{self, Instant};
use tonic::Code;
use tracing::debug;

use super::config::{EtcdConfig, EtcdConfigError};
use crate::backoff::Backoff;

/// Pauses within a call, after every endpoint has failed once more.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// Why an attempt gave no answer, or which refusal was the answer.
#[derive(Debug, Error)]
pub(super) enum Fault {
    /// What the client says.
    #[error(transparent)]
    Etcd(#[from] etcd_client::Error),
    /// The connection cannot be set up.
    #[error(transparent)]
    Config(#[from] EtcdConfigError),
    /// No answer.
    #[error("no answer from {endpoint} within {waited:?}")]
    Silent { endpoint: String, waited: Duration },
    /// A stream ended that should not have.
    #[error("etcd ended the stream{}{reason}", if .reason.is_empty() { "" } else { ": " })]
    Ended { reason: String },
    /// An answer without a revision.
    #[error("etcd's answer has no revision")]
    NoRevision,
    /// The member has not caught up, or its data is gone.
    #[error("etcd is at revision {at}, before revision {wanted} that is known to be there")]
    Behind { at: u64, wanted: u64 },
}

impl Fault {
    /// The code of a refusal that would be the same from every endpoint and at any time soon.
    pub(super) fn refusal(&self) -> Option<Code> {
        let Self::Etcd(etcd_client::Error::GRpcStatus(status)) = self else { return None };
        let is_final = matches!(
            status.code(),
            Code::NotFound
                | Code::OutOfRange
                | Code::PermissionDenied
                | Code::FailedPrecondition
                | Code::Unimplemented
        );
        is_final.then(|| status.code())
    }

    /// Whether the lease of a keep-alive is unknown to etcd, which the client library says in this way only.
    pub(super) fn is_unknown_lease(&self) -> bool {
        matches!(self, Self::Etcd(etcd_client::Error::LeaseKeepAliveError(_)))
    }
}

/// An attempt of a call: the connection, and whether an earlier attempt may have had an effect.
pub(super) struct Attempt {
    pub(super) client: Client,
    pub(super) endpoint: String,
    pub(super) is_repeat: bool,
}

/// The connections to all endpoints.
pub(super) struct Channels {
    config: EtcdConfig,
    /// One for each endpoint, made when it is first used: a connection lives on the runtime that makes it.
    clients: Vec<Mutex<Option<Client>>>,
    /// The endpoint to ask first.
    preferred: AtomicUsize,
}

impl Channels {
    pub(super) fn new(config: EtcdConfig) -> Result<Self, EtcdConfigError> {
        config.validate()?;
        let clients = config.endpoints.iter().map(|_| Mutex::new(None)).collect();
        Ok(Self { config, clients, preferred: AtomicUsize::new(0) })
    }

    pub(super) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    /// The same endpoints with no connection yet.
    pub(super) fn unconnected(&self) -> Self {
        let clients = self.clients.iter().map(|_| Mutex::new(None)).collect();
        Self { config: self.config.clone(), clients, preferred: AtomicUsize::new(0) }
    }

    /// Makes a call until an endpoint answers, within the bound of the configuration. `call` must bear to be repeated
    /// after an attempt with an effect.
    pub(super) async fn call<T, F>(&self, mut call: impl FnMut(Attempt) -> F) -> Result<T, Fault>
    where
        F: Future<Output = Result<T, Fault>>,
    {
        let deadline = Instant::now() + self.config.request_timeout;
        let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE, RandomState::new().hash_one(()));
        let (mut n_failed, mut last) = (0, None);
        loop {
            if n_failed > 0 && n_failed % self.clients.len() == 0 {
                time::sleep(backoff.pause()).await;
            }
            let idx = self.preferred.load(Ordering::Relaxed) % self.clients.len();
            let bound = deadline.min(Instant::now() + self.config.attempt_timeout);
            let fault = match self.attempt(idx, bound, n_failed > 0, &mut call).await {
                Ok(answer) => return Ok(answer),
                Err(fault) if fault.refusal().is_some() || fault.is_unknown_lease() => return Err(fault),
                Err(fault) => fault,
            };
            debug!(endpoint = self.config.endpoints[idx], %fault, "etcd call failed");
            self.leave(idx);
            if Instant::now() >= deadline {
                // The last attempt had no time of its own: what an earlier one was told says more.
                let was_cut = matches!(fault, Fault::Silent { .. }) && bound == deadline;
                return Err(last.filter(|_| was_cut).unwrap_or(fault));
            }
            last = Some(fault);
            n_failed += 1;
        }
    }

    async fn attempt<T, F>(
        &self,
        idx: usize,
        bound: Instant,
        is_repeat: bool,
        call: &mut impl FnMut(Attempt) -> F,
    ) -> Result<T, Fault>
    where
        F: Future<Output = Result<T, Fault>>,
    {
        let start = Instant::now();
        let answer = async {
            let client = self.client(idx).await?;
            call(Attempt { client, endpoint: self.config.endpoints[idx].clone(), is_repeat }).await
        };
        let silent =
            |_| Fault::Silent { endpoint: self.config.endpoints[idx].clone(), waited: start.elapsed() };
        time::timeout_at(bound, answer).await.map_err(silent)?
    }

    async fn client(&self, idx: usize) -> Result<Client, Fault> {
        let held = self.clients[idx].lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(client) = held {
            return Ok(client);
        }
        let endpoint = self.config.endpoint(&self.config.endpoints[idx])?;
        let mut options = ConnectOptions::new().with_require_leader(true);
        if let Some(auth) = &self.config.auth {
            options = options.with_user(&auth.user, &auth.password).with_auto_token_refresh(true);
        }
        // With a user this asks for a token; otherwise nothing is sent, and the connection is made by the first call.
        let client = Client::from_channel(Channel::Tonic(endpoint.connect_lazy()), Some(options)).await?;
        *self.clients[idx].lock().unwrap_or_else(PoisonError::into_inner) = Some(client.clone());
        Ok(client)
    }

    /// Drops a connection and goes on to the next endpoint, unless another call has done so.
    fn leave(&self, idx: usize) {
        self.clients[idx].lock().unwrap_or_else(PoisonError::into_inner).take();
        let next = (idx + 1) % self.clients.len();
        // Whoever loses the race finds an endpoint that another call has chosen, which is as good.
        let _ = self.preferred.compare_exchange(idx, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}
