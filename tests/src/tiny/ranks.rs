//! A decode group without its engine: N ranks as threads over the real forward pass, fed by a script.
//!
//! A scheduler would choose the batches itself. Here the test says which rows run in which step, over block tables
//! whose ids are shuffled and a pool that may be full of anything, so that nothing is right by accident.

use std::thread;

use longreach_collective::{CommConfig, Communicator, local_group};
use longreach_kernels::{Exec, Isa};
use longreach_model::{Backend, Comms, CpuBackend, LoadOptions, ModelShard, forward::Scratch};
use longreach_types::{
    BlockId, DcpLayout, Epoch, GroupShape, KvDtype, MergeForm, QueryForm, SeqId, SeqStep, StepId, StepPlan,
    TokenId, WeightForm,
};

use super::{Error, Rng, TinyModel};

/// How a group is built.
#[derive(Clone, Copy, Debug)]
pub struct GroupConfig {
    /// N and D.
    pub shape: GroupShape,
    /// Which kernels.
    pub isa: Isa,
    /// Kernel threads of each rank.
    pub n_threads: usize,
    /// How partials become one.
    pub merge_form: MergeForm,
    /// How a rank comes by its queries.
    pub query_form: QueryForm,
    /// Number format of the KV cache.
    pub kv_dtype: KvDtype,
    /// B.
    pub block_size: usize,
    /// How weights are held.
    pub weights: WeightForm,
}

impl GroupConfig {
    /// One rank that runs the loops of the contract: what everything else is compared with.
    pub const fn reference(block_size: usize, kv_dtype: KvDtype) -> Self {
        Self {
            shape: GroupShape::SINGLE,
            isa: Isa::Reference,
            n_threads: 1,
            merge_form: MergeForm::A2a,
            query_form: QueryForm::Replicate,
            kv_dtype,
            block_size,
            weights: WeightForm::AsStored,
        }
    }
}

/// Room for one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Positions its block table covers.
    pub len: usize,
    /// An earlier sequence whose first logical blocks it has, and how many of them.
    pub shared: Option<(usize, usize)>,
}

/// Rows of one sequence in one step.
#[derive(Clone, Debug)]
pub struct Feed {
    /// Which sequence.
    pub seq: usize,
    /// Position of the first row.
    pub start: usize,
    /// The rows.
    pub tokens: Vec<u32>,
    /// How many of the last rows give logits.
    pub n_logits: usize,
}

/// Steps to run on a pool that no step has touched.
#[derive(Clone, Debug)]
pub struct Script {
    /// The sequences.
    pub rooms: Vec<Room>,
    /// What runs in each step, in batch order.
    pub steps: Vec<Vec<Feed>>,
    /// Every byte of the pool before the first step.
    pub fill: u8,
    /// Decides which block ids are used.
    pub seed: u64,
}

/// Logits by sequence and position; empty where none were asked for, the last where a position ran again.
pub type Outcome = Vec<Vec<Vec<f32>>>;

/// Logits of every step of every script, flat.
type RawLogits = Vec<Vec<Vec<f32>>>;

/// Runs `scripts` one after the other on a group of `config`.
pub fn run(model: &TinyModel, config: &GroupConfig, scripts: &[Script]) -> Result<Vec<Outcome>, Error> {
    let layout = DcpLayout::new(config.block_size, config.shape.dcp_size())?;
    let tables: Vec<_> = scripts.iter().map(|script| Tables::new(script, layout)).collect();
    let n_blocks = tables.iter().map(|tables| tables.n_blocks).max().unwrap_or(1);
    let mut step = 0;
    let plans: Vec<_> =
        scripts.iter().zip(&tables).map(|(script, tables)| tables.plans(script, &mut step)).collect();
    let fills: Vec<_> = scripts.iter().map(|script| script.fill).collect();
    let by_rank = thread::scope(|scope| {
        let worlds = local_group(config.shape.n_ranks(), CommConfig::default());
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                let (plans, fills) = (&plans, &fills);
                scope.spawn(move || run_rank(model, config, n_blocks, Box::new(world), (plans, fills)))
            })
            .collect();
        let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
            thread.join().unwrap_or(Err(format!("rank {rank} panicked").into()))
        };
        ranks.into_iter().enumerate().map(join).collect::<Result<Vec<RawLogits>, _>>()
    })?;
    check_ranks_agree(&by_rank)?;
    let outcomes = scripts.iter().zip(&by_rank[0]);
    Ok(outcomes.map(|(script, steps)| outcome(script, steps, model.vocab_size)).collect())
}

fn run_rank(
    model: &TinyModel,
    config: &GroupConfig,
    n_blocks: usize,
    mut world: Box<dyn Communicator<[f32]>>,
    (plans, fills): (&[Vec<StepPlan>], &[u8]),
) -> Result<RawLogits, Error> {
    let shape = config.shape;
    let options = LoadOptions {
        shape,
        rank: world.rank(),
        weights: config.weights,
        query_form: config.query_form,
        merge_form: config.merge_form,
        kv_dtype: config.kv_dtype,
        block_size: config.block_size,
        n_blocks,
        max_seq_len: None,
    };
    let backend = CpuBackend::new(Exec::new(config.isa, config.n_threads)?);
    let shard = ModelShard::load(backend, &model.files, &options, &|_, _| {})?;
    let parts: Vec<_> = (0..shape.n_head_groups()).map(|group| shape.ranks_of(group)).collect();
    let head_group = world.split(&parts)?;
    let mut comms = Comms { world, head_group };
    let mut kv = shard.backend.kv(&shard.kv_shape);
    let mut scratch = Scratch::default();
    let mut logits = Vec::new();
    for (plans, &fill) in plans.iter().zip(fills) {
        kv.arena.fill(fill);
        let run = |plan| shard.forward(plan, &mut kv, &mut comms, &mut scratch, &mut |_, _, _| {});
        logits.push(plans.iter().map(run).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(logits)
}

fn bits_equal(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn check_ranks_agree(by_rank: &[RawLogits]) -> Result<(), Error> {
    for (rank, scripts) in by_rank.iter().enumerate() {
        for (script, (steps, first)) in scripts.iter().zip(&by_rank[0]).enumerate() {
            if let Some(step) = (0..steps.len()).find(|&step| !bits_equal(&steps[step], &first[step])) {
                return Err(format!(
                    "script {script}, step {step}: rank {rank} has other logits than rank 0"
                )
                .into());
            }
        }
    }
    Ok(())
}

fn outcome(script: &Script, steps: &[Vec<f32>], vocab_size: usize) -> Outcome {
    let mut outcome: Outcome = script.rooms.iter().map(|room| vec![Vec::new(); room.len]).collect();
    for (feeds, logits) in script.steps.iter().zip(steps) {
        let mut rows = logits.chunks_exact(vocab_size);
        for feed in feeds {
            let end = feed.start + feed.tokens.len();
            for (pos, row) in (end - feed.n_logits.min(feed.tokens.len())..end).zip(&mut rows) {
                outcome[feed.seq][pos] = row.to_vec();
            }
        }
    }
    outcome
}

/// The block tables of a script's sequences, by sequence and DCP rank.
struct Tables {
    tables: Vec<Vec<Vec<BlockId>>>,
    n_blocks: usize,
}

impl Tables {
    fn new(script: &Script, layout: DcpLayout) -> Self {
        let owned = |len: usize, rank: usize| layout.local_n_blocks(layout.n_blocks(len), rank);
        let of_shared = |room: &Room| room.shared.map_or(0, |(_, n)| n * layout.block_size());
        let needed = |rank| {
            script
                .rooms
                .iter()
                .map(|room| owned(room.len, rank) - owned(of_shared(room), rank))
                .sum::<usize>()
        };
        // A few blocks too many, so that some hold the filling throughout.
        let n_blocks = (0..layout.dcp_size()).map(needed).max().unwrap_or(0) + 3;
        let mut rng = Rng::new(script.seed);
        let mut pools: Vec<Vec<BlockId>> = Vec::new();
        for _ in 0..layout.dcp_size() {
            let mut pool: Vec<_> = (0..n_blocks as u32).map(BlockId).collect();
            rng.shuffle(&mut pool);
            pools.push(pool);
        }
        let mut tables: Vec<Vec<Vec<BlockId>>> = Vec::new();
        for room in &script.rooms {
            let table = pools.iter_mut().enumerate().map(|(rank, pool)| {
                let shared = room.shared.map_or(&[][..], |(donor, _)| &tables[donor][rank][..]);
                let shared = &shared[..owned(of_shared(room), rank)];
                let own = pool.split_off(pool.len() - (owned(room.len, rank) - shared.len()));
                [shared, &own].concat()
            });
            tables.push(table.collect());
        }
        Self { tables, n_blocks }
    }

    fn plans(&self, script: &Script, next_step: &mut u64) -> Vec<StepPlan> {
        let seq_step = |feed: &Feed| SeqStep {
            seq: SeqId(feed.seq as u64),
            context_len: feed.start,
            tokens: feed.tokens.iter().copied().map(TokenId).collect(),
            n_logits: feed.n_logits,
            tables: self.tables[feed.seq].clone(),
        };
        let mut plan = |feeds: &Vec<Feed>| {
            *next_step += 1;
            StepPlan { step: StepId(*next_step), epoch: Epoch(1), seqs: feeds.iter().map(seq_step).collect() }
        };
        script.steps.iter().map(&mut plan).collect()
    }
}
