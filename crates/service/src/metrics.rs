//! The numbers of a process, in one registry.
//!
//! Parts register their own metrics and keep the handles; reading is text for a scraper. Names follow the rules of
//! OpenMetrics: `_seconds`, `_bytes`, `_total`, and no unit that is not a base unit.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use prometheus_client::{encoding::text, metrics::info::Info, registry::Registry};

/// The content type of [`Metrics::expose`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<RwLock<Registry>>,
}

impl Metrics {
    /// An empty registry for the process `role` (`router`, `decode`, …): every name begins with `longreach_{role}_`.
    /// It says its version as `longreach_{role}_build_info`.
    pub fn new(role: &str) -> Self {
        let mut registry = Registry::with_prefix(format!("longreach_{role}"));
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of this build", build);
        Self { registry: Arc::new(RwLock::new(registry)) }
    }

    /// Registers metrics.
    pub fn register<R>(&self, register: impl FnOnce(&mut Registry) -> R) -> R {
        register(&mut self.registry.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// All metrics in OpenMetrics text.
    pub fn expose(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry.read().unwrap_or_else(PoisonError::into_inner))?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;

    use super::*;

    #[test]
    fn metrics_are_exposed_under_the_prefix_of_their_role() {
        let metrics = Metrics::new("router");
        let requests = Counter::<u64>::default();
        metrics.register(|registry| registry.register("requests", "Requests", requests.clone()));
        requests.inc_by(3);
        let version = env!("CARGO_PKG_VERSION");
        let want = format!(
            "# HELP longreach_router_build Version of this build.\n\
             # TYPE longreach_router_build info\n\
             longreach_router_build_info{{version=\"{version}\"}} 1\n\
             # HELP longreach_router_requests Requests.\n\
             # TYPE longreach_router_requests counter\n\
             longreach_router_requests_total 3\n\
             # EOF\n"
        );
        assert_eq!(metrics.expose().unwrap(), want);
    }
}
