//! What both workers do around an engine: serve gRPC with the same settings, and drain in the same order.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use longreach_proto::WorkerError;
use longreach_tls::{ANY_ROLE, Access, Listener, Role, Security};
use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};
use tracing::{info, warn};

use crate::handle::EngineHandle;

/// HTTP/2 flow-control windows, as large as the sending side's: see the transport.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Who may call what at any worker.
const ACCESS: Access = Access(&[
    ("longreach.worker.v1.DecodeService", &[Role::Router]),
    ("longreach.worker.v1.PrefillService", &[Role::Router]),
    ("longreach.worker.v1.KvService", &[Role::Prefill]),
    ("grpc.health.v1.Health", ANY_ROLE),
]);

/// A bound address of a worker.
pub struct Door {
    listener: TcpListener,
    security: Security,
    /// Where it is.
    pub addr: SocketAddr,
}

/// A worker that listens nowhere.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr}: {source}; choose another address, or end what holds it")]
pub struct BindError {
    /// The address.
    addr: SocketAddr,
    source: io::Error,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Everything in flight was finished.
    Finished,
    /// The grace was over first; this many sequences were ended with an error their router recovers from.
    CutOff {
        /// Sequences that were in flight.
        n_seqs: usize,
    },
}

/// How long open calls may take to end once all work has.
const CLOSE_PATIENCE: Duration = Duration::from_secs(3);

/// Calls that a router may have opened and ended again before this process saw them. A router has one connection to a
/// worker, and its clients may all go away while the worker is busy: beyond this number the connection ends, and with it
/// every output on it. The default of 20 is for servers whose clients are strangers.
const MAX_PENDING_RESETS: usize = 1 << 16;

/// Whether new work is taken. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Door {
    /// Listens on `addr` for those that `security` lets in; port 0 takes a free one.
    pub async fn open(addr: SocketAddr, security: Security) -> Result<Self, BindError> {
        let listener = TcpListener::bind(addr).await.map_err(|source| BindError { addr, source })?;
        let addr = listener.local_addr().map_err(|source| BindError { addr, source })?;
        Ok(Self { listener, security, addr })
    }

    /// The address as peers dial it.
    pub fn endpoint(&self) -> String {
        format!("{}://{}", self.security.scheme(), self.addr)
    }

    /// Serves `routes` until `shutdown`, then until open calls have ended, or [`CLOSE_PATIENCE`] is over: some calls never
    /// end by themselves, such as the watch of a health check, and what a slow reader is cut off from, its router makes
    /// good elsewhere.
    pub async fn serve(
        self,
        routes: Routes,
        shutdown: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let incoming = Listener::for_members(self.listener, &self.security).into_stream();
        let (until, out_of_patience) = (shutdown.clone().cancelled_owned(), async {
            shutdown.cancelled().await;
            tokio::time::sleep(CLOSE_PATIENCE).await;
        });
        let served = Server::builder()
            .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keepalive_interval(Some(Duration::from_secs(20)))
            .http2_keepalive_timeout(Some(Duration::from_secs(10)))
            .layer(ACCESS.layer(&self.security))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, until);
        // A server that is not done when patience ends is dropped, and its connections with it.
        tokio::select! {
            served = served => served,
            () = out_of_patience => Ok(()),
        }
    }
}

impl Gate {
    /// Refuses once [`Self::close`] was called.
    pub fn check(&self) -> Result<(), WorkerError> {
        if self.0.load(Ordering::Acquire) { Err(WorkerError::Unavailable("draining")) } else { Ok(()) }
    }

    /// From now on new work is refused.
    pub fn close(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Waits until the engine has finished what it has, or the grace is over. New work must be refused already.
pub async fn drain(engine: &EngineHandle, grace: Duration) -> Drained {
    match timeout(grace, engine.wait_for(|info| info.is_idle() || info.failure.is_some())).await {
        Ok(_) => {
            info!("drained: everything in flight was finished");
            Drained::Finished
        }
        Err(_) => {
            let stats = engine.info().stats;
            let n_seqs = stats.n_waiting + stats.n_receiving + stats.n_running + stats.n_sending;
            warn!(n_seqs, ?grace, "drain cut off: the grace was over");
            Drained::CutOff { n_seqs }
        }
    }
}
