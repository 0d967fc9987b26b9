//! Sections that several roles have.

use std::{fmt, fs, net::SocketAddr, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use clap::Args;
use longreach_cluster::{
    Coordinator, EtcdAuth, EtcdConfig, EtcdCoordinator, EtcdIdentity, EtcdTls, KeySpace, MemoryCoordinator,
};
use longreach_tls::{Role, Security, TlsFiles};
use serde::{Deserialize, Serialize};

use super::{ConfigError, Span};
use crate::role::{RoleError, sentence};

/// Leases are counted in seconds, and a renewal needs time.
const MIN_LEASE_TTL: Duration = Duration::from_secs(2);

/// A worker that is dead for a day is no trouble of etcd. etcd itself refuses leases of some hundred years.
const MAX_LEASE_TTL: Duration = Duration::from_secs(24 * 3600);

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
    /// The certificates, in PEM, that may have signed etcd's; for https endpoints.
    #[arg(long, id = "cluster.etcd_ca", value_name = "PATH")]
    pub etcd_ca: Option<PathBuf>,
    /// This process's own certificate, where etcd asks for one.
    #[arg(long, id = "cluster.etcd_cert", value_name = "PATH")]
    pub etcd_cert: Option<PathBuf>,
    /// The key of etcd_cert.
    #[arg(long, id = "cluster.etcd_key", value_name = "PATH")]
    pub etcd_key: Option<PathBuf>,
    /// Who this process is to etcd, where it asks for a user and a password.
    #[arg(long, id = "cluster.etcd_user", value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// A file with the password of etcd_user and nothing else; a line's end after it does not count. Read at the start.
    #[arg(long, id = "cluster.etcd_password_file", value_name = "PATH")]
    pub etcd_password_file: Option<PathBuf>,
    /// The name in etcd's certificate, where it is not the host of the endpoint.
    #[arg(long, id = "cluster.etcd_server_name", value_name = "NAME")]
    pub etcd_server_name: Option<String>,
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
        if !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&self.lease_ttl.0) {
            return Err(ConfigError::Contradiction {
                key: "cluster.lease_ttl".to_owned(),
                value: self.lease_ttl.to_string(),
                must: format!("from {} to {}", Span(MIN_LEASE_TTL), Span(MAX_LEASE_TTL)),
            });
        }
        self.etcd_config().map(drop)?;
        self.etcd_login().map(drop)
    }

    /// The keys of the cluster in its store.
    pub fn keys(&self) -> Result<KeySpace, ConfigError> {
        KeySpace::new(&self.name).map_err(|error| bad("cluster.name", error.to_string()))
    }

    /// The store. Without etcd it is this process's own, which nobody else sees. That etcd is away is no error.
    pub fn coordinator(&self) -> Result<Arc<dyn Coordinator>, ConfigError> {
        let Some(mut config) = self.etcd_config()? else { return Ok(Arc::new(MemoryCoordinator::default())) };
        config.auth = self.etcd_auth()?;
        match EtcdCoordinator::new(config) {
            Ok(etcd) => Ok(Arc::new(etcd)),
            Err(error) => Err(bad("cluster.etcd", sentence(&error))),
        }
    }

    fn etcd_login(&self) -> Result<Option<(&String, &PathBuf)>, ConfigError> {
        match (&self.etcd_user, &self.etcd_password_file) {
            (Some(user), Some(file)) => Ok(Some((user, file))),
            (None, None) => Ok(None),
            (Some(_), None) => Err(ConfigError::Missing { key: "cluster.etcd_password_file" }),
            (None, Some(_)) => Err(ConfigError::Missing { key: "cluster.etcd_user" }),
        }
    }

    fn etcd_auth(&self) -> Result<Option<EtcdAuth>, ConfigError> {
        let Some((user, file)) = self.etcd_login()? else { return Ok(None) };
        let text = fs::read_to_string(file)
            .map_err(|error| bad("cluster.etcd_password_file", format!("{}: {error}", file.display())))?;
        let password = text.trim_end_matches(['\r', '\n']).to_owned();
        Ok(Some(EtcdAuth { user: user.clone(), password }))
    }

    fn etcd_config(&self) -> Result<Option<EtcdConfig>, ConfigError> {
        let identity = match (&self.etcd_cert, &self.etcd_key) {
            (Some(cert), Some(key)) => Some(EtcdIdentity { cert: cert.clone(), key: key.clone() }),
            (None, None) => None,
            (Some(_), None) => return Err(ConfigError::Missing { key: "cluster.etcd_key" }),
            (None, Some(_)) => return Err(ConfigError::Missing { key: "cluster.etcd_cert" }),
        };
        let tls = match (&self.etcd_ca, &identity) {
            (Some(ca), _) => {
                Some(EtcdTls { ca: ca.clone(), identity, server_name: self.etcd_server_name.clone() })
            }
            (None, None) if self.etcd_server_name.is_none() => None,
            (None, _) => return Err(ConfigError::Missing { key: "cluster.etcd_ca" }),
        };
        let scheme = if tls.is_some() { "https://" } else { "http://" };
        if let Some(url) = self.etcd.iter().find(|url| !url.starts_with(scheme)) {
            let must = match &tls {
                Some(_) => "https://host:port, for cluster.etcd_ca is set".to_owned(),
                None => "http://host:port; https needs cluster.etcd_ca".to_owned(),
            };
            let key = "cluster.etcd".to_owned();
            return Err(ConfigError::Contradiction { key, value: format!("{url:?}"), must });
        }
        let config = EtcdConfig { endpoints: self.etcd.clone(), tls, ..EtcdConfig::default() };
        Ok(self.is_shared().then_some(config))
    }
}

fn bad(key: &str, reason: String) -> ConfigError {
    ConfigError::BadValue { file: None, key: key.to_owned(), reason }
}

/// Who a process is to the others of its cluster: three files in PEM form. Without them everybody who reaches the
/// network is trusted.
#[derive(Args, Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TlsSection {
    /// The CAs whose certificates are believed; several while one replaces another.
    #[arg(long, id = "tls.ca", value_name = "PATH")]
    pub ca: Option<PathBuf>,
    /// The certificate of this process, for its role in its cluster, and those between it and the CA.
    #[arg(long, id = "tls.cert", value_name = "PATH")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[arg(long, id = "tls.key", value_name = "PATH")]
    pub key: Option<PathBuf>,
}

impl TlsSection {
    /// The files; none if there is no TLS. Some of them are not enough.
    pub fn files(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let Self { ca, cert, key } = self.clone();
        match (ca, cert, key) {
            (None, None, None) => Ok(None),
            (Some(ca), Some(cert), Some(key)) => Ok(Some(TlsFiles { ca, cert, key })),
            (None, ..) => Err(ConfigError::Missing { key: "tls.ca" }),
            (_, None, _) => Err(ConfigError::Missing { key: "tls.cert" }),
            (.., None) => Err(ConfigError::Missing { key: "tls.key" }),
        }
    }

    /// How addresses of this cluster's processes begin.
    pub fn scheme(&self) -> &'static str {
        if matches!(self.files(), Ok(None)) { "http" } else { "https" }
    }

    /// Reads the files of a process that is `role` in `cluster`.
    pub fn security(&self, cluster: &str, role: Role) -> Result<Security, RoleError> {
        Security::load(self.files()?.as_ref(), cluster, role).map_err(RoleError::failed)
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

    /// Refuses an address, set by `key`, that nobody can dial, unless another is told to others.
    pub fn check(advertise: Option<&Self>, key: &str, addr: SocketAddr) -> Result<(), ConfigError> {
        if advertise.is_none() && addr.ip().is_unspecified() {
            return Err(ConfigError::Contradiction {
                key: key.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_the_tls_files_are_never_no_tls() {
        for given in 0..8_u8 {
            let path = |bit: u8| (given & bit != 0).then(|| PathBuf::from("/nowhere/file.pem"));
            let section = TlsSection { ca: path(1), cert: path(2), key: path(4) };
            let security = section.security("default", Role::Prefill);
            match given {
                0 => assert!(matches!(security, Ok(Security::Plaintext))),
                7 => assert!(matches!(security, Err(RoleError::Failed(_))), "files that cannot be read"),
                _ => assert!(matches!(security, Err(RoleError::Config(_))), "{section:?}"),
            }
            assert_eq!(section.scheme(), if given == 0 { "http" } else { "https" });
        }
    }
}
