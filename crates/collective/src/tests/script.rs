//! Random sequences of collectives, how a rank runs one, and what it must get.

use proptest::{collection::vec, prelude::*};

use super::Comm;
use crate::CommError;

/// One collective. Counts are indexed by rank of the whole group, or by pair of ranks.
#[derive(Clone, Debug)]
pub(super) enum Step {
    AllGather {
        len: usize,
    },
    AllGatherV {
        counts: Vec<usize>,
    },
    AllToAll {
        counts: Vec<Vec<usize>>,
    },
    Broadcast {
        len: usize,
        root: usize,
    },
    Bytes {
        len: usize,
    },
    Barrier,
    /// Splits before rank `cut` and gathers `len` elements in each part, then in the whole.
    Split {
        cut: usize,
        len: usize,
    },
}

pub(super) fn steps() -> impl Strategy<Value = (usize, Vec<Step>)> {
    (1_usize..=8).prop_flat_map(|n| {
        let count = || prop_oneof![2 => Just(0_usize), 6 => 1_usize..40, 1 => 2_000_usize..9_000];
        let step = prop_oneof![
            (0_usize..700).prop_map(|len| Step::AllGather { len }),
            vec(count(), n).prop_map(|counts| Step::AllGatherV { counts }),
            vec(vec(count(), n), n).prop_map(|counts| Step::AllToAll { counts }),
            (0_usize..700, 0..n).prop_map(|(len, root)| Step::Broadcast { len, root }),
            (0_usize..70).prop_map(|len| Step::Bytes { len }),
            Just(Step::Barrier),
            (1..=n, 0_usize..70).prop_map(|(cut, len)| Step::Split { cut, len }),
        ];
        (Just(n), vec(step, 1..10))
    })
}

/// Element `i` of what `from` sends to `to` in step `step`: different for any different argument.
fn value(step: usize, from: usize, to: usize, i: usize) -> f32 {
    ((step * 8 + from) * 8 + to) as f32 + i as f32 / 16_384.0
}

fn part(step: usize, from: usize, to: usize, len: usize) -> impl Iterator<Item = f32> {
    (0..len).map(move |i| value(step, from, to, i))
}

fn cut_parts(cut: usize, n: usize) -> Vec<std::ops::Range<usize>> {
    if cut == n { std::iter::once(0..n).collect() } else { vec![0..cut, cut..n] }
}

pub(super) fn run(mut comm: Comm, script: &[Step]) -> Result<Vec<Vec<f32>>, CommError> {
    run_on(&mut comm, script)
}

/// What the rank received in each step.
pub(super) fn run_on(comm: &mut Comm, script: &[Step]) -> Result<Vec<Vec<f32>>, CommError> {
    script.iter().enumerate().map(|(step, kind)| run_step(comm, step, kind)).collect()
}

fn run_step(comm: &mut Comm, step: usize, kind: &Step) -> Result<Vec<f32>, CommError> {
    let (rank, n) = (comm.rank(), comm.n_ranks());
    let same = |len| part(step, rank, 0, len).collect::<Vec<_>>();
    let mut recv = Vec::new();
    match kind {
        Step::AllGather { len } => {
            recv.resize(n * len, -1.0);
            comm.all_gather(&same(*len), &mut recv)?;
        }
        Step::AllGatherV { counts } => {
            recv.resize(counts.iter().sum(), -1.0);
            comm.all_gather_v(&same(counts[rank]), &mut recv, counts)?;
        }
        Step::AllToAll { counts } => {
            let send: Vec<f32> = (0..n).flat_map(|to| part(step, rank, to, counts[rank][to])).collect();
            let recv_counts: Vec<usize> = (0..n).map(|from| counts[from][rank]).collect();
            recv.resize(recv_counts.iter().sum(), -1.0);
            comm.all_to_all(&send, &counts[rank], &mut recv, &recv_counts)?;
        }
        Step::Broadcast { len, root } => {
            recv = if rank == *root { same(*len) } else { vec![-1.0; *len] };
            comm.broadcast(&mut recv, *root)?;
        }
        Step::Bytes { len } => {
            let mut bytes = vec![0; n * len];
            comm.all_gather_bytes(&vec![rank as u8; *len], &mut bytes)?;
            recv = bytes.into_iter().map(f32::from).collect();
        }
        Step::Barrier => comm.barrier()?,
        Step::Split { cut, len } => {
            let mut sub = comm.split(&cut_parts(*cut, n))?;
            recv.resize(sub.n_ranks() * len, -1.0);
            sub.all_gather(&same(*len), &mut recv)?;
            let mut all = vec![-1.0; n * len];
            comm.all_gather(&same(*len), &mut all)?;
            recv.append(&mut all);
        }
    }
    Ok(recv)
}

/// What rank `rank` must receive in each step.
pub(super) fn model(rank: usize, n: usize, script: &[Step]) -> Vec<Vec<f32>> {
    let gather = |step, ranks: std::ops::Range<usize>, len: usize| {
        ranks.flat_map(move |from| part(step, from, 0, len))
    };
    let step_model = |(step, kind): (usize, &Step)| match kind {
        Step::AllGather { len } => gather(step, 0..n, *len).collect(),
        Step::AllGatherV { counts } => (0..n).flat_map(|from| part(step, from, 0, counts[from])).collect(),
        Step::AllToAll { counts } => {
            (0..n).flat_map(|from| part(step, from, rank, counts[from][rank])).collect()
        }
        Step::Broadcast { len, root } => part(step, *root, 0, *len).collect(),
        Step::Bytes { len } => (0..n).flat_map(|from| std::iter::repeat_n(from as f32, *len)).collect(),
        Step::Barrier => Vec::new(),
        Step::Split { cut, len } => {
            let own = cut_parts(*cut, n).into_iter().find(|part| part.contains(&rank)).unwrap();
            gather(step, own, *len).chain(gather(step, 0..n, *len)).collect()
        }
    };
    script.iter().enumerate().map(step_model).collect()
}
