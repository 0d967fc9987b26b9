//! A prefill worker as a service: it computes prompts for routers and sends their KV to decode groups.

mod handler;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach_cluster::{
    Backoff, Coordinator, Key, KeyError, KeySpace, PrefillRegistration, Record, RegistrationSpec,
    RegistrationState, register,
};
use longreach_engine::{
    BuildError, EngineConfig, EngineHandle, GrpcTransport, Model, RunningEngine,
    serve::{BindError, Door, Drained, Gate, drain},
    start_prefill,
};
use longreach_proto::worker::prefill_server;
use longreach_types::{GroupShape, WorkerId};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use crate::handler::Prefill;

/// Time of a registration's lease.
const LEASE_TTL: Duration = Duration::from_secs(30);

/// A prefill worker's settings.
#[derive(Clone, Debug)]
pub struct PrefillConfig {
    /// The worker's stable name in the cluster.
    pub worker_id: String,
    /// Where it listens; port 0 takes a free one.
    pub addr: SocketAddr,
    /// The engine; a prefill worker is a group of one whatever the shape says.
    pub engine: EngineConfig,
    /// How long a drain waits for prompts in flight. Longer finishes more of them; shorter ends sooner.
    pub drain_grace: Duration,
}

/// Why a prefill worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The model or the engine.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The worker's name cannot be part of a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The task that builds the engine was lost.
    #[error("building the engine: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// A prefill worker that is loaded and runs, and does not serve yet.
pub struct PrefillWorker {
    config: PrefillConfig,
    key: String,
    layout_hash: String,
    door: Door,
    engine: RunningEngine,
}

impl PrefillConfig {
    /// Binds, loads the model and starts the engine.
    pub async fn build(
        mut self,
        model: &Model,
        keys: &KeySpace,
        progress: impl Fn(usize, usize) + Send + Sync + 'static,
    ) -> Result<PrefillWorker, StartError> {
        self.engine.shape = GroupShape::SINGLE;
        let key = keys.encode(&Key::Prefill(WorkerId(self.worker_id.clone())))?;
        let door = Door::open(self.addr).await?;
        let layout_hash = model.layout_hash(&self.engine);
        let (model, config, runtime) = (model.clone(), self.engine.clone(), Handle::current());
        let start =
            move || start_prefill(&model, &config, Arc::new(GrpcTransport::default()), &runtime, &progress);
        let engine = tokio::task::spawn_blocking(start).await??;
        Ok(PrefillWorker { config: self, key, layout_hash, door, engine })
    }
}

impl PrefillWorker {
    /// Where the worker is, `http://host:port`.
    pub fn endpoint(&self) -> String {
        self.door.endpoint()
    }

    /// The worker's engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine.handle
    }

    /// Serves until `shutdown`, then drains: out of the cluster, no new work, what is in flight finished within the
    /// grace, then the end. Nothing of the worker is left when it returns.
    pub async fn serve(
        self,
        coordinator: Arc<dyn Coordinator>,
        shutdown: CancellationToken,
    ) -> Result<Drained, String> {
        let Self { config, key, layout_hash, door, engine } = self;
        let (tasks, leave, close) = (TaskTracker::new(), CancellationToken::new(), CancellationToken::new());
        let gate = Gate::default();
        let (id, endpoint) = (WorkerId(config.worker_id.clone()), door.endpoint());
        let value = move |incarnation| {
            let (id, endpoint, layout_hash) = (id.clone(), endpoint.clone(), layout_hash.clone());
            PrefillRegistration { id, incarnation, endpoint, layout_hash }.encode()
        };
        let handler = Prefill::new(engine.handle.clone(), config.worker_id, gate.clone());
        let routes = Routes::new(prefill_server(Arc::new(handler)));
        let server = tasks.spawn(door.serve(routes, close.clone()));
        let spec = RegistrationSpec { key, value, ttl: LEASE_TTL, backoff: Backoff::default() };
        let (state_in, _state) = watch::channel(RegistrationState::default());
        tasks.spawn(register(coordinator, spec, state_in, leave.clone()));

        // Both arms only wait. A failed engine can serve nobody.
        tokio::select! {
            () = shutdown.cancelled() => {}
            _failed = engine.handle.wait_for(|info| info.failure.is_some()) => {}
        }
        leave.cancel();
        gate.close();
        let drained = drain(&engine.handle, config.drain_grace).await;
        let failure = engine.handle.info().failure;
        let stopped = engine.stop().await;
        close.cancel();
        tasks.close();
        let served = server.await.map_err(|error| error.to_string());
        tasks.wait().await;
        failure.map_or(stopped, Err)?;
        served?.map_err(|error| error.to_string())?;
        Ok(drained)
    }
}
