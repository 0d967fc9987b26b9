//! The processes of workers: prefill workers, leaders and followers of decode groups, from boot to death.
//!
//! A group's life follows the design: its leader raises the epoch in the store, calls its followers, and says that the
//! group is ready; a rank that is lost or stands still ends the epoch, and the next one is formed. While none is formed
//! the leader's address refuses work. Registration, epochs and the ready key are the product's.

use std::{sync::Arc, time::Duration};

use longreach_cluster::{
    Backoff, DecodeRegistration, EpochRecord, GroupId, Key, KeySpace, PrefillRegistration, ReadyRecord,
    Record, RegistrationSpec, RegistrationState, publish_ready, raise_epoch, register, withdraw_ready,
};
use longreach_engine::{
    EngineHandle, KvInlet,
    core::{Core, CoreParts, EngineSetup},
    follower::{FollowerCore, Obeyed},
    inlet::{Deliveries, InletIdentity},
};
use longreach_proto::worker::RankTarget;
use longreach_sched::Scheduler;
use longreach_types::{Epoch, GroupSecret, GroupShape, Incarnation, WorkerId};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    engine::{Engine, FollowerEvent, Followers, Part, Reply, Seen, Word, listen},
    lane::SimTransport,
    model::{EOS, VOCAB_SIZE},
    net::{Broken, Death, NodeId},
    rank::{Rank, RankFace, kv_shape},
    store::SimStore,
    world::World,
};

/// Orders on their way to a follower beyond which it is taken for lost.
const ORDERS_LEN: usize = 1024;

/// Submissions that may wait for an engine.
const INTAKE_LEN: usize = 256;

/// How long a process that leaves goes on taking work.
const NOTICE: Duration = Duration::from_millis(500);

/// How long a follower may take to join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a group tries to take back that it serves.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause before a group tries to form again.
const FORM_PAUSE: Duration = Duration::from_millis(200);

/// One decode group and its processes.
#[derive(Clone)]
pub(crate) struct Group {
    pub(crate) idx: usize,
    pub(crate) id: GroupId,
    /// By rank; all the same where ranks are threads of one process.
    pub(crate) nodes: Vec<NodeId>,
    pub(crate) sessions: Arc<Vec<mpsc::Sender<Session>>>,
    pub(crate) inboxes: Arc<Vec<tokio::sync::Mutex<mpsc::Receiver<Session>>>>,
    pub(crate) rank_faces: Vec<RankFace>,
}

/// A follower's link to its leader for one epoch.
pub(crate) struct Session {
    epoch: Epoch,
    orders: mpsc::Receiver<Result<Word, Broken>>,
    replies: mpsc::Sender<Reply>,
}

/// One prefill worker.
#[derive(Clone)]
pub(crate) struct Prefill {
    pub(crate) idx: usize,
    pub(crate) id: WorkerId,
    pub(crate) node: NodeId,
}

/// What a rank of a worker needs to run an engine for one life.
struct Life {
    name: String,
    node: NodeId,
    epoch: Epoch,
    n_ranks: usize,
    nonce: u64,
    targets: Vec<RankTarget>,
    rank_face: RankFace,
    deliveries: Deliveries,
    followers: Followers,
    words: mpsc::Receiver<(usize, FollowerEvent)>,
    parts: mpsc::Receiver<Part>,
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

    pub(crate) fn rank_endpoint(&self, rank: usize) -> String {
        format!("http://{}-{rank}", self.id)
    }

    fn rank_name(&self, rank: usize) -> String {
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
        self.leaves().insert(node, CancellationToken::new());
        for prefill in self.prefills.iter().filter(|prefill| prefill.node == node) {
            let (world, prefill) = (Arc::clone(self), prefill.clone());
            self.net.spawn_on(node, async move { world.run_prefill(prefill).await });
        }
        for group in self.groups.clone() {
            for rank in (0..group.nodes.len()).filter(|&rank| group.nodes[rank] == node) {
                let (world, group) = (Arc::clone(self), group.clone());
                self.net.spawn_on(node, async move {
                    if rank == 0 { world.lead(group).await } else { world.follow(group, rank).await }
                });
            }
        }
    }

    pub(crate) fn store(&self, node: NodeId) -> Arc<SimStore> {
        let odds = self.scenario.lost_permille;
        Arc::new(SimStore::new(self.host.clone(), self.net.clone(), node, self.journal.clone(), odds))
    }

    /// Keeps `key` registered for as long as `node` lives; gives the state of it.
    fn enlist(
        &self,
        node: NodeId,
        key: &Key,
        value: impl Fn(Incarnation) -> Vec<u8> + Send + Sync + 'static,
    ) -> watch::Receiver<RegistrationState> {
        let (state_in, state) = watch::channel(RegistrationState::default());
        let key = self.keys.encode(key).expect("names of the simulation are valid");
        let ttl = self.scenario.shape.lease_ttl;
        self.registrations().insert(key.clone(), state.clone());
        let spec = RegistrationSpec { key, value, ttl, backoff: Backoff::default() };
        let leave = self.leaving(node);
        self.net.spawn_on(node, register(self.store(node), spec, state_in, leave));
        state
    }

    async fn run_prefill(self: Arc<Self>, prefill: Prefill) {
        let endpoint = prefill.endpoint();
        let Prefill { idx, id, node } = prefill;
        let (value_id, value_endpoint) = (id.clone(), endpoint.clone());
        let value = move |incarnation| {
            let (id, endpoint) = (value_id.clone(), value_endpoint.clone());
            PrefillRegistration { id, incarnation, endpoint, layout_hash: "layout".to_owned() }.encode()
        };
        let _state = self.enlist(node, &Key::Prefill(id.clone()), value);
        // Nobody pushes KV to a prefill worker, and it has no followers.
        let (_, deliveries) = self.inlet(0, 1, Epoch(0));
        let (engine, handle) = self.engine(Life {
            name: id.0,
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
        self.services.set_engine(&endpoint, node, Some(handle));
        let failure = engine.run().await;
        self.journal.violation(format!("a prefill engine failed: {failure}"));
    }

    /// Drains the process on `node` and ends it: out of the cluster, no new work, what is in flight finished within
    /// `grace`. Whether everything was.
    pub(crate) async fn drain_worker(self: &Arc<Self>, node: NodeId, grace: Duration) -> bool {
        self.leaving(node).cancel();
        // Routers take some time to hear of it, and do not fail for what they send meanwhile.
        sleep(NOTICE).await;
        self.services.set_draining(node, true);
        let cut_off = Instant::now() + grace;
        let is_idle = || {
            let groups = self.groups.iter().filter(|group| group.nodes[0] == node).map(Group::endpoint);
            let prefills = self.prefills.iter().filter(|p| p.node == node).map(Prefill::endpoint);
            let mut engines = groups.chain(prefills).filter_map(|e| self.services.engine_info(&e));
            engines.all(|info| info.is_idle())
        };
        while Instant::now() < cut_off && !is_idle() {
            sleep(Duration::from_millis(20)).await;
        }
        let finished = is_idle();
        self.kill_worker(node, Death::Killed);
        finished
    }

    /// The door of a rank for one life.
    fn inlet(&self, rank: usize, n_ranks: usize, epoch: Epoch) -> (KvInlet, Deliveries) {
        let shape = &self.scenario.shape;
        let kv = kv_shape(shape.dcp(n_ranks), rank, shape.n_decode_blocks);
        let cell_bytes = kv.cell_bytes(kv.n_kv_heads);
        KvInlet::new(InletIdentity { rank, epoch, layout: shape.kv_layout(), cell_bytes })
    }

    /// An engine over empty pools.
    fn engine(&self, life: Life) -> (Engine, EngineHandle) {
        let shape = &self.scenario.shape;
        let Life { name, node, epoch, n_ranks, followers, .. } = life;
        let dcp = shape.dcp(n_ranks);
        let n_blocks = if life.targets.is_empty() { shape.n_prefill_blocks } else { shape.n_decode_blocks };
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
            step_time: shape.step_time,
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

    /// The leader's process: epoch after epoch.
    async fn lead(self: Arc<Self>, group: Group) {
        let node = group.nodes[0];
        let endpoint = group.endpoint();
        self.services.set_engine(&endpoint, node, None);
        let state = self.enlist_rank(&group, 0);
        let (epoch_in, epoch) = watch::channel(None);
        let (world, announced) = (Arc::clone(&self), group.clone());
        self.net.spawn_on(node, async move { world.announce(announced, state, epoch).await });
        let mut seen = Epoch(0);
        loop {
            self.net.thawed(node).await;
            if let Some((engine, handle)) = self.form(&group, &mut seen).await {
                let epoch = engine.epoch();
                self.journal.note(format_args!("{} forms epoch {epoch}", group.id));
                self.journal.count("epoch formed");
                self.services.set_engine(&endpoint, node, Some(handle));
                epoch_in.send_replace(Some(epoch));
                let failure = engine.run().await;
                self.services.set_engine(&endpoint, node, None);
                self.services.set_door(&group.rank_endpoint(0), node, None);
                epoch_in.send_replace(None);
                group.rank_faces[0].show(None, 0);
                self.journal.count("epoch ended by a failure");
                self.journal.note(format_args!("{} ends epoch {epoch}: {failure}", group.id));
                let store = self.store(node);
                let withdrawn = withdraw_ready(&*store, &self.keys, (&group.id, epoch));
                if !matches!(timeout(WITHDRAW_TIMEOUT, withdrawn).await, Ok(Ok(()))) {
                    self.journal.count("ready key left to its lease");
                }
            }
            sleep(FORM_PAUSE).await;
        }
    }

    fn enlist_rank(&self, group: &Group, rank: usize) -> watch::Receiver<RegistrationState> {
        let shape = &self.scenario.shape;
        let member = DecodeRegistration {
            id: WorkerId(group.rank_name(rank)),
            incarnation: Incarnation::default(),
            rank,
            n_ranks: shape.n_ranks,
            dcp_size: shape.n_ranks,
            endpoint: group.rank_endpoint(rank),
            peer_addr: String::new(),
            layout_hash: "layout".to_owned(),
        };
        let value = move |incarnation| DecodeRegistration { incarnation, ..member.clone() }.encode();
        self.enlist(group.nodes[rank], &Key::Rank { group: group.id.clone(), rank }, value)
    }

    /// Says that the group is ready, whenever it has a new epoch or its leader a new lease.
    async fn announce(
        self: Arc<Self>,
        group: Group,
        mut state: watch::Receiver<RegistrationState>,
        mut epoch: watch::Receiver<Option<Epoch>>,
    ) {
        let store = self.store(group.nodes[0]);
        loop {
            let registered = match *state.borrow_and_update() {
                RegistrationState::Registered { lease, .. } => Some(lease),
                _ => None,
            };
            let formed = *epoch.borrow_and_update();
            if let (Some(lease), Some(epoch)) = (registered, formed) {
                let ready = ReadyRecord {
                    epoch,
                    endpoint: group.endpoint(),
                    n_ranks: group.nodes.len(),
                    dcp_size: group.nodes.len(),
                    layout_hash: "layout".to_owned(),
                };
                if publish_ready(&*store, &self.keys, (&group.id, &ready), lease).await.is_err() {
                    sleep(FORM_PAUSE).await;
                    continue;
                }
                self.journal.note(format_args!("{} is ready in epoch {epoch}", group.id));
            }
            tokio::select! {
                biased;
                changed = state.changed() => if changed.is_err() { return },
                changed = epoch.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Begins an epoch and calls the followers; none if one of them does not come.
    async fn form(self: &Arc<Self>, group: &Group, seen: &mut Epoch) -> Option<(Engine, EngineHandle)> {
        let store = self.store(group.nodes[0]);
        let make = |epoch: Epoch| EpochRecord {
            epoch,
            secret: GroupSecret::new([epoch.0 as u8; 32]),
            members: Vec::new(),
        };
        let epoch = raise_epoch(&*store, &self.keys, (&group.id, *seen), make).await.ok()?.epoch;
        *seen = epoch;
        let targets = (0..group.nodes.len()).map(|rank| RankTarget {
            rank,
            dcp_rank: rank,
            endpoint: group.rank_endpoint(rank),
            kv_heads: 0..1,
        });
        let n_ranks = group.nodes.len();
        let (words_in, words) = mpsc::channel(ORDERS_LEN);
        let (parts_in, parts) = mpsc::channel(ORDERS_LEN);
        let mut followers = Followers::default();
        for rank in 1..n_ranks {
            let joined = timeout(JOIN_TIMEOUT, self.call_follower(group, rank, epoch)).await;
            let Ok(Some((orders, replies))) = joined else {
                self.journal.note(format_args!("{} cannot form: rank {rank} does not join", group.id));
                return None;
            };
            followers.0.push(orders);
            self.net.spawn_on(group.nodes[0], listen(rank, replies, (words_in.clone(), parts_in.clone())));
        }
        let (inlet, deliveries) = self.inlet(0, n_ranks, epoch);
        let (engine, handle) = self.engine(Life {
            name: group.rank_name(0),
            node: group.nodes[0],
            epoch,
            n_ranks,
            nonce: ((group.idx as u64 + 1) << 32) | epoch.0,
            targets: targets.collect(),
            rank_face: group.rank_faces[0].clone(),
            deliveries,
            followers,
            words,
            parts,
        });
        self.services.set_door(&group.rank_endpoint(0), group.nodes[0], Some(inlet));
        Some((engine, handle))
    }

    /// Links a follower to an epoch and waits until it has joined.
    async fn call_follower(
        &self,
        group: &Group,
        rank: usize,
        epoch: Epoch,
    ) -> Option<(mpsc::Sender<Word>, mpsc::Receiver<Result<Reply, Broken>>)> {
        let conn = self.net.connect(group.nodes[0], group.nodes[rank]).await.ok()?;
        let (orders, orders_out) = mpsc::channel(ORDERS_LEN);
        let (replies, replies_out) = mpsc::channel(ORDERS_LEN);
        let session = Session { epoch, orders: conn.carry(orders_out, || {}), replies };
        let mut replies = conn.carry(replies_out, || {});
        group.sessions[rank].try_send(session).ok()?;
        match replies.recv().await? {
            Ok(Reply::Joined) => Some((orders, replies)),
            _ => None,
        }
    }

    /// A follower's process: session after session; the newest epoch wins.
    async fn follow(self: Arc<Self>, group: Group, rank: usize) {
        let _state = self.enlist_rank(&group, rank);
        let mut inbox = group.inboxes[rank].lock().await;
        let mut next = None;
        loop {
            let session: Session = match next.take() {
                Some(session) => session,
                None => match inbox.recv().await {
                    Some(session) => session,
                    None => return,
                },
            };
            let epoch = session.epoch;
            let node = group.nodes[rank];
            let n_ranks = group.nodes.len();
            let (inlet, deliveries) = self.inlet(rank, n_ranks, epoch);
            self.services.set_door(&group.rank_endpoint(rank), node, Some(inlet));
            let shape = &self.scenario.shape;
            let kv = kv_shape(shape.dcp(n_ranks), rank, shape.n_decode_blocks);
            let face = group.rank_faces[rank].clone();
            face.show(Some(epoch), 0);
            let follower = Follower {
                world: Arc::clone(&self),
                node,
                core: FollowerCore::new(rank, epoch),
                rank: Rank::new(group.rank_name(rank), kv, epoch, self.journal.clone()),
                face: face.clone(),
                seen: Seen::default(),
            };
            tokio::select! {
                biased;
                newer = inbox.recv() => next = newer,
                () = follower.run(session, deliveries) => {}
            }
            self.services.set_door(&group.rank_endpoint(rank), node, None);
            face.show(None, 0);
        }
    }
}

/// One follower in one epoch.
struct Follower {
    world: Arc<World>,
    node: NodeId,
    core: FollowerCore,
    rank: Rank,
    face: RankFace,
    seen: Seen,
}

impl Follower {
    /// Runs until the leader says stop or the link ends.
    async fn run(mut self, session: Session, mut deliveries: Deliveries) {
        let Session { mut orders, replies, .. } = session;
        if replies.send(Reply::Joined).await.is_err() {
            return;
        }
        loop {
            self.world.net.thawed(self.node).await;
            // Orders go first: the whole group waits for a plan, a chunk only for its sender.
            let reply = tokio::select! {
                biased;
                order = orders.recv() => {
                    self.world.net.thawed(self.node).await;
                    let Some(Ok(word)) = order else { return };
                    match self.obey(word).await {
                        Some(reply) => reply,
                        None => return,
                    }
                }
                Some(delivery) = deliveries.recv() => {
                    self.world.net.thawed(self.node).await;
                    self.core.deliver(delivery, &mut self.rank).map(Reply::Told)
                }
            };
            self.seen.look_at(self.core.receiver(), &self.world.journal);
            self.face.show(self.face.epoch(), self.core.receiver().len());
            if let Some(reply) = reply
                && replies.send(reply).await.is_err()
            {
                return;
            }
        }
    }

    /// Does as it is told; `None` if that is to leave.
    async fn obey(&mut self, word: Word) -> Option<Option<Reply>> {
        match word {
            Word::Step(step) => {
                let sums = self.rank.step(&step);
                sleep(self.world.scenario.shape.step_time).await;
                Some(Some(Reply::Sums(step.plan.step, sums)))
            }
            Word::Order(order) => match self.core.obey(order, &self.rank) {
                Obeyed::Reply(message) => Some(Some(Reply::Told(message))),
                Obeyed::Done => Some(None),
                Obeyed::Run(_) | Obeyed::Leave => None,
            },
        }
    }
}

/// The keys of the simulated cluster.
pub(crate) fn key_space() -> KeySpace {
    KeySpace::new("sim").expect("the name is valid")
}
