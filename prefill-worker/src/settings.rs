//! A prefill worker's configuration as an operator writes it, and what it becomes.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use longreach_service::{
    ConfigError, Settings,
    config::{Advertise, ClusterSection, Text, TlsSection},
};
use longreach_tls::Security;
use longreach_types::GroupShape;
use longreach_worker::{EngineSection, ReuseSection, WorkerDrainSection};
use serde::{Deserialize, Serialize};

use crate::PrefillConfig;

/// The name of a worker that stands alone.
const DEFAULT_NAME: &str = "prefill-0";

/// A prefill worker's settings.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillSettings {
    /// The model's files: a directory or a GGUF file.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// The worker's stable name. In a cluster no two workers may have the same: the younger takes the other's place.
    #[arg(long)]
    pub name: Option<String>,
    /// Where the worker listens. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:50071")]
    pub addr: SocketAddr,
    /// The host, or host:port, that others are told in place of addr.
    #[arg(long, value_name = "HOST")]
    pub advertise: Option<Text<Advertise>>,
    /// Where health and metrics are served over HTTP; nowhere unless set.
    #[arg(long, value_name = "ADDR")]
    pub http_addr: Option<SocketAddr>,
    /// What is logged, as "info,longreach_engine=debug".
    #[arg(long, default_value = "info", value_name = "FILTER")]
    pub log: String,
    /// The cluster that the worker is part of.
    #[command(flatten)]
    pub cluster: ClusterSection,
    /// Who the worker is to the others of the cluster.
    #[command(flatten)]
    pub tls: TlsSection,
    /// How the worker computes and what it may hold.
    #[command(flatten)]
    pub engine: EngineSection,
    /// What computing and moving KV costs; the same for all workers of a cluster.
    #[command(flatten)]
    pub reuse: ReuseSection,
    /// How the worker ends.
    #[command(flatten)]
    pub drain: WorkerDrainSection,
}

impl Settings for PrefillSettings {
    fn validate(&self) -> Result<(), ConfigError> {
        self.model()?;
        self.cluster.validate()?;
        self.tls.files()?;
        if self.cluster.is_shared() && self.name.is_none() {
            return Err(ConfigError::Missing { key: "name" });
        }
        Advertise::check(self.advertise.as_ref().map(|Text(advertise)| advertise), "addr", self.addr)?;
        self.engine.validate()?;
        self.reuse.validate()
    }

    fn log(&self) -> &str {
        &self.log
    }
}

impl PrefillSettings {
    /// The model's files.
    pub fn model(&self) -> Result<&PathBuf, ConfigError> {
        self.model.as_ref().ok_or(ConfigError::Missing { key: "model" })
    }

    /// The worker.
    pub fn worker(&self) -> PrefillConfig {
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut engine = self.engine.config(GroupShape::SINGLE, n_cores);
        engine.sched.reuse = self.reuse.costs();
        PrefillConfig {
            worker_id: self.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned()),
            addr: self.addr,
            advertise: self.advertise.clone().map(|Text(advertise)| advertise),
            http_addr: self.http_addr,
            // Files are read by `run`: what is said here must not depend on them.
            security: Security::Plaintext,
            engine,
            lease_ttl: self.cluster.lease_ttl.0,
            drain_grace: self.drain.grace.0,
        }
    }
}
