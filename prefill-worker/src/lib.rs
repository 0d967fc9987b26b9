//! A prefill worker as a service: it computes prompts for routers and sends their KV to decode groups.

mod handler;
mod role;
mod settings;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach_cluster::{
    Coordinator, Key, KeyError, KeySpace, PrefillRegistration, Registration, RegistrationState, superseded,
};
use longreach_engine::{
    BuildError, EngineConfig, EngineHandle, GrpcTransport, Model, RunningEngine,
    serve::{BindError, Door, Drained, Gate, drain},
    start_prefill,
};
use longreach_proto::worker::prefill_server;
use longreach_service::{AdminBindError, Hold, config::Advertise};
use longreach_tls::Security;
use longreach_types::{Epoch, GroupShape, Incarnation, WorkerId};
use longreach_worker::{Introduction, Ops};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use crate::handler::Prefill;
pub use crate::{role::run, settings::PrefillSettings};

/// The services of the worker's door, as health checks name them.
const SERVICE_NAMES: [&str; 1] = ["longreach.worker.v1.PrefillService"];

/// A prefill worker's settings.
#[derive(Clone, Debug)]
pub struct PrefillConfig {
    /// The worker's stable name in the cluster.
    pub worker_id: String,
    /// Where it listens; port 0 takes a free one.
    pub addr: SocketAddr,
    /// What the cluster is told in place of `addr`; a worker that listens everywhere needs it.
    pub advertise: Option<Advertise>,
    /// Where health and metrics are served over HTTP; nowhere unless set.
    pub http_addr: Option<SocketAddr>,
    /// Who may call it, and who it is to ranks. An operator's address is never with TLS.
    pub security: Security,
    /// The engine; a prefill worker is a group of one whatever the shape says.
    pub engine: EngineConfig,
    /// How long the worker's registration outlives it, or trouble of the cluster's store.
    pub lease_ttl: Duration,
    /// How long a drain waits for prompts in flight. Longer finishes more of them; shorter ends sooner.
    pub drain_grace: Duration,
}

/// Why a prefill worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The operators' address is taken.
    #[error(transparent)]
    AdminBind(#[from] AdminBindError),
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
    keys: KeySpace,
    layout_hash: String,
    door: Door,
    ops: Ops,
    engine: RunningEngine,
}

impl PrefillConfig {
    /// A worker on a free port of loopback, with all defaults.
    pub fn new(worker_id: impl Into<String>, engine: EngineConfig) -> Self {
        Self {
            worker_id: worker_id.into(),
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            http_addr: None,
            security: Security::Plaintext,
            engine,
            lease_ttl: Duration::from_secs(30),
            drain_grace: Duration::from_secs(60),
        }
    }

    /// Binds, loads the model and starts the engine.
    pub async fn build(
        mut self,
        model: &Model,
        keys: &KeySpace,
        progress: impl Fn(usize, usize) + Send + Sync + 'static,
    ) -> Result<PrefillWorker, StartError> {
        self.engine.shape = GroupShape::SINGLE;
        let _is_a_name = keys.encode(&Key::Prefill(WorkerId(self.worker_id.clone())))?;
        let door = Door::open(self.addr, self.security.clone()).await?;
        let ops = Ops::open("prefill", self.http_addr).await?;
        let layout_hash = model.layout_hash(&self.engine);
        let (model, config, runtime) = (model.clone(), self.engine.clone(), Handle::current());
        let transport = Arc::new(GrpcTransport::new(self.security.clone()));
        let start = move || start_prefill(&model, &config, transport, &runtime, &progress);
        let engine = tokio::task::spawn_blocking(start).await??;
        let handle = engine.handle.clone();
        ops.register_engine(move || Some(handle.info()));
        Ok(PrefillWorker { config: self, keys: keys.clone(), layout_hash, door, ops, engine })
    }
}

impl PrefillWorker {
    /// Where others find the worker, `http://host:port`, or `https` with TLS.
    pub fn endpoint(&self) -> String {
        let authority = Advertise::authority(self.config.advertise.as_ref(), self.door.addr);
        format!("{}://{authority}", self.config.security.scheme())
    }

    /// Where operators ask over HTTP.
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.ops.http_addr()
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
        let endpoint = self.endpoint();
        let Self { config, keys, layout_hash, door, ops, engine } = self;
        let (tasks, leave, close) = (TaskTracker::new(), CancellationToken::new(), CancellationToken::new());
        let gate = Gate::default();
        let id = WorkerId(config.worker_id.clone());
        let member = PrefillRegistration { id, incarnation: Incarnation::default(), endpoint, layout_hash };
        let spec = member.spec(&keys, config.lease_ttl).map_err(|error| format!("registering: {error}"))?;
        let (introduction, epoch) = (Introduction::default(), engine.handle.info().epoch);
        let handler =
            Prefill::new(engine.handle.clone(), config.worker_id, gate.clone(), introduction.clone());
        let routes = Routes::new(prefill_server(Arc::new(handler)));
        let readiness = ops.readiness.clone();
        let hold = readiness.hold("registration");
        let routes = ops.start(routes, &SERVICE_NAMES, &tasks, &close).await;
        let server = tasks.spawn(door.serve(routes, close.clone()));
        let registration =
            Registration::spawn(&coordinator, spec).map_err(|error| format!("registering: {error}"))?;
        tasks.spawn(release_when_known(hold, (registration.state(), introduction, epoch), leave.clone()));
        let rival = superseded(registration.state());
        tasks.spawn(registration.until(leave.clone()));
        readiness.started();

        // All arms only wait. A failed engine can serve nobody, and nobody sends to a worker without its name.
        let ended = tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            _failed = engine.handle.wait_for(|info| info.failure.is_some()) => Ok(()),
            by = rival => Err(format!("another process registered under this worker's name, as incarnation {by}: \
                give every worker a name of its own")),
        };
        readiness.draining();
        leave.cancel();
        gate.close();
        let drained = drain(&engine.handle, config.drain_grace).await;
        let failure = engine.handle.info().failure;
        let stopped = engine.stop().await;
        close.cancel();
        tasks.close();
        let served = server.await.map_err(|error| error.to_string());
        tasks.wait().await;
        ended?;
        failure.map_or(stopped, Err)?;
        served?.map_err(|error| error.to_string())?;
        Ok(drained)
    }
}

/// Lets the worker be ready once it is registered and a router knows it. It stays so when its store goes away: those who
/// know it still send it work.
async fn release_when_known(
    hold: Hold,
    (mut state, introduction, epoch): (watch::Receiver<RegistrationState>, Introduction, Epoch),
    leave: CancellationToken,
) {
    let is_registered = |state: &RegistrationState| matches!(state, RegistrationState::Registered { .. });
    let known = async {
        // An end of either kind makes readiness void, and drops the hold too.
        drop(state.wait_for(is_registered).await);
        introduction.made(epoch).await;
    };
    let _or_left = leave.run_until_cancelled(known).await;
    drop(hold);
}
