//! `longreach up`: every role in one process, until Ctrl-C.

use std::{net::SocketAddr, pin::pin};

use longreach::local::{LocalCluster, LocalConfig, LocalError, reachable};
use longreach_engine::EngineConfig;
use longreach_model::shard::head_split;
use longreach_prefill::PrefillWorker;
use longreach_service::{Signals, serve_until_signal};
use tokio_util::sync::CancellationToken;

use crate::{
    advice,
    args::UpArgs,
    error::CliError,
    model::{self, OpenedModel},
};

/// Runs the command.
pub(crate) async fn run(args: UpArgs) -> Result<(), CliError> {
    let (engine, prefill_threads) = args.engine.config(2)?;
    let opened = model::open(args.engine.model.clone()).await?;
    // From here on a signal drains; a download before it just ends.
    let mut signals = Signals::install().map_err(|error| CliError::start(&error))?;
    let mut config = LocalConfig {
        prefill_threads,
        n_prefills: args.prefill_workers,
        ..LocalConfig::new(engine.clone(), opened.name.clone())
    };
    config.router.grpc_addr = args.grpc;
    config.router.http_addr = args.http;
    config.router.sampling = advice::sampling(&opened.name, &opened.model.files);
    let cluster = LocalCluster::start(config, &opened.model, opened.text.clone(), model::progress).await;
    let cluster = cluster.map_err(|error| failed(&error))?;
    let summary = Summary::new(&opened, &engine, &cluster);
    let shutdown = CancellationToken::new();
    let on_signal = |_| eprintln!("draining; once more ends it at once");
    let serving = serve(cluster, summary, shutdown.clone());
    let served = serve_until_signal(&mut signals, &shutdown, on_signal, serving).await;
    eprintln!("stopped");
    served.unwrap_or_else(|| Err(CliError::Start("ended before everything was finished".to_owned())))
}

/// Runs the cluster until `shutdown`, and says when it is ready.
async fn serve(cluster: LocalCluster, summary: Summary, shutdown: CancellationToken) -> Result<(), CliError> {
    let ready = cluster.ready();
    let mut running = pin!(cluster.run(shutdown));
    // A cluster that ends before it was ready has nobody to announce itself to.
    let outcome = tokio::select! {
        ready = ready => {
            ready.map_err(|error| failed(&error))?;
            println!("{}", summary.text());
            running.await
        }
        outcome = &mut running => outcome,
    };
    outcome.map_err(|error| failed(&error))
}

fn failed(error: &LocalError) -> CliError {
    match error {
        LocalError::Config(error) => CliError::Usage(error.to_string()),
        error => CliError::start(error),
    }
}

/// What a person wants to know when the cluster is ready.
struct Summary {
    name: String,
    grpc: SocketAddr,
    http: SocketAddr,
    lines: Vec<String>,
}

impl Summary {
    fn new(opened: &OpenedModel, engine: &EngineConfig, cluster: &LocalCluster) -> Self {
        let (config, shape, decode) = (&opened.model.config, engine.shape, cluster.decode());
        let mut lines = vec![
            format!("model     {} ({}, {} layers)", opened.name, config.architecture, config.n_layers),
            format!("file      {}", opened.path.display()),
            format!(
                "decode    {} ranks, dcp {}: each KV head stored {:.2} times; sequences to {} tokens; kernels {}",
                shape.n_ranks(),
                shape.dcp_size(),
                shape.duplication(config.n_q_heads, config.n_kv_heads),
                decode.max_seq_len(),
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
        let endpoints: Vec<_> = cluster.prefills().iter().map(PrefillWorker::endpoint).collect();
        lines.push(format!("prefill   {}", endpoints.join(", ")));
        if !shape.is_canonical() {
            lines.push(format!(
                "note      {} ranks do not divide 8: answers agree with other rank counts within rounding, not to \
                 the bit",
                shape.n_ranks()
            ));
        }
        let (grpc, http) = (cluster.grpc_addr(), cluster.http_addr());
        Self { name: opened.name.clone(), grpc, http, lines }
    }

    fn text(&self) -> String {
        let Self { name, grpc, http, lines } = self;
        let try_it = try_it(name, *http);
        format!(
            "\nLongreach is ready\n\n{}\ngRPC      {grpc}\nHTTP      http://{http}\n{try_it}",
            lines.join("\n")
        )
    }
}

/// A first question to a router at `http` that serves the model `name`.
pub(crate) fn try_it(name: &str, http: SocketAddr) -> String {
    let body = format!(
        r#"{{"model":"{name}","messages":[{{"role":"user","content":"Name the capital of France."}}]}}"#
    );
    format!(
        "\ntry it:\n\n  curl http://{}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n",
        reachable(http)
    )
}
