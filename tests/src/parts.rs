//! A cluster whose parts are started and drained one by one, as an orchestrator does it, in one process.
//!
//! Parts find each other by their registrations in a store in memory, and speak over loopback: ranks of one group join
//! over TCP as they do between processes. What a part cannot do here is die: for that there are processes.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach::certs::MadeCerts;
use longreach_cluster::{Coordinator, KeySpace, MemoryCoordinator};
use longreach_decode::{Cluster, DecodeConfig, FormationConfig, Hosting};
use longreach_engine::{EngineConfig, EngineHandle};
use longreach_prefill::PrefillConfig;
use longreach_proto::inference::inference_service_client::InferenceServiceClient;
use longreach_router::{RouterConfig, WorkerSource};
use longreach_tls::{Role, Security};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    cluster::{PATIENCE, http::HttpClient, model::ServedModel},
    tiny::Error,
};

/// Parts listen on free ports of this machine only.
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Name of the cluster, in its store and in certificates.
pub const CLUSTER_NAME: &str = "parts";

/// Leases are renewed at half of this, so their loss is noticed soon.
const LEASE_TTL: Duration = Duration::from_secs(2);

/// How long a part that drains lets its work finish.
const GRACE: Duration = Duration::from_secs(30);

/// A cluster to which parts are added.
pub struct Parts {
    model: ServedModel,
    cluster: Cluster,
    /// The store in which parts find each other.
    pub store: Arc<MemoryCoordinator>,
    /// With which the parts speak to each other, if it is with TLS.
    certs: Option<MadeCerts>,
    tasks: TaskTracker,
}

/// A part that serves.
pub struct Part {
    shutdown: CancellationToken,
    serving: JoinHandle<Result<(), String>>,
}

/// A process of a decode group.
pub struct RankPart {
    /// The part.
    pub part: Part,
    /// The engine of the group's current life, if this part leads it.
    pub life: watch::Receiver<Option<EngineHandle>>,
    /// Whether the part has its place in a living group.
    pub is_serving: watch::Receiver<bool>,
    /// Its services.
    pub endpoint: String,
}

/// A router.
pub struct RouterPart {
    /// The part.
    pub part: Part,
    /// For HTTP requests.
    pub http: HttpClient,
    channel: Channel,
}

impl Parts {
    /// An empty cluster that will serve `model`.
    pub fn new(model: ServedModel) -> Result<Self, Error> {
        let store = Arc::new(MemoryCoordinator::default());
        let coordinator: Arc<dyn Coordinator> = Arc::clone(&store) as _;
        let cluster = Cluster { coordinator, keys: KeySpace::new(CLUSTER_NAME)? };
        Ok(Self { model, cluster, store, certs: None, tasks: TaskTracker::new() })
    }

    /// The same, with TLS between the parts; `certs` are for a cluster of [`CLUSTER_NAME`].
    pub fn with_certs(model: ServedModel, certs: MadeCerts) -> Result<Self, Error> {
        Ok(Self { certs: Some(certs), ..Self::new(model)? })
    }

    fn security(&self, role: Role) -> Result<Security, Error> {
        let files = self.certs.as_ref().map(|certs| certs.files(role));
        Ok(Security::load(files.as_ref(), CLUSTER_NAME, role)?)
    }

    fn part(
        &self,
        shutdown: CancellationToken,
        serving: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> Part {
        Part { shutdown, serving: self.tasks.spawn(serving) }
    }

    /// Rank `rank` of a group, as a process of its own.
    pub async fn rank(&self, group: &str, rank: usize, engine: EngineConfig) -> Result<RankPart, Error> {
        let config = DecodeConfig {
            group_id: group.to_owned(),
            hosting: Hosting::Rank { rank, peer_addr: LOOPBACK },
            addr: LOOPBACK,
            advertise: None,
            http_addr: None,
            security: self.security(Role::Decode)?,
            engine,
            formation: FormationConfig { lease_ttl: LEASE_TTL, ..FormationConfig::default() },
            drain_grace: GRACE,
        };
        let worker = config.build(&self.model.model, self.cluster.clone(), |_, _| {}).await?;
        let (life, is_serving, shutdown) = (worker.life(), worker.is_serving(), CancellationToken::new());
        let endpoint = worker.endpoint().to_owned();
        let serving = worker.serve(shutdown.clone());
        let part = self.part(shutdown, async { serving.await.map(drop) });
        Ok(RankPart { part, life, is_serving, endpoint })
    }

    /// A prefill worker.
    pub async fn prefill(&self, name: &str, engine: EngineConfig) -> Result<Part, Error> {
        Ok(self.prefill_as(self.security(Role::Prefill)?, name, engine).await?.0)
    }

    /// A prefill worker that shows other certificates than the cluster's, and its engine.
    pub async fn prefill_as(
        &self,
        security: Security,
        name: &str,
        engine: EngineConfig,
    ) -> Result<(Part, EngineHandle), Error> {
        let config = PrefillConfig {
            worker_id: name.to_owned(),
            addr: LOOPBACK,
            advertise: None,
            http_addr: None,
            security,
            engine,
            lease_ttl: LEASE_TTL,
            drain_grace: GRACE,
        };
        let worker = config.build(&self.model.model, &self.cluster.keys, |_, _| {}).await?;
        let (handle, shutdown) = (worker.engine().clone(), CancellationToken::new());
        let serving = worker.serve(Arc::clone(&self.cluster.coordinator), shutdown.clone());
        Ok((self.part(shutdown, async { serving.await.map(drop) }), handle))
    }

    /// A router.
    pub async fn router(&self) -> Result<RouterPart, Error> {
        let mut config = RouterConfig::new(self.model.name.clone());
        (config.grpc_addr, config.http_addr) = (LOOPBACK, LOOPBACK);
        config.workers.poll_interval = Duration::from_millis(20);
        config.serving.drain_notice = Duration::ZERO;
        config.security = self.security(Role::Router)?;
        let Cluster { coordinator, keys } = self.cluster.clone();
        let source = WorkerSource::Cluster { coordinator, keys };
        let router = config.build(source, self.model.text.clone())?.bind().await?;
        let endpoint = Endpoint::from_shared(format!("http://{}", router.grpc_addr()))?;
        let http = HttpClient::new(router.http_addr());
        let shutdown = CancellationToken::new();
        let serving = router.serve(shutdown.clone());
        let part = self.part(shutdown, async { serving.await.map(drop).map_err(|error| error.to_string()) });
        Ok(RouterPart { part, http, channel: endpoint.tcp_nodelay(true).connect_lazy() })
    }
}

impl Part {
    /// Drains, as on SIGTERM, and waits for the end.
    pub async fn drain(self) -> Result<(), Error> {
        self.shutdown.cancel();
        Ok(self.ended().await??)
    }

    /// Waits until the part ends by itself, and says how.
    pub async fn ended(self) -> Result<Result<(), String>, Error> {
        Ok(tokio::time::timeout(PATIENCE, self.serving).await??)
    }
}

impl RankPart {
    /// Waits until the part has its place in a living group.
    pub async fn serves(&mut self) -> Result<(), Error> {
        tokio::time::timeout(PATIENCE, self.is_serving.wait_for(|is_serving| *is_serving)).await??;
        Ok(())
    }

    /// What the part answers to a health check, as a whole.
    pub async fn health(&self) -> Result<ServingStatus, Error> {
        let channel = Endpoint::from_shared(self.endpoint.clone())?.connect_lazy();
        let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await?;
        Ok(answer.into_inner().status())
    }
}

impl RouterPart {
    /// A client. All share one connection.
    pub fn inference(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone())
    }

    /// The router's metric `name`.
    pub async fn metric(&self, name: &str) -> Result<f64, Error> {
        let text = self.http.get("/metrics").await?.text().await?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)).ok_or("no such metric")?;
        Ok(line.trim().parse()?)
    }
}
