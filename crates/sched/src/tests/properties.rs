use longreach_kv::{KvConfig, KvManager};
use longreach_types::{DcpLayout, SeqId, TokenId};
use proptest::prelude::*;

use super::world::{Faults, Spec, VOCAB, World, next_token, pulls_pay};
use crate::{Phase, SchedConfig, Scheduler, SeqKind};

const MAX_LEN: usize = 24;

#[derive(Clone, Debug)]
enum Op {
    Submit(Spec),
    Plan,
    Admit,
    Complete(Faults),
    Abandon,
    Deliver { nth: usize },
    StopTransfer { nth: usize },
    Pull { nth: usize, arrives: bool },
    End { nth: usize, how: usize },
    Drafts { nth: usize, n_right: usize, n_wrong: usize },
    Flush,
}

const ENDS: [fn(&mut Scheduler, SeqId) -> bool; 3] =
    [Scheduler::finish, Scheduler::abort, Scheduler::release];

fn spec() -> impl Strategy<Value = Spec> {
    let kind = prop::sample::select(vec![SeqKind::Local, SeqKind::Receive, SeqKind::Send]);
    let prompt = prop::collection::vec(0..VOCAB as u32, 1..16);
    let remote_len = prop_oneof![Just(0), 0..20_usize];
    (0..2_u8, prompt, 1..9_usize, 0..3_i32, kind, remote_len).prop_map(
        |(tenant, prompt, n_output, priority, kind, remote_len)| Spec {
            tenant,
            prompt,
            n_output,
            priority,
            kind,
            remote_len,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let nth = any::<usize>;
    prop_oneof![
        6 => spec().prop_map(Op::Submit),
        12 => Just(Op::Plan),
        1 => Just(Op::Admit),
        12 => prop::option::weighted(0.1, 1..4_usize)
            .prop_map(|lose_every| Op::Complete(Faults { lose_every })),
        1 => Just(Op::Abandon),
        4 => nth().prop_map(|nth| Op::Deliver { nth }),
        3 => nth().prop_map(|nth| Op::StopTransfer { nth }),
        4 => (nth(), any::<bool>()).prop_map(|(nth, arrives)| Op::Pull { nth, arrives }),
        3 => (nth(), 0..ENDS.len()).prop_map(|(nth, how)| Op::End { nth, how }),
        3 => (nth(), 0..3_usize, 0..3_usize)
            .prop_map(|(nth, n_right, n_wrong)| Op::Drafts { nth, n_right, n_wrong }),
        1 => Just(Op::Flush),
    ]
}

/// Pools that just hold the longest sequence, up to a few times that.
fn kv_config() -> impl Strategy<Value = KvConfig> {
    (1..5_usize, 1..4_usize, 0..12_u32, prop::sample::select(vec![4, 128])).prop_map(
        |(block_size, dcp_size, n_more, hash_bits)| {
            let n_blocks = MAX_LEN.div_ceil(block_size * dcp_size) as u32 + n_more;
            let layout = DcpLayout::new(block_size, dcp_size).unwrap();
            KvConfig { hash_bits, ..KvConfig::new(layout, n_blocks) }
        },
    )
}

fn sched_config() -> impl Strategy<Value = SchedConfig> {
    (1..6_usize, 0..12_usize, 1..8_usize, 0..4_u32, 1..4_usize, 0..6_usize, 0..3_usize).prop_map(
        |(max_seqs, n_more, max_chunk_len, max_passes, admission_window, local_prefill_max, watermark)| {
            SchedConfig {
                max_batch_tokens: max_seqs + n_more,
                max_seqs,
                max_chunk_len,
                max_seq_len: MAX_LEN,
                max_waiting: 8,
                max_waiting_tokens: 80,
                max_passes,
                admission_window,
                local_prefill_max,
                watermark_frac: watermark as f64 * 0.1,
                reuse: pulls_pay(),
            }
        },
    )
}

fn pick(world: &World, nth: usize) -> Option<SeqId> {
    // The last few: most of the older ones have ended, which is worth a try only now and then.
    let n = world.seqs.len().min(6);
    (n > 0).then(|| *world.seqs.keys().rev().nth(nth % n).expect("below the length"))
}

fn apply(world: &mut World, op: Op) {
    match op {
        Op::Submit(spec) => {
            // A full queue is an answer, too.
            let _ = world.submit(&spec);
        }
        Op::Plan => {
            world.plan();
        }
        Op::Admit => {
            world.sched.admit();
            world.settle();
        }
        Op::Complete(faults) => world.complete(faults),
        Op::Abandon => {
            world.sched.abandon_step();
            world.plan = None;
            world.settle();
        }
        Op::Deliver { nth } => {
            if let Some(seq) = pick(world, nth)
                && world.sched.phase(seq) == Some(Phase::Receiving)
            {
                world.deliver(seq);
            }
        }
        Op::StopTransfer { nth } => {
            if let Some(seq) = pick(world, nth) {
                world.stop_transfer(seq);
            }
        }
        Op::Pull { nth, arrives } => {
            if let Some(seq) = pick(world, nth)
                && world.sched.phase(seq) == Some(Phase::Pulling)
            {
                world.pull(seq, arrives);
            }
        }
        Op::End { nth, how } => {
            if let Some(seq) = pick(world, nth) {
                world.end(seq, ENDS[how]);
            }
        }
        Op::Drafts { nth, n_right, n_wrong } => {
            if let Some(seq) = pick(world, nth) {
                let drafts = drafts(world, seq, n_right, n_wrong);
                world.sched.set_drafts(seq, drafts);
                world.settle();
            }
        }
        Op::Flush => {
            world.sched.flush_cache();
            world.settle();
        }
    }
}

/// Proposed tokens of which the first `n_right` are what the model will say.
fn drafts(world: &World, seq: SeqId, n_right: usize, n_wrong: usize) -> Vec<TokenId> {
    let start = world.seqs[&seq].tokens.len();
    let mut tokens = world.seqs[&seq].tokens.clone();
    for _ in 0..n_right {
        tokens.push(next_token(0, &tokens));
    }
    tokens.extend((0..n_wrong as u32).map(TokenId));
    tokens.split_off(start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    /// Any mix of calls at any boundary: no foreign KV is read, no block is lost or given away while in use, every
    /// sequence gets its one end, and its tokens are those its prompt alone determines.
    #[test]
    fn any_mix_of_calls_keeps_every_promise(
        kv_config in kv_config(),
        sched_config in sched_config(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut world = World::new(sched_config, KvManager::new(kv_config));
        for op in ops {
            apply(&mut world, op);
        }
        world.complete(Faults::default());
        // No starvation: each step moves at least one sequence on, so what is left ends in a bounded time.
        world.run_to_idle(60 * MAX_LEN);
        for seq in world.seqs.keys() {
            world.check_history(*seq);
        }
        world.check_baseline();
    }
}
