//! What an operator sets, and how a router is made of it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use longreach_service::{DrainConfig, Lifecycle};
use longreach_text::TextModel;
use longreach_tls::{FaceTls, Security};
use longreach_types::{SamplingError, SamplingParams};
use tokio::sync::Semaphore;

use crate::{
    discovery::WorkerSource,
    dispatch::{Dispatcher, RecoveryConfig},
    gateway::Gateway,
    http::StreamConfig,
    metrics::Metrics,
    ops::Operations,
    random::Random,
    request::{RequestLimits, SamplingDefaults},
    server::Router,
    stall::StallWatch,
    workers::{Dial, Fleet, GrpcDial, Pool, WorkerConfig},
};

/// Everything about a router that can be set.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Where gRPC is served. Port 0 takes a free one.
    pub grpc_addr: SocketAddr,
    /// Where the OpenAI API, health and metrics are served. Port 0 takes a free one.
    pub http_addr: SocketAddr,
    /// Name of the model, as requests give it.
    pub model_name: String,
    /// What requests may ask.
    pub limits: RequestLimits,
    /// What requests that leave it open get.
    pub sampling: SamplingDefaults,
    /// How workers are kept in touch with.
    pub workers: WorkerConfig,
    /// What is done when workers are lost.
    pub recovery: RecoveryConfig,
    /// How streams are held open.
    pub streams: StreamConfig,
    /// How connections are served.
    pub serving: ServingConfig,
    /// Who the router is to workers.
    pub security: Security,
    /// What clients are shown. Without it they are served without TLS, as behind a proxy or in a mesh that has its own.
    pub face_tls: Option<FaceTls>,
}

/// How connections are served, and how serving ends.
#[derive(Clone, Copy, Debug)]
pub struct ServingConfig {
    /// Streams of one connection, gRPC or HTTP/2. More lets one client use one connection; fewer bounds what it can hold.
    pub max_concurrent_streams: u32,
    /// How often a quiet connection of HTTP/2 is checked. Shorter finds dead clients sooner; longer sends less.
    pub keep_alive_interval: Duration,
    /// How long the answer to such a check may take.
    pub keep_alive_timeout: Duration,
    /// How long a router that drains goes on taking requests, so that all balancers learn of it. Longer fails fewer
    /// requests; shorter ends sooner.
    pub drain_notice: Duration,
    /// How long it then waits for requests in flight. Longer finishes more of them; shorter ends sooner.
    pub drain_grace: Duration,
}

impl Default for ServingConfig {
    fn default() -> Self {
        Self {
            max_concurrent_streams: 4096,
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(20),
            drain_notice: Duration::from_secs(3),
            drain_grace: Duration::from_secs(60),
        }
    }
}

/// A setting that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}; it must be {allowed}")]
pub struct ConfigError {
    /// The setting.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What it may be.
    pub allowed: String,
}

impl RouterConfig {
    /// A router for the model named `model_name`, on loopback and free ports, with all defaults.
    pub fn new(model_name: impl Into<String>) -> Self {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            grpc_addr: loopback,
            http_addr: loopback,
            model_name: model_name.into(),
            limits: RequestLimits::default(),
            sampling: SamplingDefaults::default(),
            workers: WorkerConfig::default(),
            recovery: RecoveryConfig::default(),
            streams: StreamConfig::default(),
            serving: ServingConfig::default(),
            security: Security::Plaintext,
            face_tls: None,
        }
    }

    /// Checks every setting, and those that depend on each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least = |field, value: usize, least: usize| {
            let allowed = format!("at least {least}");
            if value < least { Err(ConfigError { field, value: value.to_string(), allowed }) } else { Ok(()) }
        };
        let positive = |field, span: Duration| {
            let allowed = "longer than zero".to_owned();
            if span.is_zero() { Err(ConfigError { field, value: "0".to_owned(), allowed }) } else { Ok(()) }
        };
        if self.model_name.is_empty() || self.model_name.chars().any(char::is_control) {
            let (value, allowed) = (format!("{:?}", self.model_name), "a printable name".to_owned());
            return Err(ConfigError { field: "model_name", value, allowed });
        }
        at_least("limits.max_choices", self.limits.max_choices, 1)?;
        at_least("limits.max_inflight", self.limits.max_inflight, self.limits.max_choices)?;
        at_least("limits.max_body", self.limits.max_body_bytes, 1024)?;
        at_least("recovery.max_attempts", self.recovery.max_attempts as usize, 1)?;
        at_least("serving.max_concurrent_streams", self.serving.max_concurrent_streams as usize, 1)?;
        if self.limits.max_inflight > Semaphore::MAX_PERMITS {
            let (value, allowed) =
                (self.limits.max_inflight.to_string(), format!("at most {}", Semaphore::MAX_PERMITS));
            return Err(ConfigError { field: "limits.max_inflight", value, allowed });
        }
        positive("workers.connect_timeout", self.workers.connect_timeout)?;
        positive("workers.keep_alive_interval", self.workers.keep_alive_interval)?;
        positive("workers.poll_interval", self.workers.poll_interval)?;
        positive("workers.keep_alive_timeout", self.workers.keep_alive_timeout)?;
        positive("serving.heartbeat_interval", self.streams.heartbeat_interval)?;
        positive("serving.stall_timeout", self.streams.stall_timeout)?;
        positive("serving.keep_alive_interval", self.serving.keep_alive_interval)?;
        positive("serving.keep_alive_timeout", self.serving.keep_alive_timeout)?;
        self.check_sampling()
    }

    /// Defaults are not the client's: one that no request could have would be found fault with in every request.
    fn check_sampling(&self) -> Result<(), ConfigError> {
        let (defaults, base) = (&self.sampling, SamplingParams::default());
        let params = SamplingParams {
            temperature: defaults.temperature.unwrap_or(base.temperature),
            top_p: defaults.top_p.unwrap_or(base.top_p),
            min_p: defaults.min_p.unwrap_or(base.min_p),
            repetition_penalty: defaults.repetition_penalty.unwrap_or(base.repetition_penalty),
            max_tokens: 1,
            ..base
        };
        params.validate(usize::MAX).map_err(|SamplingError { field, value, allowed }| {
            let field = match field {
                "temperature" => "sampling.temperature",
                "top_p" => "sampling.top_p",
                "min_p" => "sampling.min_p",
                "repetition_penalty" => "sampling.repetition_penalty",
                other => other,
            };
            ConfigError { field, value, allowed }
        })
    }

    /// How it drains.
    pub fn drain(&self) -> DrainConfig {
        DrainConfig {
            notice: self.serving.drain_notice,
            grace: self.serving.drain_grace,
            ..DrainConfig::default()
        }
    }

    /// A router that serves `text` with the workers of `source`. Nothing runs before it is bound and serves.
    pub fn build(self, source: WorkerSource, text: TextModel) -> Result<Router, ConfigError> {
        self.validate()?;
        source.validate(self.security.scheme())?;
        let lifecycle = Lifecycle::new();
        let registry = longreach_service::Metrics::new("router");
        let metrics = registry.register(Metrics::new);
        let dial: Arc<dyn Dial> =
            Arc::new(GrpcDial { config: self.workers, security: self.security.clone() });
        let random = Random::default();
        let means = (dial, Arc::new(Fleet::new(metrics.clone())));
        let dispatcher = Arc::new(Dispatcher {
            decodes: Pool::new(self.workers, lifecycle.clone(), means.clone(), random.clone()),
            prefills: Pool::new(self.workers, lifecycle.clone(), means, random.clone()),
            recovery: self.recovery,
            metrics: metrics.clone(),
            random,
        });
        let operations = Arc::new(Operations::new(lifecycle.clone(), registry));
        let gateway = Arc::new(Gateway {
            model_name: self.model_name.clone(),
            text,
            stalls: Arc::new(StallWatch::new(self.streams.stall_timeout, metrics.clone())),
            limits: self.limits,
            sampling: self.sampling,
            dispatcher,
            metrics,
            admission: Arc::new(Semaphore::new(self.limits.max_inflight)),
            lifecycle: lifecycle.clone(),
        });
        Ok(Router { config: self, source, gateway, operations, lifecycle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_contradicts_another_is_named() {
        assert_eq!(RouterConfig::new("m").validate(), Ok(()));
        let mut config = RouterConfig::new("m");
        config.limits = RequestLimits { max_choices: 8, max_inflight: 7, ..config.limits };
        let error = config.validate().unwrap_err();
        assert_eq!(error.to_string(), "limits.max_inflight is 7; it must be at least 8");
        assert_eq!(RouterConfig::new("").validate().unwrap_err().field, "model_name");
    }
}
