//! etcd that asks for certificates.

use std::{fs, path::Path, time::Duration};

use longreach_cluster::{
    Coordinator, CoordinatorError, EtcdConfig, EtcdCoordinator, EtcdIdentity, EtcdTls, Expect, Swap,
};
use longreach_local::{EtcdCluster, EtcdFiles, EtcdOptions};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// Writes an authority and a certificate for 127.0.0.1 to a folder.
fn issue(folder: &Path) -> EtcdFiles {
    let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "test authority");
    let ca = authority.self_signed(&ca_key).unwrap();
    let issuer = Issuer::from_params(&authority, &ca_key);
    let cert =
        CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    let file = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    EtcdFiles {
        ca: file("ca.pem", ca.pem()),
        cert: file("cert.pem", cert.pem()),
        key: file("key.pem", key.serialize_pem()),
    }
}

fn store(etcd: &EtcdCluster, ca: &Path, identity: Option<&EtcdFiles>) -> EtcdCoordinator {
    let identity = identity.map(|files| EtcdIdentity { cert: files.cert.clone(), key: files.key.clone() });
    let config = EtcdConfig {
        endpoints: etcd.endpoints(),
        tls: Some(EtcdTls { ca: ca.to_owned(), identity, server_name: None }),
        request_timeout: Duration::from_secs(3),
        ..EtcdConfig::default()
    };
    EtcdCoordinator::new(config).unwrap()
}

async fn write(store: &EtcdCoordinator, key: &str) -> Result<(), CoordinatorError> {
    let swap = Swap { key: key.to_owned(), expect: Expect::Absent, value: Some(vec![]), lease: None };
    store.swap(swap).await.map(drop)
}

#[tokio::test]
async fn certificates_are_asked_for_on_both_sides_and_renewed_without_a_restart() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (good, other) = (issue(ours.path()), issue(theirs.path()));
    let options = EtcdOptions { tls: Some(good.clone()), ..crate::brisk(3) };
    let mut etcd = EtcdCluster::start(options).await.unwrap();
    let trusted = store(&etcd, &good.ca, Some(&good));
    write(&trusted, "a").await.unwrap();
    let strangers = [
        ("no certificate", store(&etcd, &good.ca, None)),
        ("a certificate of another authority", store(&etcd, &good.ca, Some(&other))),
        ("a server of another authority", store(&etcd, &other.ca, Some(&good))),
    ];
    for (who, stranger) in &strangers {
        let refused = write(stranger, "b").await;
        assert!(matches!(refused, Err(CoordinatorError::Unavailable(_))), "{who}: {refused:?}");
    }
    assert!(trusted.get("b").await.unwrap().is_none());

    // Another authority for all: who holds the paths goes on with what they hold now.
    issue(ours.path());
    for member in 0..3 {
        etcd.restart(member).await.unwrap();
    }
    etcd.wait_ready().await.unwrap();
    write(&trusted, "c").await.unwrap();
    // Changing members takes certificates too.
    etcd.wipe(2).await.unwrap();
    etcd.wait_ready().await.unwrap();
    assert!(trusted.get("c").await.unwrap().is_some());
}
