//! The standard gRPC health service, as a mirror of a process's readiness.

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::readiness::Readiness;

/// Tells health checks what the readiness is, for the process as a whole and for each of its `services`, until `end`.
/// `told` hears when they have been told first: a new reporter says that all is well, so nobody should hear it before.
pub async fn mirror_health(
    reporter: HealthReporter,
    services: &'static [&'static str],
    mut readiness: watch::Receiver<Readiness>,
    told: oneshot::Sender<()>,
    end: CancellationToken,
) {
    let mut told = Some(told);
    loop {
        let is_ready = readiness.borrow_and_update().is_ready();
        let status = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in services.iter().copied().chain([""]) {
            reporter.set_service_status(name, status).await;
        }
        if let Some(told) = told.take() {
            // A server that has gone already has nobody to wait for.
            let _server_gone = told.send(());
        }
        match end.run_until_cancelled(readiness.changed()).await {
            Some(Ok(())) => {}
            Some(Err(_)) | None => return,
        }
    }
}
