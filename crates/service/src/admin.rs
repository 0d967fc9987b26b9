//! What operators ask over HTTP: is it alive, is it ready, what does it measure.
//!
//! Live means that the process answers; a process that drains is live. Ready means that it may get new work, and the
//! answer says what it waits for if not. A router has these routes beside its API, a worker on an address of their own.

use std::{io, net::SocketAddr};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    metrics::{self, Metrics},
    readiness::Readiness,
};

/// What the routes show.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Whether the process may get new work.
    pub readiness: watch::Receiver<Readiness>,
    /// Its numbers.
    pub metrics: Metrics,
}

/// A bound address for operators.
#[derive(Debug)]
pub struct AdminDoor {
    listener: TcpListener,
    /// Where it is.
    pub addr: SocketAddr,
}

/// An address for operators that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} for health and metrics: {source}; choose another http_addr")]
pub struct AdminBindError {
    addr: SocketAddr,
    source: io::Error,
}

impl Admin {
    /// `/health/live`, `/health/ready` and `/metrics`; the first two also under the names that Kubernetes made common.
    /// They know no state of the router that they are merged into.
    pub fn routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        Router::new()
            .route("/health/live", get(live))
            .route("/healthz", get(live))
            .route("/health/ready", get(ready))
            .route("/readyz", get(ready))
            .route("/metrics", get(expose))
            .with_state(self)
    }
}

impl AdminDoor {
    /// Listens on `addr`; port 0 takes a free one.
    pub async fn open(addr: SocketAddr) -> Result<Self, AdminBindError> {
        let error = |source| AdminBindError { addr, source };
        let listener = TcpListener::bind(addr).await.map_err(error)?;
        let addr = listener.local_addr().map_err(error)?;
        Ok(Self { listener, addr })
    }

    /// Serves until `close`. It stays open while the process drains: that is when operators look.
    pub async fn serve(self, admin: Admin, close: CancellationToken) -> io::Result<()> {
        let serving = axum::serve(self.listener, admin.routes()).into_future();
        // A server that is dropped has nothing to finish: every answer is short.
        close.run_until_cancelled(serving).await.unwrap_or(Ok(()))
    }
}

async fn live() -> &'static str {
    "live\n"
}

async fn ready(State(admin): State<Admin>) -> Response {
    let readiness = admin.readiness.borrow().clone();
    let status = if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{readiness}\n")).into_response()
}

async fn expose(State(admin): State<Admin>) -> Response {
    match admin.metrics.expose() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
