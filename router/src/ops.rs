//! What operators ask of the router: is it alive, is it ready, what does it measure.

use std::time::{SystemTime, UNIX_EPOCH};

use longreach_service::{Admin, Lifecycle, Metrics};

/// The operators' view of the router.
pub(crate) struct Operations {
    lifecycle: Lifecycle,
    metrics: Metrics,
    started_unix: u64,
}

impl Operations {
    /// A view of a router that is starting, and measures into `metrics`.
    pub(crate) fn new(lifecycle: Lifecycle, metrics: Metrics) -> Self {
        Self { lifecycle, metrics, started_unix: unix_now() }
    }

    /// What is answered to those who ask over HTTP.
    pub(crate) fn admin(&self) -> Admin {
        Admin { readiness: self.lifecycle.readiness(), metrics: self.metrics.clone() }
    }

    /// When the router started, in seconds since 1970.
    pub(crate) fn started_unix(&self) -> u64 {
        self.started_unix
    }
}

/// Seconds since 1970.
#[allow(clippy::disallowed_methods, reason = "a date, which nothing is measured by")]
pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
