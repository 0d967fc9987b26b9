//! A whole cluster in one process: a decode group, prefill workers and a router, with gRPC between them on loopback and
//! their membership in memory.
//!
//! The roles are those that run in processes of their own, and speak to each other the same way; a shorter path inside
//! one process would be a second system, with bugs of its own. What is not here is everything that only a person
//! wants: arguments, signals, text on the terminal. So the command and the integration tests start the same cluster.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    sync::Arc,
    time::Duration,
};

use longreach_cluster::{Coordinator, KeyError, KeySpace, MemoryCoordinator};
use longreach_decode::{Cluster, DecodeConfig, DecodeWorker, FormationConfig, Hosting};
use longreach_engine::{EngineConfig, Model};
use longreach_prefill::{PrefillConfig, PrefillWorker};
use longreach_router::{BoundRouter, RouterConfig, WorkerSource};
use longreach_text::TextModel;
use longreach_tls::Security;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// Name of the cluster in its store, which nobody else sees, and in certificates.
pub const CLUSTER_NAME: &str = "local";

/// Workers listen on free ports of this machine only.
const LOOPBACK: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Pauses between looks at the router's health while the cluster starts.
const READY_POLL: Duration = Duration::from_millis(50);

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// The decode group. Prefill workers have the same, but for shape and threads.
    pub engine: EngineConfig,
    /// Threads of each prefill worker. More: prompts are computed sooner. Fewer: the decode group is disturbed less.
    pub prefill_threads: usize,
    /// Prefill workers.
    pub n_prefills: u16,
    /// The router, with the addresses that clients use.
    pub router: RouterConfig,
    /// Who the workers are to each other and to the router, whose own is in its configuration.
    pub security: WorkerSecurity,
    /// How long workers may finish what they have once the router is done. Longer finishes more; shorter ends sooner.
    pub worker_grace: Duration,
}

/// The certificates of the two kinds of workers. The default is without TLS.
#[derive(Clone, Debug, Default)]
pub struct WorkerSecurity {
    /// Of the decode group.
    pub decode: Security,
    /// Of the prefill workers.
    pub prefill: Security,
}

/// A cluster that is loaded and listens, and does not serve yet.
pub struct LocalCluster {
    coordinator: Arc<dyn Coordinator>,
    decode: DecodeWorker,
    prefills: Vec<PrefillWorker>,
    router: BoundRouter,
}

/// Why a cluster could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// A setting of the router that cannot be.
    #[error(transparent)]
    Config(#[from] longreach_router::ConfigError),
    /// A name that cannot be part of a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The decode group did not start.
    #[error(transparent)]
    Decode(#[from] longreach_decode::StartError),
    /// A prefill worker did not start.
    #[error(transparent)]
    Prefill(#[from] longreach_prefill::StartError),
    /// The router did not start.
    #[error(transparent)]
    Router(#[from] longreach_router::ServeError),
    /// The router's own address cannot be dialled.
    #[error(transparent)]
    Address(#[from] tonic::transport::Error),
    /// A role's task was lost.
    #[error(transparent)]
    Task(#[from] JoinError),
    /// A role failed while it served, and ended the others.
    #[error("{role} ended: {reason}")]
    Ended {
        /// Which.
        role: Role,
        /// Why.
        reason: String,
    },
}

/// The parts of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The router.
    Router,
    /// The decode group.
    Decode,
    /// One of the prefill workers.
    Prefill,
}

type Ended = (Role, Result<(), String>);

impl LocalConfig {
    /// One prefill worker beside a decode group of `engine`, and a router on free ports of loopback for the model that
    /// requests name `model_name`.
    pub fn new(engine: EngineConfig, model_name: impl Into<String>) -> Self {
        let mut router = RouterConfig::new(model_name);
        // No balancer stands before this router that would have to hear of its end first.
        router.serving.drain_notice = Duration::ZERO;
        let worker_grace = Duration::from_secs(10);
        Self {
            prefill_threads: engine.n_threads,
            engine,
            n_prefills: 1,
            router,
            security: WorkerSecurity::default(),
            worker_grace,
        }
    }
}

impl LocalCluster {
    /// Loads every role of `config` for `model` and `text`, and binds all addresses. `progress` is asked for each
    /// worker by its name, and what it gives is told the layers that are packed, and all.
    pub async fn start<P>(
        config: LocalConfig,
        model: &Model,
        text: TextModel,
        progress: impl Fn(&str) -> P,
    ) -> Result<Self, LocalError>
    where
        P: Fn(usize, usize) + Send + Sync + 'static,
    {
        let LocalConfig { engine, prefill_threads, n_prefills, mut router, security, worker_grace } = config;
        let keys = KeySpace::new(CLUSTER_NAME)?;
        let coordinator: Arc<dyn Coordinator> = Arc::new(MemoryCoordinator::default());
        let cluster = Cluster { coordinator: Arc::clone(&coordinator), keys: keys.clone() };
        let decode = DecodeConfig {
            group_id: "decode-0".to_owned(),
            hosting: Hosting::Whole,
            addr: LOOPBACK,
            advertise: None,
            http_addr: None,
            security: security.decode,
            engine: engine.clone(),
            formation: FormationConfig::default(),
            drain_grace: worker_grace,
        };
        let decode = decode.build(model, cluster, progress("decode group")).await?;
        let engine = EngineConfig { n_threads: prefill_threads, ..engine };
        let mut prefills = Vec::new();
        for idx in 0..n_prefills {
            let prefill = PrefillConfig {
                security: security.prefill.clone(),
                drain_grace: worker_grace,
                ..PrefillConfig::new(format!("prefill-{idx}"), engine.clone())
            };
            let bar = progress(&prefill.worker_id);
            prefills.push(prefill.build(model, &keys, bar).await?);
        }
        let source = WorkerSource::Cluster { coordinator: Arc::clone(&coordinator), keys };
        router.workers.prefill_optional |= n_prefills == 0;
        let router = router.build(source, text)?.bind().await?;
        Ok(Self { coordinator, decode, prefills, router })
    }

    /// Where gRPC is served.
    pub fn grpc_addr(&self) -> SocketAddr {
        self.router.grpc_addr()
    }

    /// Where the OpenAI API, health and metrics are served.
    pub fn http_addr(&self) -> SocketAddr {
        self.router.http_addr()
    }

    /// The decode group.
    pub fn decode(&self) -> &DecodeWorker {
        &self.decode
    }

    /// The prefill workers.
    pub fn prefills(&self) -> &[PrefillWorker] {
        &self.prefills
    }

    /// Resolves when the router says that it serves, that is, when it has seen the decode group. It needs
    /// [`Self::run`] beside it.
    pub fn ready(&self) -> impl Future<Output = Result<(), LocalError>> + Send + use<> {
        let router = reachable(self.grpc_addr());
        async move {
            let endpoint = Endpoint::from_shared(format!("http://{router}"))?;
            let mut health = HealthClient::new(endpoint.connect_lazy());
            loop {
                let response = health.check(HealthCheckRequest::default()).await;
                if response.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving) {
                    return Ok(());
                }
                tokio::time::sleep(READY_POLL).await;
            }
        }
    }

    /// Serves until `shutdown`, then drains: the router first, so that nobody is sent to a worker that leaves. A role
    /// that ends by itself ends all. Nothing of the cluster is left when it returns.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), LocalError> {
        let Self { coordinator, decode, prefills, router } = self;
        // Ending the roles is the cluster's affair from here on; the caller's token only says that it should.
        let router_shutdown = shutdown.child_token();
        let workers_shutdown = CancellationToken::new();
        let mut roles = JoinSet::<Ended>::new();
        let serving = router.serve(router_shutdown.clone());
        roles.spawn(async { (Role::Router, serving.await.map(drop).map_err(|error| error.to_string())) });
        let serving = decode.serve(workers_shutdown.clone());
        roles.spawn(async { (Role::Decode, serving.await.map(drop)) });
        for prefill in prefills {
            let serving = prefill.serve(Arc::clone(&coordinator), workers_shutdown.clone());
            roles.spawn(async { (Role::Prefill, serving.await.map(drop)) });
        }
        let mut outcome = Ok(());
        while let Some(ended) = roles.join_next().await {
            router_shutdown.cancel();
            // A role whose task was lost ends the workers too: it may have been the router.
            if !matches!(ended, Ok((Role::Decode | Role::Prefill, _))) {
                workers_shutdown.cancel();
            }
            outcome = outcome.and(end_of(ended));
        }
        outcome
    }
}

/// What the end of one role means.
fn end_of(ended: Result<Ended, JoinError>) -> Result<(), LocalError> {
    let (role, result) = ended?;
    result.map_err(|reason| LocalError::Ended { role, reason })
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Router => "the router",
            Self::Decode => "the decode group",
            Self::Prefill => "a prefill worker",
        })
    }
}

/// An address to dial: one that listens everywhere is reached on loopback.
pub fn reachable(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, v4.port()).into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, v6.port()).into(),
        _ => addr,
    }
}
