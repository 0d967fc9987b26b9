//! A cluster whose roles show each other certificates: it answers as one without, and believes nobody else.

use futures::StreamExt;
use longreach::certs::{CertRequest, MadeCerts};
use longreach_cluster::{
    Coordinator, Expect, GroupId, Key, KeySpace, PrefillRegistration, ReadyRecord, Record, Swap,
};
use longreach_proto::inference::inference_service_client::InferenceServiceClient;
use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output},
        cluster_config, eventually,
        model::ServedModel,
        tiny_engine,
    },
    parts::{CLUSTER_NAME, Parts},
    tiny::Error,
};
use longreach_tls::{Role, Security};
use longreach_types::{Epoch, Incarnation, WorkerId};
use tempfile::TempDir;
use tonic::transport::Channel;

fn certs(dir: &TempDir, cluster: &str) -> Result<MadeCerts, Error> {
    let out = dir.path().join("certs");
    let request = CertRequest { out, names: Vec::new(), cluster: cluster.to_owned(), days: 1, force: false };
    Ok(request.write()?)
}

fn asks() -> impl Iterator<Item = Ask> {
    (0..4_u32).map(|i| {
        let ask = Ask::tokens((0..30 + 20 * i).map(|j| (3 * i + j) % 250).collect::<Vec<_>>()).max_tokens(24);
        if i.is_multiple_of(2) { ask } else { ask.sampled(u64::from(i)) }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_has_the_same_answer_with_certificates_and_without() -> Result<(), Error> {
    let model = ServedModel::golden("llama", Some(512))?;
    let dir = tempfile::tempdir()?;
    let made = certs(&dir, longreach::local::CLUSTER_NAME)?;
    let load = |role| Security::load(Some(&made.files(role)), longreach::local::CLUSTER_NAME, role);
    let mut answers = Vec::new();
    for is_secure in [false, true] {
        let mut config = cluster_config(tiny_engine(2, 2));
        if is_secure {
            config.router.security = load(Role::Router)?;
            config.security.decode = load(Role::Decode)?;
            config.security.prefill = load(Role::Prefill)?;
        }
        let cluster = TestCluster::start(&model, config).await?;
        let mut outputs = Vec::new();
        for ask in asks() {
            outputs.push(ask.output_tokens(&cluster).await?);
        }
        answers.push(outputs);
        cluster.stop().await?;
    }
    assert_eq!(answers[0], answers[1]);
    Ok(())
}

async fn output(client: &mut InferenceServiceClient<Channel>, ask: &Ask) -> Result<Vec<u32>, tonic::Status> {
    let mut events = client.generate_stream(ask.stream_request()).await?.into_inner();
    let mut output = Output::default();
    while let Some(event) = events.next().await {
        output.take(event?);
    }
    Ok(output.tokens)
}

/// Writes a registration as somebody does who can write to the store and has no certificate of the cluster.
async fn forge(parts: &Parts, key: Key, value: Vec<u8>) -> Result<(), Error> {
    let key = KeySpace::new(CLUSTER_NAME)?.encode(&key)?;
    parts.store.swap(Swap { key, expect: Expect::Absent, value: Some(value), lease: None }).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_that_points_to_a_stranger_is_not_used() -> Result<(), Error> {
    let (dir, other_dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let (ours, others) = (certs(&dir, CLUSTER_NAME)?, certs(&other_dir, CLUSTER_NAME)?);
    let parts = Parts::with_certs(ServedModel::golden("llama", Some(512))?, ours)?;
    let engine = tiny_engine(1, 1);
    let mut rank = parts.rank("a", 0, engine.clone()).await?;
    rank.serves().await?;

    // A worker of another CA, and one without certificates, that are in the store as if they belonged here.
    let foreign = Security::load(Some(&others.files(Role::Prefill)), CLUSTER_NAME, Role::Prefill)?;
    let (foreign, foreign_engine) = parts.prefill_as(foreign, "foreign", engine.clone()).await?;
    let (plain, plain_engine) = parts.prefill_as(Security::Plaintext, "plain", engine.clone()).await?;
    // A true member that stands in the store as what it is not: the leader of a group as a prefill worker.
    let posing = PrefillRegistration {
        id: WorkerId("posing".to_owned()),
        incarnation: Incarnation(1),
        endpoint: rank.endpoint.clone(),
        layout_hash: String::new(),
    };
    forge(&parts, Key::Prefill(posing.id.clone()), posing.encode()).await?;
    // And a group that nobody with a leader's certificate leads.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let ready = ReadyRecord {
        epoch: Epoch(1),
        endpoint: format!("https://{}", silent.local_addr()?),
        n_ranks: 1,
        dcp_size: 1,
        layout_hash: String::new(),
        max_seq_len: 0,
    };
    forge(&parts, Key::Ready(GroupId("posing".to_owned())), ready.encode()).await?;

    let router = parts.router().await?;
    let prefill = parts.prefill("p0", engine).await?;
    let mut client = router.inference();
    let first = asks().next().ok_or("no request")?;
    assert!(eventually(async || output(&mut router.inference(), &first).await.is_ok()).await, "no answer");
    for ask in asks() {
        assert_eq!(output(&mut client, &ask).await?.len(), 24);
    }
    for (name, engine) in [("foreign", foreign_engine), ("plain", plain_engine)] {
        assert_eq!(engine.info().stats.totals, Default::default(), "{name} was given work");
    }
    assert!(
        router.metric("longreach_router_resumed_streams_total").await? == 0.0,
        "a request met a stranger"
    );
    drop(client);
    for part in [router.part, prefill, foreign, plain, rank.part] {
        part.drain().await?;
    }
    Ok(())
}
