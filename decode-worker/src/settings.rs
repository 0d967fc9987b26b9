//! A decode process's configuration as an operator writes it, and what it becomes.
//!
//! All processes of a group have the same file but for `rank` and addresses. What each setting trades is said in
//! [`DecodeConfig`] and the engine's configuration; defaults are theirs too.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use longreach_engine::EngineConfig;
use longreach_service::{
    ConfigError, Settings,
    config::{Advertise, ClusterSection, Span, Text, TlsSection},
};
use longreach_tls::Security;
use longreach_types::{GroupShape, MergeForm, QueryForm};
use longreach_worker::{EngineSection, ReuseSection, WorkerDrainSection};
use serde::{Deserialize, Serialize};

use crate::{DecodeConfig, FormationConfig, Hosting};

/// The name of a group that stands alone.
const DEFAULT_GROUP: &str = "decode-0";

/// The settings of a decode process.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeSettings {
    /// The model's files: a directory or a GGUF file.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// The group's stable name; the processes of one group have the same.
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// The one rank that this process hosts; rank 0 leads. Default: all ranks of the group, as threads.
    #[arg(long)]
    pub rank: Option<usize>,
    /// Where the process listens; the ranks of a whole group but the first take free ports of the same host. Port 0
    /// takes a free one.
    #[arg(long, default_value = "127.0.0.1:50061")]
    pub addr: SocketAddr,
    /// Where a rank listens for its peers. Port 0 takes a free one. Default: a free port where addr is.
    #[arg(long, value_name = "ADDR")]
    pub peer_addr: Option<SocketAddr>,
    /// The host, or host:port, that others are told in place of addr. The host holds for peer_addr too.
    #[arg(long, value_name = "HOST")]
    pub advertise: Option<Text<Advertise>>,
    /// Where health and metrics are served over HTTP; nowhere unless set.
    #[arg(long, value_name = "ADDR")]
    pub http_addr: Option<SocketAddr>,
    /// What is logged, as "info,longreach_engine=debug".
    #[arg(long, default_value = "info", value_name = "FILTER")]
    pub log: String,
    /// The cluster that the group is part of.
    #[command(flatten)]
    pub cluster: ClusterSection,
    /// Who the process is to the others of the cluster.
    #[command(flatten)]
    pub tls: TlsSection,
    /// The shape of the group, and how it comes and stays together.
    #[command(flatten)]
    pub ranks: RanksSection,
    /// How a rank computes and what it may hold.
    #[command(flatten)]
    pub engine: EngineSection,
    /// What computing and moving KV costs; the same for all workers of a cluster.
    #[command(flatten)]
    pub reuse: ReuseSection,
    /// How the process ends.
    #[command(flatten)]
    pub drain: WorkerDrainSection,
}

/// The shape of a group, and how it comes and stays together; the same for all its ranks.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RanksSection {
    /// Ranks of the group, 1 to 8. With 1, 2, 4 or 8 the answers are the same bits.
    #[arg(long, id = "ranks.count", alias = "ranks", default_value_t = 2, value_name = "N")]
    pub count: usize,
    /// Ranks that share one sequence's positions; divides the ranks. Default: all of them.
    #[arg(long, id = "ranks.dcp", alias = "dcp", value_name = "D")]
    pub dcp: Option<usize>,
    /// How partial attention is merged: a2a or ag_rs.
    #[arg(long, id = "ranks.merge", default_value_t = Text(EngineConfig::default().merge_form))]
    pub merge: Text<MergeForm>,
    /// How a rank comes by its queries: replicate or gather.
    #[arg(long, id = "ranks.query", default_value_t = Text(EngineConfig::default().query_form))]
    pub query: Text<QueryForm>,
    /// Prompts with at most this many uncached tokens may be prefilled on the group itself.
    #[arg(
        long,
        id = "ranks.local_prefill_max",
        default_value_t = EngineConfig::default().sched.local_prefill_max
    )]
    pub local_prefill_max: usize,
    /// The longest a collective may wait for its peers.
    #[arg(long, id = "ranks.collective_timeout", default_value_t = Span(EngineConfig::default().comm.timeout))]
    pub collective_timeout: Span,
    /// Pause between signs of life on the links between the leader and the others.
    #[arg(
        long,
        id = "ranks.heartbeat_interval",
        default_value_t = Span(EngineConfig::default().heartbeat.interval)
    )]
    pub heartbeat_interval: Span,
    /// How long a rank may be silent before the group ends its life and forms again; several intervals.
    #[arg(
        long,
        id = "ranks.heartbeat_silence",
        default_value_t = Span(EngineConfig::default().heartbeat.silence)
    )]
    pub heartbeat_silence: Span,
    /// How long ranks that are loaded may take to find each other.
    #[arg(
        long,
        id = "ranks.connect_timeout",
        default_value_t = Span(FormationConfig::default().connect_timeout)
    )]
    pub connect_timeout: Span,
}

impl Settings for DecodeSettings {
    fn validate(&self) -> Result<(), ConfigError> {
        self.model()?;
        self.cluster.validate()?;
        self.tls.files()?;
        if self.cluster.is_shared() && self.group.is_none() {
            return Err(ConfigError::Missing { key: "group" });
        }
        self.check_addresses()?;
        self.engine.validate()?;
        self.reuse.validate()?;
        self.ranks.validate()?;
        let Some(rank) = self.rank else { return Ok(()) };
        if rank >= self.ranks.count {
            let must = format!("below ranks.count, which is {}", self.ranks.count);
            return Err(contradiction("rank", &rank.to_string(), &must));
        }
        if self.ranks.count > 1 && !self.cluster.is_shared() {
            // A rank finds the others by their registrations.
            return Err(ConfigError::Missing { key: "cluster.etcd" });
        }
        Ok(())
    }

    fn log(&self) -> &str {
        &self.log
    }
}

impl RanksSection {
    fn validate(&self) -> Result<(), ConfigError> {
        self.shape()?;
        for (key, Span(span)) in [
            ("ranks.collective_timeout", self.collective_timeout),
            ("ranks.heartbeat_interval", self.heartbeat_interval),
            ("ranks.connect_timeout", self.connect_timeout),
        ] {
            if span.is_zero() {
                return Err(contradiction(key, "0", "longer than zero"));
            }
        }
        if self.heartbeat_silence.0 < self.heartbeat_interval.0 * 2 {
            let must =
                format!("at least twice ranks.heartbeat_interval, which is {}", self.heartbeat_interval);
            return Err(contradiction("ranks.heartbeat_silence", &self.heartbeat_silence.to_string(), &must));
        }
        Ok(())
    }

    fn shape(&self) -> Result<GroupShape, ConfigError> {
        let dcp = self.dcp.unwrap_or(self.count);
        GroupShape::new(self.count, dcp).map_err(|error| ConfigError::BadValue {
            file: None,
            key: "ranks".to_owned(),
            reason: format!("{error}; see ranks.count and ranks.dcp"),
        })
    }
}

impl DecodeSettings {
    /// The model's files.
    pub fn model(&self) -> Result<&PathBuf, ConfigError> {
        self.model.as_ref().ok_or(ConfigError::Missing { key: "model" })
    }

    /// The process.
    pub fn worker(&self) -> Result<DecodeConfig, ConfigError> {
        let ranks = &self.ranks;
        let mut engine = self.engine.config(ranks.shape()?, 1);
        engine.sched.reuse = self.reuse.costs();
        engine.merge_form = ranks.merge.0;
        engine.query_form = ranks.query.0;
        engine.sched.local_prefill_max = ranks.local_prefill_max;
        engine.comm.timeout = ranks.collective_timeout.0;
        engine.heartbeat.interval = ranks.heartbeat_interval.0;
        engine.heartbeat.silence = ranks.heartbeat_silence.0;
        let hosting = match self.rank {
            Some(rank) => Hosting::Rank { rank, peer_addr: self.peer_addr() },
            None => Hosting::Whole,
        };
        let lease_ttl = self.cluster.lease_ttl.0;
        Ok(DecodeConfig {
            group_id: self.group.clone().unwrap_or_else(|| DEFAULT_GROUP.to_owned()),
            hosting,
            addr: self.addr,
            advertise: self.advertise.clone().map(|Text(advertise)| advertise),
            http_addr: self.http_addr,
            engine,
            security: Security::Plaintext,
            formation: FormationConfig { connect_timeout: ranks.connect_timeout.0, lease_ttl },
            drain_grace: self.drain.grace.0,
        })
    }

    fn check_addresses(&self) -> Result<(), ConfigError> {
        let advertise = self.advertise.as_ref().map(|Text(advertise)| advertise);
        Advertise::check(advertise, "addr", self.addr)?;
        if self.rank.is_none() {
            return Ok(());
        }
        let peer_addr = self.peer_addr();
        if advertise.is_some() && peer_addr.ip().is_loopback() && !self.addr.ip().is_loopback() {
            let must = format!(
                "an address that other hosts reach, as addr ({}) is: they are told advertise",
                self.addr
            );
            return Err(contradiction("peer_addr", &peer_addr.to_string(), &must));
        }
        Advertise::check(advertise, "peer_addr", peer_addr)
    }

    fn peer_addr(&self) -> SocketAddr {
        self.peer_addr.unwrap_or(SocketAddr::new(self.addr.ip(), 0))
    }
}

fn contradiction(key: &str, value: &str, must: &str) -> ConfigError {
    ConfigError::Contradiction { key: key.to_owned(), value: value.to_owned(), must: must.to_owned() }
}
