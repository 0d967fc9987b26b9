//! What every backend must do. Each check runs one thread a rank and compares with a model that knows all ranks'
//! data; no check knows how a backend works.

mod script;

use std::{
    net::{SocketAddr, TcpListener},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use longreach_types::GroupSecret;
use proptest::prelude::*;

use crate::{
    AbortHandle, Call, CommConfig, CommError, Communicator, ConnectCancel, Op, TcpConfig, TcpGroup,
    WaitPolicy, control::ControlConfig, local_group,
};
use script::{Step, steps};

type Comm = Box<dyn Communicator<[f32]>>;

const CONFIG: CommConfig = CommConfig { timeout: Duration::from_secs(30), wait: None };
/// For tests in which a wait is meant to run into its bound.
const BRIEF: CommConfig = CommConfig { timeout: Duration::from_millis(100), wait: None };

fn local(n_ranks: usize, config: CommConfig) -> Vec<Comm> {
    local_group(n_ranks, config).into_iter().map(|comm| Box::new(comm) as Comm).collect()
}

fn tcp(n_ranks: usize, config: CommConfig) -> Vec<Comm> {
    tcp_groups(n_ranks, config).into_iter().map(|group| Box::new(group.comm) as Comm).collect()
}

/// Groups over loopback whose ranks start in any order.
pub(crate) fn tcp_groups(n_ranks: usize, comm: CommConfig) -> Vec<TcpGroup> {
    let listeners: Vec<_> = (0..n_ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addrs: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                let config = tcp_config(rank, addrs.clone(), comm);
                scope.spawn(move || TcpGroup::connect(listener, &config).unwrap())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn tcp_config(rank: usize, addrs: Vec<SocketAddr>, comm: CommConfig) -> TcpConfig {
    let connect_timeout = Duration::from_secs(30);
    TcpConfig {
        rank,
        addrs,
        secret: GroupSecret::new([7; 32]),
        epoch: 3,
        cancel: ConnectCancel::default(),
        connect_timeout,
        comm,
        control: ControlConfig::default(),
    }
}

/// Runs `body` on one thread a rank and returns the results in rank order.
fn on_all<R: Send>(comms: Vec<Comm>, body: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| body(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

type Misuse = fn(&mut Comm) -> Result<(), CommError>;
type MakeGroup = fn(usize, CommConfig) -> Vec<Comm>;
const BACKENDS: [(&str, MakeGroup); 4] = [
    ("local", local),
    ("tcp", tcp),
    ("local, asleep", |n, config| local(n, asleep(config))),
    ("tcp, asleep", |n, config| tcp(n, asleep(config))),
];

/// Without spinning every wait goes through sleep and wake-up.
fn asleep(config: CommConfig) -> CommConfig {
    CommConfig { wait: Some(WaitPolicy { spin: Duration::ZERO, n_yields: 0 }), ..config }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any sequence of collectives with any counts (zero included), in the whole group and in its parts, delivers
    /// to every rank of every backend what the model says.
    #[test]
    fn every_collective_delivers_what_the_model_says((n_ranks, script) in steps()) {
        for (name, make) in BACKENDS {
            let got = on_all(make(n_ranks, CONFIG), |comm| script::run(comm, &script).unwrap());
            for (rank, got) in got.into_iter().enumerate() {
                prop_assert_eq!(got, script::model(rank, n_ranks, &script), "{} rank {}", name, rank);
            }
        }
    }

    /// A rank that leaves at any moment leaves nobody waiting: all others fail with its loss, long before the bound.
    #[test]
    fn a_lost_rank_fails_all_others((n_ranks, script) in steps(), lost in any::<prop::sample::Index>(),
                                    after in any::<prop::sample::Index>()) {
        prop_assume!(n_ranks > 1);
        let (lost, after) = (lost.index(n_ranks), after.index(script.len()));
        for (name, make) in BACKENDS {
            let start = Instant::now();
            let got = on_all(make(n_ranks, CONFIG), |mut comm| {
                if comm.rank() == lost {
                    return script::run(comm, &script[..after]).map(drop);
                }
                let steps = [&script[..], &[Step::Barrier]].concat();
                script::run_on(&mut comm, &steps).map(drop)
            });
            for (rank, got) in got.into_iter().enumerate() {
                let want = if rank == lost { Ok(()) } else { Err(CommError::PeerLost { rank: lost }) };
                prop_assert_eq!(got, want, "{} rank {} of {}", name, rank, n_ranks);
            }
            prop_assert!(start.elapsed() < CONFIG.timeout / 2);
        }
    }
}

#[test]
fn big_exchanges_all_at_once_do_not_deadlock() {
    const LEN: usize = 2 << 20; // 8 MiB for each peer
    for (name, make) in BACKENDS {
        let sums = on_all(make(3, CONFIG), |mut comm| {
            let (rank, n) = (comm.rank(), comm.n_ranks());
            let send: Vec<f32> = (0..n * LEN).map(|i| (i / LEN * 10 + rank) as f32).collect();
            let mut recv = vec![0.0; n * LEN];
            comm.all_to_all(&send, &[LEN; 3], &mut recv, &[LEN; 3]).unwrap();
            recv.chunks(LEN)
                .enumerate()
                .all(|(peer, part)| part.iter().all(|&x| x == (rank * 10 + peer) as f32))
        });
        assert_eq!(sums, [true; 3], "{name}");
    }
}

#[test]
fn ranks_that_call_different_things_disagree() {
    for (name, make) in BACKENDS {
        let got = on_all(make(2, CONFIG), |mut comm| {
            comm.barrier().unwrap();
            if comm.rank() == 0 { comm.barrier() } else { comm.all_gather(&[1.0], &mut [0.0; 2]) }
        });
        for err in got.into_iter().map(Result::unwrap_err) {
            let CommError::Disagree { ours, theirs, .. } = err else { panic!("{name}: {err}") };
            assert_eq!((ours.seq, theirs.seq), (2, 2), "{name}");
            assert_eq!(ours.op.max_code(theirs.op), (Op::AllGather, Op::Barrier), "{name}");
        }
    }
}

#[test]
fn ranks_with_different_lengths_disagree_and_name_both() {
    for (name, make) in BACKENDS {
        let got = on_all(make(2, CONFIG), |mut comm| {
            let len = 3 + comm.rank();
            comm.all_gather(&vec![0.0; len], &mut vec![0.0; 2 * len])
        });
        let call = |n_bytes| Call { op: Op::AllGather, group: 0, seq: 1, n_bytes };
        let views = [
            CommError::Disagree { rank: 0, peer: 1, ours: call(12), theirs: call(16) },
            CommError::Disagree { rank: 1, peer: 0, ours: call(16), theirs: call(12) },
        ];
        assert!(got.iter().all(|got| views.contains(got.as_ref().unwrap_err())), "{name}: {got:?}");
    }
}

#[test]
fn ranks_that_split_differently_disagree() {
    for (name, make) in BACKENDS {
        let got = on_all(make(4, CONFIG), |mut comm| {
            let cut = if comm.rank() == 2 { 1 } else { 2 };
            comm.split(&[0..cut, cut..4]).map(drop)
        });
        // Whoever finds out first may end the epoch for one that had not heard all yet.
        let disagrees = |err: &CommError| match err {
            CommError::SplitDisagrees { rank, peer } => (*rank == 2) != (*peer == 2),
            _ => false,
        };
        let told = |err: &CommError| matches!(err, CommError::PeerFailed { .. });
        let errs: Vec<_> = got.into_iter().map(Result::unwrap_err).collect();
        assert!(errs.iter().any(disagrees), "{name}: {errs:?}");
        assert!(errs.iter().all(|err| disagrees(err) || told(err)), "{name}: {errs:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_bound_has_passed() {
    for (name, make) in BACKENDS {
        let (done, wait) = mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let got = on_all(make(3, BRIEF), |mut comm| {
            if comm.rank() == 1 {
                // Holds its end open, and silent, until the others have given up.
                for _ in 0..2 {
                    wait.lock().unwrap().recv().unwrap();
                }
                // The first may still find what the others sent before they gave up.
                return comm.barrier().and_then(|()| comm.barrier());
            }
            let got = comm.barrier();
            done.send(()).unwrap();
            got
        });
        let late = CommError::Timeout { op: Op::Barrier, waited: BRIEF.timeout, missing: 1 };
        assert!(got.iter().any(|got| got.as_ref() == Err(&late)), "{name}: {got:?}");
        assert!(got.iter().all(Result::is_err), "{name}: {got:?}");
    }
}

#[test]
fn abort_wakes_every_waiter_and_poisons_the_parts_too() {
    for (name, make) in BACKENDS {
        let (send, recv) = mpsc::channel::<AbortHandle>();
        let mut comms = make(4, CONFIG);
        let aborter = thread::spawn(move || recv.recv().unwrap().abort());
        let idle = comms.pop().unwrap();
        let got = thread::scope(|scope| {
            let keep = scope.spawn(move || {
                let mut idle = idle;
                let part = idle.split(&[0..2, 2..4]);
                (idle, part)
            });
            let got = on_all(comms, |mut comm| {
                let mut part = comm.split(&[0..2, 2..4]).unwrap();
                if comm.rank() == 0 {
                    send.send(comm.abort_handle()).unwrap();
                }
                [comm.barrier(), part.barrier(), comm.barrier()]
            });
            drop(keep.join());
            got
        });
        aborter.join().unwrap();
        assert_eq!(got, vec![[const { Err(CommError::Aborted) }; 3]; 3], "{name}");
    }
}

#[test]
fn buffers_that_do_not_fit_are_refused() {
    for (name, make) in BACKENDS {
        let refusals: [Misuse; 8] = [
            |comm| comm.all_gather(&[0.0; 2], &mut [0.0; 3]),
            |comm| comm.all_gather_v(&[0.0; 2], &mut [0.0; 4], &[2, 2]),
            |comm| comm.all_gather_v(&[0.0; 2], &mut [0.0; 3], &[3]),
            |comm| comm.all_to_all(&[0.0], &[1], &mut [0.0; 2], &[2]),
            |comm| comm.all_to_all(&[0.0; 2], &[1], &mut [0.0], &[1]),
            |comm| comm.broadcast(&mut [0.0], 1),
            |comm| comm.all_gather_bytes(&[0; 2], &mut [0; 3]),
            |comm| comm.split(&[0..1, 1..2]).map(drop),
        ];
        for (i, refusal) in refusals.iter().enumerate() {
            let mut comm = make(1, CONFIG).remove(0);
            let first = refusal(&mut comm);
            assert!(matches!(first, Err(CommError::Argument { .. })), "{name} {i}: {first:?}");
            assert_eq!(comm.barrier(), first, "{name} {i}");
        }
    }
}

impl Op {
    /// Orders a pair of operations by wire code, for assertions that do not care who said what.
    fn max_code(self, other: Self) -> (Self, Self) {
        if (self as u8) < other as u8 { (self, other) } else { (other, self) }
    }
}
