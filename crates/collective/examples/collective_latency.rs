//! Latency of an all-gather of 576 floats, by number of threads: `cargo run --release -p longreach-collective
//! --example collective_latency`.

use std::{
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

use longreach_collective::{CommConfig, CommError, Communicator, local_group};

const LEN: usize = 576;
const N_CALLS: usize = 20_000;

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for n_ranks in [1, 2, 4, 8] {
        let comms = local_group(n_ranks, CommConfig::default());
        let times = thread::scope(|scope| {
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| measure(comm))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a rank does not panic"))
                .collect::<Vec<_>>()
        });
        let mut times = times.into_iter().next().expect("a group has a rank").map_err(io::Error::other)?;
        times.sort_unstable();
        let at = |frac: f64| times[(frac * (times.len() - 1) as f64) as usize];
        let (p10, p50, p99) = (at(0.1), at(0.5), at(0.99));
        let mean = times.iter().sum::<Duration>() / times.len() as u32;
        writeln!(
            out,
            "local all_gather of {LEN} f32, {n_ranks} threads: p10 {p10:?} p50 {p50:?} p99 {p99:?} mean {mean:?}"
        )?;
    }
    Ok(())
}

fn measure(mut comm: impl Communicator<[f32]>) -> Result<Vec<Duration>, CommError> {
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
