//! Calling: one function makes every connection to a member of the cluster.

use std::{
    error::Error,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::{io::AsyncBufReadExt, net::TcpStream};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{
    Status,
    codegen::http::uri::Authority,
    transport::{Channel, Endpoint, Uri},
};
use tower::Service;

use crate::{
    error::{HandshakeError, TlsError},
    files::{MemberConfigs, TlsFiles},
    identity::Identity,
    reload::Reloading,
    role::Role,
};

/// How the processes of a cluster speak with each other: what a configuration says, and nothing in between.
#[derive(Clone, Debug, Default)]
pub enum Security {
    /// Without TLS: everybody who reaches the network is trusted, or a service mesh protects it.
    #[default]
    Plaintext,
    /// Both sides of every connection show a certificate.
    Mutual(Identity),
}

/// An address that cannot be dialed with this configuration.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// It is none.
    #[error("{endpoint:?} is not of the form {scheme}://host:port")]
    Form {
        /// The address.
        endpoint: String,
        /// How it must begin.
        scheme: &'static str,
    },
    /// It is a process without TLS, and this one has it.
    #[error("{endpoint} is without TLS, and this process speaks with nobody without")]
    Unprotected {
        /// The address.
        endpoint: String,
    },
    /// It is a process with TLS, and this one has no certificate.
    #[error("{endpoint} is with TLS, and this process has no certificate")]
    NeedsTls {
        /// The address.
        endpoint: String,
    },
    /// The cluster's name has no place in a certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl Security {
    /// What the files say of a process that is `role` in `cluster`; without files it is without TLS.
    pub fn load(files: Option<&TlsFiles>, cluster: &str, role: Role) -> Result<Self, TlsError> {
        files.map_or(Ok(Self::Plaintext), |files| Identity::load(files, cluster, role).map(Self::Mutual))
    }

    /// The scheme of the addresses of this cluster's processes.
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::Plaintext => "http",
            Self::Mutual(_) => "https",
        }
    }

    /// Whether `endpoint` may be dialed.
    pub fn check(&self, endpoint: &str) -> Result<(), EndpointError> {
        self.parse(endpoint).map(drop)
    }

    fn parse(&self, endpoint: &str) -> Result<Uri, EndpointError> {
        let uri: Uri = endpoint.parse().map_err(|_| self.form(endpoint))?;
        match (uri.scheme_str(), self) {
            (Some("http"), Self::Mutual(_)) => {
                Err(EndpointError::Unprotected { endpoint: endpoint.to_owned() })
            }
            (Some("https"), Self::Plaintext) => {
                Err(EndpointError::NeedsTls { endpoint: endpoint.to_owned() })
            }
            (Some("http"), Self::Plaintext) | (Some("https"), Self::Mutual(_))
                if uri.port_u16().is_some() && uri.path() == "/" =>
            {
                Ok(uri)
            }
            _ => Err(self.form(endpoint)),
        }
    }

    fn form(&self, endpoint: &str) -> EndpointError {
        EndpointError::Form { endpoint: endpoint.to_owned(), scheme: self.scheme() }
    }

    /// A connection with the process at `endpoint`, which must be `role`. It is made when it is first used, and again
    /// when it breaks, each time with the certificates of that moment. `tune` sets bounds and keep-alive.
    pub fn channel(
        &self,
        endpoint: &str,
        role: Role,
        tune: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Result<Channel, EndpointError> {
        let uri = self.parse(endpoint)?;
        match self {
            Self::Plaintext => Ok(tune(Endpoint::from(uri)).connect_lazy()),
            Self::Mutual(identity) => {
                let configs = Arc::clone(&identity.configs);
                let connector = Connector { configs, name: identity.server_name(role)? };
                // tonic would insist on its own TLS for an https address. Requests still say what the address says.
                let plain = format!("http://{}", uri.authority().map_or("", Authority::as_str));
                let endpoint = Endpoint::from_shared(plain).map_err(|_| self.form(endpoint))?;
                Ok(tune(endpoint).origin(uri).connect_with_connector_lazy(connector))
            }
        }
    }
}

/// Finds what `error` of a call says about a handshake, however deep.
pub fn handshake_error(status: &Status) -> Option<&HandshakeError> {
    let mut source = status.source();
    while let Some(error) = source {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        source = error.source();
    }
    None
}

/// Makes connections for tonic: shows this process's certificate to a process that must have `name` in its own.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) configs: Arc<Reloading<MemberConfigs>>,
    pub(crate) name: ServerName<'static>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = HandshakeError;
    type Future = BoxFuture<'static, Result<Self::Response, HandshakeError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), HandshakeError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect(&uri).await.map(TokioIo::new) })
    }
}

impl Connector {
    pub(crate) async fn connect(self, uri: &Uri) -> Result<TlsStream<TcpStream>, HandshakeError> {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let tcp =
            TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await.map_err(HandshakeError::Io)?;
        tcp.set_nodelay(true).map_err(HandshakeError::Io)?;
        let config = Arc::clone(&self.configs.current().await.client);
        let connected = TlsConnector::from(config).connect(self.name, tcp).await;
        accepted(connected.map_err(HandshakeError::from_io)?).await
    }
}

/// Waits until the server has accepted this side's certificate. In TLS 1.3 it judges after the client has finished, so
/// a refusal would else be an error of the first call and not of the connection. A member's server speaks first: the
/// settings of HTTP/2.
pub(crate) async fn accepted(
    mut stream: TlsStream<TcpStream>,
) -> Result<TlsStream<TcpStream>, HandshakeError> {
    let is_closed = stream.fill_buf().await.map_err(HandshakeError::from_io)?.is_empty();
    if is_closed { Err(HandshakeError::Closed) } else { Ok(stream) }
}
