//! Settings of the connection to etcd.

use std::{
    error::Error,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use thiserror::Error;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

/// Pings of a connection that carries streams. etcd closes a connection on which they come more often than every 5 s
/// (`--grpc-keepalive-min-time`); what is noticed sooner is noticed by the probes of a watch.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// How etcd is reached.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `http://host:port` or `https://host:port` of each member. All of them: one that is not named here is not used
    /// when the others are down.
    pub endpoints: Vec<String>,
    /// TLS, for `https` endpoints.
    pub tls: Option<EtcdTls>,
    /// User and password, if etcd asks for them.
    pub auth: Option<EtcdAuth>,
    /// Longest wait for a connection. Shorter leaves a dead host sooner; too short never reaches a distant one.
    pub connect_timeout: Duration,
    /// Longest wait for one endpoint's answer before the next is asked. Shorter leaves a stopped member sooner; longer
    /// bears a slow disk, where every repetition would add to the load.
    pub attempt_timeout: Duration,
    /// Longest time of a call, all its attempts together. Longer rides out an election within the call (1 to 2 s with
    /// etcd's defaults); shorter tells the caller sooner, who tries again in any case.
    pub request_timeout: Duration,
    /// How long a watch may be silent before it asks etcd for a sign of life, and how long it then waits for one.
    /// Shorter notices a cut-off or stopped member sooner; longer sends fewer messages.
    pub watch_probe: Duration,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            tls: None,
            auth: None,
            connect_timeout: Duration::from_secs(1),
            attempt_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(6),
            watch_probe: Duration::from_secs(3),
        }
    }
}

/// Files of a TLS connection, in PEM. They are read again for every new connection, so a renewed certificate needs no
/// restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// The certificates that may have signed etcd's; no others are trusted.
    pub ca: PathBuf,
    /// This process's own certificate and its key, where etcd asks for one (`--client-cert-auth`).
    pub identity: Option<EtcdIdentity>,
    /// The name in etcd's certificate, where it is not the host of the endpoint.
    pub server_name: Option<String>,
}

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdIdentity {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdAuth {
    /// The name.
    pub user: String,
    /// The password.
    pub password: String,
}

/// Shows nothing of the password: settings are logged.
impl fmt::Debug for EtcdAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdAuth").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Settings with which no connection is possible, whatever state etcd is in.
#[derive(Debug, Error)]
pub enum EtcdConfigError {
    /// No endpoint.
    #[error("no etcd endpoint is configured: name at least one, http://host:port")]
    NoEndpoint,
    /// An endpoint that is none.
    #[error("{endpoint:?} is no etcd endpoint: {reason}")]
    Endpoint {
        /// As configured.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file that cannot be read.
    #[error("cannot read {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// What the files hold is not usable.
    #[error("the TLS files for etcd cannot be used")]
    Tls(#[source] Box<dyn Error + Send + Sync>),
}

impl EtcdConfig {
    /// Checks everything that does not need etcd.
    pub(super) fn validate(&self) -> Result<(), EtcdConfigError> {
        if self.endpoints.is_empty() {
            return Err(EtcdConfigError::NoEndpoint);
        }
        self.endpoints.iter().try_for_each(|endpoint| self.endpoint(endpoint).map(drop))
    }

    /// An endpoint as tonic wants it, with the TLS files as they are now. They are a few kilobytes and are read once
    /// for each connection, so they are read in place.
    pub(super) fn endpoint(&self, text: &str) -> Result<Endpoint, EtcdConfigError> {
        let refuse = |reason| EtcdConfigError::Endpoint { endpoint: text.to_owned(), reason };
        match (text.starts_with("http://"), text.starts_with("https://"), &self.tls) {
            (true, _, None) | (_, true, Some(_)) => {}
            (true, _, Some(_)) => return Err(refuse("TLS is configured, so it must begin with https://")),
            (_, true, None) => return Err(refuse("https:// needs TLS to be configured")),
            _ => return Err(refuse("it must be http://host:port or https://host:port")),
        }
        let endpoint =
            Endpoint::from_shared(text.to_owned()).map_err(|_| refuse("it cannot be read as an address"))?;
        let endpoint = endpoint
            .connect_timeout(self.connect_timeout)
            // Only while streams are open: to a connection without any, etcd allows a ping every two hours.
            .keep_alive_while_idle(false)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(self.attempt_timeout);
        match &self.tls {
            None => Ok(endpoint),
            Some(tls) => {
                endpoint.tls_config(tls.load()?).map_err(|source| EtcdConfigError::Tls(Box::new(source)))
            }
        }
    }
}

impl EtcdTls {
    fn load(&self) -> Result<ClientTlsConfig, EtcdConfigError> {
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&self.ca)?));
        if let Some(EtcdIdentity { cert, key }) = &self.identity {
            config = config.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        if let Some(name) = &self.server_name {
            config = config.domain_name(name.clone());
        }
        Ok(config)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, EtcdConfigError> {
    std::fs::read(path).map_err(|source| EtcdConfigError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(endpoints: &[&str], tls: Option<EtcdTls>) -> String {
        let endpoints = endpoints.iter().map(|&endpoint| endpoint.to_owned()).collect();
        EtcdConfig { endpoints, tls, ..EtcdConfig::default() }.validate().unwrap_err().to_string()
    }

    #[test]
    fn settings_that_can_never_work_are_refused_at_once_and_say_what_to_write() {
        let tls = EtcdTls { ca: "no-such-ca.pem".into(), identity: None, server_name: None };
        assert!(complaint(&[], None).contains("name at least one"));
        assert!(complaint(&["http://a:1", "a:1"], None).contains("\"a:1\" is no etcd endpoint"));
        assert!(complaint(&["http://a b"], None).contains("cannot be read"));
        assert!(complaint(&["https://a:1"], None).contains("needs TLS"));
        assert!(complaint(&["http://a:1"], Some(tls.clone())).contains("https://"));
        assert_eq!(complaint(&["https://a:1"], Some(tls)), "cannot read no-such-ca.pem");
        EtcdConfig::default().validate().unwrap();
    }

    #[test]
    fn a_password_is_not_shown() {
        let auth = EtcdAuth { user: "u".into(), password: "hush".into() };
        let shown = format!("{:?}", EtcdConfig { auth: Some(auth), ..EtcdConfig::default() });
        assert!(shown.contains("user: \"u\"") && !shown.contains("hush"), "{shown}");
    }
}
