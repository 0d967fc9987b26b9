//! The ranks of a simulated process: what the product's formation leads and follows in place of threads and sockets.
//!
//! A leader calls each of the other ranks over the simulated network until it answers or the time is over. A rank answers
//! to the life it was called into by the store, and to no other. When all have answered the leader lets them begin.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use longreach_cluster::{DecodeRegistration, EpochRecord, Key, ReadyRecord, Record};
use longreach_decode::ranks::{Followed, Led, Ranks};
use longreach_engine::{EngineHandle, follower::FollowerCore, inlet::Deliveries};
use longreach_proto::{
    group::{FollowerMessage, LeaderMessage},
    worker::RankTarget,
};
use longreach_types::{Epoch, GroupSecret, Incarnation};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{Engine, EngineFailure, Followers, Reply, Seen, Word, listen},
    follower::Follower,
    net::{Broken, NodeId},
    rank::{Rank, kv_shape},
    worker::{Group, Life, Process},
    world::World,
};

/// Orders on their way to a follower beyond which it is taken for lost.
const ORDERS_LEN: usize = 1024;

/// The pause before a rank that does not answer is called again.
const CALL_PAUSE: Duration = Duration::from_millis(100);

/// How long what the store says takes to be known, where nothing is wrong.
const NEWS: Duration = Duration::from_secs(2);

/// How long nothing may have been wrong before that holds: whoever repairs a watch pauses for so long at most.
const CALM: Duration = Duration::from_secs(10);

/// A call to a rank: its side of the links of one life.
pub(crate) struct Session {
    epoch: Epoch,
    secret: GroupSecret,
    joined: mpsc::Sender<()>,
    begin: mpsc::Receiver<Result<(), Broken>>,
    orders: mpsc::Receiver<Result<Word, Broken>>,
    replies: mpsc::Sender<Reply>,
}

/// The leader's side of it.
struct Called {
    rank: usize,
    joined: mpsc::Receiver<Result<(), Broken>>,
    begin: mpsc::Sender<()>,
    orders: mpsc::Sender<Word>,
    replies: mpsc::Receiver<Result<Reply, Broken>>,
    /// The rank, if it is of this process.
    local: Option<SimFollowed>,
}

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeetError {
    #[error("not all ranks came in time")]
    Late,
    #[error("not all ranks can come any more")]
    Moot,
}

/// The ranks of one process.
pub(crate) struct SimRanks {
    world: Arc<World>,
    group: Group,
    node: NodeId,
    hosted: Range<usize>,
    process: Process,
    /// Where calls come in.
    calls: tokio::sync::Mutex<mpsc::Receiver<Session>>,
    known: Mutex<Known>,
}

/// What a process has seen of its lives, to hold the next one against.
#[derive(Default)]
struct Known {
    /// The last epoch that it led or followed.
    last: Option<Epoch>,
    /// The life that it leads, and nobody has ended.
    leads: Option<Epoch>,
    /// Members that were called into a life although the store did not know them, and since when.
    missing: BTreeMap<(usize, Incarnation), Instant>,
}

pub(crate) struct SimLed {
    handle: EngineHandle,
    deserted: CancellationToken,
    ended: CancellationToken,
    /// The ends of the other ranks of this process.
    locals: Vec<oneshot::Receiver<()>>,
}

pub(crate) struct SimFollowed {
    rank: usize,
    leaving: mpsc::Sender<Reply>,
    deserted: CancellationToken,
    ended: oneshot::Receiver<()>,
}

impl SimRanks {
    pub(crate) fn new(world: Arc<World>, group: Group, hosted: Range<usize>, process: Process) -> Self {
        let node = group.nodes[hosted.start];
        let (listener, calls) = mpsc::channel(1);
        *group.listeners[hosted.start].lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        for rank in hosted.clone() {
            world.services.set_door(&group.rank_endpoint(rank), node, None);
        }
        let calls = tokio::sync::Mutex::new(calls);
        Self { world, group, node, hosted, process, calls, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What holds of every life that begins here: it is newer than the ones before, it is of this very process, and the
    /// last one has closed its door.
    fn check_call(&self, record: &EpochRecord) {
        let (journal, id, epoch) = (&self.world.journal, &self.group.id, record.epoch);
        let last = self.known().last.replace(epoch);
        if self.hosted.start == 0 && last.is_some_and(|last| last >= epoch) {
            journal.violation(format!("{id}: epoch {epoch} came after {last:?}"));
        }
        for rank in self.hosted.clone() {
            let is_ours =
                record.members.get(rank).is_some_and(|member| self.process.was(rank, member.incarnation));
            if !is_ours {
                journal.violation(format!("{id}: epoch {epoch} counts on another life of rank {rank}"));
            }
            if self.world.services.is_open(&self.group.rank_endpoint(rank)) {
                journal.violation(format!("{id}: epoch {epoch} finds the door of rank {rank} open"));
            }
        }
    }

    /// A leader counts on nobody of whom the store has told that he left.
    fn check_members(&self, record: &EpochRecord) {
        let registered = |member: &DecodeRegistration| {
            let entry = self.world.stored(&Key::Rank { group: self.group.id.clone(), rank: member.rank })?;
            let found = entry.and_then(|value| DecodeRegistration::decode(&value).ok());
            Some(found.is_some_and(|found| found.incarnation == member.incarnation))
        };
        let now = Instant::now();
        for member in &record.members {
            let key = (member.rank, member.incarnation);
            match registered(member) {
                // The store does not answer.
                None => {}
                Some(true) => {
                    self.known().missing.remove(&key);
                }
                Some(false) => {
                    let since = *self.known().missing.entry(key).or_insert(now);
                    if now - since >= NEWS && self.knows_news_since(since) {
                        self.world.journal.violation(format!(
                            "{}: epoch {} counts on rank {} that left {:?} ago",
                            self.group.id,
                            record.epoch,
                            member.rank,
                            now - since
                        ));
                    }
                }
            }
        }
    }

    /// Whether the process must know what the store has said since `time`, but for the time that news take.
    fn knows_news_since(&self, time: Instant) -> bool {
        self.world.store_was_calm(self.node, time.checked_sub(CALM).unwrap_or(time))
    }

    fn open_door(&self, record: &EpochRecord, rank: usize) -> Deliveries {
        let (inlet, deliveries) = self.world.inlet(rank, self.group.nodes.len(), record.epoch);
        self.world.services.set_door(&self.group.rank_endpoint(rank), self.node, Some(inlet));
        deliveries
    }

    /// Meets all other ranks and starts the engine.
    async fn begin(&self, record: &EpochRecord) -> SimLed {
        let (world, group, node) = (&self.world, &self.group, self.node);
        let deliveries = self.open_door(record, 0);
        let mut called = Vec::new();
        for rank in 1..group.nodes.len() {
            called.push(self.call_rank(record, rank).await);
        }
        let targets = record.members.iter().map(|member| RankTarget {
            rank: member.rank,
            dcp_rank: member.rank,
            endpoint: member.endpoint.clone(),
            kv_heads: 0..1,
        });
        let (words_in, words) = mpsc::channel(ORDERS_LEN);
        let (parts_in, parts) = mpsc::channel(ORDERS_LEN);
        let (mut followers, mut locals, deserted) =
            (Followers::default(), Vec::new(), CancellationToken::new());
        for Called { rank, begin, orders, replies, local, .. } in called {
            // Only the end: one who could still speak for the rank would hide that it has left.
            locals.extend(local.map(|local| local.ended));
            // One who is gone again is found by his link.
            let _gone = begin.send(()).await;
            followers.0.push(orders);
            let into = (words_in.clone(), parts_in.clone());
            world.net.spawn_on(node, listen(rank, replies, into, deserted.clone()));
        }
        let (engine, handle) = world.engine(Life {
            name: group.rank_name(0),
            node,
            epoch: record.epoch,
            n_ranks: group.nodes.len(),
            nonce: nonce(&record.secret),
            targets: targets.collect(),
            rank_face: group.rank_faces[0].clone(),
            deliveries,
            followers,
            words,
            parts,
        });
        world.journal.note(format_args!("{} forms epoch {}", group.id, record.epoch));
        world.journal.count("epoch formed");
        self.known().leads = Some(record.epoch);
        SimLed { handle, deserted, ended: self.start_engine(engine, record.epoch), locals }
    }

    /// Runs an engine until it ends; then the token is cancelled.
    fn start_engine(&self, engine: Engine, epoch: Epoch) -> CancellationToken {
        let (journal, face) = (self.world.journal.clone(), self.group.rank_faces[0].clone());
        let (id, ended) = (self.group.id.clone(), CancellationToken::new());
        let at_end = ended.clone().drop_guard();
        self.world.net.spawn_on(self.node, async move {
            let failure = engine.run().await;
            face.show(0);
            journal.note(format_args!("{id} ends epoch {epoch}: {failure}"));
            let is_told = matches!(failure, EngineFailure::Stopped);
            journal.count(if is_told { "epoch ended in good order" } else { "epoch ended by a failure" });
            drop(at_end);
        });
        ended
    }

    /// Calls one rank until it has joined.
    async fn call_rank(&self, record: &EpochRecord, rank: usize) -> Called {
        loop {
            if let Some(mut called) = self.try_call(record, rank).await
                && matches!(called.joined.recv().await, Some(Ok(())))
            {
                return called;
            }
            sleep(CALL_PAUSE).await;
        }
    }

    async fn try_call(&self, record: &EpochRecord, rank: usize) -> Option<Called> {
        let (net, to) = (&self.world.net, self.group.nodes[rank]);
        let conn = net.connect(self.node, to).await.ok()?;
        let (joined, joined_out) = mpsc::channel(1);
        let (begin, begin_out) = mpsc::channel(1);
        let (orders, orders_out) = mpsc::channel(ORDERS_LEN);
        let (replies, replies_out) = mpsc::channel(ORDERS_LEN);
        let session = Session {
            epoch: record.epoch,
            secret: record.secret.clone(),
            joined,
            begin: conn.carry(begin_out, || {}),
            orders: conn.carry(orders_out, || {}),
            replies,
        };
        let called = Called {
            rank,
            joined: conn.carry(joined_out, || {}),
            begin,
            orders,
            replies: conn.carry(replies_out, || {}),
            local: None,
        };
        if self.hosted.contains(&rank) {
            // A thread of this process.
            let deliveries = self.open_door(record, rank);
            let local = self.start_follower(record.epoch, rank, session, deliveries);
            return Some(Called { joined: already(), local: Some(local), ..called });
        }
        let listener = self.group.listeners[rank].lock().unwrap_or_else(PoisonError::into_inner).clone();
        listener?.try_send(session).ok()?;
        Some(called)
    }

    /// Waits for the call into the life of `record`.
    async fn answer(&self, record: &EpochRecord) -> SimFollowed {
        let rank = self.hosted.start;
        let deliveries = self.open_door(record, rank);
        let mut calls = self.calls.lock().await;
        loop {
            let Some(mut session) = calls.recv().await else { std::future::pending().await };
            if session.epoch != record.epoch || session.secret != record.secret {
                self.world.journal.count("call into another life refused");
                continue;
            }
            let joined = session.joined.send(()).await.is_ok();
            if joined && matches!(session.begin.recv().await, Some(Ok(()))) {
                return self.start_follower(record.epoch, rank, session, deliveries);
            }
        }
    }

    fn start_follower(
        &self,
        epoch: Epoch,
        rank: usize,
        session: Session,
        deliveries: Deliveries,
    ) -> SimFollowed {
        let (world, group) = (&self.world, &self.group);
        let shape = &world.scenario.shape;
        let Session { orders, replies, .. } = session;
        let (leaving, deserted) = (replies.clone(), CancellationToken::new());
        let (heard_in, heard) = mpsc::channel(ORDERS_LEN);
        world.net.spawn_on(self.node, hear(orders, heard_in, deserted.clone()));
        let (ended_in, ended) = oneshot::channel();
        let kv = kv_shape(shape.dcp(group.nodes.len()), rank, shape.n_decode_blocks);
        let follower = Follower {
            net: world.net.clone(),
            node: self.node,
            journal: world.journal.clone(),
            idx: rank,
            name: group.rank_name(rank),
            step_time: shape.step_time,
            watchdog: shape.watchdog,
            core: FollowerCore::new(rank, epoch),
            rank: Rank::new(group.rank_name(rank), kv, epoch, world.journal.clone()),
            face: group.rank_faces[rank].clone(),
            seen: Seen::default(),
            orders: heard,
            replies,
        };
        world.net.spawn_on(self.node, async move {
            follower.run(deliveries).await;
            let _nobody_waits = ended_in.send(());
        });
        SimFollowed { rank, leaving, deserted, ended }
    }

    /// Bounds an attempt.
    async fn attempt<T>(
        &self,
        attempt: impl Future<Output = T>,
        moot: &CancellationToken,
    ) -> Result<T, MeetError> {
        // Both arms may be dropped: what has begun is found to have ended by its links. Biased for the seed's sake.
        tokio::select! {
            biased;
            met = timeout(self.world.scenario.shape.connect_timeout, attempt) => {
                met.map_err(|_| MeetError::Late)
            }
            () = moot.cancelled() => Err(MeetError::Moot),
        }
    }
}

impl Ranks for SimRanks {
    type Led = SimLed;
    type Followed = SimFollowed;
    type Error = MeetError;

    fn has_leader(&self) -> bool {
        self.hosted.start == 0
    }

    fn secret(&self) -> io::Result<GroupSecret> {
        let mut rng = self.group.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; 32];
        let (words, _) = bytes.as_chunks_mut::<8>();
        words.iter_mut().for_each(|word| *word = rng.next().to_le_bytes());
        Ok(GroupSecret::new(bytes))
    }

    async fn lead(&self, record: &EpochRecord, moot: &CancellationToken) -> Result<SimLed, MeetError> {
        self.check_call(record);
        self.check_members(record);
        let led = self.attempt(self.begin(record), moot).await;
        if matches!(led, Err(MeetError::Late)) {
            self.check_members(record);
        }
        led
    }

    async fn follow(&self, record: &EpochRecord, moot: &CancellationToken) -> Result<SimFollowed, MeetError> {
        self.check_call(record);
        self.attempt(self.answer(record), moot).await
    }

    fn close_doors(&self) {
        for rank in self.hosted.clone() {
            self.world.services.set_door(&self.group.rank_endpoint(rank), self.node, None);
        }
        let Some(epoch) = self.known().leads.take() else { return };
        // The store was told that the group is gone, if it could be.
        let since = Instant::now().checked_sub(NEWS);
        let could = self.world.scenario.lost_permille == 0
            && since.is_some_and(|since| self.world.store_was_calm(self.node, since));
        let ready = self.world.stored(&Key::Ready(self.group.id.clone())).flatten();
        let ready = ready.and_then(|value| ReadyRecord::decode(&value).ok());
        if could && ready.is_some_and(|ready| ready.epoch == epoch) {
            let id = &self.group.id;
            self.world.journal.violation(format!("{id} is said to be ready in epoch {epoch}, which is over"));
        }
    }

    async fn serves(&self, endpoint: &str) -> bool {
        let services = &self.world.services;
        let Some(node) = services.engine_node(endpoint) else { return false };
        let Ok(conn) = self.world.net.connect(self.node, node).await else { return false };
        let serves = !services.is_draining(node) && services.engine(endpoint).is_some();
        conn.transit().await.is_ok() && serves
    }
}

impl Led for SimLed {
    fn engine(&self) -> &EngineHandle {
        &self.handle
    }

    fn deserted(&self) -> CancellationToken {
        self.deserted.clone()
    }

    async fn stop(self) {
        self.handle.stop().await;
        self.ended.cancelled().await;
        for local in self.locals {
            let _ended = local.await;
        }
    }
}

impl Followed for SimFollowed {
    fn deserted(&self) -> CancellationToken {
        self.deserted.clone()
    }

    fn leaver(&self) -> Box<dyn FnOnce() + Send> {
        let (leaving, rank) = (self.leaving.clone(), self.rank);
        Box::new(move || {
            let _gone = leaving.try_send(Reply::Told(FollowerMessage::Leaving { rank }));
        })
    }

    async fn ended(self) -> Result<(), String> {
        // Nobody who drains speaks after that.
        drop(self.leaving);
        self.ended.await.map_err(|_| "its task is gone".to_owned())
    }
}

/// Passes a leader's orders on to a rank, and sees the end of them even while the rank computes.
async fn hear(
    mut orders: mpsc::Receiver<Result<Word, Broken>>,
    rank: mpsc::Sender<Word>,
    deserted: CancellationToken,
) {
    while let Some(Ok(order)) = orders.recv().await {
        let is_last = matches!(order, Word::Order(LeaderMessage::Stop));
        if rank.send(order).await.is_err() || is_last {
            break;
        }
    }
    deserted.cancel();
}

/// A rank that has joined.
fn already() -> mpsc::Receiver<Result<(), Broken>> {
    let (sender, receiver) = mpsc::channel(1);
    let _has_room = sender.try_send(Ok(()));
    receiver
}

fn nonce(secret: &GroupSecret) -> u64 {
    let (words, _) = secret.bytes().as_chunks::<8>();
    u64::from_le_bytes(words[0])
}
