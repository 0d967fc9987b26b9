//! Who gets through, and what each side is told: every pair of ends that may meet.

use std::sync::Arc;

use rustls::{
    AlertDescription, ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{CLUSTER, Ca, Home, NOW, Pair, identity};
use crate::{
    HandshakeError, Identity, Role, Security,
    dial::{Connector, accepted},
    listen::{Listener, Protection},
};

/// What HTTP/2 servers and clients say first.
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

enum Server {
    Member(Identity),
    /// Shows any certificate, asks for none.
    Any(Arc<ServerConfig>),
    Plain,
}

enum Client {
    /// Who, and what it wants to reach.
    Member(Identity, Role),
    /// Shows any certificate or none, and wants to reach a decode rank.
    Any(Arc<ClientConfig>),
    Plain,
}

type Told = Result<(), HandshakeError>;

/// Lets both ends meet; what each is told, in the order of the arguments.
async fn meet(server: Server, client: Client) -> (Told, Told) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let serve = async {
        let (mut tcp, from) = listener.accept().await.unwrap();
        match server {
            Server::Member(identity) => {
                let (_, conn) = Protection::Member(identity).welcome(tcp, from).await;
                let mut conn = conn?;
                conn.write_all(SETTINGS).await.map_err(HandshakeError::from_io)?;
                // The client decides when it has seen enough.
                let _end = conn.read(&mut [0; 64]).await;
            }
            Server::Any(config) => {
                let mut conn =
                    TlsAcceptor::from(config).accept(tcp).await.map_err(HandshakeError::from_io)?;
                conn.write_all(SETTINGS).await.map_err(HandshakeError::from_io)?;
                let _end = conn.read(&mut [0; 64]).await;
            }
            Server::Plain => {
                tcp.write_all(SETTINGS).await.unwrap();
                let _end = tcp.read_to_end(&mut Vec::new()).await;
            }
        }
        Ok(())
    };
    let call = async {
        match client {
            Client::Member(identity, role) => {
                let name = identity.server_name(role).unwrap();
                let uri = format!("https://{addr}").parse().unwrap();
                Connector { configs: identity.configs, name }.connect(&uri).await.map(drop)
            }
            Client::Any(config) => {
                let name = ServerName::try_from(Role::Decode.dns_name(CLUSTER)).unwrap();
                let tcp = TcpStream::connect(addr).await.unwrap();
                let stream = TlsConnector::from(config).connect(name, tcp).await;
                accepted(stream.map_err(HandshakeError::from_io)?).await.map(drop)
            }
            Client::Plain => {
                let mut tcp = TcpStream::connect(addr).await.unwrap();
                tcp.write_all(PREFACE).await.unwrap();
                // An alert, or nothing; the end comes in any case.
                let _end = tcp.read_to_end(&mut Vec::new()).await;
                Ok(())
            }
        }
    };
    tokio::join!(serve, call)
}

fn chain(pair: &Pair) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from_pem_slice(pair.cert.as_bytes()).unwrap();
    (vec![cert], PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap())
}

/// A client that believes `ca` and shows `pair`, which no identity would have accepted.
pub(super) fn any_client(ca: &Ca, pair: Option<&Pair>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let client = client.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    Arc::new(match pair.map(chain) {
        Some((chain, key)) => client.with_client_auth_cert(chain, key).unwrap(),
        None => client.with_no_client_auth(),
    })
}

fn any_server(pair: &Pair) -> Server {
    let server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let server = server.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let (chain, key) = chain(pair);
    Server::Any(Arc::new(server.with_single_cert(chain, key).unwrap()))
}

#[tokio::test]
async fn members_of_one_cluster_reach_each_other() {
    let ca = Ca::new("ca");
    for (called, caller) in
        [(Role::Decode, Role::Prefill), (Role::Decode, Role::Router), (Role::Prefill, Role::Router)]
    {
        let server = Server::Member(identity(&ca, called));
        let told = meet(server, Client::Member(identity(&ca, caller), called)).await;
        assert!(matches!(told, (Ok(()), Ok(()))), "{told:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_what_was_dialed_is_left() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let dial = |server| meet(server, Client::Member(identity(&ca, Role::Router), Role::Decode));

    let told = dial(Server::Member(identity(&ca, Role::Prefill))).await.1.unwrap_err();
    let HandshakeError::WrongName { wanted, presented } = &told else { panic!("{told:?}") };
    assert_eq!(wanted, "decode.prod.longreach");
    assert!(format!("{presented:?}").contains("prefill.prod.longreach"), "{presented:?}");

    let of_another_cluster = ca.issue(&["decode.staging.longreach"], NOW);
    let told = dial(any_server(&of_another_cluster)).await.1.unwrap_err();
    assert!(matches!(told, HandshakeError::WrongName { .. }), "{told:?}");
    let told = dial(any_server(&other.role(Role::Decode))).await.1.unwrap_err();
    assert!(matches!(told, HandshakeError::UnknownCa), "{told:?}");
    let told = dial(any_server(&ca.issue(&["decode.prod.longreach"], -9..-2))).await.1.unwrap_err();
    assert!(matches!(told, HandshakeError::Expired), "{told:?}");
    let told = dial(any_server(&ca.issue(&["decode.prod.longreach"], 2..9))).await.1.unwrap_err();
    assert!(matches!(told, HandshakeError::NotYetValid), "{told:?}");
    let told = dial(Server::Plain).await.1.unwrap_err();
    assert!(matches!(told, HandshakeError::NotTls), "{told:?}");
}

#[tokio::test]
async fn a_client_that_is_no_member_is_turned_away_and_told() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let server = || Server::Member(identity(&ca, Role::Decode));
    let names = ["prefill.prod.longreach"];

    let (ours, theirs) = meet(server(), Client::Any(any_client(&ca, None))).await;
    assert!(matches!(ours, Err(HandshakeError::NoCertificate)), "{ours:?}");
    assert!(
        matches!(theirs, Err(HandshakeError::Refused(AlertDescription::CertificateRequired))),
        "{theirs:?}"
    );

    let (ours, theirs) = meet(server(), Client::Any(any_client(&ca, Some(&other.issue(&names, NOW))))).await;
    assert!(matches!(ours, Err(HandshakeError::UnknownCa)), "{ours:?}");
    assert!(matches!(theirs, Err(HandshakeError::Refused(AlertDescription::UnknownCA))), "{theirs:?}");

    let (ours, theirs) = meet(server(), Client::Any(any_client(&ca, Some(&ca.issue(&names, -9..-2))))).await;
    assert!(matches!(ours, Err(HandshakeError::Expired)), "{ours:?}");
    assert!(
        matches!(theirs, Err(HandshakeError::Refused(AlertDescription::CertificateExpired))),
        "{theirs:?}"
    );

    let (ours, theirs) = meet(server(), Client::Plain).await;
    assert!(matches!(ours, Err(HandshakeError::NotTls)), "{ours:?}");
    assert!(theirs.is_ok(), "the connection is closed, and the client is not left waiting");
}

#[tokio::test]
async fn a_certificate_that_peers_would_refuse_is_refused_at_the_start() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let refused = |cas: &[&Ca], pair: &Pair| {
        let home = Home::new(cas, pair);
        Identity::load(&home.files, CLUSTER, Role::Prefill).unwrap_err()
    };
    let own = |error: &crate::TlsError| match error {
        crate::TlsError::OwnCertificate { source, .. } => format!("{source:?}"),
        error => panic!("{error}"),
    };
    assert!(own(&refused(&[&ca], &ca.role(Role::Decode))).starts_with("WrongName"));
    assert_eq!(own(&refused(&[&ca], &other.role(Role::Prefill))), "UnknownCa");
    assert_eq!(own(&refused(&[&ca], &ca.issue(&["prefill.prod.longreach"], -9..-2))), "Expired");
    let (one, another) = (ca.role(Role::Prefill), ca.role(Role::Prefill));
    let mixed = refused(&[&ca], &Pair { cert: one.cert, key: another.key });
    assert!(matches!(mixed, crate::TlsError::KeyMismatch { .. }), "{mixed}");
    let empty = refused(&[], &ca.role(Role::Prefill));
    assert!(matches!(empty, crate::TlsError::Pem { what: "certificate", .. }), "{empty}");

    let home = Home::new(&[&ca], &ca.role(Role::Prefill));
    // The last would share its names in certificates with another cluster.
    for name in ["no/name", "Prod"] {
        let unnamed = Identity::load(&home.files, name, Role::Prefill).unwrap_err();
        assert!(matches!(unnamed, crate::TlsError::ClusterName { .. }), "{unnamed}");
    }
    std::fs::remove_file(&home.files.key).unwrap();
    let missing = Identity::load(&home.files, CLUSTER, Role::Prefill).unwrap_err();
    assert!(matches!(&missing, crate::TlsError::Read { path, .. } if *path == home.files.key), "{missing}");
}

#[tokio::test]
async fn silent_clients_keep_nobody_out() {
    let ca = Ca::new("ca");
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = socket.local_addr().unwrap();
    let mut listener = Listener::for_members(socket, &Security::Mutual(identity(&ca, Role::Decode)));
    let caller = identity(&ca, Role::Router);
    let name = caller.server_name(Role::Decode).unwrap();
    let uri = format!("https://{addr}").parse().unwrap();
    let call = async {
        // More than there may be handshakes at a time: the oldest make room.
        let mut silent = Vec::new();
        for _ in 0..300 {
            silent.push(TcpStream::connect(addr).await.unwrap());
        }
        let called = Connector { configs: caller.configs, name }.connect(&uri).await;
        called.map(|conn| (conn, silent))
    };
    let serve = async {
        let mut conn = listener.accept().await;
        conn.write_all(SETTINGS).await.unwrap();
        conn
    };
    let (called, conn) = tokio::join!(call, serve);
    let _open_until_here = called.unwrap();
    let names = conn.peer().names.clone().unwrap();
    assert_eq!(*names, ["router.prod.longreach".to_owned()]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_says_nothing_is_given_up() {
    let ca = Ca::new("ca");
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _silent = TcpStream::connect(socket.local_addr().unwrap()).await.unwrap();
    let (tcp, addr) = socket.accept().await.unwrap();
    let (_, conn) = Protection::Member(identity(&ca, Role::Decode)).welcome(tcp, addr).await;
    assert!(matches!(conn, Err(HandshakeError::Timeout(_))));
}
