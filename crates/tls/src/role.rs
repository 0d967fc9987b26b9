//! What a process is in its cluster, as its certificate names it.

use std::fmt;

use rustls::pki_types::{DnsName, ServerName};

use crate::error::TlsError;

/// Ends every name, so that no certificate for a host is mistaken for one of a role.
const SUFFIX: &str = "longreach";

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// It serves clients and calls workers.
    Router,
    /// It computes prompts.
    Prefill,
    /// It is a rank of a decode group.
    Decode,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Router, Self::Prefill, Self::Decode];

    /// The DNS name in the certificate of a process of this role in `cluster`.
    pub fn dns_name(self, cluster: &str) -> String {
        format!("{self}.{cluster}.{SUFFIX}").to_ascii_lowercase()
    }

    /// [`Self::dns_name`], as TLS wants it.
    pub(crate) fn server_name(self, cluster: &str) -> Result<ServerName<'static>, TlsError> {
        let refused = || TlsError::ClusterName { name: cluster.to_owned() };
        // DNS names do not tell case apart, and clusters' names do: two clusters must not share certificates.
        if cluster.contains(|c: char| c.is_ascii_uppercase()) {
            return Err(refused());
        }
        DnsName::try_from(self.dns_name(cluster)).map(ServerName::DnsName).map_err(|_| refused())
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}
