//! A process of a decode group as a service: its leader answers routers, every rank receives KV, and the group forms
//! again for as long as its processes live.
//!
//! A process hosts all ranks of a group as threads, or one rank. Both live by the same rules: registrations, epochs,
//! the announcement that the group serves. They differ in how ranks reach each other. Every rank has a listener of its
//! own in both, so that a hand-off addresses a rank the same way wherever it runs.

mod formation;
mod hosted;
mod leader;
pub mod ranks;
mod role;
mod settings;
#[cfg(feature = "simulation")]
pub mod simulation;
mod view;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use futures::future::select_all;
use longreach_cluster::{
    Backoff, Coordinator, DecodeRegistration, GroupId, KeyError, KeySpace, Registration, RegistrationState,
    superseded,
};
use longreach_engine::{
    BuildError, EngineConfig, EngineHandle, KvDoor, Model,
    serve::{BindError, Door, Drained, Gate},
};
use longreach_proto::worker::{decode_server, kv_server};
use longreach_service::{AdminBindError, Hold, ReadinessCell, config::Advertise};
use longreach_tls::Security;
use longreach_types::{Epoch, Incarnation};
use longreach_worker::{Introduction, Ops};
use tokio::{sync::watch, task::JoinHandle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use crate::{
    formation::Formation,
    hosted::Hosted,
    leader::Leader,
    view::{Fit, GroupView},
};
pub use crate::{formation::FormationConfig, role::run, settings::DecodeSettings};

/// How long a rank may need, beyond the bound of a collective, to come back from a life that is over. A step may have
/// just begun; and a process that was stopped and continued catches up first.
const STUCK_MARGIN: Duration = Duration::from_secs(5);

/// How long a process with a rank that does not end tries to take its registration with it.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(3);

/// What keeps a process from being ready while its group does not live.
const WITHOUT_GROUP: &str = "the group's other ranks";

/// The services of which health checks ask.
const SERVICE_NAMES: [&str; 2] = ["longreach.worker.v1.DecodeService", "longreach.worker.v1.KvService"];

/// Which ranks of the group a process hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosting {
    /// All, as threads. The leader listens at the configured address, the other ranks at free ports of its host.
    Whole,
    /// One. Rank 0 leads.
    Rank {
        /// Which.
        rank: usize,
        /// Where it listens for its peers; port 0 takes a free one.
        peer_addr: SocketAddr,
    },
}

/// The settings of a decode process.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    /// The group's name in the cluster.
    pub group_id: String,
    /// Which ranks this process hosts.
    pub hosting: Hosting,
    /// Where its services listen; port 0 takes a free one.
    pub addr: SocketAddr,
    /// What the cluster is told in place of `addr`; a process that listens everywhere needs it. Its host holds for the
    /// other listeners, too.
    pub advertise: Option<Advertise>,
    /// Where health and metrics are served over HTTP; nowhere unless set.
    pub http_addr: Option<SocketAddr>,
    /// Who may call its services. Operators' addresses and the links between ranks are never with TLS.
    pub security: Security,
    /// The engine; its shape is the group's.
    pub engine: EngineConfig,
    /// How the group comes together.
    pub formation: FormationConfig,
    /// How long a drain waits for sequences in flight. Longer finishes more of them; shorter ends sooner.
    pub drain_grace: Duration,
}

/// Why a decode process could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The address for peers is taken.
    #[error("cannot listen for peers on {addr}: {source}; choose another address, or end what holds it")]
    BindPeers {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The operators' address is taken.
    #[error(transparent)]
    AdminBind(#[from] AdminBindError),
    /// There is no such rank.
    #[error("rank {rank} of a group of {n_ranks}: ranks are 0 to {}", n_ranks - 1)]
    NoSuchRank {
        /// The configured rank.
        rank: usize,
        /// Ranks of the group.
        n_ranks: usize,
    },
    /// The model or the engine.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The group's name cannot be part of a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A task that loads the model was lost.
    #[error("loading the model: {0}")]
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

/// A decode process that is loaded and bound, and does not serve yet.
pub struct DecodeWorker {
    config: DecodeConfig,
    cluster: Cluster,
    fit: Fit,
    max_seq_len: usize,
    members: Vec<DecodeRegistration>,
    doors: Vec<Door>,
    hosted: Hosted,
    weight_bytes: Vec<usize>,
    life: watch::Sender<Option<EngineHandle>>,
    is_serving: watch::Sender<bool>,
    ops: Ops,
}

impl DecodeConfig {
    /// A group as one process on a free port of loopback, with all defaults.
    pub fn new(group_id: impl Into<String>, engine: EngineConfig) -> Self {
        Self {
            group_id: group_id.into(),
            hosting: Hosting::Whole,
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            http_addr: None,
            security: Security::Plaintext,
            engine,
            formation: FormationConfig::default(),
            drain_grace: Duration::from_secs(60),
        }
    }

    /// Binds, and loads every hosted rank. `progress` is called with layers done and in all.
    pub async fn build(
        self,
        model: &Model,
        cluster: Cluster,
        progress: impl Fn(usize, usize) + Send + Sync + 'static,
    ) -> Result<DecodeWorker, StartError> {
        let (ranks, group) = (self.ranks()?, GroupId(self.group_id.clone()));
        let _is_a_name = cluster.keys.group(&group)?;
        let max_seq_len = model.max_seq_len(&self.engine)?;
        let layout_hash = model.layout_hash(&self.engine);
        let listener = self.listen_for_peers()?;
        let peer_addr = match &listener {
            Some((_, addr)) => self.beside(*addr),
            // Threads of one process find each other without addresses.
            None => String::new(),
        };
        let (mut doors, mut members) = (Vec::new(), Vec::new());
        for rank in ranks {
            let port = if doors.is_empty() { self.addr.port() } else { 0 };
            let door = Door::open(SocketAddr::new(self.addr.ip(), port), self.security.clone()).await?;
            let authority = match doors.is_empty() {
                true => Advertise::authority(self.advertise.as_ref(), door.addr),
                false => self.beside(door.addr),
            };
            members.push(DecodeRegistration {
                id: DecodeRegistration::id_of(&group, rank),
                incarnation: Default::default(),
                rank,
                n_ranks: self.engine.shape.n_ranks(),
                dcp_size: self.engine.shape.dcp_size(),
                endpoint: format!("{}://{authority}", self.security.scheme()),
                peer_addr: peer_addr.clone(),
                layout_hash: layout_hash.clone(),
            });
            doors.push(door);
        }
        let (loading, config) = (model.clone(), self.engine.clone());
        let one = listener.map(|(listener, _)| (members[0].rank, listener));
        let means = (self.formation.connect_timeout, self.security.clone());
        let load = move || Hosted::load(&loading, &config, one, means, &progress);
        let ops = Ops::open("decode", self.http_addr).await?;
        let life = watch::Sender::new(None::<EngineHandle>);
        let current = life.subscribe();
        ops.register_engine(move || current.borrow().as_ref().map(EngineHandle::info));
        let hosted = tokio::task::spawn_blocking(load).await??;
        Ok(DecodeWorker {
            fit: Fit { shape: self.engine.shape, layout_hash },
            config: self,
            cluster,
            max_seq_len,
            members,
            doors,
            weight_bytes: hosted.weight_bytes(),
            hosted,
            life,
            is_serving: watch::Sender::new(false),
            ops,
        })
    }

    /// The ranks that the process hosts.
    fn ranks(&self) -> Result<Range<usize>, StartError> {
        let n_ranks = self.engine.shape.n_ranks();
        match self.hosting {
            Hosting::Whole => Ok(0..n_ranks),
            Hosting::Rank { rank, .. } if rank < n_ranks => Ok(rank..rank + 1),
            Hosting::Rank { rank, .. } => Err(StartError::NoSuchRank { rank, n_ranks }),
        }
    }

    fn listen_for_peers(&self) -> Result<Option<(TcpListener, SocketAddr)>, StartError> {
        let Hosting::Rank { peer_addr: addr, .. } = self.hosting else { return Ok(None) };
        let bound = TcpListener::bind(addr).and_then(|listener| {
            let addr = listener.local_addr()?;
            Ok((listener, addr))
        });
        bound.map(Some).map_err(|source| StartError::BindPeers { addr, source })
    }

    /// How others dial a further listener of this process.
    fn beside(&self, addr: SocketAddr) -> String {
        Advertise::authority(self.advertise.as_ref().map(Advertise::without_port).as_ref(), addr)
    }
}

impl DecodeWorker {
    /// Where the services of the first hosted rank are, `http://host:port`. Where that is rank 0, routers ask here.
    pub fn endpoint(&self) -> &str {
        &self.members[0].endpoint
    }

    /// The engine of the group's current life, on the process that leads it.
    pub fn life(&self) -> watch::Receiver<Option<EngineHandle>> {
        self.life.subscribe()
    }

    /// Whether the group lives and this process has its part in it.
    pub fn is_serving(&self) -> watch::Receiver<bool> {
        self.is_serving.subscribe()
    }

    /// Where operators ask over HTTP.
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.ops.http_addr()
    }

    /// Bytes of packed weights of each hosted rank.
    pub fn weight_bytes(&self) -> &[usize] {
        &self.weight_bytes
    }

    /// The longest sequence.
    pub fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// Serves until `shutdown`, then drains: out of the cluster, no new work, what is in flight handed over or finished
    /// within the grace, then the end. Nothing of the process's part is left when it returns, unless a rank does not come
    /// back from a step.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<Drained, String> {
        let Self { config, cluster, fit, members, doors, hosted, life, is_serving, ops, .. } = self;
        let (tasks, leave, close) = (TaskTracker::new(), CancellationToken::new(), CancellationToken::new());
        let gate = Gate::default();
        let leads = members.first().is_some_and(|member| member.rank == 0);
        let introduction = Introduction::default();
        let leader = leads.then(|| {
            Leader::new(life.subscribe(), config.group_id.clone(), gate.clone(), introduction.clone())
        });
        let readiness = ops.readiness.clone();
        // Before anybody is told that the process has started.
        let hold = readiness.hold(WITHOUT_GROUP);
        let lives = (is_serving.subscribe(), life.subscribe());
        let holding = hold_without_group((readiness.clone(), hold), lives, introduction);
        tasks.spawn(close.clone().run_until_cancelled_owned(holding));
        readiness.started();
        let servers =
            start_servers(doors.into_iter().zip(hosted.doors()), (leader, ops), &tasks, &close).await;
        let group = GroupId(config.group_id.clone());
        let registrations = enlist(&tasks, &cluster, (&group, &members), (config.formation, &leave))
            .map_err(|error| format!("registering: {error}"))?;
        let backoff = Backoff::of(members.first().map_or("", |member| &member.id.0));
        let view = follow_view(&tasks, &cluster, (&group, &fit), (&backoff, &close));
        let formation = Formation {
            cluster,
            group,
            fit,
            ranks: hosted,
            drain_grace: config.drain_grace,
            stuck_timeout: config.engine.comm.timeout + STUCK_MARGIN,
            view,
            registrations,
            life,
            is_serving,
            backoff,
            seen: Epoch(0),
        };
        let end = shutdown.child_token();
        let states = formation.registrations.values().cloned().collect();
        let rival = tasks.spawn(rival_or_end(states, (readiness, gate), end.clone()));
        let drained = formation.run(&end, &leave).await;
        leave.cancel();
        close.cancel();
        tasks.close();
        let drained = match drained {
            Ok(drained) => drained,
            Err(stuck) => {
                end.cancel();
                // Not for longer: calls may hang on the rank as well.
                let _farewell = timeout(FAREWELL_TIMEOUT, tasks.wait()).await;
                return Err(stuck.to_string());
            }
        };
        let mut outcome = Ok(());
        for server in servers {
            outcome = outcome.and(server.await.map_err(|error| error.to_string()).and_then(|result| result));
        }
        // The formation ends with `end` only, so the task that waits for it has ended too.
        tasks.wait().await;
        if let Ok(Some(by)) = rival.await {
            return Err(format!(
                "another process took a rank's name, as incarnation {by}: a rank has one process"
            ));
        }
        outcome.map(|()| drained)
    }
}

/// Waits for `end`, or for another process that has taken a rank's name over, which then is the end. From then on no new
/// work is taken.
async fn rival_or_end(
    states: Vec<watch::Receiver<RegistrationState>>,
    (readiness, gate): (ReadinessCell, Gate),
    end: CancellationToken,
) -> Option<Incarnation> {
    let rivals: Vec<_> = states.into_iter().map(superseded).map(Box::pin).collect();
    // Both arms only wait.
    let rival = tokio::select! {
        () = end.cancelled() => None,
        (by, ..) = select_all(rivals) => Some(by),
    };
    readiness.draining();
    gate.close();
    end.cancel();
    rival
}

/// Serves at every door until `close`. What is asked of the process, it is asked at its first rank's door.
async fn start_servers(
    doors: impl Iterator<Item = (Door, &KvDoor)>,
    (leader, ops): (Option<Leader>, Ops),
    tasks: &TaskTracker,
    close: &CancellationToken,
) -> Vec<JoinHandle<Result<(), String>>> {
    let (mut first, mut servers) = (Some((leader, ops)), Vec::new());
    for (door, kv_door) in doors {
        let mut routes = Routes::new(kv_server(Arc::new(kv_door.clone())));
        if let Some((leader, ops)) = first.take() {
            if let Some(leader) = leader {
                routes = routes.add_service(decode_server(Arc::new(leader)));
            }
            routes = ops.start(routes, &SERVICE_NAMES, tasks, close).await;
        }
        let close = close.clone();
        let serving = async move { door.serve(routes, close).await.map_err(|error| error.to_string()) };
        servers.push(tasks.spawn(serving));
    }
    servers
}

/// Registers every hosted rank until `leave`.
fn enlist(
    tasks: &TaskTracker,
    cluster: &Cluster,
    (group, members): (&GroupId, &[DecodeRegistration]),
    (formation, leave): (FormationConfig, &CancellationToken),
) -> io::Result<BTreeMap<usize, watch::Receiver<RegistrationState>>> {
    let mut states = BTreeMap::new();
    for member in members {
        let spec = member.clone().spec(&cluster.keys, group, formation.lease_ttl);
        let spec = spec.expect("the group's name was part of a key when its worker was built");
        let registration = Registration::spawn(&cluster.coordinator, spec)?;
        states.insert(member.rank, registration.state());
        tasks.spawn(registration.until(leave.clone()));
    }
    Ok(states)
}

/// Keeps a view of the cluster until `close`.
fn follow_view(
    tasks: &TaskTracker,
    cluster: &Cluster,
    (group, fit): (&GroupId, &Fit),
    (backoff, close): (&Backoff, &CancellationToken),
) -> watch::Receiver<GroupView> {
    let (view_in, view) = watch::channel(GroupView::default());
    let Cluster { coordinator, keys } = cluster.clone();
    let following = view::follow(coordinator, keys, (group.clone(), fit.clone()), (view_in, backoff.clone()));
    tasks.spawn(close.clone().run_until_cancelled_owned(following));
    view
}

/// Keeps the process from being ready while its group does not live.
async fn hold_without_group(
    (readiness, hold): (ReadinessCell, Hold),
    (mut is_serving, life): (watch::Receiver<bool>, watch::Receiver<Option<EngineHandle>>),
    introduction: Introduction,
) {
    let mut hold = Some(hold);
    loop {
        let serves = *is_serving.borrow_and_update();
        if serves && hold.is_some() {
            // Only the process that leads is asked by routers.
            let epoch = life.borrow().as_ref().map(|engine| engine.info().epoch);
            if let Some(epoch) = epoch {
                introduction.made(epoch).await;
            }
            if *is_serving.borrow() {
                hold = None;
            }
        } else if !serves && hold.is_none() {
            hold = Some(readiness.hold(WITHOUT_GROUP));
        }
        if is_serving.changed().await.is_err() {
            return;
        }
    }
}
