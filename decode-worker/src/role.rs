//! A decode process, from its settings to its end.

use longreach_service::{Exit, RoleError, Signals, serve_until_signal};
use longreach_tls::Role;
use longreach_worker::open_model;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{Cluster, DecodeSettings};

/// Serves until a signal, then drains.
pub async fn run(settings: DecodeSettings, mut signals: Signals) -> Result<Exit, RoleError> {
    let (coordinator, keys) = (settings.cluster.coordinator()?, settings.cluster.keys()?);
    let model = open_model(settings.model()?).await?;
    let cluster = Cluster { coordinator, keys };
    let mut config = settings.worker()?;
    config.security = settings.tls.security(&settings.cluster.name, Role::Decode)?;
    let worker = config.build(&model, cluster, |_, _| {}).await.map_err(RoleError::failed)?;
    info!(endpoint = worker.endpoint(), http_addr = ?worker.http_addr(), "decode process serves");
    let shutdown = CancellationToken::new();
    let on_signal = |signal| info!(%signal, "draining; once more ends it at once");
    let serving = worker.serve(shutdown.clone());
    match serve_until_signal(&mut signals, &shutdown, on_signal, serving).await {
        Some(served) => served.map(|_drained| Exit::Clean).map_err(RoleError::failed),
        None => Err(RoleError::failed("ended by a second signal before it had drained")),
    }
}
