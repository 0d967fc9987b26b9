//! Thousands of requests, many of them given up at random moments, leave nothing behind.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output},
        cluster_config, eventually,
        model::ServedModel,
        n_tasks, report, seed, tiny_engine,
    },
    tiny::{Error, Rng},
};
use serde_json::Value;

const N_REQUESTS: usize = 2000;

/// Requests in flight at once: more than the engine runs at once here, so that some wait when they are given up.
const CONCURRENCY: usize = 24;

/// When a client goes away.
#[derive(Clone, Copy, Debug)]
enum Patience {
    /// Never.
    Endless,
    /// After so long, wherever the request then is.
    Time(Duration),
    /// After so many events of the stream.
    Events(usize),
}

/// How a client asks.
#[derive(Clone, Copy, Debug)]
enum Face {
    GrpcUnary,
    GrpcStream,
    Http,
    HttpStream,
}

struct Client {
    face: Face,
    patience: Patience,
    ask: Ask,
    n_tokens: usize,
}

impl Client {
    fn random(rng: &mut Rng) -> Self {
        let n_tokens = 1 + rng.below(12);
        // Few beginnings, so that prefixes are found in caches; many lengths, so that blocks are partly filled.
        let start = rng.below(6) as u32;
        let prompt: Vec<u32> = (0..1 + rng.below(60) as u32).map(|i| (start * 31 + i * 7) % 250).collect();
        let patience = match rng.below(5) {
            0 => Patience::Time(Duration::from_micros(rng.below(20_000) as u64)),
            1 => Patience::Events(rng.below(4)),
            _ => Patience::Endless,
        };
        let mut ask = Ask::tokens(prompt).max_tokens(n_tokens as u32).sampled(rng.bits());
        ask.options.priority = Some(rng.below(2) as i32);
        let face =
            rng.pick(&[Face::GrpcUnary, Face::GrpcStream, Face::GrpcStream, Face::Http, Face::HttpStream]);
        Self { face, patience, ask, n_tokens }
    }

    /// Asks, and checks the answer if it is waited for. Gives whether the client went away.
    async fn run(self, cluster: &TestCluster) -> Result<bool, Error> {
        match self.patience {
            Patience::Endless => self.ask(cluster, usize::MAX).await.map(|()| false),
            Patience::Events(n) => self.ask(cluster, n).await.map(|()| true),
            Patience::Time(time) => match tokio::time::timeout(time, self.ask(cluster, usize::MAX)).await {
                Ok(answered) => answered.map(|()| false),
                Err(_) => Ok(true),
            },
        }
    }

    /// Reads at most `max_events` of an answer. One that was read to its end must be complete.
    async fn ask(&self, cluster: &TestCluster, max_events: usize) -> Result<(), Error> {
        let mut n_events = 0;
        let n_tokens = match self.face {
            Face::GrpcUnary => self.ask.generate(cluster).await?.choices[0].token_ids.len(),
            Face::GrpcStream => {
                let mut events = self.ask.open(cluster).await?;
                let mut output = Output::default();
                loop {
                    if n_events == max_events {
                        return Ok(());
                    }
                    let Some(event) = events.next().await else { break };
                    output.take(event?);
                    n_events += 1;
                }
                output.tokens.len()
            }
            Face::Http => {
                let answer = cluster.http.post("/v1/completions", &self.ask.body()).await?.json().await?;
                completion_tokens(&answer)?
            }
            Face::HttpStream => {
                let mut body = self.ask.body();
                body["stream"] = true.into();
                body["stream_options"] = serde_json::json!({"include_usage": true});
                let mut answer = cluster.http.post("/v1/completions", &body).await?;
                let mut last = Value::Null;
                loop {
                    if n_events == max_events {
                        return Ok(());
                    }
                    let event = answer.event().await?.ok_or("a stream ended without [DONE]")?;
                    if event == "[DONE]" {
                        break;
                    }
                    last = serde_json::from_str(&event)?;
                    n_events += 1;
                }
                completion_tokens(&last)?
            }
        };
        assert_eq!(n_tokens, self.n_tokens, "{:?}", self.face);
        Ok(())
    }
}

fn completion_tokens(answer: &Value) -> Result<usize, Error> {
    let count = answer["usage"]["completion_tokens"].as_u64();
    Ok(count.ok_or_else(|| format!("no usage in {answer}"))? as usize)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_with_a_third_given_up_leaves_nothing_behind() -> Result<(), Error> {
    let seed = seed();
    let model = ServedModel::golden("llama", None)?;
    let mut engine = tiny_engine(2, 2);
    // Room for a few sequences only, so that requests also wait and are preempted.
    engine.kv_bytes = 160 << 10;
    engine.sched.max_seqs = 16;
    engine.max_seq_len = Some(128);
    // Some prompts are short enough to be computed on the decode group.
    engine.sched.local_prefill_max = 8;
    let cluster = Arc::new(TestCluster::start(&model, cluster_config(engine)).await?);
    let n_tasks_before = n_tasks();

    let mut rng = Rng::new(seed);
    let clients: Vec<Client> = (0..N_REQUESTS).map(|_| Client::random(&mut rng)).collect();
    let start = Instant::now();
    let running = stream::iter(clients).map(|client| {
        let cluster = Arc::clone(&cluster);
        async move { client.run(&cluster).await }
    });
    let gone: Vec<bool> = running
        .buffer_unordered(CONCURRENCY)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect::<Result<_, _>>()?;
    let took = start.elapsed();
    let n_gone = gone.into_iter().filter(|&gone| gone).count();
    let to_idle = cluster.wait_idle().await;
    report(&format!(
        "{N_REQUESTS} requests, {n_gone} of them given up, in {took:?}; at rest {to_idle:?} later; {} preemptions",
        cluster.n_preemptions()
    ));
    assert!(n_gone > N_REQUESTS / 4, "too few went away to mean anything: {n_gone}");
    assert!(to_idle < Duration::from_secs(5), "{to_idle:?}");
    cluster.assert_pools_whole().await?;
    let is_quiet = eventually(async || n_tasks() <= n_tasks_before).await;
    assert!(is_quiet, "{} tasks before, {} after", n_tasks_before, n_tasks());
    let cluster = Arc::into_inner(cluster).ok_or("a client still holds the cluster")?;
    cluster.stop().await
}
