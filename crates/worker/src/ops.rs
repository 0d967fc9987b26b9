//! What a worker tells operators and health checks: HTTP on an address of its own, and `grpc.health.v1` on its door.

use std::net::SocketAddr;

use longreach_engine::EngineInfo;
use longreach_service::{Admin, AdminBindError, AdminDoor, Metrics, ReadinessCell, mirror_health};
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use crate::metrics::EngineMetrics;

/// The operators' side of a worker. It says that the worker is starting until it is told otherwise.
#[derive(Debug)]
pub struct Ops {
    /// Whether the worker may get new work.
    pub readiness: ReadinessCell,
    /// Its numbers.
    pub metrics: Metrics,
    door: Option<AdminDoor>,
}

impl Ops {
    /// Prepares for the worker of this `role`, and binds `http_addr` if there is one.
    pub async fn open(role: &str, http_addr: Option<SocketAddr>) -> Result<Self, AdminBindError> {
        let door = match http_addr {
            Some(addr) => Some(AdminDoor::open(addr).await?),
            None => None,
        };
        Ok(Self { readiness: ReadinessCell::default(), metrics: Metrics::new(role), door })
    }

    /// Where operators ask over HTTP.
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.door.as_ref().map(|door| door.addr)
    }

    /// Adds the numbers of the engine that `source` gives at the moment of a scrape.
    pub fn register_engine(&self, source: impl Fn() -> Option<EngineInfo> + Send + Sync + 'static) {
        let collector = Box::new(EngineMetrics::new(source));
        self.metrics.register(|registry| registry.register_collector(collector));
    }

    /// Serves over HTTP, and returns `routes` with the health service for all `services` of it. Both are true until
    /// `end`, which comes after the drain.
    pub async fn start(
        self,
        routes: Routes,
        services: &'static [&'static str],
        tasks: &TaskTracker,
        end: &CancellationToken,
    ) -> Routes {
        let Self { readiness, metrics, door } = self;
        if let Some(door) = door {
            let (admin, end) = (Admin { readiness: readiness.subscribe(), metrics }, end.clone());
            tasks.spawn(async move {
                if let Err(error) = door.serve(admin, end).await {
                    tracing::error!(%error, "HTTP server for operators ended");
                }
            });
        }
        let (reporter, health) = tonic_health::server::health_reporter();
        let (told, is_told) = oneshot::channel();
        tasks.spawn(mirror_health(reporter, services, readiness.subscribe(), told, end.clone()));
        // It is lost only with the task, which is lost only with the whole runtime.
        let _told = is_told.await;
        routes.add_service(health)
    }
}
