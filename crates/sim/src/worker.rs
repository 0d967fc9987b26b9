//! The processes of workers, from boot to death. A process of a decode group is the product's: its registrations, its view
//! and its part in the lives of the group; what it hosts are simulated ranks.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use longreach_cluster::{
    DecodeRegistration, GroupId, KeySpace, PrefillRegistration, RegistrationSpec, RegistrationState, register,
};
use longreach_decode::{
    Cluster,
    simulation::{Drained, SimProcess},
};
use longreach_engine::{
    EngineHandle, KvInlet,
    core::{Core, CoreParts, EngineSetup},
    inlet::{Deliveries, InletIdentity},
    serve::drain,
};
use longreach_proto::worker::RankTarget;
use longreach_sched::Scheduler;
use longreach_types::{Epoch, GroupShape, Incarnation, WorkerId};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    engine::{Engine, FollowerEvent, Followers, Part, Seen},
    host::{Session, SimRanks},
    lane::SimTransport,
    model::{EOS, VOCAB_SIZE},
    net::{Death, NodeId},
    rank::{Rank, RankFace, kv_shape},
    rng::Rng,
    store::SimStore,
    world::World,
};

/// What every worker says of its KV.
const LAYOUT_HASH: &str = "layout";

/// Submissions that may wait for an engine.
const INTAKE_LEN: usize = 256;

/// How long a process that drains waits for its sequences.
const DRAIN_GRACE: Duration = Duration::from_secs(5);

/// How long a drain may take beyond its grace: the store may not answer, and a rank may not come back.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);

/// How long a process may be late to find that its rank is stuck, beyond the bound of a collective.
const STUCK_MARGIN: Duration = Duration::from_secs(2);

/// How long an orchestrator takes to start a process that has ended again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// One decode group and its processes.
#[derive(Clone)]
pub(crate) struct Group {
    pub(crate) id: GroupId,
    /// By rank; all the same where ranks are threads of one process.
    pub(crate) nodes: Vec<NodeId>,
    /// Where each rank is called.
    pub(crate) listeners: Arc<Vec<Mutex<Option<mpsc::Sender<Session>>>>>,
    /// Where the secrets of its lives come from.
    pub(crate) secrets: Arc<Mutex<Rng>>,
    pub(crate) rank_faces: Vec<RankFace>,
}

/// One prefill worker.
#[derive(Clone)]
pub(crate) struct Prefill {
    pub(crate) idx: usize,
    pub(crate) id: WorkerId,
    pub(crate) node: NodeId,
}

/// What a rank of a worker needs to run an engine for one life.
pub(crate) struct Life {
    pub(crate) name: String,
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) n_ranks: usize,
    pub(crate) nonce: u64,
    pub(crate) targets: Vec<RankTarget>,
    pub(crate) rank_face: RankFace,
    pub(crate) deliveries: Deliveries,
    pub(crate) followers: Followers,
    pub(crate) words: mpsc::Receiver<(usize, FollowerEvent)>,
    pub(crate) parts: mpsc::Receiver<Part>,
}

/// A worker's process, as whoever started it sees it.
#[derive(Clone, Default)]
pub(crate) struct Process {
    /// Asks it to drain.
    pub(crate) shutdown: CancellationToken,
    /// Takes it out of the membership.
    pub(crate) leave: CancellationToken,
    /// How its drain ended.
    drained: Arc<OnceLock<Drained>>,
    ended: CancellationToken,
    /// The lives as which its ranks were registered, or tried to be.
    incarnations: Arc<Mutex<BTreeSet<(usize, Incarnation)>>>,
}

impl Process {
    fn incarnations(&self) -> MutexGuard<'_, BTreeSet<(usize, Incarnation)>> {
        self.incarnations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note that it has ended, however it did.
    pub(crate) fn end(&self) {
        self.ended.cancel();
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.drained, &other.drained)
    }

    /// Whether it was this life of `rank`.
    pub(crate) fn was(&self, rank: usize, incarnation: Incarnation) -> bool {
        self.incarnations().contains(&(rank, incarnation))
    }
}

impl Prefill {
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.id)
    }
}

impl Group {
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.id)
    }

    /// Where a rank's services are; the leader is found there, too.
    pub(crate) fn rank_endpoint(&self, rank: usize) -> String {
        if rank == 0 { self.endpoint() } else { format!("http://{}-{rank}", self.id) }
    }

    pub(crate) fn rank_name(&self, rank: usize) -> String {
        format!("{}-{rank}", self.id)
    }
}

impl World {
    /// Starts what runs on `node`, unless it runs.
    pub(crate) fn boot_worker(self: &Arc<Self>, node: NodeId) {
        if self.retired().contains(&node) || !self.net.boot(node) {
            return;
        }
        self.journal.note(format_args!("{} boots", self.net.name(node)));
        self.services.set_draining(node, false);
        let process = Process::default();
        self.processes().insert(node, process.clone());
        for prefill in self.prefills.iter().filter(|prefill| prefill.node == node) {
            let (world, prefill, process) = (Arc::clone(self), prefill.clone(), process.clone());
            self.net.spawn_on(node, async move { world.run_prefill(prefill, process).await });
        }
        for group in self.groups.clone() {
            let mut ranks = (0..group.nodes.len()).filter(|&rank| group.nodes[rank] == node);
            let Some(first) = ranks.next() else { continue };
            let hosted = first..ranks.next_back().unwrap_or(first) + 1;
            let (world, process) = (Arc::clone(self), process.clone());
            self.net.spawn_on(node, async move { world.run_member(group, hosted, process).await });
        }
    }

    pub(crate) fn store(&self, node: NodeId) -> Arc<SimStore> {
        let odds = self.scenario.lost_permille;
        Arc::new(SimStore::new(self.host.clone(), self.net.clone(), node, self.journal.clone(), odds))
    }

    /// Keeps a worker registered until its process leaves; gives the state of that.
    fn enlist<F>(
        &self,
        node: NodeId,
        process: &Process,
        spec: RegistrationSpec<F>,
    ) -> watch::Receiver<RegistrationState>
    where
        F: Fn(Incarnation) -> Vec<u8> + Send + Sync + 'static,
    {
        let (state_in, state) = watch::channel(RegistrationState::default());
        self.registrations().insert(spec.key.clone(), state.clone());
        self.net.spawn_on(node, register(self.store(node), spec, state_in, process.leave.clone()));
        state
    }

    async fn run_prefill(self: Arc<Self>, prefill: Prefill, process: Process) {
        let endpoint = prefill.endpoint();
        let Prefill { idx, id, node } = prefill;
        let name = id.0.clone();
        let (incarnation, layout_hash) = (Incarnation::default(), LAYOUT_HASH.to_owned());
        let member = PrefillRegistration { id, incarnation, endpoint: endpoint.clone(), layout_hash };
        let spec = member.spec(&self.keys, self.scenario.shape.lease_ttl);
        let _state = self.enlist(node, &process, spec.expect("names of the simulation are valid"));
        // Nobody pushes KV to a prefill worker, and it has no followers.
        let (_, deliveries) = self.inlet(0, 1, Epoch(0));
        let (engine, handle) = self.engine(Life {
            name,
            node,
            epoch: Epoch(0),
            n_ranks: 1,
            nonce: (idx as u64 + 1) << 40,
            targets: Vec::new(),
            rank_face: RankFace::default(),
            deliveries,
            followers: Followers::default(),
            words: mpsc::channel(1).1,
            parts: mpsc::channel(1).1,
        });
        let (_life_in, life) = watch::channel(Some(handle));
        self.services.set_engine(&endpoint, node, life);
        let failure = engine.run().await;
        self.journal.violation(format!("a prefill engine failed: {failure}"));
    }

    /// The process of one rank, or of all ranks of a group, until it drains or cannot go on.
    async fn run_member(self: Arc<Self>, group: Group, hosted: Range<usize>, process: Process) {
        let node = group.nodes[hosted.start];
        let registrations: BTreeMap<_, _> =
            hosted.clone().map(|rank| (rank, self.enlist_rank(&group, rank, &process))).collect();
        let (life_in, life) = watch::channel(None);
        if hosted.start == 0 {
            self.services.set_engine(&group.endpoint(), node, life);
        }
        let n_ranks = group.nodes.len();
        let member = SimProcess {
            cluster: Cluster { coordinator: self.store(node), keys: self.keys.clone() },
            group: group.id.clone(),
            shape: GroupShape::new(n_ranks, n_ranks).expect("every group has ranks"),
            layout_hash: LAYOUT_HASH.to_owned(),
            ranks: SimRanks::new(Arc::clone(&self), group.clone(), hosted, process.clone()),
            registrations: registrations.clone(),
            drain_grace: DRAIN_GRACE,
            stuck_timeout: self.stuck_timeout(),
        };
        match member.live(life_in, &process.shutdown, &process.leave).await {
            Ok(drained) => {
                if !process.shutdown.is_cancelled() {
                    self.journal.violation(format!("{} drains unasked", self.net.name(node)));
                }
                process.leave.cancel();
                for mut state in registrations.into_values() {
                    let _left = state.wait_for(|state| *state == RegistrationState::Left).await;
                }
                let _once = process.drained.set(drained);
                process.end();
            }
            Err(stuck) => {
                // One that stood still finds its time over, whatever it may still do.
                let expected =
                    self.net.is_stuck(node) || !self.net.was_calm(&[node], Instant::now() - stuck.after);
                if !expected {
                    self.journal.violation(format!("{} without reason: {stuck}", self.net.name(node)));
                }
                self.journal.count("process with a stuck rank ended");
                let world = Arc::clone(&self);
                self.net.spawn(async move {
                    world.kill_worker(node, Death::Killed);
                    sleep(RESTART_PAUSE).await;
                    world.boot_worker(node);
                });
            }
        }
    }

    /// How long a rank whose peers have left may not come back.
    pub(crate) fn stuck_timeout(&self) -> Duration {
        self.scenario.shape.watchdog + STUCK_MARGIN
    }

    fn enlist_rank(
        &self,
        group: &Group,
        rank: usize,
        process: &Process,
    ) -> watch::Receiver<RegistrationState> {
        let shape = &self.scenario.shape;
        let member = DecodeRegistration {
            id: DecodeRegistration::id_of(&group.id, rank),
            incarnation: Incarnation::default(),
            rank,
            n_ranks: shape.n_ranks,
            dcp_size: shape.n_ranks,
            endpoint: group.rank_endpoint(rank),
            peer_addr: String::new(),
            layout_hash: LAYOUT_HASH.to_owned(),
        };
        let spec = member.spec(&self.keys, &group.id, shape.lease_ttl);
        let RegistrationSpec { key, value, ttl, backoff } = spec.expect("names of the simulation are valid");
        let lives = process.clone();
        let value = move |incarnation| {
            lives.incarnations().insert((rank, incarnation));
            value(incarnation)
        };
        self.enlist(group.nodes[rank], process, RegistrationSpec { key, value, ttl, backoff })
    }

    /// Drains the process on `node` and ends it. Whether everything in flight was finished.
    pub(crate) async fn drain_worker(self: &Arc<Self>, node: NodeId) -> bool {
        let process = self.process(node);
        process.shutdown.cancel();
        self.services.set_draining(node, true);
        let prefill = self.prefills.iter().find(|prefill| prefill.node == node);
        let finished = match prefill {
            Some(prefill) => {
                process.leave.cancel();
                match self.services.engine(&prefill.endpoint()) {
                    Some(engine) => drain(&engine, DRAIN_GRACE).await == Drained::Finished,
                    None => true,
                }
            }
            None => {
                let _ended = timeout(DRAIN_GRACE + DRAIN_MARGIN, process.ended.cancelled()).await;
                process.drained.get() == Some(&Drained::Finished)
            }
        };
        // Something else may have ended it meanwhile, and it may have been started again.
        if self.process(node).is(&process) {
            self.kill_worker(node, Death::Killed);
        }
        finished
    }

    /// The door of a rank for one life.
    pub(crate) fn inlet(&self, rank: usize, n_ranks: usize, epoch: Epoch) -> (KvInlet, Deliveries) {
        let shape = &self.scenario.shape;
        let kv = kv_shape(shape.dcp(n_ranks), rank, shape.n_decode_blocks);
        let cell_bytes = kv.cell_bytes(kv.n_kv_heads);
        KvInlet::new(InletIdentity { rank, epoch, layout: shape.kv_layout(), cell_bytes })
    }

    /// An engine over empty pools.
    pub(crate) fn engine(&self, life: Life) -> (Engine, EngineHandle) {
        let shape = &self.scenario.shape;
        let Life { name, node, epoch, n_ranks, followers, .. } = life;
        let dcp = shape.dcp(n_ranks);
        let (n_blocks, step_time) = if life.targets.is_empty() {
            (shape.n_prefill_blocks, shape.prefill_step_time)
        } else {
            (shape.n_decode_blocks, shape.step_time)
        };
        let sched = Scheduler::new(shape.sched(), shape.kv(dcp, n_blocks), epoch);
        let rank = Rank::new(name.clone(), kv_shape(dcp, 0, n_blocks), epoch, self.journal.clone());
        let orders = followers.clone();
        let (core, intake, handle) = Core::new(CoreParts {
            setup: EngineSetup {
                layout: shape.kv_layout(),
                dcp,
                shape: GroupShape::new(n_ranks, n_ranks).expect("every rank has positions of its own"),
                targets: life.targets,
                eos: vec![EOS],
                vocab_size: VOCAB_SIZE,
                max_seq_len: shape.max_seq_len,
                handoff_timeout: shape.handoff_timeout,
                max_chunk_bytes: shape.chunk_len * rank.cell_bytes(),
                nonce: life.nonce,
                intake_len: INTAKE_LEN,
            },
            sched: sched.expect("scenarios have limits that fit together"),
            orders: Box::new(move |order| orders.order(order)),
            transport: Arc::new(SimTransport {
                net: self.net.clone(),
                node,
                services: self.services.clone(),
                mangling: self.scenario.mangling,
                seed: self.scenario.seed,
            }),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            deliveries: life.deliveries,
            followers: life.words,
        });
        let engine = Engine {
            name,
            node,
            net: self.net.clone(),
            journal: self.journal.clone(),
            step_time,
            watchdog: shape.watchdog,
            core,
            intake,
            rank,
            rank_face: life.rank_face,
            followers,
            parts: life.parts,
            seen: Seen::default(),
            _handle: handle.clone(),
        };
        (engine, handle)
    }
}

/// The keys of the simulated cluster.
pub(crate) fn key_space() -> KeySpace {
    KeySpace::new("sim").expect("the name is valid")
}
