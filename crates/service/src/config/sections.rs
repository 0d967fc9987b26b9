//! Sections that several roles have.

use std::{fmt, net::SocketAddr, str::FromStr, sync::Arc, time::Duration};

use clap::Args;
use longreach_cluster::{Coordinator, KeySpace, MemoryCoordinator};
use serde::{Deserialize, Serialize};

use super::{ConfigError, Span};

/// Leases are counted in seconds, and a renewal needs time.
const MIN_LEASE_TTL: Duration = Duration::from_secs(2);

/// The cluster that a role belongs to.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSection {
    /// Name of the cluster: roles of one name find each other. Clusters of other names may share the same etcd.
    #[arg(long, id = "cluster.name", default_value = "default", value_name = "NAME")]
    pub name: String,
    /// Endpoints of etcd, http://host:port. Without any, a role stands alone: workers are found by the addresses that
    /// a router is given.
    #[arg(long, id = "cluster.etcd", value_delimiter = ',', value_name = "URL")]
    pub etcd: Vec<String>,
    /// How long a registration outlives a process that has died, or lost etcd. Longer survives longer trouble of etcd
    /// without a change of membership; shorter removes the dead sooner, whom their peers notice in any case.
    #[arg(long, id = "cluster.lease_ttl", default_value = "30s")]
    pub lease_ttl: Span,
}

impl ClusterSection {
    /// Whether membership is kept where other processes see it.
    pub fn is_shared(&self) -> bool {
        !self.etcd.is_empty()
    }

    /// Checks name and endpoints.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.keys().map(drop)?;
        if self.lease_ttl.0 < MIN_LEASE_TTL {
            return Err(ConfigError::Contradiction {
                key: "cluster.lease_ttl".to_owned(),
                value: self.lease_ttl.to_string(),
                must: format!("at least {}", Span(MIN_LEASE_TTL)),
            });
        }
        match self.etcd.iter().find(|url| !url.starts_with("http://") && !url.starts_with("https://")) {
            Some(url) => Err(ConfigError::Contradiction {
                key: "cluster.etcd".to_owned(),
                value: format!("{url:?}"),
                must: "http://host:port or https://host:port".to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// The keys of the cluster in its store.
    pub fn keys(&self) -> Result<KeySpace, ConfigError> {
        KeySpace::new(&self.name).map_err(|error| ConfigError::BadValue {
            file: None,
            key: "cluster.name".to_owned(),
            reason: error.to_string(),
        })
    }

    /// The store. Without etcd it is this process's own, which nobody else sees.
    pub fn coordinator(&self) -> Result<Arc<dyn Coordinator>, ConfigError> {
        Ok(Arc::new(MemoryCoordinator::default()))
    }
}

/// Where others find what listens here: a host, or a host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertise {
    host: String,
    port: Option<u16>,
}

/// A text that is no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no address: write host or host:port, an IPv6 host in brackets")]
pub struct AdvertiseError {
    text: String,
}

impl Advertise {
    /// The authority, `host:port`, under which others reach what listens on `bound`.
    pub fn authority(advertise: Option<&Self>, bound: SocketAddr) -> String {
        match advertise {
            Some(Self { host, port }) => format!("{host}:{}", port.unwrap_or(bound.port())),
            None => bound.to_string(),
        }
    }

    /// The same host for what listens on other ports of it.
    pub fn without_port(&self) -> Self {
        Self { host: self.host.clone(), port: None }
    }

    /// Refuses an address that nobody can dial, unless another is told to others.
    pub fn check(advertise: Option<&Self>, addr: SocketAddr) -> Result<(), ConfigError> {
        if advertise.is_none() && addr.ip().is_unspecified() {
            return Err(ConfigError::Contradiction {
                key: "addr".to_owned(),
                value: addr.to_string(),
                must: "an address that others can dial, unless `advertise` says which they are to use"
                    .to_owned(),
            });
        }
        Ok(())
    }
}

impl FromStr for Advertise {
    type Err = AdvertiseError;

    fn from_str(text: &str) -> Result<Self, AdvertiseError> {
        let refused = || AdvertiseError { text: text.to_owned() };
        let after_host = if text.starts_with('[') { text.find(']').ok_or_else(refused)? } else { 0 };
        let (host, port) = match text[after_host..].find(':') {
            Some(colon) => {
                let (host, port) = text.split_at(after_host + colon);
                (host, Some(port[1..].parse().map_err(|_| refused())?))
            }
            None => (text, None),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.bytes().all(is_name),
        };
        if is_host { Ok(Self { host: host.to_owned(), port }) } else { Err(refused()) }
    }
}

impl fmt::Display for Advertise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}
