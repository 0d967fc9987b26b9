//! A rank and its lives: weights are loaded once, and every epoch of the group gets a new [`Member`] made of them.
//!
//! A member has its own door for KV, its own pool and its own communicators, so nothing of one epoch can reach into the
//! next: what comes late for an old life finds an old door. Only weights are shared, and they never change.

use std::{
    cell::Cell,
    sync::{Arc, mpsc::sync_channel},
    thread::JoinHandle,
};

use longreach_collective::{
    AbortHandle, CommError, Communicator,
    control::{Broadcaster, ControlLink, ControlSender, Leader, Reader},
};
use longreach_kernels::Exec;
use longreach_model::{Backend, Comms, CpuBackend, LoadOptions, ModelShard, shard::head_split};
use longreach_proto::{
    group::{FollowerMessage, LeaderMessage},
    worker::RankTarget,
};
use longreach_types::{Epoch, GroupShape};
use tokio::{runtime::Handle, sync::mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use crate::{
    core::{Core, CoreParts, Orders},
    engine::{Engine, LinkEvent},
    follower::{Follower, FollowerCore},
    handle::EngineHandle,
    inlet::{Deliveries, InletIdentity, KvInlet},
    rank::RankWorker,
    setup::{BuildError, EngineConfig, Model, Plan},
    transport::KvTransport,
};

/// Orders and replies that may wait for a rank's thread; it drains them every turn.
const MESSAGES_LEN: usize = 1024;

/// Length of what ranks compare before their first step.
const DIGEST_BYTES: usize = 32;

/// A rank's way to its peers.
pub(crate) type World = Box<dyn Communicator<[f32]>>;

/// One rank's weights, loaded once for all lives of its group. Cheap to clone.
#[derive(Clone)]
pub struct Rank {
    pub(crate) model: Model,
    pub(crate) config: EngineConfig,
    pub(crate) plan: Plan,
    pub(crate) idx: usize,
    shard: Arc<ModelShard<CpuBackend>>,
}

/// A rank in one life of its group, before it has met its peers.
pub struct Member {
    pub(crate) rank: Rank,
    pub(crate) epoch: Epoch,
    inlet: KvInlet,
    deliveries: Deliveries,
}

/// A running engine of this process.
pub struct RunningEngine {
    /// The way into it.
    pub handle: EngineHandle,
    threads: Vec<JoinHandle<Result<(), String>>>,
    lane_tasks: TaskTracker,
    readers: Vec<Reader>,
    deserted: CancellationToken,
}

impl RunningEngine {
    /// Stops the engine and waits until its threads and lanes have ended. The first failure of a thread is returned.
    pub async fn stop(self) -> Result<(), String> {
        self.handle.stop().await;
        let threads = self.threads;
        let ended = tokio::task::spawn_blocking(move || {
            let join = |thread: JoinHandle<Result<(), String>>| {
                thread.join().unwrap_or_else(|_| Err("a rank's thread panicked".to_owned()))
            };
            threads.into_iter().map(join).fold(Ok(()), Result::and)
        });
        let outcome = ended.await.map_err(|error| error.to_string())?;
        self.lane_tasks.close();
        self.lane_tasks.wait().await;
        outcome
    }

    /// Cancelled when another rank has left the group. The engine notices too, unless its thread does not come back from
    /// a step.
    pub fn deserted(&self) -> CancellationToken {
        self.deserted.clone()
    }

    /// Tasks that send KV and have not ended.
    pub fn n_lane_tasks(&self) -> usize {
        self.lane_tasks.len()
    }
}

/// A follower that runs.
pub struct RunningFollower {
    leader: ControlSender,
    rank: usize,
    thread: JoinHandle<Result<(), String>>,
    reader: Reader,
    deserted: CancellationToken,
}

/// Says for a follower that its process drains.
#[derive(Clone, Debug)]
pub struct Leaver {
    leader: ControlSender,
    rank: usize,
}

/// What the leader's thread needs besides its rank.
pub(crate) struct LeaderParts {
    pub(crate) world: World,
    pub(crate) control: Option<Leader>,
    pub(crate) targets: Vec<RankTarget>,
    pub(crate) transport: Arc<dyn KvTransport>,
}

impl Rank {
    /// Packs the share of rank `idx`. `progress` is called with layers done and in all.
    pub fn load(
        model: &Model,
        config: &EngineConfig,
        idx: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let plan = Plan::new(model, config)?;
        // Before the weights are read, which takes longer.
        longreach_kernels::check_memory(plan.kv_bytes)
            .map_err(|source| BuildError::KvMemory { bytes: plan.kv_bytes, source })?;
        let options = LoadOptions {
            shape: config.shape,
            rank: idx,
            weights: config.weights,
            query_form: config.query_form,
            merge_form: config.merge_form,
            kv_dtype: config.kv_dtype,
            block_size: config.block_size,
            n_blocks: plan.n_blocks,
            max_seq_len: Some(plan.max_seq_len),
        };
        let backend = CpuBackend::new(Exec::new(config.isa, config.n_threads)?);
        let shard = Arc::new(ModelShard::load(backend, &model.files, &options, progress)?);
        Ok(Self { model: model.clone(), config: config.clone(), plan, idx, shard })
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.shard.weight_bytes()
    }

    /// The rank in the life `epoch`. A rank computes for one life at a time: the last one must have ended.
    pub fn enlist(&self, epoch: Epoch) -> Member {
        let kv_shape = &self.shard.kv_shape;
        let (inlet, deliveries) = KvInlet::new(InletIdentity {
            rank: self.idx,
            epoch,
            layout: self.model.kv_layout(&self.config),
            cell_bytes: kv_shape.cell_bytes(kv_shape.n_kv_heads),
        });
        Member { rank: self.clone(), epoch, inlet, deliveries }
    }

    /// Meets the peers of the life `epoch` on the rank's own thread: head group, and a first collective that proves
    /// that the group works and was set up alike.
    fn join(self, epoch: Epoch, world: World) -> Result<RankWorker<CpuBackend>, BuildError> {
        let Self { model, config, plan, idx, shard } = self;
        let digest = plan.digest(&model, &config, epoch);
        let comms = join_group(world, config.shape)?;
        let Comms { mut world, head_group } = comms;
        let mut digests = vec![0; config.shape.n_ranks() * DIGEST_BYTES];
        world.all_gather_bytes(&digest, &mut digests)?;
        if let Some(peer) = digests.chunks_exact(DIGEST_BYTES).position(|theirs| theirs != digest) {
            return Err(BuildError::Differs { rank: idx, peer });
        }
        let kv = shard.backend.kv(&shard.kv_shape);
        Ok(RankWorker::new(shard, kv, Comms { world, head_group }, epoch))
    }
}

impl Member {
    /// The door for KV in this life.
    pub fn inlet(&self) -> KvInlet {
        self.inlet.clone()
    }

    /// Starts the engine with this rank as its leader, and returns when it has joined its group.
    pub(crate) fn start_leader(
        self,
        parts: LeaderParts,
        runtime: &Handle,
    ) -> Result<RunningEngine, BuildError> {
        let Self { rank, epoch, deliveries, .. } = self;
        let (follower_in, followers) = mpsc::channel(MESSAGES_LEN);
        let (tasks, deserted) = (TaskTracker::new(), CancellationToken::new());
        let (orders, readers): (Orders, _) = match parts.control {
            Some(control) => {
                let (broadcaster, readers) =
                    hear(control, (parts.world.abort_handle(), deserted.clone()), follower_in)?;
                (Box::new(move |order| Ok(broadcaster.broadcast(&order.encode())?)), readers)
            }
            None => (Box::new(|_| Ok(())), Vec::new()),
        };
        let (core, intake, handle) = Core::new(CoreParts {
            setup: rank.plan.setup(&rank.model, &rank.config, parts.targets),
            sched: rank.plan.scheduler(&rank.config, epoch)?,
            orders,
            transport: parts.transport,
            tasks: tasks.clone(),
            runtime: runtime.clone(),
            deliveries,
            followers,
        });
        let thread = spawn_joining("engine".to_owned(), (rank, epoch), parts.world, move |rank| {
            Engine { core, rank, intake }.run();
            Ok(())
        })?;
        Ok(RunningEngine { handle, threads: vec![thread], lane_tasks: tasks, readers, deserted })
    }

    /// Starts this rank as a follower, and returns when it has joined its group.
    pub(crate) fn start_follower(
        self,
        world: World,
        link: ControlLink,
    ) -> Result<RunningFollower, BuildError> {
        let Self { rank, epoch, deliveries, .. } = self;
        let idx = rank.idx;
        let (orders_in, orders) = mpsc::channel(MESSAGES_LEN);
        let (abort, stop) = (world.abort_handle(), LeaderMessage::Stop.encode());
        let is_told = Cell::new(false);
        let deserted = CancellationToken::new();
        let is_over = deserted.clone();
        let (leader, reader) = link.spawn_reader(move |order| {
            match &order {
                Ok(order) => is_told.set(*order == stop),
                // A leader that said stop may close while this rank still finishes the last step.
                Err(_) if is_told.get() => {}
                Err(_) => abort.abort(),
            }
            if is_told.get() || order.is_err() {
                is_over.cancel();
            }
            // A follower that has left needs no more orders.
            let _left = orders_in.blocking_send(order);
        })?;
        let (core, leader_out) = (FollowerCore::new(idx, epoch), leader.clone());
        let thread = spawn_joining(format!("rank-{idx}"), (rank, epoch), world, move |rank| {
            Follower { idx, core, rank, orders, deliveries, leader: leader_out }.run()
        })?;
        Ok(RunningFollower { leader, rank: idx, thread, reader, deserted })
    }
}

impl RunningEngine {
    /// Takes in the followers that are threads of the same process, to be stopped with the leader.
    pub(crate) fn adopt(&mut self, followers: impl IntoIterator<Item = RunningFollower>) {
        for RunningFollower { thread, reader, .. } in followers {
            self.threads.push(thread);
            self.readers.push(reader);
        }
    }
}

impl RunningFollower {
    /// A way to ask the leader for the end.
    pub fn leaver(&self) -> Leaver {
        Leaver { leader: self.leader.clone(), rank: self.rank }
    }

    /// Cancelled when the leader has left the group or told this rank to. The rank notices too, unless its thread does not
    /// come back from a step.
    pub fn deserted(&self) -> CancellationToken {
        self.deserted.clone()
    }

    /// Waits until the rank has left its group, and says why if it was not told to.
    pub async fn join(self) -> Result<(), String> {
        let (thread, reader) = (self.thread, self.reader);
        let joined = tokio::task::spawn_blocking(move || {
            let outcome = thread.join().unwrap_or_else(|_| Err("the rank's thread panicked".to_owned()));
            reader.stop();
            outcome
        });
        joined.await.map_err(|error| error.to_string())?
    }
}

impl Leaver {
    /// Asks the leader to end the epoch in good order, because this process drains. The leader's Stop, or the end of
    /// the link, ends [`RunningFollower::join`].
    pub fn announce(&self) {
        let message = FollowerMessage::Leaving { rank: self.rank }.encode();
        if let Err(error) = self.leader.send(&message) {
            warn!(rank = self.rank, %error, "the leader could not be told that this rank leaves");
        }
    }
}

/// Hands what followers say to the engine. The end of a link ends the epoch at once: the engine may be in a collective
/// with that very rank, and must not wait out its bound.
fn hear(
    control: Leader,
    (abort, deserted): (AbortHandle, CancellationToken),
    events: mpsc::Sender<(usize, LinkEvent)>,
) -> std::io::Result<(Broadcaster, Vec<Reader>)> {
    control.spawn_readers(move |rank, message| {
        if let Err(end) = &message {
            // What it means, the engine says: a group that is told to stop ends like this too.
            info!(rank, %end, "control link ended");
            abort.abort();
            deserted.cancel();
        }
        // A stopped engine needs no more events.
        let _stopped = events.blocking_send((rank, message));
    })
}

/// Starts a rank's thread, which joins its group and then runs `run`; returns when it has joined.
fn spawn_joining<F>(
    name: String,
    (rank, epoch): (Rank, Epoch),
    world: World,
    run: F,
) -> Result<JoinHandle<Result<(), String>>, BuildError>
where
    F: FnOnce(RankWorker<CpuBackend>) -> Result<(), String> + Send + 'static,
{
    let (joined_in, joined) = sync_channel(1);
    let thread = std::thread::Builder::new().name(name).spawn(move || match rank.join(epoch, world) {
        Ok(rank) => {
            // The starter waits for exactly this.
            let _starter_gone = joined_in.send(Ok(()));
            run(rank)
        }
        Err(error) => {
            let reason = error.to_string();
            let _starter_gone = joined_in.send(Err(error));
            Err(reason)
        }
    })?;
    joined.recv().map_err(|_| BuildError::Lost)??;
    Ok(thread)
}

/// Joins the rank's head group.
fn join_group(mut world: World, shape: GroupShape) -> Result<Comms<World>, CommError> {
    let parts: Vec<_> = (0..shape.n_head_groups()).map(|group| shape.ranks_of(group)).collect();
    let head_group = world.split(&parts)?;
    Ok(Comms { world, head_group })
}

/// The ranks of a group as receivers of KV.
pub(crate) fn targets(model: &Model, config: &EngineConfig, endpoints: Vec<String>) -> Vec<RankTarget> {
    endpoints
        .into_iter()
        .enumerate()
        .map(|(rank, endpoint)| RankTarget {
            rank,
            dcp_rank: config.shape.dcp_rank(rank),
            endpoint,
            kv_heads: head_split(&model.config, config.shape, rank).kv,
        })
        .collect()
}
