//! A router's configuration as an operator writes it, and what it becomes.
//!
//! What each setting trades is said where it is used, in [`RouterConfig`] and its parts; defaults are theirs too.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use longreach_service::{
    ByteSize, ConfigError, Settings,
    config::{ClusterSection, Span, TlsSection},
};
use longreach_tls::{FaceFiles, Security};
use serde::{Deserialize, Serialize};

use crate::{
    config::{RouterConfig, ServingConfig},
    discovery::WorkerSource,
    dispatch::RecoveryConfig,
    http::StreamConfig,
    request::{RequestLimits, SamplingDefaults},
    workers::WorkerConfig,
};

/// A router's settings.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterSettings {
    /// The model's files: a directory or a GGUF file. Only its tokenizer and chat template are read.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// The name that requests give. Default: the name of the file or directory.
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// A chat template in place of the model's own.
    #[arg(long, value_name = "PATH")]
    pub chat_template: Option<PathBuf>,
    /// Where gRPC is served.
    #[arg(long, default_value = "127.0.0.1:50051", value_name = "ADDR")]
    pub grpc_addr: SocketAddr,
    /// Where the OpenAI API, health and metrics are served.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDR")]
    pub http_addr: SocketAddr,
    /// What is logged, as "info,longreach_router=debug".
    #[arg(long, default_value = "info", value_name = "FILTER")]
    pub log: String,
    /// The cluster whose workers are used.
    #[command(flatten)]
    pub cluster: ClusterSection,
    /// Who the router is to workers.
    #[command(flatten)]
    pub tls: TlsSection,
    /// What clients are shown.
    #[command(flatten)]
    pub face_tls: FaceTlsSection,
    /// Workers, and how they are kept in touch with.
    #[command(flatten)]
    pub workers: WorkersSection,
    /// What requests may ask.
    #[command(flatten)]
    pub limits: LimitsSection,
    /// What requests that leave it open get.
    #[command(flatten)]
    pub sampling: SamplingSection,
    /// What is done when workers are lost.
    #[command(flatten)]
    pub recovery: RecoverySection,
    /// How connections and streams are held open.
    #[command(flatten)]
    pub serving: ServingSection,
    /// How the router ends.
    #[command(flatten)]
    pub drain: DrainSection,
}

/// What clients are shown: files in PEM form. Without them clients are served without TLS.
#[derive(Args, Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FaceTlsSection {
    /// The certificate, for the names under which clients know the service, and those between it and its CA.
    #[arg(long, id = "face_tls.cert", value_name = "PATH")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[arg(long, id = "face_tls.key", value_name = "PATH")]
    pub key: Option<PathBuf>,
    /// CAs; only clients with a certificate from one of them are let in.
    #[arg(long, id = "face_tls.client_ca", value_name = "PATH")]
    pub client_ca: Option<PathBuf>,
}

impl FaceTlsSection {
    /// The files; none if there is no TLS. Some of them are not enough.
    pub fn files(&self) -> Result<Option<FaceFiles>, ConfigError> {
        let Self { cert, key, client_ca } = self.clone();
        match (cert, key, client_ca) {
            (None, None, None) => Ok(None),
            (Some(cert), Some(key), client_ca) => Ok(Some(FaceFiles { cert, key, client_ca })),
            (None, ..) => Err(ConfigError::Missing { key: "face_tls.cert" }),
            (_, None, _) => Err(ConfigError::Missing { key: "face_tls.key" }),
        }
    }
}

/// Workers, and how they are kept in touch with.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkersSection {
    /// Leaders of decode groups, http://host:port. Only without etcd.
    #[arg(long, id = "workers.decode", alias = "decode", value_delimiter = ',', value_name = "URL")]
    pub decode: Vec<String>,
    /// Prefill workers, http://host:port. Only without etcd.
    #[arg(long, id = "workers.prefill", alias = "prefill", value_delimiter = ',', value_name = "URL")]
    pub prefill: Vec<String>,
    /// How long a connection may take.
    #[arg(long, id = "workers.connect_timeout", default_value_t = Span(WorkerConfig::default().connect_timeout))]
    pub connect_timeout: Span,
    /// How often a quiet connection is checked.
    #[arg(
        long,
        id = "workers.keep_alive_interval",
        default_value_t = Span(WorkerConfig::default().keep_alive_interval)
    )]
    pub keep_alive_interval: Span,
    /// How long the answer to such a check may take.
    #[arg(
        long,
        id = "workers.keep_alive_timeout",
        default_value_t = Span(WorkerConfig::default().keep_alive_timeout)
    )]
    pub keep_alive_timeout: Span,
    /// How often a worker's load is read.
    #[arg(long, id = "workers.poll_interval", default_value_t = Span(WorkerConfig::default().poll_interval))]
    pub poll_interval: Span,
    /// Be ready without a prefill worker: the decode groups compute every prompt themselves.
    #[arg(
        long,
        id = "workers.prefill_optional",
        action = clap::ArgAction::Set,
        default_value_t = false,
        value_name = "BOOL"
    )]
    pub prefill_optional: bool,
    /// How long a worker is kept whose registration is gone although it goes on answering.
    #[arg(long, id = "workers.unlisted_grace", default_value_t = Span(WorkerConfig::default().unlisted_grace))]
    pub unlisted_grace: Span,
}

/// What requests may ask.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsSection {
    /// Outputs of one request, over all its prompts.
    #[arg(long, id = "limits.max_choices", default_value_t = RequestLimits::default().max_choices)]
    pub max_choices: usize,
    /// The largest request.
    #[arg(
        long,
        id = "limits.max_body",
        alias = "max-body",
        default_value_t = ByteSize(RequestLimits::default().max_body_bytes as u64)
    )]
    pub max_body: ByteSize,
    /// The most outputs in the making.
    #[arg(
        long,
        id = "limits.max_inflight",
        alias = "max-inflight",
        default_value_t = RequestLimits::default().max_inflight
    )]
    pub max_inflight: usize,
}

/// What requests that leave it open get.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingSection {
    /// Temperature, instead of 1.
    #[arg(long, id = "sampling.temperature", value_name = "T")]
    pub temperature: Option<f64>,
    /// The most likely tokens that are kept, instead of all.
    #[arg(long, id = "sampling.top_k", value_name = "K")]
    pub top_k: Option<u32>,
    /// The probability mass that is kept, instead of 1.
    #[arg(long, id = "sampling.top_p", value_name = "P")]
    pub top_p: Option<f64>,
    /// The least probability of a kept token, relative to the most likely one, instead of 0.
    #[arg(long, id = "sampling.min_p", value_name = "P")]
    pub min_p: Option<f64>,
    /// The repetition penalty, instead of 1.
    #[arg(long, id = "sampling.repetition_penalty", value_name = "R")]
    pub repetition_penalty: Option<f64>,
}

/// What is done when workers are lost.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecoverySection {
    /// Attempts at one output that may fail before it is given up.
    #[arg(long, id = "recovery.max_attempts", default_value_t = RecoveryConfig::default().max_attempts)]
    pub max_attempts: u32,
    /// How long an interrupted output waits for a worker that can take it up.
    #[arg(long, id = "recovery.window", default_value_t = Span(RecoveryConfig::default().recovery_window))]
    pub window: Span,
    /// The hint given to a client that is turned away.
    #[arg(long, id = "recovery.retry_after", default_value_t = Span(RecoveryConfig::default().retry_after))]
    pub retry_after: Span,
}

/// How connections and streams are held open.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServingSection {
    /// Streams of one connection, gRPC or HTTP/2.
    #[arg(
        long,
        id = "serving.max_concurrent_streams",
        default_value_t = ServingConfig::default().max_concurrent_streams
    )]
    pub max_concurrent_streams: u32,
    /// How often a quiet connection of HTTP/2 is checked.
    #[arg(
        long,
        id = "serving.keep_alive_interval",
        default_value_t = Span(ServingConfig::default().keep_alive_interval)
    )]
    pub keep_alive_interval: Span,
    /// How long the answer to such a check may take.
    #[arg(
        long,
        id = "serving.keep_alive_timeout",
        default_value_t = Span(ServingConfig::default().keep_alive_timeout)
    )]
    pub keep_alive_timeout: Span,
    /// How long the headers of an HTTP stream wait for a worker to accept the request.
    #[arg(long, id = "serving.max_header_wait", default_value_t = Span(StreamConfig::default().max_header_wait))]
    pub max_header_wait: Span,
    /// Pause after which a quiet HTTP stream says that it lives.
    #[arg(
        long,
        id = "serving.heartbeat_interval",
        default_value_t = Span(StreamConfig::default().heartbeat_interval)
    )]
    pub heartbeat_interval: Span,
    /// How long a client may read nothing of a stream before its request ends.
    #[arg(long, id = "serving.stall_timeout", default_value_t = Span(StreamConfig::default().stall_timeout))]
    pub stall_timeout: Span,
}

/// How the router ends.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DrainSection {
    /// How long to go on taking requests after saying that no more should come.
    #[arg(long, id = "drain.notice", default_value_t = Span(ServingConfig::default().drain_notice))]
    pub notice: Span,
    /// How long requests in flight may then take to finish.
    #[arg(long, id = "drain.grace", default_value_t = Span(ServingConfig::default().drain_grace))]
    pub grace: Span,
}

impl Settings for RouterSettings {
    fn validate(&self) -> Result<(), ConfigError> {
        self.model()?;
        self.cluster.validate()?;
        self.tls.files()?;
        self.face_tls.files()?;
        let fixed = self.workers.decode.len() + self.workers.prefill.len();
        if self.cluster.is_shared() && fixed > 0 {
            let must = "left out where cluster.etcd says where workers are registered".to_owned();
            return Err(ConfigError::Contradiction {
                key: "workers".to_owned(),
                value: "a fixed list".to_owned(),
                must,
            });
        }
        if !self.cluster.is_shared() && self.workers.decode.is_empty() {
            return Err(ConfigError::Missing { key: "workers.decode" });
        }
        if !self.cluster.is_shared() {
            self.source()?.validate(self.tls.scheme()).map_err(named)?;
        }
        self.router().validate().map_err(named)
    }

    fn log(&self) -> &str {
        &self.log
    }
}

/// A contradiction among the router's own settings.
fn named(error: crate::config::ConfigError) -> ConfigError {
    let crate::config::ConfigError { field, value, allowed } = error;
    ConfigError::Contradiction { key: field.to_owned(), value, must: allowed }
}

impl RouterSettings {
    /// The model's files.
    pub fn model(&self) -> Result<&PathBuf, ConfigError> {
        self.model.as_ref().ok_or(ConfigError::Missing { key: "model" })
    }

    /// Where workers are found.
    pub fn source(&self) -> Result<WorkerSource, ConfigError> {
        if self.cluster.is_shared() {
            let (coordinator, keys) = (self.cluster.coordinator()?, self.cluster.keys()?);
            return Ok(WorkerSource::Cluster { coordinator, keys });
        }
        let WorkersSection { decode, prefill, .. } = self.workers.clone();
        Ok(WorkerSource::Fixed { decodes: decode, prefills: prefill })
    }

    /// The router.
    pub fn router(&self) -> RouterConfig {
        let stem = self.model.as_ref().and_then(|model| model.file_stem());
        let stem = stem.map(|stem| stem.to_string_lossy().into_owned());
        let Self { workers, limits, sampling, recovery, serving, drain, .. } = self;
        RouterConfig {
            grpc_addr: self.grpc_addr,
            http_addr: self.http_addr,
            model_name: self.model_name.clone().or(stem).unwrap_or_default(),
            limits: RequestLimits {
                max_choices: limits.max_choices,
                max_body_bytes: usize::try_from(limits.max_body.0).unwrap_or(usize::MAX),
                max_inflight: limits.max_inflight,
            },
            sampling: SamplingDefaults {
                temperature: sampling.temperature.map(|t| t as f32),
                top_k: sampling.top_k,
                top_p: sampling.top_p.map(|p| p as f32),
                min_p: sampling.min_p.map(|p| p as f32),
                repetition_penalty: sampling.repetition_penalty.map(|r| r as f32),
            },
            workers: WorkerConfig {
                connect_timeout: workers.connect_timeout.0,
                keep_alive_interval: workers.keep_alive_interval.0,
                keep_alive_timeout: workers.keep_alive_timeout.0,
                poll_interval: workers.poll_interval.0,
                prefill_optional: workers.prefill_optional,
                unlisted_grace: workers.unlisted_grace.0,
            },
            recovery: RecoveryConfig {
                max_attempts: recovery.max_attempts,
                recovery_window: recovery.window.0,
                retry_after: recovery.retry_after.0,
            },
            streams: StreamConfig {
                max_header_wait: serving.max_header_wait.0,
                heartbeat_interval: serving.heartbeat_interval.0,
                stall_timeout: serving.stall_timeout.0,
            },
            serving: ServingConfig {
                max_concurrent_streams: serving.max_concurrent_streams,
                keep_alive_interval: serving.keep_alive_interval.0,
                keep_alive_timeout: serving.keep_alive_timeout.0,
                drain_notice: drain.notice.0,
                drain_grace: drain.grace.0,
            },
            // Files are read by `run`: what is said here must not depend on them.
            security: Security::Plaintext,
            face_tls: None,
        }
    }
}
