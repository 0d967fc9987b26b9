//! Being called: a listener whose connections have shown what they must before anybody reads from them.
//!
//! Handshakes run side by side and are bounded in time and number, so a client that connects and says nothing keeps
//! nobody else out. A handshake that fails is logged and is no error of the listener.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::Duration,
};

use futures::{
    Stream, StreamExt,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use rustls::{ServerConfig, pki_types::CertificateDer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use crate::{
    dial::Security,
    error::HandshakeError,
    identity::{FaceTls, Identity},
};

/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Handshakes at a time. A further connection takes the place of the oldest: one that means it is done in a moment, so that
/// those who only hold their places keep nobody out.
const MAX_HANDSHAKES: usize = 256;

/// Pause after the system refused to accept, as it does when descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections.
pub struct Listener {
    socket: TcpListener,
    protection: Protection,
    handshakes: FuturesUnordered<BoxFuture<'static, (SocketAddr, Result<Conn, HandshakeError>)>>,
    /// The handshakes that go on, oldest first, and some that are done.
    oldest: VecDeque<Weak<CancellationToken>>,
}

#[derive(Clone)]
pub(crate) enum Protection {
    None,
    Member(Identity),
    Face(FaceTls),
}

/// A connection that may be read from.
pub enum Conn {
    /// Without TLS.
    Plain(TcpStream, Peer),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>, Peer),
}

/// Who is at the other end. Every request of a connection carries it among its extensions.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Where it comes from.
    pub addr: SocketAddr,
    /// The names in its certificate, if it has shown one.
    pub names: Option<Arc<[String]>>,
}

impl Listener {
    /// Accepts members of the cluster, as `security` says.
    pub fn for_members(socket: TcpListener, security: &Security) -> Self {
        let protection = match security {
            Security::Plaintext => Protection::None,
            Security::Mutual(identity) => Protection::Member(identity.clone()),
        };
        Self { socket, protection, handshakes: FuturesUnordered::new(), oldest: VecDeque::new() }
    }

    /// Accepts clients, with TLS if there is a certificate for it.
    pub fn for_clients(socket: TcpListener, tls: Option<&FaceTls>) -> Self {
        let protection = tls.map_or(Protection::None, |tls| Protection::Face(tls.clone()));
        Self { socket, protection, handshakes: FuturesUnordered::new(), oldest: VecDeque::new() }
    }

    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The next connection. Nothing is lost if the future is dropped: handshakes go on in the next.
    pub async fn accept(&mut self) -> Conn {
        loop {
            // Both arms are cancel-safe: accepting takes nothing until it is done, and handshakes stay in their set.
            tokio::select! {
                Some((addr, conn)) = self.handshakes.next() => match conn {
                    Ok(conn) => return conn,
                    Err(error) => self.protection.log(addr, &error),
                },
                accepted = self.socket.accept() => match accepted {
                    Ok((tcp, addr)) => {
                        if let Err(error) = tcp.set_nodelay(true) {
                            debug!(%error, "a connection cannot send small packets at once");
                        }
                        match self.protection.clone() {
                            Protection::None => return Conn::Plain(tcp, Peer { addr, names: None }),
                            protection => self.begin(protection, tcp, addr),
                        }
                    }
                    Err(error) => {
                        debug!(%error, "accept failed");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    fn begin(&mut self, protection: Protection, tcp: TcpStream, addr: SocketAddr) {
        if self.handshakes.len() >= MAX_HANDSHAKES
            && let Some(oldest) = std::iter::from_fn(|| self.oldest.pop_front()).find_map(|it| it.upgrade())
        {
            oldest.cancel();
        }
        let token = Arc::new(CancellationToken::new());
        // Those that are done are forgotten now and then.
        if self.oldest.len() >= 2 * MAX_HANDSHAKES {
            self.oldest.retain(|token| token.strong_count() > 0);
        }
        self.oldest.push_back(Arc::downgrade(&token));
        self.handshakes.push(Box::pin(async move {
            let done = token.run_until_cancelled(protection.welcome(tcp, addr)).await;
            done.unwrap_or((addr, Err(HandshakeError::Displaced)))
        }));
    }

    /// All connections, as tonic takes them.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<Conn>> + Send {
        stream::unfold(self, |mut listener| async {
            let conn = listener.accept().await;
            Some((Ok(conn), listener))
        })
    }
}

impl Protection {
    pub(crate) async fn welcome(
        self,
        tcp: TcpStream,
        addr: SocketAddr,
    ) -> (SocketAddr, Result<Conn, HandshakeError>) {
        let done = timeout(HANDSHAKE_TIMEOUT, self.shake(tcp, addr)).await;
        (addr, done.unwrap_or(Err(HandshakeError::Timeout(HANDSHAKE_TIMEOUT))))
    }

    async fn shake(self, tcp: TcpStream, addr: SocketAddr) -> Result<Conn, HandshakeError> {
        let config: Arc<ServerConfig> = match self {
            Self::None => return Ok(Conn::Plain(tcp, Peer { addr, names: None })),
            Self::Member(identity) => Arc::clone(&identity.configs.current().await.server),
            Self::Face(face) => Arc::clone(&*face.config.current().await),
        };
        let stream = TlsAcceptor::from(config).accept(tcp).await.map_err(HandshakeError::from_io)?;
        let cert = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let names = cert.map(names);
        Ok(Conn::Tls(Box::new(stream), Peer { addr, names }))
    }

    /// Members do not fail without a reason that somebody has to mend; on a public face it is the clients' business.
    fn log(&self, addr: SocketAddr, error: &HandshakeError) {
        match (self, error) {
            (Self::Member(_), error) if !matches!(error, HandshakeError::Closed | HandshakeError::Io(_)) => {
                warn!(from = %addr, %error, "a connection was refused");
            }
            _ => debug!(from = %addr, %error, "a connection ended in its handshake"),
        }
    }
}

/// The DNS names of a certificate that was verified.
fn names(cert: &CertificateDer<'_>) -> Arc<[String]> {
    let parsed = webpki::EndEntityCert::try_from(cert);
    parsed.map_or(Arc::default(), |cert| cert.valid_dns_names().map(str::to_ascii_lowercase).collect())
}

impl Conn {
    /// Who is at the other end.
    pub fn peer(&self) -> &Peer {
        match self {
            Self::Plain(_, peer) | Self::Tls(_, peer) => peer,
        }
    }
}

impl Connected for Conn {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer().clone()
    }
}

impl AsyncRead for Conn {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_read(cx, into),
            Self::Tls(stream, _) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for Conn {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream, _) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_write_vectored(cx, parts),
            Self::Tls(stream, _) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream, _) => stream.is_write_vectored(),
            Self::Tls(stream, _) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
