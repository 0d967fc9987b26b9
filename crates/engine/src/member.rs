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
    control::{Broadcaster, ControlError, ControlLink, ControlSender, Leader, Reader},
};
use longreach_kernels::Exec;
use longreach_model::{Backend, Comms, CpuBackend, LoadOptions, ModelShard, shard::head_split};
use longreach_proto::{
    group::{FollowerMessage, LeaderMessage},
    worker::RankTarget,
};
use longreach_sched::SchedStats;
use longreach_types::{Epoch, GroupShape};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use crate::{
    engine::{Engine, EngineSetup, LaneSetup},
    follower::Follower,
    handle::{EngineHandle, EngineInfo},
    inbound::InboundSet,
    inlet::{Delivery, InletIdentity, KvInlet},
    intake::Intake,
    outbound::OutboundSet,
    pull::PullSet,
    rank::RankWorker,
    setup::{BuildError, EngineConfig, Model, Plan},
    transport::KvTransport,
};

/// Lane reports and control events that may wait for the engine thread; it drains them every turn.
const REPORTS_LEN: usize = 1024;

/// Length of what ranks compare before their first step.
const DIGEST_BYTES: usize = 32;

/// A rank's way to its peers.
pub(crate) type World = Box<dyn Communicator<[f32]>>;

/// One rank's weights, loaded once for all lives of its group. Cheap to clone.
#[derive(Clone)]
pub struct Rank {
    pub(crate) model: Model,
    pub(crate) config: EngineConfig,
    pub(crate) idx: usize,
    shard: Arc<ModelShard<CpuBackend>>,
}

/// A rank in one life of its group, before it has met its peers.
pub struct Member {
    pub(crate) rank: Rank,
    pub(crate) epoch: Epoch,
    inlet: KvInlet,
    deliveries: mpsc::Receiver<Delivery>,
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
        Ok(Self { model: model.clone(), config: config.clone(), idx, shard })
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
}

impl Member {
    /// The door for KV in this life.
    pub fn inlet(&self) -> KvInlet {
        self.inlet.clone()
    }

    /// Meets the peers on the rank's own thread: head group, and a first collective that proves that the group works
    /// and was set up alike.
    fn join(self, world: World) -> Result<(RankWorker<CpuBackend>, mpsc::Receiver<Delivery>), BuildError> {
        let Rank { model, config, idx, shard } = self.rank;
        let digest = Plan::new(&model, &config)?.digest(&model, &config, self.epoch);
        let comms = join_group(world, config.shape)?;
        let Comms { mut world, head_group } = comms;
        let mut digests = vec![0; config.shape.n_ranks() * DIGEST_BYTES];
        world.all_gather_bytes(&digest, &mut digests)?;
        if let Some(peer) = digests.chunks_exact(DIGEST_BYTES).position(|theirs| theirs != digest) {
            return Err(BuildError::Differs { rank: idx, peer });
        }
        let kv = shard.backend.kv(&shard.kv_shape);
        let comms = Comms { world, head_group };
        Ok((RankWorker::new(shard, kv, comms, self.epoch), self.deliveries))
    }

    /// Starts the engine with this rank as its leader, and returns when it has joined its group.
    pub(crate) fn start_leader(
        self,
        parts: LeaderParts,
        runtime: &Handle,
    ) -> Result<RunningEngine, BuildError> {
        let (model, config, epoch) = (self.rank.model.clone(), self.rank.config.clone(), self.epoch);
        let plan = Plan::new(&model, &config)?;
        let (commands_in, commands) = mpsc::channel(config.intake_len);
        let (reports_in, reports) = mpsc::channel(REPORTS_LEN);
        let (follower_in, followers) = mpsc::channel(REPORTS_LEN);
        let wake = Arc::new(Notify::new());
        let (lane_tasks, deserted) = (TaskTracker::new(), CancellationToken::new());
        let (broadcaster, readers) = match parts.control {
            Some(control) => {
                let (broadcaster, readers) =
                    hear(control, (parts.world.abort_handle(), deserted.clone()), follower_in)?;
                (Some(broadcaster), readers)
            }
            None => (None, Vec::new()),
        };
        let setup = plan.setup(&model, &config, parts.targets);
        let sched = plan.scheduler(&config, epoch)?;
        let (info, info_out) = watch::channel(first_info(epoch, &setup));
        let lanes = LaneSetup {
            transport: parts.transport,
            wake: Arc::clone(&wake),
            reports: reports_in,
            tasks: lane_tasks.clone(),
            runtime: runtime.clone(),
        };
        let handle = EngineHandle::new(commands_in, Arc::clone(&wake), info_out);
        let (world, runtime) = (parts.world, runtime.clone());
        let thread = spawn_joining("engine".to_owned(), self, world, move |rank, deliveries| {
            let intake = Intake { runtime, commands, deliveries, reports, followers, wake };
            Engine {
                rank,
                followers: broadcaster,
                sched,
                setup,
                lanes,
                intake,
                info,
                live: Default::default(),
                inbound: InboundSet::default(),
                outbound: OutboundSet::default(),
                pulls: PullSet::default(),
                is_stopping: false,
            }
            .run();
            Ok(())
        })?;
        Ok(RunningEngine { handle, threads: vec![thread], lane_tasks, readers, deserted })
    }

    /// Starts this rank as a follower, and returns when it has joined its group.
    pub(crate) fn start_follower(
        self,
        world: World,
        link: ControlLink,
        runtime: &Handle,
    ) -> Result<RunningFollower, BuildError> {
        let idx = self.rank.idx;
        let (orders_in, orders) = mpsc::channel(REPORTS_LEN);
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
        let (runtime, to_leader) = (runtime.clone(), leader.clone());
        let thread = spawn_joining(format!("rank-{idx}"), self, world, move |rank, deliveries| {
            Follower { idx, rank, runtime, orders, deliveries, leader: Arc::new(to_leader) }.run()
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

/// What is known of an engine before its first step.
fn first_info(epoch: Epoch, setup: &EngineSetup) -> EngineInfo {
    EngineInfo {
        epoch,
        layout: setup.layout.clone(),
        shape: setup.shape,
        max_seq_len: setup.max_seq_len,
        vocab_size: setup.vocab_size,
        stats: SchedStats::default(),
        n_handoffs: 0,
        pulled_bytes: 0,
        leaving: None,
        failure: None,
    }
}

/// Hands what followers say to the engine. The end of a link ends the epoch at once: the engine may be in a collective
/// with that very rank, and must not wait out its bound.
fn hear(
    control: Leader,
    (abort, deserted): (AbortHandle, CancellationToken),
    events: mpsc::Sender<(usize, Result<Vec<u8>, ControlError>)>,
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
    member: Member,
    world: World,
    run: F,
) -> Result<JoinHandle<Result<(), String>>, BuildError>
where
    F: FnOnce(RankWorker<CpuBackend>, mpsc::Receiver<Delivery>) -> Result<(), String> + Send + 'static,
{
    let (joined_in, joined) = sync_channel(1);
    let thread = std::thread::Builder::new().name(name).spawn(move || match member.join(world) {
        Ok((rank, deliveries)) => {
            // The starter waits for exactly this.
            let _starter_gone = joined_in.send(Ok(()));
            run(rank, deliveries)
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
