//! A router on loopback, with workers that do as they are told.

mod client;
mod cluster;
mod model;
mod workers;

use std::{sync::Arc, time::Duration};

use longreach_router::{RouterConfig, WorkerSource};
use longreach_service::{DrainConfig, DrainReport, Lifecycle};
use tonic::transport::Channel;

pub(crate) use self::{
    client::{Answer, HttpClient, post_head},
    cluster::Registry,
    model::{EOS, text_model, text_of, tokens_of},
    workers::{FakeDecode, FakePrefill, Handoffs, Plan, layout},
};
use longreach_proto::inference::{
    inference_service_client::InferenceServiceClient, model_service_client::ModelServiceClient,
};

/// A router that serves, and its clients.
pub(crate) struct TestRouter {
    pub(crate) http: HttpClient,
    grpc_uri: String,
    lifecycle: Lifecycle,
}

/// Settings under which tests are quick.
pub(crate) fn quick_config() -> RouterConfig {
    let mut config = RouterConfig::new("m");
    config.workers.poll_interval = Duration::from_millis(20);
    config.recovery.recovery_window = Duration::from_secs(2);
    config
}

impl TestRouter {
    /// A router for these workers, ready to serve.
    pub(crate) async fn start(decodes: &[&FakeDecode], prefills: &[&FakePrefill]) -> Self {
        Self::start_with(quick_config(), decodes, prefills).await
    }

    /// The same with other settings.
    pub(crate) async fn start_with(
        config: RouterConfig,
        decodes: &[&FakeDecode],
        prefills: &[&FakePrefill],
    ) -> Self {
        let source = WorkerSource::Fixed {
            decodes: decodes.iter().map(|worker| worker.uri()).collect(),
            prefills: prefills.iter().map(|worker| worker.uri()).collect(),
        };
        let router = Self::start_from(config, source).await;
        if !decodes.is_empty() {
            router.wait_ready().await;
            // Every worker is described once it was polled; with fixed workers that is one poll.
            for worker in decodes {
                worker.wait_described().await;
            }
            for worker in prefills {
                worker.wait_described().await;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        router
    }

    /// A router for the workers of `source`; it may not be ready.
    pub(crate) async fn start_from(config: RouterConfig, source: WorkerSource) -> Self {
        let router = config.build(source, text_model()).unwrap().bind().await.unwrap();
        let http = HttpClient::new(router.http_addr());
        let grpc_uri = format!("http://{}", router.grpc_addr());
        Self { http, grpc_uri, lifecycle: router.start().unwrap() }
    }

    /// Waits until the router says that it is ready.
    pub(crate) async fn wait_ready(&self) {
        eventually("the router is ready", async || self.http.get("/readyz").await.status == 200).await;
    }

    /// A connection to the gRPC port.
    pub(crate) async fn channel(&self) -> Channel {
        Channel::from_shared(self.grpc_uri.clone()).unwrap().connect().await.unwrap()
    }

    /// A connection whose streams have little room for what is not read, and that has room for all its streams.
    pub(crate) async fn narrow_channel(&self) -> Channel {
        let endpoint = Channel::from_shared(self.grpc_uri.clone()).unwrap();
        let endpoint = endpoint.initial_stream_window_size(16 << 10).initial_connection_window_size(1 << 28);
        endpoint.connect().await.unwrap()
    }

    /// A client of the typed face.
    pub(crate) async fn inference(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel().await)
    }

    /// A client of the model service.
    pub(crate) async fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel().await)
    }

    /// The value of a metric, all its labels summed.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = self.http.get("/metrics").await.text();
        let lines = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ') || rest.starts_with('{'))
        });
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Ends the router in order.
    pub(crate) async fn drain(&self, notice: Duration, grace: Duration) -> DrainReport {
        let config = DrainConfig { notice, grace, cancel_timeout: Duration::from_secs(2) };
        self.lifecycle.drain(config, std::future::pending()).await
    }
}

/// Waits until `condition` holds; fails after ten seconds.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "{what}: not within 60 s");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// One decode group that prefills by itself, under `plan`, and a router for it.
pub(crate) async fn simple(plan: Plan) -> (TestRouter, FakeDecode) {
    let decode = FakeDecode::start(move |_, _| plan.clone()).await;
    let router = TestRouter::start(&[&decode], &[]).await;
    (router, decode)
}

/// A prefill worker and a decode group that hand over, under these plans, and a router for them.
pub(crate) async fn pair(prefill: Plan, decode: Plan) -> (TestRouter, FakePrefill, FakeDecode) {
    let handoffs = Arc::new(Handoffs::default());
    let prefill = FakePrefill::start(Arc::clone(&handoffs), move |_, _| prefill.clone()).await;
    let decode = FakeDecode::start_with(handoffs, move |_, _| decode.clone()).await;
    let router = TestRouter::start(&[&decode], &[&prefill]).await;
    (router, prefill, decode)
}
