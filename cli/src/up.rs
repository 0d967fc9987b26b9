//! `longreach up`: every role in one process, gRPC between them on loopback, membership in memory.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    sync::Arc,
    time::Duration,
};

use longreach_cluster::{KeySpace, MemoryCoordinator};
use longreach_decode::{Cluster, DecodeConfig, DecodeWorker};
use longreach_engine::EngineConfig;
use longreach_model::shard::head_split;
use longreach_prefill::{PrefillConfig, PrefillWorker};
use longreach_router::{BoundRouter, RouterConfig, WorkerSource};
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::{
    args::UpArgs,
    error::CliError,
    model::{self, OpenedModel},
    signals,
};

/// How long workers may finish what they have once the router is done.
const WORKER_GRACE: Duration = Duration::from_secs(10);

/// Workers listen on free ports of this machine only.
const LOOPBACK: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Pauses between looks at the router's health while the cluster starts.
const READY_POLL: Duration = Duration::from_millis(50);

/// Who ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Router,
    Decode,
    Prefill,
}

type Ended = (Role, Result<(), String>);

/// Runs the command.
pub(crate) async fn run(args: UpArgs) -> Result<(), CliError> {
    let (engine, prefill_threads) = args.engine.config(2)?;
    let shutdown = signals::shutdown()?;
    let opened = model::open(args.engine.model.clone()).await?;
    let keys = KeySpace::new("local").map_err(|error| CliError::start(&error))?;
    let cluster = Cluster { coordinator: Arc::new(MemoryCoordinator::default()), keys };
    let decode = start_decode(&opened, &engine, cluster.clone()).await?;
    let prefill_engine = EngineConfig { n_threads: prefill_threads, ..engine.clone() };
    let prefills = start_prefills(args.prefill_workers, &opened, &prefill_engine, &cluster.keys).await?;
    let summary = Summary::new(&opened, &engine, &decode, &prefills);
    let router = start_router(&args, opened, &cluster).await?;
    let (grpc, http) = (router.grpc_addr(), router.http_addr());

    let workers_shutdown = CancellationToken::new();
    let mut roles = JoinSet::<Ended>::new();
    let serving = router.serve(shutdown.clone());
    roles.spawn(async { (Role::Router, serving.await.map(drop).map_err(|error| error.to_string())) });
    let serving = decode.serve(workers_shutdown.clone());
    roles.spawn(async { (Role::Decode, serving.await.map(drop)) });
    for prefill in prefills {
        let serving = prefill.serve(Arc::clone(&cluster.coordinator), workers_shutdown.clone());
        roles.spawn(async { (Role::Prefill, serving.await.map(drop)) });
    }

    let mut outcome = Ok(());
    tokio::select! {
        ready = wait_until_ready(grpc) => {
            ready?;
            println!("{}", summary.text(grpc, http));
        }
        () = shutdown.cancelled() => {}
        Some(ended) = roles.join_next() => outcome = after(ended, &shutdown, &workers_shutdown),
    }
    // The router goes first, so that nobody is sent to a worker that leaves. A role that ends by itself ends all.
    while let Some(ended) = roles.join_next().await {
        outcome = outcome.and(after(ended, &shutdown, &workers_shutdown));
    }
    eprintln!("stopped");
    outcome
}

/// Takes the end of one role, and ends the others in order.
fn after(
    ended: Result<Ended, JoinError>,
    shutdown: &CancellationToken,
    workers_shutdown: &CancellationToken,
) -> Result<(), CliError> {
    shutdown.cancel();
    let (role, result) = ended.map_err(|error| CliError::start(&error))?;
    if role == Role::Router {
        workers_shutdown.cancel();
    }
    let name = match role {
        Role::Router => "the router",
        Role::Decode => "the decode group",
        Role::Prefill => "a prefill worker",
    };
    result.map_err(|error| CliError::Start(format!("{name} ended: {error}")))
}

async fn start_decode(
    opened: &OpenedModel,
    engine: &EngineConfig,
    cluster: Cluster,
) -> Result<DecodeWorker, CliError> {
    let config = DecodeConfig {
        group_id: "decode-0".to_owned(),
        addr: LOOPBACK,
        engine: engine.clone(),
        drain_grace: WORKER_GRACE,
    };
    let built = config.build(&opened.model, cluster, model::progress("decode group")).await;
    built.map_err(|error| CliError::start(&error))
}

async fn start_prefills(
    n_workers: u16,
    opened: &OpenedModel,
    engine: &EngineConfig,
    keys: &KeySpace,
) -> Result<Vec<PrefillWorker>, CliError> {
    let mut workers = Vec::new();
    for idx in 0..n_workers {
        let config = PrefillConfig {
            worker_id: format!("prefill-{idx}"),
            addr: LOOPBACK,
            engine: engine.clone(),
            drain_grace: WORKER_GRACE,
        };
        let bar = model::progress(&config.worker_id);
        let built = config.build(&opened.model, keys, bar).await;
        workers.push(built.map_err(|error| CliError::start(&error))?);
    }
    Ok(workers)
}

async fn start_router(
    args: &UpArgs,
    opened: OpenedModel,
    cluster: &Cluster,
) -> Result<BoundRouter, CliError> {
    let mut config = RouterConfig::new(opened.name);
    config.grpc_addr = args.grpc;
    config.http_addr = args.http;
    // No balancer stands before this router that would have to hear of its end first.
    config.serving.drain_notice = Duration::ZERO;
    let Cluster { coordinator, keys } = cluster.clone();
    let router = config
        .build(WorkerSource::Cluster { coordinator, keys }, opened.text)
        .map_err(|error| CliError::Usage(error.to_string()))?;
    router.bind().await.map_err(|error| CliError::start(&error))
}

/// Asks the router's health until it serves, that is, until it has seen a decode group.
async fn wait_until_ready(grpc: SocketAddr) -> Result<(), CliError> {
    let endpoint =
        Endpoint::from_shared(format!("http://{}", reachable(grpc))).map_err(|error| CliError::start(&error))?;
    let mut health = HealthClient::new(endpoint.connect_lazy());
    loop {
        let response = health.check(HealthCheckRequest::default()).await;
        let is_serving = response.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving);
        if is_serving {
            return Ok(());
        }
        tokio::time::sleep(READY_POLL).await;
    }
}

/// An address to dial: one that listens everywhere is reached on loopback.
fn reachable(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, v4.port()).into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, v6.port()).into(),
        _ => addr,
    }
}

/// What a person wants to know when the cluster is ready.
struct Summary {
    name: String,
    lines: Vec<String>,
}

impl Summary {
    fn new(
        opened: &OpenedModel,
        engine: &EngineConfig,
        decode: &DecodeWorker,
        prefills: &[PrefillWorker],
    ) -> Self {
        let (config, shape) = (&opened.model.config, engine.shape);
        let info = decode.engine().info();
        let mut lines = vec![
            format!("model     {} ({}, {} layers)", opened.name, config.architecture, config.n_layers),
            format!("file      {}", opened.path.display()),
            format!(
                "decode    {} ranks, dcp {}: each KV head stored {:.2} times; sequences to {} tokens; kernels {}",
                shape.n_ranks(),
                shape.dcp_size(),
                shape.duplication(config.n_q_heads, config.n_kv_heads),
                info.max_seq_len,
                engine.isa,
            ),
        ];
        for (rank, weight_bytes) in decode.weight_bytes().iter().enumerate() {
            let heads = head_split(config, shape, rank);
            lines.push(format!(
                "  rank {rank}  {} of {} query heads, {} of {} KV heads, every block g with g mod {} = {}, {} MiB of \
                 weights",
                heads.own_q.len(),
                config.n_q_heads,
                heads.kv.len(),
                config.n_kv_heads,
                shape.dcp_size(),
                shape.dcp_rank(rank),
                weight_bytes >> 20,
            ));
        }
        let endpoints: Vec<_> = prefills.iter().map(PrefillWorker::endpoint).collect();
        lines.push(format!("prefill   {}", endpoints.join(", ")));
        if !shape.is_canonical() {
            lines.push(format!(
                "note      {} ranks do not divide 8: answers agree with other rank counts within rounding, not to \
                 the bit",
                shape.n_ranks()
            ));
        }
        Self { name: opened.name.clone(), lines }
    }

    fn text(&self, grpc: SocketAddr, http: SocketAddr) -> String {
        let body = format!(
            r#"{{"model":"{}","messages":[{{"role":"user","content":"What is the capital of France?"}}]}}"#,
            self.name
        );
        format!(
            "\nLongreach is ready\n\n{}\ngRPC      {grpc}\nHTTP      http://{http}\n\ntry it:\n\n  curl \
             http://{}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n",
            self.lines.join("\n"),
            reachable(http),
        )
    }
}
