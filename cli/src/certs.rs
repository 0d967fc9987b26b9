//! A development CA and a certificate for every role: `longreach certs`.
//!
//! It is for machines of developers and for tests. Its CA's key lies beside the certificates, nobody revokes anything,
//! and all keys are made in one place and must be carried to the others. In production a certificate authority of the
//! organisation signs for the same names; the names are all that the processes look at.

use std::{
    fmt::{self, Display, Formatter},
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use longreach_tls::{Role, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Clocks differ: certificates are good from a little before they were made.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(24 * 3600);

/// What is to be made.
#[derive(Clone, Debug)]
pub struct CertRequest {
    /// The directory of the files.
    pub out: PathBuf,
    /// Names and addresses of the router's hosts, in its certificate for clients; localhost is added.
    pub names: Vec<String>,
    /// The cluster.
    pub cluster: String,
    /// How long the certificates are good.
    pub days: u16,
    /// Whether files that are there are replaced.
    pub force: bool,
}

/// What was made. Its text says how it is used.
#[derive(Clone, Debug)]
pub struct MadeCerts {
    out: PathBuf,
    request: CertRequest,
}

/// Why no certificates were made.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    /// Files would be lost.
    #[error("{} is there already; --force replaces all files of {}", path.display(), out.display())]
    Exists {
        /// The first of them.
        path: PathBuf,
        /// The directory.
        out: PathBuf,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A name that no certificate can have.
    #[error("cannot make a certificate for {names}: {source}")]
    Issue {
        /// The names.
        names: String,
        /// Why.
        source: rcgen::Error,
    },
    /// What was made is not accepted by those who are to use it.
    #[error(transparent)]
    Tls(#[from] longreach_tls::TlsError),
}

struct Pem {
    cert: String,
    key: String,
}

impl CertRequest {
    /// Makes CA, certificates and keys, and writes them.
    pub fn write(self) -> Result<MadeCerts, CertsError> {
        fs::create_dir_all(&self.out).map_err(|source| self.write_error(&self.out, source))?;
        // Certificates of different CAs beside each other would be worse than none: nobody mixes them without --force.
        if let Some(path) = self.paths().into_iter().find(|path| path.exists() && !self.force) {
            return Err(CertsError::Exists { path, out: self.out });
        }
        let (ca, issuer) = self.authority()?;
        self.put("ca", &ca)?;
        for role in Role::ALL {
            let name = role.dns_name(&self.cluster);
            self.put(&role.to_string(), &self.issue(&[name], &issuer)?)?;
        }
        let mut names = self.names.clone();
        names.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
        self.put("public", &self.issue(&names, &issuer)?)?;
        for role in Role::ALL {
            longreach_tls::Identity::load(&self.files(role), &self.cluster, role)?;
        }
        Ok(MadeCerts { out: self.out.clone(), request: self })
    }

    /// The files of a process that is `role`.
    pub fn files(&self, role: Role) -> TlsFiles {
        TlsFiles {
            ca: self.out.join("ca.pem"),
            cert: self.out.join(format!("{role}.pem")),
            key: self.out.join(format!("{role}.key")),
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        let roles = Role::ALL.map(|role| role.to_string());
        let stems = roles.iter().map(String::as_str).chain(["ca", "public"]);
        stems.flat_map(|stem| ["pem", "key"].map(|end| self.out.join(format!("{stem}.{end}")))).collect()
    }

    fn authority(&self) -> Result<(Pem, Issuer<'static, KeyPair>), CertsError> {
        let name = format!("Longreach development CA of cluster {}", self.cluster);
        let failed = |source| CertsError::Issue { names: name.clone(), source };
        let mut params = self.params(&[]).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, &name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(failed)?;
        let cert = params.self_signed(&key).map_err(failed)?;
        let pem = Pem { cert: cert.pem(), key: key.serialize_pem() };
        Ok((pem, Issuer::new(params, key)))
    }

    fn issue(&self, names: &[String], issuer: &Issuer<'_, KeyPair>) -> Result<Pem, CertsError> {
        let failed = |source| CertsError::Issue { names: names.join(", "), source };
        let mut params = self.params(names).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, names.first().map_or("", String::as_str));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().map_err(failed)?;
        let cert = params.signed_by(&key, issuer).map_err(failed)?;
        Ok(Pem { cert: cert.pem(), key: key.serialize_pem() })
    }

    #[allow(clippy::disallowed_methods, reason = "a date, which nothing is measured by")]
    fn params(&self, names: &[String]) -> Result<CertificateParams, rcgen::Error> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        let now = SystemTime::now();
        params.not_before = (now - CLOCK_SKEW).into();
        params.not_after = (now + DAY * u32::from(self.days)).into();
        Ok(params)
    }

    fn put(&self, stem: &str, pem: &Pem) -> Result<(), CertsError> {
        for (end, text, mode) in [("pem", &pem.cert, 0o644), ("key", &pem.key, 0o600)] {
            let path = self.out.join(format!("{stem}.{end}"));
            create(&path, text, mode).map_err(|source| self.write_error(&path, source))?;
        }
        Ok(())
    }

    fn write_error(&self, path: &Path, source: io::Error) -> CertsError {
        CertsError::Write { path: path.to_owned(), source }
    }
}

/// Writes a new file that has its mode from the first moment: an old one is removed and not written over, because it
/// may be open to others.
fn create(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _no_modes = mode;
    options.open(path)?.write_all(text.as_bytes())
}

impl MadeCerts {
    /// The files of a process that is `role`.
    pub fn files(&self, role: Role) -> TlsFiles {
        self.request.files(role)
    }
}

impl Display for MadeCerts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { out, request } = self;
        writeln!(
            f,
            "A CA for development and certificates of cluster {:?}, good for {} days, are in {}.\n\
             Its key lies there too: whoever can read it can be any role. Do not use it in production.\n",
            request.cluster,
            request.days,
            out.display()
        )?;
        for role in Role::ALL {
            let TlsFiles { ca, cert, key } = request.files(role);
            writeln!(f, "# configuration of {role} processes")?;
            writeln!(f, "[tls]\nca = {ca:?}\ncert = {cert:?}\nkey = {key:?}\n")?;
        }
        let (cert, key) = (out.join("public.pem"), out.join("public.key"));
        writeln!(f, "# for a router that clients reach with TLS; they need {:?}", out.join("ca.pem"))?;
        write!(f, "[face_tls]\ncert = {cert:?}\nkey = {key:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(out: &Path) -> CertRequest {
        let names = vec!["llm.example.org".to_owned(), "10.1.2.3".to_owned()];
        CertRequest { out: out.to_owned(), names, cluster: "lab".to_owned(), days: 2, force: false }
    }

    #[test]
    fn every_role_gets_a_certificate_that_it_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let made = request(&dir.path().join("new")).write().unwrap();
        for role in Role::ALL {
            longreach_tls::Identity::load(&made.files(role), "lab", role).unwrap();
            assert!(longreach_tls::Identity::load(&made.files(role), "other", role).is_err());
        }
        let cert = dir.path().join("new/public.pem");
        let face = longreach_tls::FaceFiles { key: cert.with_extension("key"), cert, client_ca: None };
        longreach_tls::FaceTls::load(&face).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_their_owners_alone_even_where_an_open_file_was() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.key"), "").unwrap();
        CertRequest { force: true, ..request(dir.path()) }.write().unwrap();
        let mut n_keys = 0;
        for path in request(dir.path()).paths().iter().filter(|path| path.extension() == Some("key".as_ref()))
        {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600, "{path:?}");
            n_keys += 1;
        }
        assert_eq!(n_keys, 5);
    }

    #[test]
    fn nothing_is_replaced_unless_it_is_said() {
        let dir = tempfile::tempdir().unwrap();
        request(dir.path()).write().unwrap();
        let ca = fs::read(dir.path().join("ca.pem")).unwrap();
        fs::remove_file(dir.path().join("ca.key")).unwrap();
        let refused = request(dir.path()).write().unwrap_err();
        assert!(matches!(refused, CertsError::Exists { .. }), "{refused}");
        assert_eq!(fs::read(dir.path().join("ca.pem")).unwrap(), ca);
        assert!(!dir.path().join("ca.key").exists());
        CertRequest { force: true, ..request(dir.path()) }.write().unwrap();
        assert_ne!(fs::read(dir.path().join("ca.pem")).unwrap(), ca);
    }

    #[test]
    fn what_is_printed_is_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let made = request(dir.path()).write().unwrap();
        let text = made.to_string();
        assert!(text.contains("Do not use it in production"));
        for role in Role::ALL {
            let TlsFiles { ca, cert, key } = made.files(role);
            assert!(text.contains(&format!("[tls]\nca = {ca:?}\ncert = {cert:?}\nkey = {key:?}\n")));
        }
    }
}
