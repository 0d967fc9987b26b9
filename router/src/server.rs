//! A router's life: bind, serve, until its process drains.
//!
//! The order of draining is the [`Lifecycle`]'s; here it is only followed: health says so first, then the servers stop
//! accepting and finish what they have, and connections get a moment to take their last bytes along.

use std::{convert::Infallible, future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{http::Request, response::IntoResponse};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use longreach_proto::DESCRIPTOR_SET;
use longreach_service::{DrainReport, Hold, Lifecycle, StopReason, mirror_health};
use longreach_tls::{FaceTls, Listener};
use tokio::{net::TcpListener, sync::oneshot, task::JoinSet};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tonic::{body::Body, server::NamedService, transport::Server};
use tower::Service;

use crate::{
    config::{RouterConfig, ServingConfig},
    discovery::{self, WorkerSource},
    gateway::Gateway,
    grpc::{self, SERVICE_NAMES},
    http::{self, HttpFace},
    ops::Operations,
};

/// How often it is looked which workers are there.
const READY_INTERVAL: Duration = Duration::from_millis(50);

/// How long connections may take their last bytes along when everything ends.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);

/// A router that is configured and does nothing yet.
pub struct Router {
    pub(crate) config: RouterConfig,
    pub(crate) source: WorkerSource,
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) operations: Arc<Operations>,
    pub(crate) lifecycle: Lifecycle,
}

/// A router that listens: connections wait for it to serve.
pub struct BoundRouter {
    router: Router,
    grpc: Listener,
    http: Listener,
    grpc_addr: SocketAddr,
    http_addr: SocketAddr,
}

/// Why a router could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address cannot be listened on.
    #[error("cannot listen on {addr} for {face}: {source}")]
    Bind {
        /// Which face.
        face: &'static str,
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The compiled protobuf descriptors are not readable.
    #[error("the descriptors for reflection are not readable")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// A part of the router ended that it cannot do without; the log says why.
    #[error("the router's {part} ended by itself")]
    PartEnded {
        /// Which.
        part: &'static str,
    },
}

impl Router {
    /// Listens on both addresses.
    pub async fn bind(self) -> Result<BoundRouter, ServeError> {
        let tls = self.config.face_tls.as_ref();
        let (grpc, grpc_addr) = listen("gRPC", self.config.grpc_addr, tls).await?;
        let (http, http_addr) = listen("HTTP", self.config.http_addr, tls).await?;
        Ok(BoundRouter { router: self, grpc, http, grpc_addr, http_addr })
    }
}

impl BoundRouter {
    /// Where gRPC is served.
    pub fn grpc_addr(&self) -> SocketAddr {
        self.grpc_addr
    }

    /// Where the OpenAI API, health and metrics are served.
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Serves until `shutdown`, then drains. No task of the router is left when it returns, unless one is stuck.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<DrainReport, ServeError> {
        let drain = self.router.config.drain();
        let lifecycle = self.start()?;
        // Both arms are cancel-safe; the reasons are alike to what follows.
        tokio::select! {
            () = shutdown.cancelled() => {}
            _ = lifecycle.stopped() => {}
        }
        let report = lifecycle.drain(drain, future::pending()).await;
        match report.reason {
            StopReason::TaskEnded { name } => Err(ServeError::PartEnded { part: name }),
            StopReason::Signal(_) | StopReason::Requested => Ok(report),
        }
    }

    /// Starts to serve, and gives the lifecycle on which it does. Ready once a decode group is; the end, and its
    /// order, are the lifecycle's.
    pub fn start(self) -> Result<Lifecycle, ServeError> {
        let Self { router, grpc, http, grpc_addr, http_addr } = self;
        let Router { config, source, gateway, operations, lifecycle } = router;
        let (reporter, health) = tonic_health::server::health_reporter();
        let grpc = grpc_server(grpc, &config, &gateway, health, lifecycle.clone())?;
        let (told, is_told) = oneshot::channel();
        lifecycle.spawn_essential("gRPC server", async move {
            // A new reporter says that all is well: nobody may hear that before it is so.
            let _told = is_told.await;
            grpc.await;
        });
        let face = HttpFace { gateway: Arc::clone(&gateway), operations, streams: config.streams };
        lifecycle.spawn_essential("HTTP server", http_server(http, face, config.serving, lifecycle.clone()));
        let needs_prefill = source.needs_prefill(config.workers.prefill_optional);
        lifecycle.spawn(discovery::follow(source, Arc::clone(&gateway.dispatcher), lifecycle.token()));
        let holds = Holds::new(&lifecycle, needs_prefill);
        lifecycle.spawn(holds.keep(Arc::clone(&gateway), lifecycle.clone()));
        lifecycle.spawn(Arc::clone(&gateway.stalls).run(lifecycle.clone()));
        let (readiness, end) = (lifecycle.readiness(), lifecycle.token());
        lifecycle.spawn(mirror_health(reporter, &SERVICE_NAMES, readiness, told, end));
        lifecycle.started();
        tracing::info!(%grpc_addr, %http_addr, model = config.model_name, "router serves");
        Ok(lifecycle)
    }
}

async fn listen(
    face: &'static str,
    addr: SocketAddr,
    tls: Option<&FaceTls>,
) -> Result<(Listener, SocketAddr), ServeError> {
    let bind_error = |source| ServeError::Bind { face, addr, source };
    let listener = TcpListener::bind(addr).await.map_err(bind_error)?;
    let addr = listener.local_addr().map_err(bind_error)?;
    Ok((Listener::for_clients(listener, tls), addr))
}

fn grpc_server<H>(
    listener: Listener,
    config: &RouterConfig,
    gateway: &Arc<Gateway>,
    health: H,
    lifecycle: Lifecycle,
) -> Result<impl Future<Output = ()> + use<H>, ServeError>
where
    H: Service<Request<Body>, Error = Infallible> + NamedService + Clone + Send + Sync + 'static,
    H::Response: IntoResponse,
    H::Future: Send + 'static,
{
    let (inference, models) = grpc::services(gateway, config.streams);
    let server = Server::builder()
        .max_concurrent_streams(config.serving.max_concurrent_streams)
        .http2_max_pending_accept_reset_streams(max_pending_resets(&config.serving))
        .http2_keepalive_interval(Some(config.serving.keep_alive_interval))
        .http2_keepalive_timeout(Some(config.serving.keep_alive_timeout))
        .add_service(inference)
        .add_service(models)
        .add_service(health)
        .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
        // Tools that are in wide use still speak the older form.
        .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?);
    Ok(async move {
        let (incoming, end) = (listener.into_stream(), lifecycle.draining().cancelled_owned());
        let served = server.serve_with_incoming_shutdown(incoming, end);
        if let Some(Err(error)) = until_closed(served, &lifecycle).await {
            tracing::error!(%error, "gRPC server failed");
        }
    })
}

/// All calls of a connection may be given up in one burst, as when a proxy's client goes away. It must not end the
/// connection, which others share.
fn max_pending_resets(serving: &ServingConfig) -> Option<usize> {
    usize::try_from(serving.max_concurrent_streams).ok()
}

/// The public services, without the internal ones that the descriptors hold too.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    let builder = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        // What the details of errors are made of, so that tools can show them.
        .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
        .with_service_name("grpc.health.v1.Health");
    SERVICE_NAMES.into_iter().fold(builder, tonic_reflection::server::Builder::with_service_name)
}

/// Both versions of HTTP. What a connection of HTTP/2 carries, a mesh shares between its clients, as on the gRPC face.
fn http_connections(serving: &ServingConfig) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(serving.max_concurrent_streams)
        .max_pending_accept_reset_streams(max_pending_resets(serving))
        .keep_alive_interval(serving.keep_alive_interval)
        .keep_alive_timeout(serving.keep_alive_timeout);
    builder
}

async fn http_server(mut listener: Listener, face: HttpFace, serving: ServingConfig, lifecycle: Lifecycle) {
    // The watch ends the *stream* of a client that does not read, but where a connection carries one answer at a time what
    // was written before stays in it, and would for as long as the client's machine lives. So a connection ends by itself
    // when nobody takes what is written to it. Twice the watch's time: it is the watch that ends a stream, which counts it
    // and leaves a last word.
    let patience = face.streams.stall_timeout * 2;
    let (builder, service) = (http_connections(&serving), TowerToHyperService::new(http::routes(face)));
    let (connections, mut tasks, draining) = (GracefulShutdown::new(), JoinSet::new(), lifecycle.draining());
    loop {
        // All arms are cancel-safe; those that have ended only have to be forgotten.
        let conn = tokio::select! {
            () = draining.cancelled() => break,
            Some(_ended) = tasks.join_next() => continue,
            conn = listener.accept() => conn,
        };
        let peer = conn.peer().addr;
        let mut conn = TimeoutStream::new(conn);
        conn.set_write_timeout(Some(patience));
        let served = builder.serve_connection(TokioIo::new(Box::pin(conn)), service.clone()).into_owned();
        let served = connections.watch(served);
        tasks.spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!(%peer, error, "HTTP connection failed");
            }
        });
    }
    drop(listener);
    until_closed(connections.shutdown(), &lifecycle).await;
    tasks.shutdown().await;
}

/// Runs a server until it has closed all its connections, or they were given long enough to close.
async fn until_closed<T>(served: impl Future<Output = T>, lifecycle: &Lifecycle) -> Option<T> {
    let token = lifecycle.token();
    let out_of_patience = async {
        token.cancelled().await;
        tokio::time::sleep(CLOSE_PATIENCE).await;
    };
    // A server that is not done when patience ends is dropped for good.
    tokio::select! {
        served = served => Some(served),
        () = out_of_patience => None,
    }
}

/// What keeps the process from being ready: workers that are missing.
struct Holds {
    decode: Option<Hold>,
    prefill: Option<Hold>,
    needs_prefill: bool,
}

impl Holds {
    const DECODE: &str = "a decode group";
    const PREFILL: &str = "a prefill worker";

    /// Everything is missing.
    fn new(lifecycle: &Lifecycle, needs_prefill: bool) -> Self {
        let prefill = needs_prefill.then(|| lifecycle.hold(Self::PREFILL));
        Self { decode: Some(lifecycle.hold(Self::DECODE)), prefill, needs_prefill }
    }

    /// Looks again and again who is there.
    async fn keep(mut self, gateway: Arc<Gateway>, lifecycle: Lifecycle) {
        let (token, mut ticks) = (lifecycle.token(), tokio::time::interval(READY_INTERVAL));
        let set = |hold: &mut Option<Hold>, what: &str, is_missing: bool| match (is_missing, &hold) {
            (true, None) => *hold = Some(lifecycle.hold(what)),
            (false, Some(_)) => *hold = None,
            _ => {}
        };
        while token.run_until_cancelled(ticks.tick()).await.is_some() {
            let dispatcher = &gateway.dispatcher;
            set(&mut self.decode, Self::DECODE, dispatcher.decodes.n_ready() == 0);
            let is_missing = self.needs_prefill && dispatcher.prefills.n_ready() == 0;
            set(&mut self.prefill, Self::PREFILL, is_missing);
        }
    }
}
