//! A whole cluster in one process, as `longreach up` starts it, and clients for both of its faces.
//!
//! Nothing here stands in for a part of the product: every test goes through the router, real gRPC and the engines.
//! What is added is only what a test must see that no client can: the engines' own figures.

pub mod ask;
pub mod http;
pub mod model;

use std::{
    net::SocketAddr,
    time::{Duration, Instant, SystemTime},
};

use longreach::local::{LocalCluster, LocalConfig, LocalError};
use longreach_engine::{EngineConfig, EngineHandle};
use longreach_proto::inference::inference_service_client::InferenceServiceClient;
use longreach_types::{GroupShape, KvDtype};
use tokio::{runtime::Handle, sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use self::{ask::Ask, http::HttpClient, model::ServedModel};
use crate::tiny::Error;

/// How long anything may take that is only waited for. Far beyond what it takes, so that only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster that serves.
pub struct TestCluster {
    /// For HTTP requests.
    pub http: HttpClient,
    /// The decode group's engine, in its first life.
    pub decode: EngineHandle,
    /// The decode group's engine, in whatever life it has.
    pub life: watch::Receiver<Option<EngineHandle>>,
    /// The prefill workers' engines.
    pub prefills: Vec<EngineHandle>,
    /// The model's name.
    pub model_name: String,
    /// Where the router serves gRPC.
    pub grpc_addr: SocketAddr,
    /// Where it serves HTTP.
    pub http_addr: SocketAddr,
    channel: Channel,
    shutdown: CancellationToken,
    running: JoinSet<Result<(), LocalError>>,
}

/// An engine for tiny models: blocks of 4, so that short prompts have many; every prompt is handed off.
pub fn tiny_engine(n_ranks: usize, dcp_size: usize) -> EngineConfig {
    let shape = GroupShape::new(n_ranks, dcp_size).expect("tests give shapes that exist");
    let mut engine = EngineConfig {
        shape,
        kv_dtype: KvDtype::F32,
        block_size: 4,
        kv_bytes: 4 << 20,
        ..EngineConfig::default()
    };
    engine.sched.local_prefill_max = 0;
    // What a test lets the decode group compute by that limit, it does compute, however busy it is.
    engine.sched.reuse.handoff_latency = Duration::from_secs(3600);
    engine
}

/// A cluster with `engine`, for tests: membership is looked at often.
pub fn cluster_config(engine: EngineConfig) -> LocalConfig {
    let mut config = LocalConfig::new(engine, "tiny");
    config.router.workers.poll_interval = Duration::from_millis(20);
    config
}

impl TestCluster {
    /// Starts the cluster and waits until a request has gone through all of it.
    pub async fn start(model: &ServedModel, config: LocalConfig) -> Result<Self, Error> {
        let model_name = config.router.model_name.clone();
        let has_prefills = config.n_prefills > 0;
        let cluster = LocalCluster::start(config, &model.model, model.text.clone(), |_| |_, _| {}).await?;
        let (grpc_addr, http_addr) = (cluster.grpc_addr(), cluster.http_addr());
        let mut life = cluster.decode().life();
        let prefills = cluster.prefills().iter().map(|worker| worker.engine().clone()).collect();
        let (ready, shutdown) = (cluster.ready(), CancellationToken::new());
        let mut running = JoinSet::new();
        running.spawn(cluster.run(shutdown.clone()));
        ready.await?;
        let decode = life.wait_for(Option::is_some).await?.clone().ok_or("the decode group has no life")?;
        let channel = Endpoint::from_shared(format!("http://{grpc_addr}"))?.tcp_nodelay(true).connect_lazy();
        let http = HttpClient::new(http_addr);
        let started = Self {
            http,
            decode,
            life,
            prefills,
            model_name,
            grpc_addr,
            http_addr,
            channel,
            shutdown,
            running,
        };
        if has_prefills {
            started.warm_up().await?;
        }
        Ok(started)
    }

    /// The router is ready once it knows a decode group; the prefill workers are there when a prompt has passed them.
    async fn warm_up(&self) -> Result<(), Error> {
        let prompt_len = self.decode.info().max_seq_len.min(300) as u32 - 2;
        let prompt: Vec<u32> = (0..prompt_len).map(|i| i % 7).collect();
        let warm = async || Ask::tokens(prompt.clone()).max_tokens(2).generate(self).await.is_ok();
        assert!(eventually(warm).await, "the cluster answers no request");
        self.wait_idle().await;
        for engine in self.engines() {
            engine.flush_cache().await?;
        }
        Ok(())
    }

    /// A client of the gRPC face. All share one connection.
    pub fn inference(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone())
    }

    /// A client of the gRPC face with a connection of its own.
    pub fn lone_inference(&self) -> Result<InferenceServiceClient<Channel>, Error> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc_addr))?;
        Ok(InferenceServiceClient::new(endpoint.tcp_nodelay(true).connect_lazy()))
    }

    /// Every engine.
    pub fn engines(&self) -> impl Iterator<Item = &EngineHandle> {
        std::iter::once(&self.decode).chain(&self.prefills)
    }

    /// Waits until no engine has anything to do or holds a block, and gives the time that took.
    pub async fn wait_idle(&self) -> Duration {
        let start = Instant::now();
        for engine in self.engines() {
            let idle = tokio::time::timeout(PATIENCE, engine.wait_for(|info| info.is_idle())).await;
            assert!(matches!(idle, Ok(true)), "an engine does not come to rest: {:?}", engine.info());
        }
        start.elapsed()
    }

    /// Checks that every block of every pool is accounted for, and free once the cached ones are forgotten.
    pub async fn assert_pools_whole(&self) -> Result<(), Error> {
        self.wait_idle().await;
        for engine in self.engines() {
            for pool in engine.info().pools() {
                assert_eq!(pool.free + pool.cached, pool.total, "{pool:?}");
            }
            engine.flush_cache().await?;
            let is_free = engine.wait_for(|info| info.pools().iter().all(|pool| pool.free == pool.total));
            assert!(tokio::time::timeout(PATIENCE, is_free).await?, "{:?}", engine.info().pools());
        }
        Ok(())
    }

    /// Preemptions on the decode group so far.
    pub fn n_preemptions(&self) -> u64 {
        self.decode.info().stats.totals.preemptions
    }

    /// Tells the cluster to end, as Ctrl-C does.
    pub fn begin_shutdown(&self) {
        self.shutdown.cancel();
    }

    /// Waits for the end, and says how it was.
    pub async fn ended(mut self) -> Result<Result<(), LocalError>, Error> {
        let ended = tokio::time::timeout(PATIENCE, self.running.join_next()).await?;
        Ok(ended.ok_or("the cluster was never started")??)
    }

    /// Ends the cluster, which waits for every task and thread of it.
    pub async fn stop(self) -> Result<(), Error> {
        self.begin_shutdown();
        Ok(self.ended().await??)
    }
}

/// Tries `attempt` until it succeeds; whether it did.
pub async fn eventually(mut attempt: impl AsyncFnMut() -> bool) -> bool {
    let trying = async {
        while !attempt().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, trying).await.is_ok()
}

/// Tasks of this test's runtime that have not ended.
pub fn n_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// The seed of a random test: `LONGREACH_TEST_SEED`, or another one each time. It is printed, so that a failure can be
/// played again.
pub fn seed() -> u64 {
    let given = std::env::var("LONGREACH_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
    let seed = given.unwrap_or(now);
    report(&format!("LONGREACH_TEST_SEED={seed}"));
    seed
}

/// A measured figure, beside the test's result.
#[allow(clippy::print_stdout, reason = "shown by the test harness, with the test that it belongs to")]
pub fn report(figure: &str) {
    println!("{figure}");
}
