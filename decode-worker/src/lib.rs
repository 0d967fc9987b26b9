//! A decode group as a service: its leader answers routers, every rank receives KV, and the cluster hears when the
//! group is ready.
//!
//! The ranks here are threads of one process, each with its own listener, so that a hand-off addresses a rank the same
//! way wherever it runs.

mod leader;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach_cluster::{
    Backoff, Coordinator, DecodeRegistration, EpochError, EpochRecord, GroupId, Key, KeyError, KeySpace,
    ReadyRecord, Record, RegistrationSpec, RegistrationState, publish_ready, raise_epoch, register,
};
use longreach_engine::{
    BuildError, DecodeGroup, EngineConfig, EngineHandle, Model, RunningEngine,
    process::random_secret,
    serve::{BindError, Door, Drained, Gate, drain},
};
use longreach_proto::worker::{decode_server, kv_server};
use longreach_types::{Epoch, WorkerId};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;
use tracing::{info, warn};

use crate::leader::Leader;

/// Time of a registration's lease.
const LEASE_TTL: Duration = Duration::from_secs(30);

/// A decode group's settings.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    /// The group's name in the cluster.
    pub group_id: String,
    /// Where the leader listens; port 0 takes a free one. The other ranks take free ports of the same host.
    pub addr: SocketAddr,
    /// The engine; its shape is the group's.
    pub engine: EngineConfig,
    /// How long a drain waits for sequences in flight. Longer finishes more of them; shorter ends sooner.
    pub drain_grace: Duration,
}

/// Why a decode group could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The model or the engine.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The cluster's store.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// The group's name cannot be part of a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The system gave no random bytes for the group's secret.
    #[error("cannot make the group's secret: {0}")]
    Secret(#[from] std::io::Error),
    /// A task that builds the group was lost.
    #[error("building the group: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// The cluster a worker belongs to.
#[derive(Clone)]
pub struct Cluster {
    /// Its store.
    pub coordinator: Arc<dyn Coordinator>,
    /// Its keys there.
    pub keys: KeySpace,
}

/// A decode group that is loaded and runs, and does not serve yet.
pub struct DecodeWorker {
    config: DecodeConfig,
    cluster: Cluster,
    record: EpochRecord,
    doors: Vec<Door>,
    routes: Vec<Routes>,
    engine: RunningEngine,
    gate: Gate,
    weight_bytes: Vec<usize>,
}

impl DecodeConfig {
    /// Binds, begins the group's next epoch, loads every rank and starts the engine.
    pub async fn build(
        self,
        model: &Model,
        cluster: Cluster,
        progress: impl Fn(usize, usize) + Send + Sync + 'static,
    ) -> Result<DecodeWorker, StartError> {
        let mut doors = Vec::new();
        for rank in 0..self.engine.shape.n_ranks() {
            let port = if rank == 0 { self.addr.port() } else { 0 };
            doors.push(Door::open(SocketAddr::new(self.addr.ip(), port)).await?);
        }
        let group = GroupId(self.group_id.clone());
        let layout_hash = model.layout_hash(&self.engine);
        let members: Vec<_> = doors
            .iter()
            .enumerate()
            .map(|(rank, door)| DecodeRegistration {
                id: WorkerId(format!("{}-{rank}", self.group_id)),
                incarnation: Default::default(),
                rank,
                n_ranks: self.engine.shape.n_ranks(),
                dcp_size: self.engine.shape.dcp_size(),
                endpoint: door.endpoint(),
                // Threads of one process find each other without addresses.
                peer_addr: String::new(),
                layout_hash: layout_hash.clone(),
            })
            .collect();
        let secret = random_secret()?;
        let make = |epoch: Epoch| EpochRecord { epoch, secret, members };
        let record = raise_epoch(&*cluster.coordinator, &cluster.keys, &group, make).await?;
        let (loading, config, epoch) = (model.clone(), self.engine.clone(), record.epoch);
        let load = move || DecodeGroup::load(&loading, &config, epoch, &progress);
        let ranks = tokio::task::spawn_blocking(load).await??;
        let (inlets, weight_bytes) = (ranks.inlets(), ranks.weight_bytes());
        let engine = ranks.start(doors.iter().map(Door::endpoint).collect(), &Handle::current())?;
        let gate = Gate::default();
        let leader = Leader::new(engine.handle.clone(), self.group_id.clone(), gate.clone());
        let leader = decode_server(Arc::new(leader));
        let mut routes: Vec<_> =
            inlets.into_iter().map(|inlet| Routes::new(kv_server(Arc::new(inlet)))).collect();
        if let Some(first) = routes.first_mut() {
            *first = std::mem::take(first).add_service(leader);
        }
        Ok(DecodeWorker { config: self, cluster, record, doors, routes, engine, gate, weight_bytes })
    }
}

impl DecodeWorker {
    /// Where the leader is, `http://host:port`.
    pub fn endpoint(&self) -> String {
        self.doors[0].endpoint()
    }

    /// The group's engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine.handle
    }

    /// Bytes of packed weights of each rank.
    pub fn weight_bytes(&self) -> &[usize] {
        &self.weight_bytes
    }

    /// Serves until `shutdown`, then drains: out of the cluster, no new work, what is in flight finished within the
    /// grace, then the end. Nothing of the group is left when it returns.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<Drained, String> {
        let Self { config, cluster, record, doors, routes, engine, gate, .. } = self;
        let (tasks, leave, close) = (TaskTracker::new(), CancellationToken::new(), CancellationToken::new());
        let leader_endpoint = doors[0].endpoint();
        let servers = doors.into_iter().zip(routes).map(|(door, routes)| {
            let close = close.clone();
            tasks.spawn(async move { door.serve(routes, close).await.map_err(|error| error.to_string()) })
        });
        let servers: Vec<_> = servers.collect();
        let ready = ReadyRecord {
            epoch: record.epoch,
            endpoint: leader_endpoint,
            n_ranks: config.engine.shape.n_ranks(),
            dcp_size: config.engine.shape.dcp_size(),
            layout_hash: record.members[0].layout_hash.clone(),
        };
        enlist(&tasks, &cluster, &config.group_id, (&record, ready), &leave);

        // Both arms only wait. A failed engine has ended its epoch: the group leaves at once.
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
        let mut outcome = failure.map_or(stopped, Err);
        for server in servers {
            outcome = outcome.and(server.await.map_err(|error| error.to_string()).and_then(|result| result));
        }
        tasks.wait().await;
        outcome.map(|()| drained)
    }
}

/// Registers every rank, and says that the group is ready under the leader's lease, as often as that is renewed.
fn enlist(
    tasks: &TaskTracker,
    cluster: &Cluster,
    group_id: &str,
    (record, ready): (&EpochRecord, ReadyRecord),
    leave: &CancellationToken,
) {
    let group = GroupId(group_id.to_owned());
    let mut leader_state = None;
    for member in &record.members {
        let key = Key::Rank { group: group.clone(), rank: member.rank };
        let Ok(key) = cluster.keys.encode(&key) else { continue };
        let member = member.clone();
        let value = move |incarnation| DecodeRegistration { incarnation, ..member.clone() }.encode();
        let spec = RegistrationSpec { key, value, ttl: LEASE_TTL, backoff: Backoff::default() };
        let (state_in, state) = watch::channel(RegistrationState::default());
        leader_state.get_or_insert(state);
        tasks.spawn(register(Arc::clone(&cluster.coordinator), spec, state_in, leave.clone()));
    }
    let Some(mut state) = leader_state else { return };
    let (cluster, leave) = (cluster.clone(), leave.clone());
    tasks.spawn(async move {
        while let Some(Ok(())) = leave.run_until_cancelled(state.changed()).await {
            let RegistrationState::Registered { lease, .. } = *state.borrow_and_update() else { continue };
            match publish_ready(&*cluster.coordinator, &cluster.keys, (&group, &ready), lease).await {
                Ok(_) => info!(group = group.0, epoch = %ready.epoch, "group is ready"),
                Err(error) => warn!(group = group.0, %error, "group could not be announced"),
            }
        }
    });
}
