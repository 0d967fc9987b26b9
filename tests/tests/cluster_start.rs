//! A cluster that says it is ready is.

use std::time::Duration;

use longreach::local::LocalCluster;
use longreach_proto::inference::inference_service_client::InferenceServiceClient;
use longreach_tests::{
    cluster::{ask::Ask, cluster_config, model::ServedModel, tiny_engine},
    tiny::Error,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Starts again and again, because what can go wrong here is a race.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_request_after_readiness_is_served() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    for _ in 0..20 {
        let mut engine = tiny_engine(2, 2);
        // Readiness is about the decode group: it must be able to answer alone.
        engine.sched.local_prefill_max = 100;
        let mut config = cluster_config(engine);
        config.router.workers.poll_interval = Duration::from_secs(1);
        let cluster = LocalCluster::start(config, &model.model, model.text.clone(), |_| |_, _| {}).await?;
        let (grpc, ready, shutdown) = (cluster.grpc_addr(), cluster.ready(), CancellationToken::new());
        let mut running = JoinSet::new();
        running.spawn(cluster.run(shutdown.clone()));
        ready.await?;
        let mut client = InferenceServiceClient::connect(format!("http://{grpc}")).await?;
        client.generate(Ask::tokens([1, 2, 3]).request()).await?;
        shutdown.cancel();
        running.join_next().await.ok_or("it was never started")???;
    }
    Ok(())
}
