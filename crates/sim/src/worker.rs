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
use longreach_proto::worker::RankTarget;
use longreach_sched::Scheduler;
use longreach_types::{Epoch, GroupSecret, Incarnation, WorkerId};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{
        Engine, EngineFace, EngineHandle, EngineSetup, FollowerEvent, FollowerMessage, Input, LeaderMessage,
    },
    lane::LaneContext,
    net::{Broken, Death, NodeId},
    rank::{Delivery, HandoffEnd, Rank, RankFace},
    services::Door,
    store::SimStore,
    world::World,
};

/// Orders on their way to a follower beyond which it is taken for lost.
const ORDERS_LEN: usize = 1024;

/// Chunks that may wait for a rank.
const DELIVERIES_LEN: usize = 32;

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
    pub(crate) engine_face: EngineFace,
}

/// A follower's link to its leader for one epoch.
pub(crate) struct Session {
    epoch: Epoch,
    orders: mpsc::Receiver<Result<LeaderMessage, Broken>>,
    replies: mpsc::Sender<FollowerMessage>,
}

/// One prefill worker.
#[derive(Clone)]
pub(crate) struct Prefill {
    pub(crate) idx: usize,
    pub(crate) id: WorkerId,
    pub(crate) node: NodeId,
    pub(crate) engine_face: EngineFace,
}

impl Group {
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.id)
    }

    fn rank_endpoint(&self, rank: usize) -> String {
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
        let Prefill { idx, id, node, engine_face } = prefill;
        let endpoint = format!("http://{id}");
        let (value_id, value_endpoint) = (id.clone(), endpoint.clone());
        let value = move |incarnation| {
            let (id, endpoint) = (value_id.clone(), value_endpoint.clone());
            PrefillRegistration { id, incarnation, endpoint, layout_hash: "layout".to_owned() }.encode()
        };
        let _state = self.enlist(node, &Key::Prefill(id.clone()), value);
        let name = id.0;
        let life = (name, node, engine_face, RankFace::default());
        let (engine, handle) = self.engine(life, (1, Epoch(0)), Vec::new(), (idx as u64 + 1) << 40);
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
        let faces = || {
            let groups = self.groups.iter().filter(|group| group.nodes[0] == node).map(|g| &g.engine_face);
            groups.chain(self.prefills.iter().filter(|prefill| prefill.node == node).map(|p| &p.engine_face))
        };
        while Instant::now() < cut_off && !faces().all(|face| face.info().is_idle()) {
            sleep(Duration::from_millis(20)).await;
        }
        let finished = faces().all(|face| face.info().is_idle());
        self.kill_worker(node, Death::Killed);
        finished
    }

    /// An engine over empty pools.
    fn engine(
        &self,
        (name, node, face, rank_face): (String, NodeId, EngineFace, RankFace),
        (n_ranks, epoch): (usize, Epoch),
        targets: Vec<RankTarget>,
        nonce: u64,
    ) -> (Engine, EngineHandle) {
        let shape = &self.scenario.shape;
        let (handle, inputs) = EngineHandle::new(face);
        let dcp = shape.dcp(n_ranks);
        let n_blocks = if targets.is_empty() { shape.n_prefill_blocks } else { shape.n_decode_blocks };
        let sched = Scheduler::new(shape.sched(), shape.kv(dcp, n_blocks), epoch);
        let setup = EngineSetup {
            name: name.clone(),
            node,
            net: self.net.clone(),
            journal: self.journal.clone(),
            kv_layout: shape.kv_layout(),
            dcp,
            targets,
            max_seq_len: shape.max_seq_len,
            handoff_timeout: shape.handoff_timeout,
            watchdog: shape.watchdog,
            nonce,
            step_time: shape.step_time,
            lanes: LaneContext {
                net: self.net.clone(),
                node,
                services: self.services.clone(),
                reports: handle.inputs(),
                mangling: self.scenario.mangling,
                chunk_len: shape.chunk_len,
                seed: self.scenario.seed,
            },
        };
        let engine = Engine {
            rank: Rank::new((name, 0), dcp, n_blocks, epoch, self.journal.clone()),
            rank_face,
            sched: sched.expect("scenarios have limits that fit together"),
            followers: Vec::new(),
            inputs,
            handle: handle.clone(),
            deferred: Default::default(),
            live: Default::default(),
            inbound: Default::default(),
            outbound: Default::default(),
            unused: Vec::new(),
            n_steps: 0,
            setup,
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
                let epoch = engine.sched.epoch();
                self.journal.note(format_args!("{} forms epoch {epoch}", group.id));
                self.journal.count("epoch formed");
                self.services.set_engine(&endpoint, node, Some(handle));
                epoch_in.send_replace(Some(epoch));
                let failure = engine.run().await;
                self.services.set_engine(&endpoint, node, None);
                self.services.set_door(&group.rank_endpoint(0), node, None);
                epoch_in.send_replace(None);
                group.rank_faces[0].show(None, 0);
                group.engine_face.show(Default::default());
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
        let life =
            (group.rank_name(0), group.nodes[0], group.engine_face.clone(), group.rank_faces[0].clone());
        let nonce = ((group.idx as u64 + 1) << 32) | epoch.0;
        let (mut engine, handle) = self.engine(life, (group.nodes.len(), epoch), targets.collect(), nonce);
        for rank in 1..group.nodes.len() {
            let joined = timeout(JOIN_TIMEOUT, self.call_follower(group, rank, epoch)).await;
            let Ok(Some((orders, replies))) = joined else {
                self.journal.note(format_args!("{} cannot form: rank {rank} does not join", group.id));
                return None;
            };
            engine.followers.push(orders);
            let inputs = handle.inputs();
            self.net.spawn_on(group.nodes[0], listen(rank, replies, inputs));
        }
        let deliveries = deliveries_to(&self.net, group.nodes[0], handle.inputs());
        let journal = self.journal.clone();
        let door = Door { epoch, layout: self.scenario.shape.dcp(group.nodes.len()), deliveries, journal };
        self.services.set_door(&group.rank_endpoint(0), group.nodes[0], Some(door));
        Some((engine, handle))
    }

    /// Links a follower to an epoch and waits until it has joined.
    async fn call_follower(
        &self,
        group: &Group,
        rank: usize,
        epoch: Epoch,
    ) -> Option<(mpsc::Sender<LeaderMessage>, mpsc::Receiver<Result<FollowerMessage, Broken>>)> {
        let conn = self.net.connect(group.nodes[0], group.nodes[rank]).await.ok()?;
        let (orders, orders_out) = mpsc::channel(ORDERS_LEN);
        let (replies, replies_out) = mpsc::channel(ORDERS_LEN);
        let session = Session { epoch, orders: conn.carry(orders_out, || {}), replies };
        let mut replies = conn.carry(replies_out, || {});
        group.sessions[rank].try_send(session).ok()?;
        match replies.recv().await? {
            Ok(FollowerMessage::Joined) => Some((orders, replies)),
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
            let (deliveries_in, deliveries) = mpsc::channel(DELIVERIES_LEN);
            let layout = self.scenario.shape.dcp(group.nodes.len());
            let door = Door { epoch, layout, deliveries: deliveries_in, journal: self.journal.clone() };
            self.services.set_door(&group.rank_endpoint(rank), node, Some(door));
            let rank_state = Rank::new(
                (group.rank_name(rank), rank),
                layout,
                self.scenario.shape.n_decode_blocks,
                epoch,
                self.journal.clone(),
            );
            let face = group.rank_faces[rank].clone();
            face.show(Some(epoch), 0);
            let follower = Follower { world: Arc::clone(&self), node, rank: rank_state, face: face.clone() };
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
    rank: Rank,
    face: RankFace,
}

impl Follower {
    /// Runs until the leader says stop or the link ends.
    async fn run(mut self, session: Session, mut deliveries: mpsc::Receiver<Delivery>) {
        let Session { mut orders, replies, .. } = session;
        if replies.send(FollowerMessage::Joined).await.is_err() {
            return;
        }
        loop {
            self.world.net.thawed(self.node).await;
            // Orders go first: the whole group waits for a plan, a chunk only for its sender.
            let reply = tokio::select! {
                biased;
                order = orders.recv() => {
                    self.world.net.thawed(self.node).await;
                    match order {
                        Some(Ok(LeaderMessage::Stop) | Err(Broken)) | None => return,
                        Some(Ok(order)) => self.obey(order).await,
                    }
                }
                Some(delivery) = deliveries.recv() => {
                    self.world.net.thawed(self.node).await;
                    self.deliver(delivery)
                }
            };
            let n_receiving = self.rank.n_receiving();
            self.face.show(self.face.epoch(), n_receiving);
            if let Some(reply) = reply
                && replies.send(reply).await.is_err()
            {
                return;
            }
        }
    }

    async fn obey(&mut self, order: LeaderMessage) -> Option<FollowerMessage> {
        match order {
            LeaderMessage::Plan(order) => {
                let sums = self.rank.step(&order);
                sleep(self.world.scenario.shape.step_time).await;
                Some(FollowerMessage::Done { step: order.plan.step, sums })
            }
            LeaderMessage::Expect(expect) => {
                self.rank.expect(&expect);
                let (handoff, event) = (expect.handoff, FollowerEvent::Expected);
                Some(FollowerMessage::Handoff { handoff, event })
            }
            LeaderMessage::Drop(handoff) => {
                self.rank.forget(handoff);
                None
            }
            LeaderMessage::Stop => None,
        }
    }

    fn deliver(&mut self, delivery: Delivery) -> Option<FollowerMessage> {
        let HandoffEnd { handoff, result } = self.rank.deliver(delivery)?;
        let event = match result {
            Ok(_first_token_goes_to_rank_0) => FollowerEvent::Received,
            Err(reason) => FollowerEvent::Refused(reason),
        };
        Some(FollowerMessage::Handoff { handoff, event })
    }
}

/// Passes a follower's words on to the engine, its loss included.
async fn listen(
    rank: usize,
    mut replies: mpsc::Receiver<Result<FollowerMessage, Broken>>,
    inputs: mpsc::Sender<Input>,
) {
    while let Some(reply) = replies.recv().await {
        let lost = reply.is_err();
        if inputs.send(Input::Follower(rank, reply)).await.is_err() || lost {
            return;
        }
    }
    let _engine_gone = inputs.send(Input::Follower(rank, Err(Broken))).await;
}

/// A queue of deliveries that ends in an engine's intake.
fn deliveries_to(net: &crate::net::Net, node: NodeId, inputs: mpsc::Sender<Input>) -> mpsc::Sender<Delivery> {
    let (deliveries, mut queue) = mpsc::channel(DELIVERIES_LEN);
    net.spawn_on(node, async move {
        while let Some(delivery) = queue.recv().await {
            if inputs.send(Input::Delivery(delivery)).await.is_err() {
                return;
            }
        }
    });
    deliveries
}

/// The keys of the simulated cluster.
pub(crate) fn key_space() -> KeySpace {
    KeySpace::new("sim").expect("the name is valid")
}
