//! Certificates in use: of a member of the cluster, and of a public face.

use std::{fmt, sync::Arc, time::Duration};

use rustls::{ServerConfig, pki_types::ServerName};

use crate::{
    error::TlsError,
    files::{FaceFiles, MemberConfigs, TlsFiles},
    reload::{CHECK_INTERVAL, Reloading},
    role::Role,
};

/// Who this process is to the others of its cluster. Cheap to clone; all clones see changed files.
#[derive(Clone)]
pub struct Identity {
    pub(crate) configs: Arc<Reloading<MemberConfigs>>,
    role: Role,
    cluster: Arc<str>,
}

impl Identity {
    /// Reads the certificate of a process that is `role` in `cluster`. It is checked as a peer would check it, so that
    /// a wrong file is an error here and not a cluster in which nobody reaches this process.
    pub fn load(files: &TlsFiles, cluster: &str, role: Role) -> Result<Self, TlsError> {
        Self::load_checked(files, cluster, role, CHECK_INTERVAL)
    }

    /// [`Self::load`], with another time between two looks at the files.
    pub fn load_checked(
        files: &TlsFiles,
        cluster: &str,
        role: Role,
        check_interval: Duration,
    ) -> Result<Self, TlsError> {
        let own_name = role.server_name(cluster)?;
        let owned = files.clone();
        let configs =
            Reloading::load(files.paths(), check_interval, move |pem| owned.member(pem, &own_name))?;
        Ok(Self { configs, role, cluster: cluster.into() })
    }

    /// What this process is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Its cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    pub(crate) fn server_name(&self, role: Role) -> Result<ServerName<'static>, TlsError> {
        role.server_name(&self.cluster)
    }
}

/// What a public face shows to clients.
#[derive(Clone)]
pub struct FaceTls {
    pub(crate) config: Arc<Reloading<Arc<ServerConfig>>>,
}

impl FaceTls {
    /// Reads the files.
    pub fn load(files: &FaceFiles) -> Result<Self, TlsError> {
        Self::load_checked(files, CHECK_INTERVAL)
    }

    /// [`Self::load`], with another time between two looks at the files.
    pub fn load_checked(files: &FaceFiles, check_interval: Duration) -> Result<Self, TlsError> {
        let owned = files.clone();
        let parse = move |pem: &[Vec<u8>]| owned.server(pem).map(Arc::new);
        Ok(Self { config: Reloading::load(files.paths(), check_interval, parse)? })
    }
}

// Keys are in there.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.role.dns_name(&self.cluster))
    }
}

impl fmt::Debug for FaceTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaceTls(..)")
    }
}
