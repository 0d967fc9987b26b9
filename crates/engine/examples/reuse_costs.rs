//! Measures what `longreach_sched::ReuseCosts` is made of, on this machine: a prefill worker and a decode group in one
//! process, gRPC over loopback between them, as `longreach up` starts them.
//!
//! `cargo run --release -p longreach-engine --example reuse_costs -- [model file or folder] [decode ranks]`
//!
//! - `prefill_tokens_per_s`, `group_tokens_per_s`: the difference between prompts of two lengths, so that what every
//!   prompt costs falls out; from submission to the first token, with nothing cached.
//! - `handoff_latency`: how much later the *second* token comes when a prompt of two tokens is handed off and not
//!   computed by the group. The first one is sent before its hand-off is complete.
//! - `pull_latency`, `link_bytes_per_s`: pulls of one block and of a long prefix from an idle group, read and held
//!   against their checksums.
//!
//! Each figure is the median of some runs. On a machine with other work only ratios between them mean much.
#![allow(clippy::print_stdout, reason = "this program's output is its purpose")]

use std::{
    error::Error,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use longreach_engine::{
    DecodeGroup, EngineConfig, EngineEvent, EngineHandle, GrpcTransport, KvTransport, Model, RunningEngine,
    SeqStream, Submission, Work, prompt_hash, serve::Door, start_prefill,
};
use longreach_model::files::{ModelFiles, resolve};
use longreach_proto::worker::{PullMessage, PullRequest, Reservation, kv_server};
use longreach_tls::Security;
use longreach_types::{Epoch, GroupShape, Prompt, RequestId, SamplingParams, TokenId};
use tokio::runtime::Handle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

const N_RUNS: usize = 7;

/// Lengths whose difference gives a rate.
const SHORT: usize = 64;
const LONG: usize = 384;

/// A prompt that costs next to nothing to compute.
const TINY: usize = 2;

/// A prefix that takes long enough to pull.
const PREFIX: usize = 1024;

type Failure = Box<dyn Error + Send + Sync>;

/// Both sides.
struct Cluster {
    prefill: RunningEngine,
    decode: RunningEngine,
    servers: TaskTracker,
    close: CancellationToken,
    vocab_size: usize,
    n_prompts: u32,
}

impl Cluster {
    /// Starts both sides; the group computes prompts itself if `is_local`, and none if not.
    async fn start(model: &Model, n_ranks: usize, is_local: bool) -> Result<Self, Failure> {
        let mut config =
            EngineConfig { shape: GroupShape::new(n_ranks, n_ranks)?, ..EngineConfig::default() };
        config.sched.local_prefill_max = if is_local { usize::MAX } else { 0 };
        config.sched.reuse.handoff_latency = Duration::from_secs(3600);
        let life = DecodeGroup::load(model, &config, &|_, _| {})?.enlist(Epoch(1));
        let (servers, close) = (TaskTracker::new(), CancellationToken::new());
        let mut endpoints = Vec::new();
        for inlet in life.inlets() {
            let door = Door::open(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Security::Plaintext).await?;
            endpoints.push(door.endpoint());
            servers.spawn(door.serve(Routes::new(kv_server(Arc::new(inlet))), close.clone()));
        }
        let decode = life.start(endpoints, &Handle::current())?;
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let config = EngineConfig { n_threads, ..config };
        let transport = Arc::new(GrpcTransport::default());
        let prefill = start_prefill(model, &config, transport, &Handle::current(), &|_, _| {})?;
        let vocab_size = model.config.vocab_size;
        Ok(Self { prefill, decode, servers, close, vocab_size, n_prompts: 0 })
    }

    async fn stop(self) -> Result<(), Failure> {
        self.prefill.stop().await?;
        self.decode.stop().await?;
        self.close.cancel();
        self.servers.close();
        self.servers.wait().await;
        Ok(())
    }

    /// A prompt that nobody has seen.
    fn prompt(&mut self, len: usize) -> Prompt {
        self.n_prompts += 1;
        let token = |i: usize| {
            TokenId((i * 7919 + self.n_prompts as usize * 104_729) as u32 % self.vocab_size as u32)
        };
        Prompt { tokens: (0..len).map(token).collect(), ..Prompt::default() }
    }

    /// Runs one prompt, and gives the times to its first and its second token.
    async fn run(&self, prompt: &Prompt) -> Result<(Duration, Duration), Failure> {
        let start = Instant::now();
        let (mut decode, reservation) = reserve(&self.decode.handle, prompt).await?;
        let mut first = None;
        let mut prefill = None;
        if !reservation.prefilled_here {
            let mut stream = submit(&self.prefill.handle, prompt, Work::Prefill(reservation)).await?;
            let Some(Ok(EngineEvent::FirstToken(_))) = stream.next().await else {
                return Err("no token".into());
            };
            first = Some(start.elapsed());
            prefill = Some(stream);
        }
        let mut second = None;
        while let Some(event) = decode.next().await {
            if matches!(event?, EngineEvent::Token(_)) {
                let now = start.elapsed();
                match first {
                    None => first = Some(now),
                    Some(_) => {
                        second.get_or_insert(now);
                    }
                }
            }
        }
        drop(prefill);
        Ok((first.ok_or("no first token")?, second.ok_or("no second token")?))
    }

    /// Medians over prompts of `len` tokens.
    async fn times(&mut self, len: usize) -> Result<(f64, f64), Failure> {
        let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
        for _ in 0..N_RUNS {
            let prompt = self.prompt(len);
            let (first, second) = self.run(&prompt).await?;
            firsts.push(first.as_secs_f64());
            seconds.push(second.as_secs_f64());
        }
        Ok((median(firsts), median(seconds)))
    }
}

async fn submit(engine: &EngineHandle, prompt: &Prompt, work: Work) -> Result<SeqStream, Failure> {
    let sampling =
        SamplingParams { temperature: 0.0, max_tokens: 3, ignore_eos: true, ..SamplingParams::default() };
    let (request_id, prompt) = (RequestId("reuse costs".to_owned()), prompt.clone());
    Ok(engine.submit(Submission { request_id, prompt, sampling, priority: 0, work }).await?)
}

async fn reserve(engine: &EngineHandle, prompt: &Prompt) -> Result<(SeqStream, Reservation), Failure> {
    let mut stream = submit(engine, prompt, Work::Decode).await?;
    match stream.next().await {
        Some(Ok(EngineEvent::Reserved(reservation))) => Ok((stream, reservation)),
        other => Err(format!("no reservation: {other:?}").into()),
    }
}

/// Pulls `n_blocks` of the cached prefix from every rank at once. Gives the bytes and the time.
async fn pull(reservation: &Reservation, prompt: &Prompt, n_blocks: usize) -> Result<(u64, f64), Failure> {
    let transport = GrpcTransport::default();
    let start = Instant::now();
    let pulls = reservation.ranks.iter().map(|target| {
        let request = PullRequest {
            handoff: reservation.handoff,
            epoch: reservation.epoch,
            rank: target.rank,
            layout: reservation.layout.clone(),
            prompt_hash: prompt_hash(prompt),
            blocks: 0..n_blocks,
            heads: target.kv_heads.clone(),
        };
        let mut messages = transport.pull(target.endpoint.clone(), request);
        async move {
            let mut n_bytes = 0;
            while let Some(message) = messages.next().await {
                if let PullMessage::Chunk(chunk) = message? {
                    n_bytes += chunk.payload.len() as u64;
                    let cell_bytes = chunk.payload.len() / chunk.crc32c.len();
                    let crcs = chunk.payload.chunks(cell_bytes).map(crc32c::crc32c);
                    if !crcs.eq(chunk.crc32c.iter().copied()) {
                        return Err(Failure::from("a checksum is wrong"));
                    }
                }
            }
            Ok(n_bytes)
        }
    });
    let n_bytes = futures::future::try_join_all(pulls).await?.into_iter().sum();
    Ok((n_bytes, start.elapsed().as_secs_f64()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let model = args.next();
    let n_ranks = args.next().map_or(Ok(2), |n| n.parse())?;
    let model = Model::open(ModelFiles::open(&resolve(model.as_deref())?.path)?)?;

    let mut cluster = Cluster::start(&model, n_ranks, true).await?;
    let (_, local_second) = cluster.times(TINY).await?;
    let (short, _) = cluster.times(SHORT).await?;
    let (long, _) = cluster.times(LONG).await?;
    cluster.stop().await?;
    let group_rate = (LONG - SHORT) as f64 / (long - short);

    let mut cluster = Cluster::start(&model, n_ranks, false).await?;
    let (_, second) = cluster.times(TINY).await?;
    let (short, _) = cluster.times(SHORT).await?;
    let (long, _) = cluster.times(LONG).await?;
    let prefill_rate = (LONG - SHORT) as f64 / (long - short);
    let handoff_latency = second - local_second;

    let prompt = cluster.prompt(PREFIX + 1);
    cluster.run(&prompt).await?;
    let (stream, reservation) = reserve(&cluster.decode.handle, &prompt).await?;
    let n_blocks = reservation.blocks.start;
    let (mut latencies, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..N_RUNS {
        // A fresh connection each time, as the first pull of a worker has it.
        let (_, one) = pull(&reservation, &prompt, 1).await?;
        let (n_bytes, all) = pull(&reservation, &prompt, n_blocks).await?;
        latencies.push(one);
        rates.push(n_bytes as f64 / (all - one).max(1e-9));
    }
    drop(stream);
    cluster.stop().await?;

    println!("prefill_tokens_per_s = {prefill_rate:.0}");
    println!("group_tokens_per_s = {group_rate:.0}");
    println!("link_bytes_per_s = {:.0e}", median(rates));
    println!("handoff_latency = {:.1} ms", handoff_latency * 1e3);
    println!("pull_latency = {:.1} ms", median(latencies) * 1e3);
    Ok(())
}
