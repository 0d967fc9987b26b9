//! A registration on a thread of its own.
//!
//! A runtime that is busy with requests polls late, and a lease does not wait: so the renewals have a thread, a runtime
//! and a connection that nobody else uses. A task of the process's runtime was the obvious way, and the reason why leases
//! were lost under load elsewhere.

use std::{io, sync::Arc, thread};

use longreach_types::Incarnation;
use tokio::{runtime::Builder, sync::watch, task};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::warn;

use super::{RegistrationSpec, RegistrationState, register};
use crate::coordinator::Coordinator;

/// A worker's registration. Dropping it takes the key away too, without waiting for that.
#[derive(Debug)]
pub struct Registration {
    state: watch::Receiver<RegistrationState>,
    cancel: DropGuard,
    thread: thread::JoinHandle<()>,
}

impl Registration {
    /// Starts the thread, which registers as soon as the store answers.
    pub fn spawn<F>(coordinator: &Arc<dyn Coordinator>, spec: RegistrationSpec<F>) -> io::Result<Self>
    where
        F: Fn(Incarnation) -> Vec<u8> + Send + Sync + 'static,
    {
        let coordinator = coordinator.detached().unwrap_or_else(|| Arc::clone(coordinator));
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (state_in, state) = watch::channel(RegistrationState::default());
        let cancel = CancellationToken::new();
        let registration = register(coordinator, spec, state_in, cancel.clone());
        let thread = thread::Builder::new()
            .name("registration".to_owned())
            .spawn(move || runtime.block_on(registration))?;
        Ok(Self { state, cancel: cancel.drop_guard(), thread })
    }

    /// How it stands, now and from now on.
    pub fn state(&self) -> watch::Receiver<RegistrationState> {
        self.state.clone()
    }

    /// Stays until `leave` is cancelled, then [leaves](Self::leave).
    pub async fn until(self, leave: CancellationToken) {
        leave.cancelled().await;
        self.leave().await;
    }

    /// Takes the key away and waits until the thread has ended, a few seconds at most.
    pub async fn leave(self) {
        let Self { mut state, cancel, thread } = self;
        drop(cancel);
        while state.changed().await.is_ok() {}
        // It has let go of the state as the last thing but its connections.
        if !matches!(task::spawn_blocking(|| thread.join()).await, Ok(Ok(()))) {
            warn!("the thread of a registration was lost");
        }
    }
}
