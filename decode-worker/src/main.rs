//! One decode group as a process: configuration, build, serve, drain.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::Parser;
use longreach_cluster::{KeySpace, MemoryCoordinator};
use longreach_decode::{Cluster, DecodeConfig, FormationConfig, Hosting};
use longreach_engine::{EngineConfig, Model};
use longreach_model::files::ModelFiles;
use longreach_service::{
    ByteSize, Exit, LogConfig, Signals, init_tracing, parse_args, parse_duration, serve_until_signal,
};
use longreach_tls::Security;
use longreach_types::{GroupShape, KvDtype};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// A decode group whose ranks are threads of this process; routers are given its address.
#[derive(Debug, Parser)]
#[command(name = "longreach-decode", version)]
struct Args {
    /// The model's files: a GGUF file, or a directory.
    #[arg(long, env = "LONGREACH_MODEL")]
    model: PathBuf,
    /// The group's name.
    #[arg(long, default_value = "decode-0")]
    group: String,
    /// Where the leader listens; the other ranks take free ports of the same host.
    #[arg(long, default_value = "127.0.0.1:50061")]
    addr: SocketAddr,
    /// Ranks of the group, 1 to 8.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Ranks that share one sequence's positions; divides the ranks. Default: all of them.
    #[arg(long)]
    dcp: Option<usize>,
    /// KV memory of each rank.
    #[arg(long, default_value = "512MiB")]
    kv_mem: ByteSize,
    /// Number format of the KV cache: f16, f32 or bf16. Prefill workers must have the same.
    #[arg(long, default_value = "f16")]
    kv_dtype: KvDtype,
    /// Compute threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// How long a drain waits for sequences in flight.
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    drain_grace: Duration,
    /// What is logged, as "info,longreach_engine=debug".
    #[arg(long, default_value = "info", env = "LONGREACH_LOG")]
    log: String,
}

#[tokio::main]
async fn main() -> Exit {
    let args: Args = match parse_args() {
        Ok(args) => args,
        Err(exit) => return exit,
    };
    let shape = GroupShape::new(args.ranks, args.dcp.unwrap_or(args.ranks));
    if let Err(error) = init_tracing(&LogConfig { filter: args.log.clone() }) {
        error!(%error, "log filter");
        return Exit::BadConfig;
    }
    let shape = match shape {
        Ok(shape) => shape,
        Err(error) => {
            error!(%error, "group shape");
            return Exit::BadConfig;
        }
    };
    match run(args, shape).await {
        Ok(()) => Exit::Clean,
        Err(error) => {
            error!(error, "decode group ended");
            Exit::Failed
        }
    }
}

async fn run(args: Args, shape: GroupShape) -> Result<(), String> {
    let mut signals = Signals::install().map_err(|error| error.to_string())?;
    let files = ModelFiles::open(&args.model).map_err(|error| error.to_string())?;
    let model = Model::open(files).map_err(|error| error.to_string())?;
    let engine = EngineConfig {
        shape,
        kv_bytes: usize::try_from(args.kv_mem.0).unwrap_or(usize::MAX),
        kv_dtype: args.kv_dtype,
        n_threads: args.threads,
        ..EngineConfig::default()
    };
    // Membership of one: routers are told the address until a shared store is configured.
    let keys = KeySpace::new("standalone").map_err(|error| error.to_string())?;
    let cluster = Cluster { coordinator: Arc::new(MemoryCoordinator::default()), keys };
    let config = DecodeConfig {
        group_id: args.group,
        hosting: Hosting::Whole,
        addr: args.addr,
        advertise: None,
        http_addr: None,
        security: Security::Plaintext,
        engine,
        formation: FormationConfig::default(),
        drain_grace: args.drain_grace,
    };
    let worker = config.build(&model, cluster, |_, _| {}).await.map_err(|error| error.to_string())?;
    info!(
        endpoint = worker.endpoint(),
        ranks = shape.n_ranks(),
        dcp = shape.dcp_size(),
        "decode group serves"
    );
    let shutdown = CancellationToken::new();
    let on_signal = |signal| info!(?signal, "draining; once more ends it at once");
    let served = serve_until_signal(&mut signals, &shutdown, on_signal, worker.serve(shutdown.clone())).await;
    served.unwrap_or(Err("ended by a second signal before it had drained".to_owned())).map(drop)
}
