//! What configuration and address together may do on the wire.

use std::net::SocketAddr;

use proptest::prelude::*;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, transport::Server};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{Ca, Home, NOW, Pair, handshakes::any_client, identity};
use crate::{
    Access, EndpointError, FaceFiles, FaceTls, HandshakeError, Listener, Role, Security, dial::accepted,
    handshake_error,
};

const FOR_ROUTERS: Access = Access(&[("grpc.health.v1.Health", &[Role::Router])]);

/// Serves health checks with `security` while `calls` run.
async fn beside<T>(security: &Security, access: Access, calls: impl AsyncFnOnce(SocketAddr) -> T) -> T {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = socket.local_addr().unwrap();
    let incoming = Listener::for_members(socket, security).into_stream();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(access.layer(security)).add_service(health);
    let close = CancellationToken::new();
    let end = close.clone().cancelled_owned();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { server.serve_with_incoming_shutdown(incoming, end).await });
    let result = calls(addr).await;
    close.cancel();
    tasks.join_next().await.unwrap().unwrap().unwrap();
    result
}

async fn check(caller: &Security, endpoint: &str) -> Result<(), Status> {
    let channel = caller.channel(endpoint, Role::Decode, |endpoint| endpoint).unwrap();
    HealthClient::new(channel).check(HealthCheckRequest::default()).await.map(drop)
}

#[tokio::test]
async fn a_service_is_called_by_its_roles_only() {
    let ca = Ca::new("ca");
    let rank = Security::Mutual(identity(&ca, Role::Decode));
    beside(&rank, FOR_ROUTERS, async |addr| {
        let endpoint = format!("https://{addr}");
        check(&Security::Mutual(identity(&ca, Role::Router)), &endpoint).await.unwrap();
        let refused = check(&Security::Mutual(identity(&ca, Role::Prefill)), &endpoint).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert_eq!(
            refused.message(),
            "grpc.health.v1.Health is for router.prod.longreach; the caller is prefill.prod.longreach"
        );
    })
    .await;
    // What the table does not know, nobody may call.
    beside(&rank, Access(&[]), async |addr| {
        let refused = check(&Security::Mutual(identity(&ca, Role::Router)), &format!("https://{addr}")).await;
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    })
    .await;
}

#[tokio::test]
async fn a_failed_handshake_is_found_in_the_status_of_the_call() {
    let ca = Ca::new("ca");
    let router = Security::Mutual(identity(&ca, Role::Router));
    let posing = Security::Mutual(identity(&ca, Role::Prefill));
    let error = beside(&posing, FOR_ROUTERS, async |addr| check(&router, &format!("https://{addr}")).await);
    let error = error.await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(matches!(handshake_error(&error), Some(HandshakeError::WrongName { .. })), "{error:?}");

    let plain = Security::Plaintext;
    let error = beside(&plain, FOR_ROUTERS, async |addr| check(&router, &format!("https://{addr}")).await);
    let error = error.await.unwrap_err();
    assert!(matches!(handshake_error(&error), Some(HandshakeError::NotTls)), "{error:?}");

    // The other way round it is the client that knows nothing of TLS; it gets an error and no answer.
    let rank = Security::Mutual(identity(&ca, Role::Decode));
    let error = beside(&rank, FOR_ROUTERS, async |addr| check(&plain, &format!("http://{addr}")).await);
    let error = error.await.unwrap_err();
    assert!(matches!(error.code(), Code::Unavailable | Code::Unknown | Code::Internal), "{error:?}");
}

#[test]
fn an_address_of_the_other_kind_is_an_error_that_says_so() {
    let ca = Ca::new("ca");
    let (plain, mutual) = (Security::Plaintext, Security::Mutual(identity(&ca, Role::Router)));
    assert!(matches!(plain.check("https://h:1"), Err(EndpointError::NeedsTls { .. })));
    assert!(matches!(mutual.check("http://h:1"), Err(EndpointError::Unprotected { .. })));
    assert!(matches!(mutual.check("h:1"), Err(EndpointError::Form { scheme: "https", .. })));
    assert!(plain.check("http://[::1]:1").is_ok() && mutual.check("https://h:1").is_ok());
}

proptest! {
    /// With certificates nothing but an https address is dialed, and without them nothing but an http one.
    #[test]
    fn no_address_leads_past_the_configuration(scheme in "(http|https|HTTP|HTTPS|ftp|)", rest in "(://|:|//)?[a-z0-9@:/.\\[\\]-]{0,20}") {
        let endpoint = scheme + &rest;
        let mutual = MUTUAL.with(Security::clone);
        if mutual.check(&endpoint).is_ok() {
            prop_assert!(endpoint.to_lowercase().starts_with("https://"));
        }
        if Security::Plaintext.check(&endpoint).is_ok() {
            prop_assert!(endpoint.to_lowercase().starts_with("http://"));
        }
    }
}

thread_local! {
    static MUTUAL: Security = Security::Mutual(identity(&Ca::new("ca"), Role::Router));
}

/// The first bytes that anybody on the way can read.
async fn first_bytes(caller: Security, endpoint: impl Fn(SocketAddr) -> String) -> [u8; 3] {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = endpoint(socket.local_addr().unwrap());
    let seen = async {
        let (mut tcp, _) = socket.accept().await.unwrap();
        let mut bytes = [0; 3];
        tcp.read_exact(&mut bytes).await.unwrap();
        bytes
    };
    tokio::join!(seen, async move { check(&caller, &endpoint).await.unwrap_err() }).0
}

#[tokio::test]
async fn with_certificates_the_first_byte_is_that_of_a_handshake() {
    let mutual = Security::Mutual(identity(&Ca::new("ca"), Role::Router));
    // A handshake record of TLS.
    assert_eq!(first_bytes(mutual, |addr| format!("https://{addr}")).await[..2], [22, 3]);
    assert_eq!(first_bytes(Security::Plaintext, |addr| format!("http://{addr}")).await, *b"PRI");
}

/// A client of the public face, with a certificate if `pair` is one.
async fn visit(addr: SocketAddr, ca: &Ca, pair: Option<&Pair>) -> Result<(), HandshakeError> {
    let tcp = TcpStream::connect(addr).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(any_client(ca, pair)).connect(name, tcp).await;
    accepted(stream.map_err(HandshakeError::from_io)?).await.map(drop)
}

#[tokio::test]
async fn a_public_face_may_ask_for_certificates_and_need_not() {
    let ca = Ca::new("ca");
    let home = Home::new(&[&ca], &ca.issue(&["localhost"], NOW));
    let client = ca.issue(&["somebody"], NOW);
    for (client_ca, pair, is_let_in) in [
        (None, None, true),
        (None, Some(&client), true),
        (Some(home.files.ca.clone()), None, false),
        (Some(home.files.ca.clone()), Some(&client), true),
    ] {
        let files = FaceFiles { cert: home.files.cert.clone(), key: home.files.key.clone(), client_ca };
        let pem = files.paths().iter().map(|path| std::fs::read(path).unwrap()).collect::<Vec<_>>();
        let server = files.server(&pem).unwrap();
        // A session that is taken up again would not show its certificate again, nor when that ends.
        assert_eq!(server.send_tls13_tickets == 0, files.client_ca.is_some());
        assert_eq!(server.session_storage.can_cache(), files.client_ca.is_none());
        let face = FaceTls::load(&files).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = socket.local_addr().unwrap();
        let mut listener = Listener::for_clients(socket, Some(&face));
        let serve = async {
            // Until the visitor is gone.
            loop {
                listener.accept().await.write_all(b"welcome").await.unwrap();
            }
        };
        let visited = tokio::select! {
            visited = visit(addr, &ca, pair) => visited,
            () = serve => unreachable!(),
        };
        assert_eq!(visited.is_ok(), is_let_in, "{visited:?}");
    }
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = socket.local_addr().unwrap();
    let mut plain = Listener::for_clients(socket, None);
    let (conn, _tcp) = tokio::join!(plain.accept(), TcpStream::connect(addr));
    assert!(conn.peer().names.is_none());
}
