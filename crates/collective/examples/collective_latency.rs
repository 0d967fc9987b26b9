//! Latency of an all-gather of 576 floats, between threads and over TCP on loopback, by number of ranks:
//! `cargo run --release -p longreach-collective --example collective_latency`.

use std::{
    error::Error,
    io::{self, Write},
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use longreach_collective::{
    CommConfig, CommError, Communicator, ConnectCancel, TcpConfig, TcpGroup, control::ControlConfig,
    local_group, random_secret,
};

const LEN: usize = 576;
const N_CALLS: usize = 20_000;

type Comm = Box<dyn Communicator<[f32]>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    for n_ranks in [1, 2, 4, 8] {
        let comms = local_group(n_ranks, CommConfig::default());
        let times = on_all(comms.into_iter().map(|comm| Box::new(comm) as Comm).collect())?;
        report(&mut out, "threads", n_ranks, times)?;
    }
    for n_ranks in [2, 4, 8] {
        let times = on_all(tcp_group(n_ranks)?)?;
        report(&mut out, "tcp", n_ranks, times)?;
    }
    Ok(())
}

fn report(out: &mut impl Write, kind: &str, n_ranks: usize, mut times: Vec<Duration>) -> io::Result<()> {
    times.sort_unstable();
    let at = |frac: f64| times[(frac * (times.len() - 1) as f64) as usize];
    let (p10, p50, p99) = (at(0.1), at(0.5), at(0.99));
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    writeln!(out, "{kind}, {n_ranks} ranks, {LEN} f32: p10 {p10:?} p50 {p50:?} p99 {p99:?} mean {mean:?}")
}

/// Rank 0's times.
fn on_all(comms: Vec<Comm>) -> Result<Vec<Duration>, CommError> {
    thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| measure(comm))).collect();
        let mut times = threads.into_iter().map(|thread| thread.join().expect("a rank does not panic"));
        times.next().expect("a group has a rank")
    })
}

fn measure(mut comm: Comm) -> Result<Vec<Duration>, CommError> {
    let send = vec![comm.rank() as f32; LEN];
    let mut recv = vec![0.0; LEN * comm.n_ranks()];
    (0..N_CALLS)
        .map(|_| {
            let start = Instant::now();
            comm.all_gather(&send, &mut recv)?;
            Ok(start.elapsed())
        })
        .collect()
}

fn tcp_group(n_ranks: usize) -> Result<Vec<Comm>, Box<dyn Error>> {
    let listeners: Vec<_> =
        (0..n_ranks).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    let addrs: Vec<_> = listeners.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
    let secret = random_secret()?;
    let config = |rank| TcpConfig {
        rank,
        addrs: addrs.clone(),
        secret: secret.clone(),
        epoch: 0,
        cancel: ConnectCancel::default(),
        connect_timeout: Duration::from_secs(10),
        comm: CommConfig::default(),
        control: ControlConfig::default(),
    };
    thread::scope(|scope| {
        let dial = |(rank, listener)| {
            let config = config(rank);
            scope.spawn(move || TcpGroup::connect(listener, &config))
        };
        let threads: Vec<_> = listeners.iter().enumerate().map(dial).collect();
        let groups = threads.into_iter().map(|thread| thread.join().expect("a rank does not panic"));
        groups.map(|group| Ok(Box::new(group?.comm) as Comm)).collect()
    })
}
