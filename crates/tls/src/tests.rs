//! Two ends over loopback, with certificates made for each test.

mod dialing;
mod handshakes;
mod reloading;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use tempfile::TempDir;

use crate::{Identity, Role, TlsFiles};

const CLUSTER: &str = "prod";
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A CA of a test.
struct Ca {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key.
struct Pair {
    cert: String,
    key: String,
}

/// Days from now in which a certificate is valid.
type Days = std::ops::Range<i64>;
const NOW: Days = -1..30;

impl Ca {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    #[allow(clippy::disallowed_methods, reason = "a date, which nothing is measured by")]
    fn issue(&self, names: &[&str], valid: Days) -> Pair {
        let key = KeyPair::generate().unwrap();
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        let at = |days: i64| {
            let now = SystemTime::now();
            let shift = DAY * u32::try_from(days.abs()).unwrap();
            if days < 0 { now - shift } else { now + shift }
        };
        (params.not_before, params.not_after) = (at(valid.start).into(), at(valid.end).into());
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Pair { cert: params.signed_by(&key, &self.issuer).unwrap().pem(), key: key.serialize_pem() }
    }

    fn role(&self, role: Role) -> Pair {
        self.issue(&[&role.dns_name(CLUSTER)], NOW)
    }
}

/// Files of one process.
struct Home {
    dir: TempDir,
    files: TlsFiles,
}

impl Home {
    fn new(cas: &[&Ca], pair: &Pair) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files = TlsFiles { ca: path("ca.pem"), cert: path("tls.pem"), key: path("tls.key") };
        let home = Self { dir, files };
        home.write(cas, pair);
        home
    }

    fn write(&self, cas: &[&Ca], pair: &Pair) {
        write(&self.files, cas, pair);
    }

    fn identity(&self, role: Role) -> Identity {
        // Looks at its files before every connection.
        Identity::load_checked(&self.files, CLUSTER, role, Duration::ZERO).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn write(files: &TlsFiles, cas: &[&Ca], pair: &Pair) {
    let put = |path: &Path, text: &str| fs::write(path, text).unwrap();
    put(&files.ca, &cas.iter().map(|ca| ca.pem.as_str()).collect::<String>());
    put(&files.cert, &pair.cert);
    put(&files.key, &pair.key);
}

fn identity(ca: &Ca, role: Role) -> Identity {
    Home::new(&[ca], &ca.role(role)).identity(role)
}
