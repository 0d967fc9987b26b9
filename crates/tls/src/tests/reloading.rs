//! Certificates that change while connections live.

use std::{
    fs,
    os::unix::fs::symlink,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::{ServingStatus, pb::health_client::HealthClient, server::HealthReporter};

use super::{CLUSTER, Ca, Home, Pair, identity, write};
use crate::{
    ANY_ROLE, Access, HandshakeError, Identity, Listener, Role, Security, TlsFiles, dial::Connector,
    reload::Reloading,
};

const ACCESS: Access = Access(&[("grpc.health.v1.Health", ANY_ROLE)]);

/// A decode rank that answers health checks.
struct Rank {
    endpoint: String,
    reporter: HealthReporter,
    close: CancellationToken,
    tasks: JoinSet<()>,
}

impl Rank {
    async fn start(identity: Identity) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let security = Security::Mutual(identity);
        let endpoint = format!("{}://{}", security.scheme(), socket.local_addr().unwrap());
        let incoming = Listener::for_members(socket, &security).into_stream();
        let (reporter, health) = tonic_health::server::health_reporter();
        let close = CancellationToken::new();
        let end = close.clone().cancelled_owned();
        let server = Server::builder().layer(ACCESS.layer(&security)).add_service(health);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { server.serve_with_incoming_shutdown(incoming, end).await.unwrap() });
        Self { endpoint, reporter, close, tasks }
    }

    fn client(&self, identity: &Identity) -> HealthClient<Channel> {
        let security = Security::Mutual(identity.clone());
        HealthClient::new(
            security.channel(&self.endpoint, Role::Decode, |endpoint: Endpoint| endpoint).unwrap(),
        )
    }

    /// The certificate that a new connection is shown.
    async fn shown_to(&self, identity: &Identity) -> Result<CertificateDer<'static>, HandshakeError> {
        let name = identity.server_name(Role::Decode).unwrap();
        let connector = Connector { configs: Arc::clone(&identity.configs), name };
        let stream = connector.connect(&self.endpoint.parse().unwrap()).await?;
        Ok(stream.get_ref().1.peer_certificates().unwrap()[0].clone())
    }

    async fn end(mut self) {
        self.close.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }
}

fn der(pair: &Pair) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pair.cert.as_bytes()).unwrap()
}

#[tokio::test]
async fn connections_live_on_and_new_ones_use_the_new_certificate() {
    let ca = Ca::new("ca");
    let (first, second) = (ca.role(Role::Decode), ca.role(Role::Decode));
    let home = Home::new(&[&ca], &first);
    let rank = Rank::start(home.identity(Role::Decode)).await;
    let router = identity(&ca, Role::Router);
    assert_eq!(rank.shown_to(&router).await.unwrap(), der(&first));

    // A stream that is open all the time.
    let mut client = rank.client(&router);
    let mut watch = client.watch(tonic_health::pb::HealthCheckRequest::default()).await.unwrap().into_inner();
    watch.next().await.unwrap().unwrap();

    home.write(&[&ca], &second);
    assert_eq!(rank.shown_to(&router).await.unwrap(), der(&second));

    // Files that are broken in any way change nothing.
    let faults: [&dyn Fn(); 4] = [
        &|| fs::write(&home.files.key, &first.key).unwrap(),
        &|| fs::write(&home.files.cert, &second.cert[..second.cert.len() / 2]).unwrap(),
        &|| fs::write(&home.files.ca, "").unwrap(),
        &|| fs::remove_file(&home.files.cert).unwrap(),
    ];
    for fault in faults {
        fault();
        assert_eq!(rank.shown_to(&router).await.unwrap(), der(&second));
    }
    let third = ca.role(Role::Decode);
    home.write(&[&ca], &third);
    assert_eq!(rank.shown_to(&router).await.unwrap(), der(&third));

    // The old connection has noticed nothing.
    rank.reporter.set_service_status("", ServingStatus::NotServing).await;
    assert_eq!(watch.next().await.unwrap().unwrap().status, ServingStatus::NotServing as i32);
    drop((watch, client));
    rank.end().await;
}

#[tokio::test]
async fn a_ca_is_replaced_while_everybody_reaches_everybody() {
    let (old, new) = (Ca::new("old"), Ca::new("new"));
    let (served, called) =
        (Home::new(&[&old], &old.role(Role::Decode)), Home::new(&[&old], &old.role(Role::Router)));
    let rank = Rank::start(served.identity(Role::Decode)).await;
    let router = called.identity(Role::Router);
    let stays = identity(&old, Role::Router);
    // First both CAs are believed everywhere, then certificates are replaced in any order, then the old CA goes.
    let steps: [&dyn Fn(); 6] = [
        &|| served.write(&[&old, &new], &old.role(Role::Decode)),
        &|| called.write(&[&new, &old], &old.role(Role::Router)),
        &|| called.write(&[&new, &old], &new.role(Role::Router)),
        &|| served.write(&[&old, &new], &new.role(Role::Decode)),
        &|| called.write(&[&new], &new.role(Role::Router)),
        &|| served.write(&[&new], &new.role(Role::Decode)),
    ];
    for (idx, step) in steps.iter().enumerate() {
        step();
        rank.shown_to(&router).await.unwrap_or_else(|error| panic!("step {idx}: {error}"));
    }
    let left_behind = rank.shown_to(&stays).await.unwrap_err();
    assert!(matches!(left_behind, HandshakeError::UnknownCa), "{left_behind:?}");
    rank.end().await;
}

#[tokio::test]
async fn a_mounted_secret_that_is_swapped_by_its_link_is_noticed() {
    let ca = Ca::new("ca");
    let (first, second) = (ca.role(Role::Decode), ca.role(Role::Decode));
    let home = Home::new(&[&ca], &first);
    let version = |name: &str, pair: &Pair| {
        let dir = home.path(name);
        fs::create_dir(&dir).unwrap();
        write(
            &TlsFiles { ca: dir.join("ca.pem"), cert: dir.join("tls.pem"), key: dir.join("tls.key") },
            &[&ca],
            pair,
        );
    };
    version("v1", &first);
    version("v2", &second);
    // As a kubelet lays it out: the files are links into a link to the version.
    symlink("v1", home.path("data")).unwrap();
    for path in [&home.files.ca, &home.files.cert, &home.files.key] {
        fs::remove_file(path).unwrap();
        symlink(home.path("data").join(path.file_name().unwrap()), path).unwrap();
    }
    let rank = Rank::start(home.identity(Role::Decode)).await;
    let router = identity(&ca, Role::Router);
    assert_eq!(rank.shown_to(&router).await.unwrap(), der(&first));
    symlink("v2", home.path("data.new")).unwrap();
    fs::rename(home.path("data.new"), home.path("data")).unwrap();
    assert_eq!(rank.shown_to(&router).await.unwrap(), der(&second));
    rank.end().await;
}

#[tokio::test(start_paused = true)]
async fn files_are_looked_at_no_more_often_than_configured() {
    let home = Home::new(&[], &Pair { cert: "a".into(), key: String::new() });
    let n_parsed = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&n_parsed);
    let interval = Duration::from_secs(10);
    let text = Reloading::load(vec![home.files.cert.clone()], interval, move |contents| {
        counts.fetch_add(1, Ordering::Relaxed);
        Ok(contents[0].clone())
    });
    let text = text.unwrap();
    fs::write(&home.files.cert, "b").unwrap();
    tokio::time::advance(interval - Duration::from_millis(1)).await;
    assert_eq!(*text.current().await, b"a");
    tokio::time::advance(Duration::from_millis(1)).await;
    for _ in 0..5 {
        assert_eq!(*text.current().await, b"b");
    }
    tokio::time::advance(interval).await;
    assert_eq!(*text.current().await, b"b");
    assert_eq!(n_parsed.load(Ordering::Relaxed), 2, "contents that are the same are not parsed again");
}

#[tokio::test]
async fn a_changed_certificate_of_another_role_is_not_taken() {
    let ca = Ca::new("ca");
    let first = ca.role(Role::Decode);
    let home = Home::new(&[&ca], &first);
    let rank = Rank::start(home.identity(Role::Decode)).await;
    home.write(&[&ca], &ca.role(Role::Prefill));
    assert_eq!(rank.shown_to(&identity(&ca, Role::Router)).await.unwrap(), der(&first));
    assert!(Identity::load(&home.files, CLUSTER, Role::Decode).is_err());
    rank.end().await;
}

/// A volume that hangs takes one thread, however often it is time to look at it again, and nobody waits for it twice.
#[tokio::test]
async fn files_that_hang_are_waited_for_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cert.pem");
    fs::write(&path, "first").unwrap();
    let files = Reloading::load(vec![path.clone()], Duration::ZERO, |pem| Ok(pem.to_vec())).unwrap();
    fs::remove_file(&path).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let (mut hanging, first) = (JoinSet::new(), Arc::clone(&files));
    hanging.spawn(async move { first.current().await });
    let others = async {
        // Whoever comes before the first has begun is the one that hangs.
        while files.is_idle() {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            assert_eq!(*files.current().await, [b"first".to_vec()]);
        }
    };
    tokio::time::timeout(Duration::from_secs(20), others).await.unwrap();
    fs::write(&path, "second").unwrap();
    assert_eq!(*hanging.join_next().await.unwrap().unwrap(), [b"second".to_vec()]);
}
