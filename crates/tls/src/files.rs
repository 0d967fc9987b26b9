//! The files that an operator names, and what is made of their contents.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, Error, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem, pem::PemObject},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::TLS13,
};
use serde::{Deserialize, Serialize};

use crate::error::{HandshakeError, TlsError};

/// Who a process is to the others of its cluster: three files in PEM form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The CAs whose certificates are believed. Several during a change of the CA: first the new one is added
    /// everywhere, then certificates are replaced, then the old one is removed.
    pub ca: PathBuf,
    /// The certificate of this process, and those between it and the CA.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// What a public face shows to clients: files in PEM form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaceFiles {
    /// The certificate, with the name under which clients know the service, and those between it and its CA.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// If there is one, only clients with a certificate from these CAs are let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
}

/// HTTP/2, as TLS names it.
const H2: &[u8] = b"h2";
const HTTP11: &[u8] = b"http/1.1";

/// What a member of the cluster needs for one connection.
pub(crate) struct MemberConfigs {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
}

/// The same cryptography in every process, whatever other crates have chosen as the process's default.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

impl TlsFiles {
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        vec![self.ca.clone(), self.cert.clone(), self.key.clone()]
    }

    /// Both ends of a member whose peers will want to see `own_name`.
    pub(crate) fn member(
        &self,
        pem: &[Vec<u8>],
        own_name: &ServerName<'_>,
    ) -> Result<MemberConfigs, TlsError> {
        let (roots, chain, key) = self.parts(pem)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider()).build();
        let verifier = verifier.map_err(|error| self.ca_error(&error))?;
        let (own, between) = chain.split_first().expect("an empty chain was refused");
        verifier
            .verify_server_cert(own, between, own_name, &[], UnixTime::now())
            .map_err(HandshakeError::from_tls)
            .map_err(|source| TlsError::OwnCertificate { path: self.cert.clone(), source })?;

        let clients = client_verifier(&self.ca, Arc::clone(&roots))?;
        let server = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let server = server.map_err(|error| self.cert_error(error))?.with_client_cert_verifier(clients);
        let server = server.with_single_cert(chain.clone(), key.clone_key());
        let mut server = server.map_err(|error| self.cert_error(error))?;
        // Without resumption every connection is checked against the certificates and the time of its own moment.
        // Connections are few and live long.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![H2.to_vec()];

        let client = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let client = client.map_err(|error| self.cert_error(error))?.with_root_certificates(roots);
        let client = client.with_client_auth_cert(chain, key);
        let mut client = client.map_err(|error| self.cert_error(error))?;
        client.resumption = Resumption::disabled();
        client.alpn_protocols = vec![H2.to_vec()];
        Ok(MemberConfigs { server: Arc::new(server), client: Arc::new(client) })
    }

    fn parts(
        &self,
        pem: &[Vec<u8>],
    ) -> Result<(Arc<RootCertStore>, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
        let [ca, cert, key] = pem else { unreachable!("as many contents as paths are read") };
        Ok((roots(&self.ca, ca)?, certificates(&self.cert, cert)?, private_key(&self.key, key)?))
    }

    fn cert_error(&self, source: Error) -> TlsError {
        key_pair_error(&self.cert, &self.key, source)
    }

    fn ca_error(&self, source: &dyn std::error::Error) -> TlsError {
        TlsError::Unusable { path: self.ca.clone(), source: Error::General(source.to_string()) }
    }
}

impl FaceFiles {
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca).cloned().collect()
    }

    /// The end that is called.
    pub(crate) fn server(&self, pem: &[Vec<u8>]) -> Result<ServerConfig, TlsError> {
        let (Some(cert), Some(key)) = (pem.first(), pem.get(1)) else {
            unreachable!("as many contents as paths are read")
        };
        let (chain, key) = (certificates(&self.cert, cert)?, private_key(&self.key, key)?);
        let pair_error = |error| key_pair_error(&self.cert, &self.key, error);
        let server = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let server = server.map_err(pair_error)?;
        let server = match (&self.client_ca, pem.get(2)) {
            (Some(path), Some(ca)) => {
                server.with_client_cert_verifier(client_verifier(path, roots(path, ca)?)?)
            }
            _ => server.with_no_client_auth(),
        };
        let mut server = server.with_single_cert(chain, key).map_err(pair_error)?;
        if self.client_ca.is_some() {
            // As between members: a session that is taken up again would not ask for the certificate, which may be over.
            server.session_storage = Arc::new(NoServerSessionStorage {});
            server.send_tls13_tickets = 0;
        }
        server.alpn_protocols = vec![H2.to_vec(), HTTP11.to_vec()];
        Ok(server)
    }
}

fn client_verifier(path: &Path, roots: Arc<RootCertStore>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    WebPkiClientVerifier::builder_with_provider(roots, provider()).build().map_err(|error| {
        TlsError::Unusable { path: path.to_owned(), source: Error::General(error.to_string()) }
    })
}

fn key_pair_error(cert: &Path, key: &Path, source: Error) -> TlsError {
    match source {
        Error::InconsistentKeys(_) => TlsError::KeyMismatch { cert: cert.to_owned(), key: key.to_owned() },
        source => TlsError::Unusable { path: cert.to_owned(), source },
    }
}

fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem_error = |source| TlsError::Pem { path: path.to_owned(), what: "certificate", source };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(bytes).collect::<Result<_, _>>().map_err(pem_error)?;
    if chain.is_empty() { Err(pem_error(pem::Error::NoItemsFound)) } else { Ok(chain) }
}

fn roots(path: &Path, bytes: &[u8]) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for ca in certificates(path, bytes)? {
        roots.add(ca).map_err(|source| TlsError::Unusable { path: path.to_owned(), source })?;
    }
    Ok(Arc::new(roots))
}

fn private_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|source| TlsError::Pem {
        path: path.to_owned(),
        what: "private key",
        source,
    })
}
