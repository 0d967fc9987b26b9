//! One router process: configuration, build, serve, drain.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use longreach_router::{ConfigError, RouterConfig, ServeError, WorkerSource};
use longreach_service::{
    ByteSize, Exit, LogConfig, LogError, Signals, UnitError, init_tracing, parse_args, parse_duration,
};
use longreach_text::{LoadOptions, TextError, TextModel};

/// Serves a model to clients, with the workers that it is given.
#[derive(Debug, Parser)]
#[command(name = "longreach-router", version)]
struct Args {
    /// The model's files: a directory or a GGUF file. Only its tokenizer and chat template are read.
    #[arg(long, env = "LONGREACH_MODEL")]
    model: PathBuf,
    /// The name that requests give. Default: the name of the file or directory.
    #[arg(long, env = "LONGREACH_MODEL_NAME")]
    model_name: Option<String>,
    /// A chat template in place of the model's own.
    #[arg(long)]
    chat_template: Option<PathBuf>,
    /// Where gRPC is served.
    #[arg(long, default_value = "127.0.0.1:50051", env = "LONGREACH_GRPC_ADDR")]
    grpc_addr: SocketAddr,
    /// Where the OpenAI API, health and metrics are served.
    #[arg(long, default_value = "127.0.0.1:8080", env = "LONGREACH_HTTP_ADDR")]
    http_addr: SocketAddr,
    /// The leader of a decode group, http://host:port; repeat it for more.
    #[arg(long = "decode", required = true)]
    decodes: Vec<String>,
    /// A prefill worker, http://host:port; repeat it for more.
    #[arg(long = "prefill")]
    prefills: Vec<String>,
    /// The largest request.
    #[arg(long, value_parser = str::parse::<ByteSize>)]
    max_body: Option<ByteSize>,
    /// The most outputs in the making.
    #[arg(long)]
    max_inflight: Option<usize>,
    /// How long to go on taking requests after saying that no more should come.
    #[arg(long, value_parser = parse_time)]
    drain_notice: Option<Duration>,
    /// How long requests in flight may then take to finish.
    #[arg(long, value_parser = parse_time)]
    drain_grace: Option<Duration>,
    /// What is logged, as "info,longreach_router=debug".
    #[arg(long, default_value = "info", env = "LONGREACH_LOG")]
    log: String,
}

/// Why a router did not come to serve.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot load the model's text side: {0}")]
    Text(#[from] TextError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
}

#[tokio::main]
async fn main() -> Exit {
    let args: Args = match parse_args() {
        Ok(args) => args,
        Err(exit) => return exit,
    };
    match run(args).await {
        Ok(exit) => exit,
        Err(error) => {
            tracing::error!(%error, "router did not start");
            match error {
                StartError::Log(_) | StartError::Config(_) => Exit::BadConfig,
                StartError::Text(_) | StartError::Serve(_) | StartError::Signals(_) => Exit::Failed,
            }
        }
    }
}

async fn run(args: Args) -> Result<Exit, StartError> {
    init_tracing(&LogConfig { filter: args.log.clone() })?;
    let signals = Signals::install().map_err(StartError::Signals)?;
    let (config, source, text) = args.into_parts()?;
    let drain = config.drain();
    let lifecycle = config.build(source, text)?.bind().await?.start()?;
    Ok(lifecycle.run(signals, drain).await.into())
}

impl Args {
    fn into_parts(self) -> Result<(RouterConfig, WorkerSource, TextModel), StartError> {
        let stem = self.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let mut config = RouterConfig::new(self.model_name.or(stem).unwrap_or_default());
        config.grpc_addr = self.grpc_addr;
        config.http_addr = self.http_addr;
        if let Some(ByteSize(max_body)) = self.max_body {
            config.limits.max_body_bytes = usize::try_from(max_body).unwrap_or(usize::MAX);
        }
        config.limits.max_inflight = self.max_inflight.unwrap_or(config.limits.max_inflight);
        config.serving.drain_notice = self.drain_notice.unwrap_or(config.serving.drain_notice);
        config.serving.drain_grace = self.drain_grace.unwrap_or(config.serving.drain_grace);
        config.validate()?;
        let text = TextModel::load_with(&self.model, &LoadOptions { chat_template: self.chat_template })?;
        let source = WorkerSource::Fixed { decodes: self.decodes, prefills: self.prefills };
        Ok((config, source, text))
    }
}

fn parse_time(text: &str) -> Result<Duration, UnitError> {
    parse_duration(text)
}
