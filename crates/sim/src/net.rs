//! The simulated network: nodes that live, die and stand still, and links that delay, break and are cut.
//!
//! It behaves as TCP under gRPC does. What is sent arrives in order or the connection ends; loss shows as delay. A
//! process that is killed resets its connections at once; a host that vanishes, a cut link and a process that stands
//! still are noticed only after `silence`, which stands for the keep-alive of the connection. Duplicates and another
//! order exist one level up, between the chunks of a hand-off, see [`lane`](crate::lane).

use std::{
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{journal::Journal, rng::Rng};

/// Messages on their way in one stream, beyond which its sender waits.
const WINDOW: usize = 8;

/// The least that a connection takes.
const CONNECT_TIME: Duration = Duration::from_millis(1);

/// A process, or the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(pub(crate) usize);

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    /// Its connections are reset.
    Killed,
    /// Nobody is told.
    Vanished,
}

/// A connection that is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("connection lost")]
pub(crate) struct Broken;

/// How the network behaves in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetConfig {
    /// The most a message usually takes.
    pub(crate) max_delay: Duration,
    /// How often one is lost and sent again.
    pub(crate) loss_permille: u32,
    /// How long a connection may be silent before it is given up.
    pub(crate) silence: Duration,
}

/// A handle on the network.
#[derive(Clone)]
pub(crate) struct Net {
    shared: Arc<Shared>,
}

struct Shared {
    config: NetConfig,
    state: Mutex<State>,
    /// Rings whenever a node or link changes.
    changed: Notify,
    /// Everything that runs.
    tasks: TaskTracker,
    journal: Journal,
    /// The end of the run.
    end: CancellationToken,
}

struct State {
    rng: Rng,
    nodes: Vec<Node>,
    links: BTreeMap<(NodeId, NodeId), Link>,
}

struct Node {
    name: String,
    life: u64,
    /// Cancelled when this life ends.
    alive: CancellationToken,
    died: Option<(Instant, Death)>,
    frozen: Option<Instant>,
    /// The rank that computes for ever, if one does.
    stuck: Option<usize>,
    /// When something last began or ceased to be wrong with it.
    disturbed: Option<Instant>,
}

#[derive(Clone, Copy, Default)]
struct Link {
    cut: Option<Instant>,
    n_resets: u64,
    disturbed: Option<Instant>,
}

enum Condition {
    Open,
    Blocked { since: Instant },
    Dead { at: Instant, death: Death },
}

/// One connection between two lives.
#[derive(Clone)]
pub(crate) struct Conn {
    net: Net,
    ends: [NodeId; 2],
    lives: [u64; 2],
    n_resets: u64,
}

impl Net {
    pub(crate) fn new(config: NetConfig, seed: u64, journal: Journal) -> Self {
        let state = State { rng: Rng::new(seed, 11), nodes: Vec::new(), links: BTreeMap::new() };
        Self {
            shared: Arc::new(Shared {
                config,
                state: Mutex::new(state),
                changed: Notify::new(),
                tasks: TaskTracker::new(),
                journal,
                end: CancellationToken::new(),
            }),
        }
    }

    /// Adds a node that is not up yet.
    pub(crate) fn add_node(&self, name: impl Into<String>) -> NodeId {
        let mut state = self.state();
        state.nodes.push(Node {
            name: name.into(),
            life: 0,
            alive: CancellationToken::new(),
            died: Some((Instant::now(), Death::Killed)),
            frozen: None,
            stuck: None,
            disturbed: None,
        });
        NodeId(state.nodes.len() - 1)
    }

    pub(crate) fn name(&self, node: NodeId) -> String {
        self.state().nodes[node.0].name.clone()
    }

    /// Begins a life of `node`, if it has none.
    pub(crate) fn boot(&self, node: NodeId) -> bool {
        let mut state = self.state();
        let end = self.shared.end.child_token();
        let state = &mut state.nodes[node.0];
        if state.died.is_none() {
            return false;
        }
        state.life += 1;
        // Its first start is no disturbance.
        state.disturbed = (state.life > 1).then(Instant::now);
        (state.alive, state.died, state.frozen, state.stuck) = (end, None, None, None);
        true
    }

    /// Ends the life of `node`, if it lives.
    pub(crate) fn kill(&self, node: NodeId, death: Death) -> bool {
        let alive = {
            let mut state = self.state();
            let node = &mut state.nodes[node.0];
            if node.died.is_some() {
                return false;
            }
            (node.died, node.frozen) = (Some((Instant::now(), death)), None);
            node.disturbed = Some(Instant::now());
            node.alive.clone()
        };
        alive.cancel();
        self.ring();
        true
    }

    /// Stops or continues `node`; whether that changed anything.
    pub(crate) fn set_frozen(&self, node: NodeId, frozen: bool) -> bool {
        let changed = {
            let node = &mut self.state().nodes[node.0];
            let changes = node.died.is_none() && node.frozen.is_some() != frozen;
            if changes {
                node.frozen = frozen.then(Instant::now);
                node.disturbed = Some(Instant::now());
            }
            changes
        };
        self.ring();
        changed
    }

    /// From now on a step of this rank of `node` does not end, in this life of it; whether that changed anything.
    pub(crate) fn set_stuck(&self, node: NodeId, rank: usize) -> bool {
        let node = &mut self.state().nodes[node.0];
        let changes = node.died.is_none() && node.stuck.is_none();
        if changes {
            node.stuck = Some(rank);
            node.disturbed = Some(Instant::now());
        }
        changes
    }

    pub(crate) fn is_stuck(&self, node: NodeId) -> bool {
        self.state().nodes[node.0].stuck.is_some()
    }

    /// A step of this rank on `node`, but for its time.
    pub(crate) async fn computes(&self, node: NodeId, rank: usize) {
        let stuck = self.state().nodes[node.0].stuck;
        if stuck == Some(rank) {
            std::future::pending().await
        }
    }

    /// Cuts or heals the link between two nodes; whether that changed anything.
    pub(crate) fn set_cut(&self, a: NodeId, b: NodeId, cut: bool) -> bool {
        let changed = {
            let mut state = self.state();
            let link = state.links.entry(pair(a, b)).or_default();
            let changes = link.cut.is_some() != cut;
            link.cut = if cut { link.cut.or_else(|| Some(Instant::now())) } else { None };
            link.disturbed = Some(Instant::now());
            changes
        };
        self.ring();
        changed
    }

    /// Ends all connections between two nodes.
    pub(crate) fn reset(&self, a: NodeId, b: NodeId) {
        {
            let mut state = self.state();
            let link = state.links.entry(pair(a, b)).or_default();
            link.n_resets += 1;
            link.disturbed = Some(Instant::now());
        }
        self.ring();
    }

    /// Whether nothing has been wrong with any of `nodes`, nor between any of them, since `time`.
    pub(crate) fn was_calm(&self, nodes: &[NodeId], time: Instant) -> bool {
        let state = self.state();
        let calm = |disturbed: Option<Instant>| disturbed.is_none_or(|at| at < time);
        let node_calm = |node: &NodeId| {
            let node = &state.nodes[node.0];
            node.died.is_none() && node.frozen.is_none() && node.stuck.is_none() && calm(node.disturbed)
        };
        let mut links = state.links.iter().filter(|((a, b), _)| nodes.contains(a) && nodes.contains(b));
        nodes.iter().all(node_calm) && links.all(|(_, link)| link.cut.is_none() && calm(link.disturbed))
    }

    /// Waits while `node` stands still.
    pub(crate) async fn thawed(&self, node: NodeId) {
        loop {
            let changed = self.shared.changed.notified();
            if self.state().nodes[node.0].frozen.is_none() {
                return;
            }
            changed.await;
        }
    }

    /// Runs `task` for as long as this life of `node` lasts, and not while `node` stands still. A panic of it is a
    /// violation.
    pub(crate) fn spawn_on(&self, node: NodeId, task: impl Future<Output = ()> + Send + 'static) {
        let alive = self.state().nodes[node.0].alive.clone();
        let net = self.clone();
        self.spawn(async move {
            // Biased: the dead do nothing more. Both arms may be dropped, as everything of a process may.
            tokio::select! {
                biased;
                () = alive.cancelled() => {}
                () = net.freezing(node, task) => {}
            }
        });
    }

    /// `task`, which does nothing while `node` stands still, whatever it waits for.
    async fn freezing(&self, node: NodeId, task: impl Future<Output = ()>) {
        tokio::pin!(task);
        let mut thaw = None;
        std::future::poll_fn(|context| {
            if self.is_frozen(node) {
                let thaw = thaw.get_or_insert_with(|| Box::pin(self.thawed(node)));
                std::task::ready!(thaw.as_mut().poll(context));
            }
            thaw = None;
            task.as_mut().poll(context)
        })
        .await;
    }

    fn is_frozen(&self, node: NodeId) -> bool {
        self.state().nodes[node.0].frozen.is_some()
    }

    /// Runs `task` until the end of the run.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (end, journal) = (self.shared.end.clone(), self.shared.journal.clone());
        self.shared.tasks.spawn(async move {
            let guarded = AssertUnwindSafe(end.run_until_cancelled(task)).catch_unwind();
            if guarded.await.is_err() {
                journal.violation("a task panicked");
            }
        });
    }

    /// Ends everything that runs, and waits for it.
    pub(crate) async fn shut_down(&self) {
        self.shared.end.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self, from: NodeId, to: NodeId) -> Result<Conn, Broken> {
        let conn = {
            let state = self.state();
            let n_resets = state.links.get(&pair(from, to)).map_or(0, |link| link.n_resets);
            let lives = [state.nodes[from.0].life, state.nodes[to.0].life];
            Conn { net: self.clone(), ends: [from, to], lives, n_resets }
        };
        // Never for nothing: who is refused and tries again at once must not do so for ever at one instant.
        sleep(CONNECT_TIME).await;
        conn.transit().await?;
        Ok(conn)
    }

    /// True in `permille` of a thousand cases.
    pub(crate) fn draws(&self, permille: u32) -> bool {
        self.state().rng.chance(permille)
    }

    fn delay(&self) -> Duration {
        let config = &self.shared.config;
        let rng = &mut self.state().rng;
        let usual = Duration::from_millis(rng.range(0, config.max_delay.as_millis() as usize) as u64);
        if rng.chance(config.loss_permille) {
            self.shared.journal.count("message lost and sent again");
            return usual + Duration::from_millis(200);
        }
        usual
    }

    fn ring(&self) {
        self.shared.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Conn {
    /// A message goes from one end to the other.
    pub(crate) async fn transit(&self) -> Result<(), Broken> {
        let delay = self.net.delay();
        if !delay.is_zero() {
            sleep(delay).await;
        }
        loop {
            let changed = self.net.shared.changed.notified();
            match self.condition() {
                Condition::Open => return Ok(()),
                condition => self.wait(condition, changed).await?,
            }
        }
    }

    /// Resolves when the connection is found to have ended.
    pub(crate) async fn broken(&self) -> Broken {
        loop {
            let changed = self.net.shared.changed.notified();
            match self.condition() {
                Condition::Open => changed.await,
                condition => {
                    if let Err(broken) = self.wait(condition, changed).await {
                        return broken;
                    }
                }
            }
        }
    }

    /// Waits for a change, or until the silence has lasted for too long.
    async fn wait(&self, condition: Condition, changed: impl Future<Output = ()>) -> Result<(), Broken> {
        let silence = self.net.shared.config.silence;
        match condition {
            Condition::Open => Ok(()),
            Condition::Blocked { since } => {
                tokio::select! {
                    biased;
                    () = changed => Ok(()),
                    () = sleep_until(since + silence) => Err(Broken),
                }
            }
            Condition::Dead { at, death } => {
                if death == Death::Vanished {
                    sleep_until(at + silence).await;
                }
                Err(Broken)
            }
        }
    }

    fn condition(&self) -> Condition {
        let state = self.net.state();
        let link = state.links.get(&pair(self.ends[0], self.ends[1])).copied().unwrap_or_default();
        let mut since = link.cut;
        for (end, life) in self.ends.into_iter().zip(self.lives) {
            let node = &state.nodes[end.0];
            if let Some((at, death)) = node.died {
                return Condition::Dead { at, death };
            }
            if node.life != life {
                // Its next life knows nothing of the connection and says so.
                return Condition::Dead { at: Instant::now(), death: Death::Killed };
            }
            since = since.or(node.frozen);
        }
        if link.n_resets != self.n_resets {
            return Condition::Dead { at: Instant::now(), death: Death::Killed };
        }
        since.map_or(Condition::Open, |since| Condition::Blocked { since })
    }

    /// Carries a stream over this connection. Dropping the receiver ends the sender's side a little later; the end of
    /// the connection ends both.
    pub(crate) fn carry<T: Send + 'static>(
        &self,
        source: mpsc::Receiver<T>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> mpsc::Receiver<Result<T, Broken>> {
        let (sink, receiver) = mpsc::channel(WINDOW);
        let conn = self.clone();
        self.net.spawn(async move {
            conn.carry_all(source, &sink).await;
            on_end();
        });
        receiver
    }

    async fn carry_all<T>(&self, mut source: mpsc::Receiver<T>, sink: &mpsc::Sender<Result<T, Broken>>) {
        loop {
            // Each arm only learns that something is there; what is taken is passed on below.
            let first = tokio::select! {
                biased;
                () = sink.closed() => {
                    let _news_or_silence = self.transit().await;
                    return;
                }
                first = source.recv() => first,
                broken = self.broken() => {
                    let _gone = sink.send(Err(broken)).await;
                    return;
                }
            };
            let arrived = self.transit().await;
            // The source of a process that died ends too; what its peer sees is a connection that is lost.
            let ended = first.is_none();
            if let Err(broken) = arrived {
                let _gone = sink.send(Err(broken)).await;
                return;
            }
            let mut next = first;
            while let Some(item) = next {
                tokio::select! {
                    biased;
                    sent = sink.send(Ok(item)) => if sent.is_err() { break },
                    broken = self.broken() => {
                        let _gone = sink.try_send(Err(broken));
                        return;
                    }
                }
                next = source.try_recv().ok();
            }
            if ended {
                return;
            }
        }
    }
}

const fn pair(a: NodeId, b: NodeId) -> (NodeId, NodeId) {
    if a.0 <= b.0 { (a, b) } else { (b, a) }
}
