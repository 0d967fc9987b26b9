//! What a seed stands for: the shape of a cluster, how its network behaves, what clients ask, and what goes wrong.

use std::time::Duration;

use longreach_kv::{KvConfig, KvManager};
use longreach_proto::{WIRE_VERSION, worker::KvLayout};
use longreach_router::{RecoveryConfig, WorkerConfig};
use longreach_sched::{ReuseCosts, SchedConfig};
use longreach_types::{DcpLayout, KvDtype};

use crate::{lane::Mangling, model::N_LAYERS, net::NetConfig, rng::Rng};

/// Everything about a run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) shape: Shape,
    pub(crate) net: NetConfig,
    pub(crate) mangling: Mangling,
    /// How often an answer of the store is lost after the call had its effect.
    pub(crate) lost_permille: u32,
    pub(crate) workers: WorkerConfig,
    pub(crate) recovery: RecoveryConfig,
    pub(crate) n_requests: usize,
    /// Mean pause between two requests.
    pub(crate) pause: Duration,
    pub(crate) cancel_permille: u32,
    pub(crate) slow_permille: u32,
    pub(crate) n_faults: usize,
    /// When faults may begin, and over how long they are spread.
    pub(crate) faults_over: Duration,
}

/// How large everything is.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) n_routers: usize,
    pub(crate) n_prefills: usize,
    pub(crate) n_groups: usize,
    pub(crate) n_ranks: usize,
    /// Whether each rank is a process of its own.
    pub(crate) ranks_apart: bool,
    pub(crate) block_size: usize,
    pub(crate) n_decode_blocks: usize,
    pub(crate) n_prefill_blocks: usize,
    pub(crate) max_seq_len: usize,
    pub(crate) max_prompt_len: usize,
    pub(crate) max_tokens: usize,
    pub(crate) max_waiting: usize,
    pub(crate) local_prefill_max: usize,
    pub(crate) max_chunk_len: usize,
    pub(crate) max_batch_tokens: usize,
    /// Cells of a hand-off that go into one message.
    pub(crate) chunk_len: usize,
    pub(crate) step_time: Duration,
    /// Prefill workers may be so slow that prompts wait there for longer than anything may stand still.
    pub(crate) prefill_step_time: Duration,
    pub(crate) handoff_timeout: Duration,
    pub(crate) watchdog: Duration,
    pub(crate) lease_ttl: Duration,
    /// How long a pull may take at least.
    pub(crate) min_pull_patience: Duration,
    /// How long the ranks of a group may take to find each other.
    pub(crate) connect_timeout: Duration,
}

impl Scenario {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let millis = |n: usize| Duration::from_millis(n as u64);
        let calm = rng.chance(150);
        let max_delay = rng.pick(&[0, 1, 3, 20]);
        Self {
            seed,
            shape: Shape::new(&mut rng),
            net: NetConfig {
                max_delay: millis(max_delay),
                loss_permille: rng.pick(&[0, 0, 2, 10]),
                silence: millis(rng.pick(&[1_000, 3_000, 10_000])),
            },
            mangling: Mangling {
                repeat_permille: rng.pick(&[0, 50, 300]),
                reorder_permille: rng.pick(&[0, 50, 300]),
                spoil_permille: 0,
            },
            lost_permille: if calm { 0 } else { rng.pick(&[0, 0, 20, 100]) },
            workers: WorkerConfig {
                poll_interval: millis(rng.pick(&[200, 500, 1_000])),
                connect_timeout: millis(1_000),
                keep_alive_timeout: millis(1_000),
                unlisted_grace: millis(rng.pick(&[2_000, 60_000])),
                ..WorkerConfig::default()
            },
            recovery: RecoveryConfig::default(),
            n_requests: rng.range(8, 30),
            pause: millis(rng.pick(&[10, 100, 400])),
            cancel_permille: rng.pick(&[0, 100, 400]),
            slow_permille: rng.pick(&[0, 0, 200]),
            n_faults: if calm { 0 } else { rng.range(1, 8) },
            faults_over: millis(rng.pick(&[300, 2_000, 8_000])),
        }
    }

    /// Whether nothing is done to the cluster.
    pub(crate) fn is_calm(&self) -> bool {
        self.n_faults == 0
    }
}

impl Shape {
    fn new(rng: &mut Rng) -> Self {
        let millis = |n: usize| Duration::from_millis(n as u64);
        let (block_size, n_ranks): (usize, usize) = (rng.pick(&[1, 2, 4]), rng.pick(&[1, 2, 2, 3, 4]));
        let (max_prompt_len, max_tokens) = (rng.pick(&[12, 40, 80]), rng.pick(&[4, 16, 40]));
        let max_seq_len = max_prompt_len + max_tokens + 1;
        // From room for two sequences, where they preempt each other, to room for all.
        let tightness: usize = rng.pick(&[2, 4, 12]);
        let n_blocks = |n_ranks: usize| (tightness * max_seq_len).div_ceil(block_size * n_ranks) + 1;
        let max_batch_tokens = rng.pick(&[24, 64, 256]);
        Self {
            n_routers: rng.range(1, 2),
            n_prefills: rng.range(1, 3),
            n_groups: rng.range(1, 3),
            n_ranks,
            ranks_apart: rng.chance(700),
            block_size,
            n_decode_blocks: n_blocks(n_ranks),
            n_prefill_blocks: n_blocks(1),
            max_seq_len,
            max_prompt_len,
            max_tokens,
            max_waiting: rng.pick(&[2, 8, 64]),
            local_prefill_max: rng.pick(&[0, 0, 4, 8]),
            max_chunk_len: rng.pick(&[4, 16, 64]),
            max_batch_tokens,
            chunk_len: rng.range(1, 4),
            step_time: millis(rng.pick(&[1, 3, 10])),
            prefill_step_time: millis(rng.pick(&[1, 10, 500])),
            handoff_timeout: millis(rng.pick(&[2_000, 10_000])),
            watchdog: millis(rng.pick(&[1_000, 5_000])),
            lease_ttl: millis(rng.pick(&[5_000, 10_000, 30_000])),
            min_pull_patience: millis(rng.pick(&[20, 200, 2_000])),
            connect_timeout: millis(rng.pick(&[2_000, 10_000])),
        }
    }

    /// What prefill workers and decode groups must agree on.
    pub(crate) fn kv_layout(&self) -> KvLayout {
        KvLayout {
            model_fingerprint: [7; 16],
            n_layers: N_LAYERS,
            n_kv_heads: 1,
            head_dim: 1,
            kv_dtype: KvDtype::F32,
            block_size: self.block_size,
            n_shards: 8,
            wire_version: WIRE_VERSION,
        }
    }

    pub(crate) fn dcp(&self, n_ranks: usize) -> DcpLayout {
        DcpLayout::new(self.block_size, n_ranks).expect("no scenario has empty blocks or groups")
    }

    pub(crate) fn kv(&self, layout: DcpLayout, n_blocks: usize) -> KvManager {
        KvManager::new(KvConfig::new(layout, n_blocks as u32))
    }

    pub(crate) fn sched(&self) -> SchedConfig {
        SchedConfig {
            max_batch_tokens: self.max_batch_tokens,
            max_seqs: 16,
            max_chunk_len: self.max_chunk_len,
            max_seq_len: self.max_seq_len,
            max_waiting: self.max_waiting,
            max_waiting_tokens: 1 << 20,
            local_prefill_max: self.local_prefill_max,
            reuse: ReuseCosts {
                kv_token_bytes: N_LAYERS * 8,
                min_pull_patience: self.min_pull_patience,
                ..ReuseCosts::default()
            },
            ..SchedConfig::default()
        }
    }
}
