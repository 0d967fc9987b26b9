//! Building engines: a prefill engine, a decode group of threads, or one rank of a group of processes.
//!
//! Building has two steps. [`DecodeGroup::load`] packs weights and opens the inlets, so that services can be bound;
//! [`DecodeGroup::start`] takes the addresses they got and starts the threads.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use longreach_collective::{
    CommConfig, CommError, Communicator, ConnectError,
    control::{ControlConfig, ControlLink, Leader, Reader, local_control},
    local_group,
};
use longreach_kernels::{Exec, ExecError, Isa};
use longreach_kv::{KvConfig, KvManager};
use longreach_model::{
    Backend, Comms, CpuBackend, LoadError, LoadOptions, ModelShard,
    config::{ConfigError, ModelConfig},
    files::{ModelFiles, fingerprint},
    shard::head_split,
};
use longreach_proto::{
    WIRE_VERSION,
    worker::{KvLayout, RankTarget},
};
use longreach_sched::{ReuseCosts, SchedConfig, SchedStats, Scheduler};
use longreach_types::{DcpLayout, Epoch, GroupShape, KvDtype, MergeForm, N_SHARDS, QueryForm, WeightForm};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, watch},
};
use tokio_util::task::TaskTracker;

use crate::{
    engine::{Engine, EngineSetup, LaneSetup},
    follower::Follower,
    handle::{EngineHandle, EngineInfo},
    inbound::InboundSet,
    inlet::{Delivery, InletIdentity, KvInlet},
    intake::Intake,
    outbound::OutboundSet,
    rank::RankWorker,
    transport::KvTransport,
};

/// Lane reports and control events that may wait for the engine thread; it drains them every turn.
const REPORTS_LEN: usize = 1024;

/// An opened model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its mapped files.
    pub files: Arc<ModelFiles>,
    /// Its configuration.
    pub config: ModelConfig,
    /// First half of its fingerprint.
    pub fingerprint: [u8; 16],
}

/// How an engine is built. Every rank of a group is built with the same.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// N and D. A prefill worker is a group of one.
    pub shape: GroupShape,
    /// How weights are held.
    pub weights: WeightForm,
    /// Number format of the KV cache.
    pub kv_dtype: KvDtype,
    /// How partial attention becomes one.
    pub merge_form: MergeForm,
    /// How a rank comes by its queries.
    pub query_form: QueryForm,
    /// B, positions a KV block. The kernels are tuned for 32.
    pub block_size: usize,
    /// Bytes of KV a rank may hold. More: more and longer sequences before any waits. Less: room for weights.
    pub kv_bytes: usize,
    /// The longest sequence; unset is what the model and the pools allow.
    pub max_seq_len: Option<usize>,
    /// Threads of each rank.
    pub n_threads: usize,
    /// Which kernels; all give the same bits.
    pub isa: Isa,
    /// Limits of the scheduler; `max_seq_len` and `reuse.kv_token_bytes` there are set from the above.
    pub sched: SchedConfig,
    /// Bounds of collectives.
    pub comm: CommConfig,
    /// How long one hand-off may stand still on either side. Longer: a prompt may wait longer for a busy prefill
    /// worker. Shorter: one that is stuck is given up, and tried elsewhere, sooner.
    pub handoff_timeout: Duration,
    /// Submissions that may wait for the engine thread between two steps.
    pub intake_len: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            shape: GroupShape::SINGLE,
            weights: WeightForm::default(),
            kv_dtype: KvDtype::default(),
            merge_form: MergeForm::default(),
            query_form: QueryForm::default(),
            block_size: 32,
            kv_bytes: 512 << 20,
            max_seq_len: None,
            n_threads: 1,
            isa: Isa::best(),
            sched: SchedConfig { max_batch_tokens: 512, max_chunk_len: 256, ..SchedConfig::default() },
            comm: CommConfig::default(),
            handoff_timeout: Duration::from_secs(120),
            intake_len: 1024,
        }
    }
}

/// Why an engine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's weights.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The kernels or their threads.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The scheduler's limits.
    #[error(transparent)]
    Sched(#[from] longreach_sched::ConfigError),
    /// Block size or group shape.
    #[error(transparent)]
    Layout(#[from] longreach_types::LayoutError),
    /// The KV budget holds not even one sequence of one block.
    #[error(
        "kv_bytes is {have}, one block of {block_size} positions takes {need}; give the KV cache more memory"
    )]
    KvBudget {
        /// Bytes of one block.
        need: usize,
        /// Bytes allowed.
        have: usize,
        /// B.
        block_size: usize,
    },
    /// This build's block hash is not the one that keys are made of.
    #[error(transparent)]
    Hash(#[from] longreach_kv::HashMismatch),
    /// The first collective failed.
    #[error("the group did not come together: {0}")]
    Comm(#[from] CommError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Rank 0 leads and no other.
    #[error("rank {rank} was started as the wrong end: rank 0 leads, all others follow")]
    WrongEnd {
        /// The rank.
        rank: usize,
    },
    /// A thread could not be started.
    #[error("thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The number of addresses is not the number of ranks.
    #[error("{got} rank endpoints for {want} ranks")]
    Endpoints {
        /// Ranks.
        want: usize,
        /// Endpoints given.
        got: usize,
    },
}

/// A running engine of this process.
pub struct RunningEngine {
    /// The way into it.
    pub handle: EngineHandle,
    threads: Vec<JoinHandle<Result<(), String>>>,
    lane_tasks: TaskTracker,
    _readers: Vec<Reader>,
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

    /// Tasks that send KV and have not ended.
    pub fn n_lane_tasks(&self) -> usize {
        self.lane_tasks.len()
    }
}

impl Model {
    /// Reads the configuration of `files`.
    pub fn open(files: ModelFiles) -> Result<Self, ConfigError> {
        let config = ModelConfig::from_files(&files)?;
        let full = fingerprint(&files, &config).0;
        let mut half = [0; 16];
        half.copy_from_slice(&full[..16]);
        Ok(Self { files: Arc::new(files), config, fingerprint: half })
    }

    /// What KV of this model looks like under `config`.
    pub fn kv_layout(&self, config: &EngineConfig) -> KvLayout {
        KvLayout {
            model_fingerprint: self.fingerprint,
            n_layers: self.config.n_layers,
            n_kv_heads: self.config.n_kv_heads,
            head_dim: self.config.head_dim,
            kv_dtype: config.kv_dtype,
            block_size: config.block_size,
            n_shards: N_SHARDS,
            wire_version: WIRE_VERSION,
        }
    }

    /// What workers of a cluster must agree on, as one word for registrations.
    pub fn layout_hash(&self, config: &EngineConfig) -> String {
        let layout = self.kv_layout(config);
        let hex: String = layout.model_fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}-{}-b{}-v{}", layout.kv_dtype, layout.block_size, layout.wire_version)
    }
}

/// What follows from a model and a configuration, equal on every rank.
#[derive(Clone, Debug)]
struct Plan {
    dcp: DcpLayout,
    /// Blocks of every rank's pool: ranks of one DCP rank hold the same blocks, and plans name them once.
    n_blocks: usize,
    max_seq_len: usize,
    /// KV of one token over all heads, as it travels.
    kv_token_bytes: usize,
}

impl Plan {
    fn new(model: &Model, config: &EngineConfig) -> Result<Self, BuildError> {
        longreach_kv::self_check()?;
        let dcp = DcpLayout::new(config.block_size, config.shape.dcp_size())?;
        let heads = |rank| head_split(&model.config, config.shape, rank).kv.len();
        let n_kv_heads = (0..config.shape.n_ranks()).map(heads).max().unwrap_or(0).max(1);
        let cell = n_kv_heads * 2 * model.config.head_dim * config.block_size * config.kv_dtype.bytes();
        let (need, have) = (cell * model.config.n_layers, config.kv_bytes);
        let n_blocks = have / need;
        if n_blocks == 0 {
            return Err(BuildError::KvBudget { need, have, block_size: config.block_size });
        }
        let capacity = n_blocks * config.block_size * dcp.dcp_size();
        let wanted = config.max_seq_len.unwrap_or(usize::MAX);
        let max_seq_len = model.config.max_position.min(capacity).min(wanted);
        let layout = model.kv_layout(config);
        let token_heads = layout.n_layers * layout.n_kv_heads;
        let kv_token_bytes = token_heads * 2 * layout.head_dim * layout.kv_dtype.bytes();
        Ok(Self { dcp, n_blocks, max_seq_len, kv_token_bytes })
    }

    fn setup(&self, model: &Model, config: &EngineConfig, targets: Vec<RankTarget>) -> EngineSetup {
        EngineSetup {
            layout: model.kv_layout(config),
            dcp: self.dcp,
            shape: config.shape,
            targets,
            eos: model.config.eos.clone(),
            vocab_size: model.config.vocab_size,
            max_seq_len: self.max_seq_len,
            handoff_timeout: config.handoff_timeout,
            // A new hasher's keys are random, which makes this number unlike that of any other life.
            nonce: RandomState::new().hash_one(self.n_blocks),
        }
    }

    fn scheduler(&self, config: &EngineConfig, epoch: Epoch) -> Result<Scheduler, BuildError> {
        let n_blocks = u32::try_from(self.n_blocks).unwrap_or(u32::MAX);
        let kv = KvManager::new(KvConfig::new(self.dcp, n_blocks));
        let reuse = ReuseCosts { kv_token_bytes: self.kv_token_bytes, ..config.sched.reuse };
        let sched = SchedConfig { max_seq_len: self.max_seq_len, reuse, ..config.sched };
        sched.validate(&kv)?;
        Ok(Scheduler::new(sched, kv, epoch)?)
    }
}

/// One rank, loaded, before it has peers.
pub(crate) struct LoadedRank {
    shard: ModelShard<CpuBackend>,
    pub(crate) inlet: KvInlet,
    deliveries: mpsc::Receiver<Delivery>,
}

pub(crate) fn load_rank(
    model: &Model,
    config: &EngineConfig,
    rank: usize,
    epoch: Epoch,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<LoadedRank, BuildError> {
    let plan = Plan::new(model, config)?;
    let options = LoadOptions {
        shape: config.shape,
        rank,
        weights: config.weights,
        query_form: config.query_form,
        merge_form: config.merge_form,
        kv_dtype: config.kv_dtype,
        block_size: config.block_size,
        n_blocks: plan.n_blocks,
        max_seq_len: Some(plan.max_seq_len),
    };
    let backend = CpuBackend::new(Exec::new(config.isa, config.n_threads)?);
    let shard = ModelShard::load(backend, &model.files, &options, progress)?;
    let (inlet, deliveries) = KvInlet::new(InletIdentity {
        rank,
        epoch,
        layout: model.kv_layout(config),
        cell_bytes: shard.kv_shape.cell_bytes(shard.kv_shape.n_kv_heads),
    });
    Ok(LoadedRank { shard, inlet, deliveries })
}

/// Joins the rank's head group, then proves that the group works: a collective over everyone.
fn join_group(
    mut world: Box<dyn Communicator<[f32]>>,
    shape: GroupShape,
    epoch: Epoch,
) -> Result<Comms<Box<dyn Communicator<[f32]>>>, CommError> {
    let parts: Vec<_> = (0..shape.n_head_groups()).map(|group| shape.ranks_of(group)).collect();
    let head_group = world.split(&parts)?;
    let mut epochs = vec![0; shape.n_ranks() * 8];
    world.all_gather_bytes(&epoch.0.to_le_bytes(), &mut epochs)?;
    Ok(Comms { world, head_group })
}

impl LoadedRank {
    fn join(
        self,
        world: Box<dyn Communicator<[f32]>>,
        epoch: Epoch,
    ) -> Result<(RankWorker<CpuBackend>, mpsc::Receiver<Delivery>), CommError> {
        let comms = join_group(world, self.shard.shape, epoch)?;
        let kv = self.shard.backend.kv(&self.shard.kv_shape);
        Ok((RankWorker::new(self.shard, kv, comms, epoch), self.deliveries))
    }
}

/// A rank's way to its peers.
pub(crate) type World = Box<dyn Communicator<[f32]>>;

/// Everything the leader's thread is made of.
pub(crate) struct LeaderParts {
    pub(crate) rank: LoadedRank,
    pub(crate) world: World,
    pub(crate) control: Option<Leader>,
    pub(crate) targets: Vec<RankTarget>,
    pub(crate) transport: Arc<dyn KvTransport>,
}

pub(crate) fn start_leader(
    model: &Model,
    config: &EngineConfig,
    epoch: Epoch,
    parts: LeaderParts,
    runtime: &Handle,
) -> Result<RunningEngine, BuildError> {
    let plan = Plan::new(model, config)?;
    let (commands_in, commands) = mpsc::channel(config.intake_len);
    let (reports_in, reports) = mpsc::channel(REPORTS_LEN);
    let (follower_in, followers) = mpsc::channel(REPORTS_LEN);
    let wake = Arc::new(Notify::new());
    let lane_tasks = TaskTracker::new();
    let (broadcaster, readers) = match parts.control {
        Some(control) => {
            let (broadcaster, readers) = control.spawn_readers(move |rank, message| {
                // A stopped engine needs no more events.
                let _stopped = follower_in.blocking_send((rank, message));
            })?;
            (Some(broadcaster), readers)
        }
        None => (None, Vec::new()),
    };
    let setup = plan.setup(model, config, parts.targets);
    let sched = plan.scheduler(config, epoch)?;
    let (info, info_out) = watch::channel(EngineInfo {
        epoch,
        layout: setup.layout.clone(),
        shape: config.shape,
        max_seq_len: plan.max_seq_len,
        vocab_size: setup.vocab_size,
        stats: SchedStats::default(),
        n_handoffs: 0,
        failure: None,
    });
    let lanes = LaneSetup {
        transport: parts.transport,
        wake: Arc::clone(&wake),
        reports: reports_in,
        tasks: lane_tasks.clone(),
        runtime: runtime.clone(),
    };
    let (loaded, world, runtime) = (parts.rank, parts.world, runtime.clone());
    let handle = EngineHandle::new(commands_in, Arc::clone(&wake), info_out);
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let (rank, deliveries) = loaded.join(world, epoch).map_err(|error| error.to_string())?;
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
            is_stopping: false,
        }
        .run();
        Ok(())
    })?;
    Ok(RunningEngine { handle, threads: vec![thread], lane_tasks, _readers: readers })
}

pub(crate) fn start_follower(
    idx: usize,
    rank: LoadedRank,
    world: World,
    link: ControlLink,
    (epoch, runtime): (Epoch, &Handle),
) -> Result<(JoinHandle<Result<(), String>>, Reader), BuildError> {
    let (orders_in, orders) = mpsc::channel(REPORTS_LEN);
    let (leader, reader) = link.spawn_reader(move |order| {
        // A follower that has left needs no more orders.
        let _left = orders_in.blocking_send(order);
    })?;
    let runtime = runtime.clone();
    let thread = std::thread::Builder::new().name(format!("rank-{idx}")).spawn(move || {
        let (rank, deliveries) = rank.join(world, epoch).map_err(|error| error.to_string())?;
        Follower { idx, rank, runtime, orders, deliveries, leader: Arc::new(leader) }.run()
    })?;
    Ok((thread, reader))
}

/// Builds and starts the engine of a prefill worker.
pub fn start_prefill(
    model: &Model,
    config: &EngineConfig,
    transport: Arc<dyn KvTransport>,
    runtime: &Handle,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<RunningEngine, BuildError> {
    let config = EngineConfig { shape: GroupShape::SINGLE, ..config.clone() };
    let epoch = Epoch(1);
    let rank = load_rank(model, &config, 0, epoch, progress)?;
    let world = local_worlds(1, &config).remove(0);
    let parts = LeaderParts { rank, world, control: None, targets: Vec::new(), transport };
    start_leader(model, &config, epoch, parts, runtime)
}

fn local_worlds(n_ranks: usize, config: &EngineConfig) -> Vec<World> {
    local_group(n_ranks, config.comm).into_iter().map(|comm| Box::new(comm) as World).collect()
}

/// A decode group whose ranks are threads of this process, loaded and not yet started.
pub struct DecodeGroup {
    model: Model,
    config: EngineConfig,
    epoch: Epoch,
    ranks: Vec<LoadedRank>,
}

impl DecodeGroup {
    /// Packs every rank's share. `progress` is called with layers done and in all, over all ranks.
    pub fn load(
        model: &Model,
        config: &EngineConfig,
        epoch: Epoch,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let (n_ranks, n_layers) = (config.shape.n_ranks(), model.config.n_layers);
        let load = |rank: usize| {
            let report = |done: usize, _: usize| progress(rank * n_layers + done, n_ranks * n_layers);
            load_rank(model, config, rank, epoch, &report)
        };
        let ranks = (0..n_ranks).map(load).collect::<Result<_, _>>()?;
        Ok(Self { model: model.clone(), config: config.clone(), epoch, ranks })
    }

    /// The door of each rank, in rank order.
    pub fn inlets(&self) -> Vec<KvInlet> {
        self.ranks.iter().map(|rank| rank.inlet.clone()).collect()
    }

    /// Bytes of packed weights of each rank, in rank order.
    pub fn weight_bytes(&self) -> Vec<usize> {
        self.ranks.iter().map(|rank| rank.shard.weight_bytes()).collect()
    }

    /// Starts the threads. `endpoints` say where each rank's inlet can be reached, in rank order.
    pub fn start(self, endpoints: Vec<String>, runtime: &Handle) -> Result<RunningEngine, BuildError> {
        let n_ranks = self.ranks.len();
        if endpoints.len() != n_ranks {
            return Err(BuildError::Endpoints { want: n_ranks, got: endpoints.len() });
        }
        let (leader, links) = local_control(n_ranks, ControlConfig::default());
        let mut worlds = local_worlds(n_ranks, &self.config).into_iter();
        let mut ranks = self.ranks.into_iter();
        let (Some(rank), Some(world)) = (ranks.next(), worlds.next()) else {
            return Err(BuildError::Endpoints { want: 0, got: 0 });
        };
        let (mut threads, mut readers) = (Vec::new(), Vec::new());
        for (idx, ((rank, world), link)) in ranks.zip(worlds).zip(links).enumerate() {
            let (thread, reader) = start_follower(idx + 1, rank, world, link, (self.epoch, runtime))?;
            threads.push(thread);
            readers.push(reader);
        }
        let parts = LeaderParts {
            rank,
            world,
            control: Some(leader),
            targets: targets(&self.model, &self.config, endpoints),
            transport: Arc::new(crate::transport::GrpcTransport::default()),
        };
        let mut engine = start_leader(&self.model, &self.config, self.epoch, parts, runtime)?;
        engine.threads.append(&mut threads);
        engine._readers.append(&mut readers);
        Ok(engine)
    }
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
