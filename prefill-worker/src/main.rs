//! One prefill worker as a process: configuration, build, serve, drain.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::Parser;
use longreach_cluster::{KeySpace, MemoryCoordinator};
use longreach_engine::{EngineConfig, Model};
use longreach_model::files::ModelFiles;
use longreach_prefill::PrefillConfig;
use longreach_service::{
    ByteSize, Exit, LogConfig, Signals, init_tracing, parse_args, parse_duration, serve_until_signal,
};
use longreach_types::KvDtype;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// A prefill worker; routers are given its address.
#[derive(Debug, Parser)]
#[command(name = "longreach-prefill", version)]
struct Args {
    /// The model's files: a GGUF file, or a directory.
    #[arg(long, env = "LONGREACH_MODEL")]
    model: PathBuf,
    /// The worker's stable name.
    #[arg(long, default_value = "prefill-0")]
    name: String,
    /// Where it listens.
    #[arg(long, default_value = "127.0.0.1:50071")]
    addr: SocketAddr,
    /// KV memory.
    #[arg(long, default_value = "512MiB")]
    kv_mem: ByteSize,
    /// Number format of the KV cache: f16, f32 or bf16. The decode group must have the same.
    #[arg(long, default_value = "f16")]
    kv_dtype: KvDtype,
    /// Compute threads. Default: all cores.
    #[arg(long)]
    threads: Option<usize>,
    /// How long a drain waits for prompts in flight.
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
    if let Err(error) = init_tracing(&LogConfig { filter: args.log.clone() }) {
        error!(%error, "log filter");
        return Exit::BadConfig;
    }
    match run(args).await {
        Ok(()) => Exit::Clean,
        Err(error) => {
            error!(error, "prefill worker ended");
            Exit::Failed
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    let mut signals = Signals::install().map_err(|error| error.to_string())?;
    let files = ModelFiles::open(&args.model).map_err(|error| error.to_string())?;
    let model = Model::open(files).map_err(|error| error.to_string())?;
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let engine = EngineConfig {
        kv_bytes: usize::try_from(args.kv_mem.0).unwrap_or(usize::MAX),
        kv_dtype: args.kv_dtype,
        n_threads: args.threads.unwrap_or(n_cores),
        ..EngineConfig::default()
    };
    // Membership of one: routers are told the address until a shared store is configured.
    let keys = KeySpace::new("standalone").map_err(|error| error.to_string())?;
    let config =
        PrefillConfig { worker_id: args.name, addr: args.addr, engine, drain_grace: args.drain_grace };
    let worker = config.build(&model, &keys, |_, _| {}).await.map_err(|error| error.to_string())?;
    info!(endpoint = worker.endpoint(), "prefill worker serves");
    let shutdown = CancellationToken::new();
    let on_signal = |signal| info!(?signal, "draining; once more ends it at once");
    let serving = worker.serve(Arc::new(MemoryCoordinator::default()), shutdown.clone());
    let served = serve_until_signal(&mut signals, &shutdown, on_signal, serving).await;
    served.unwrap_or(Err("ended by a second signal before it had drained".to_owned())).map(drop)
}
