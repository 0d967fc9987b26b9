//! A router's process, from its settings to its end.

use longreach_service::{Exit, RoleError, Signals};
use longreach_text::{LoadOptions, TextModel};
use longreach_tls::{FaceTls, Role};

use crate::settings::RouterSettings;

/// Serves until a signal, then drains.
pub async fn run(settings: RouterSettings, signals: Signals) -> Result<Exit, RoleError> {
    let (mut config, source) = (settings.router(), settings.source()?);
    config.security = settings.tls.security(&settings.cluster.name, Role::Router)?;
    let face_tls = settings.face_tls.files()?.map(|files| FaceTls::load(&files));
    config.face_tls = face_tls.transpose().map_err(RoleError::failed)?;
    let model = settings.model()?.clone();
    let options = LoadOptions { chat_template: settings.chat_template.clone() };
    let load = move || TextModel::load_with(&model, &options);
    let text = tokio::task::spawn_blocking(load).await.map_err(RoleError::failed)?;
    let text = text.map_err(RoleError::failed)?;
    let drain = config.drain();
    let router = config.build(source, text).map_err(RoleError::config)?;
    let bound = router.bind().await.map_err(RoleError::failed)?;
    let lifecycle = bound.start().map_err(RoleError::failed)?;
    Ok(lifecycle.run(signals, drain).await.into())
}
