//! What can be wrong with files, and with the process at the other end.

use std::{io, path::PathBuf, time::Duration};

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible, pki_types::pem};
use thiserror::Error;

/// Why a certificate, key or CA cannot be used. An operator has to change a file or a setting.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file does not hold what it should, in PEM form.
    #[error("{} holds no {what} in PEM form: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What should be in it.
        what: &'static str,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// A certificate or key that is well packed and useless.
    #[error("{} cannot be used: {source}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Error,
    },
    /// The key is another certificate's.
    #[error("the key in {} does not belong to the certificate in {}", key.display(), cert.display())]
    KeyMismatch {
        /// The file of the certificate.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// Peers with the same CA would refuse this certificate.
    #[error("the certificate in {} is not good for this process: {source}", path.display())]
    OwnCertificate {
        /// The file.
        path: PathBuf,
        /// What they would say.
        source: HandshakeError,
    },
    /// The cluster's name has no place in a certificate.
    #[error(
        "cluster name {name:?} cannot be part of a DNS name, which certificates need; use a-z 0-9 - and ."
    )]
    ClusterName {
        /// The name.
        name: String,
    },
}

/// Why a connection was not made.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// The other side sent something else than TLS.
    #[error("the other side does not speak TLS; set it up with certificates, or this process without")]
    NotTls,
    /// Its certificate was not signed by a CA of the configured file.
    #[error("its certificate is not from a CA that this process trusts")]
    UnknownCa,
    /// The time of its certificate is over, or of a CA above it.
    #[error("its certificate has expired")]
    Expired,
    /// The time of its certificate has not begun, or a clock is wrong.
    #[error("its certificate is not valid yet; are the clocks right?")]
    NotYetValid,
    /// It is something else than what was dialed.
    #[error("its certificate is for {presented:?}, and {wanted} was wanted")]
    WrongName {
        /// What was dialed.
        wanted: String,
        /// The names of its certificate.
        presented: Vec<String>,
    },
    /// The client has no certificate.
    #[error("it presented no certificate")]
    NoCertificate,
    /// The other side does not accept this process's certificate; its log says why.
    #[error("the other side refused this process: {0:?}")]
    Refused(AlertDescription),
    /// It hung up in the middle.
    #[error("the connection ended during the handshake")]
    Closed,
    /// It did not finish in time.
    #[error("the handshake was not done within {0:?}")]
    Timeout(Duration),
    /// It was not done when others wanted its place.
    #[error("the handshake was given up for newer ones")]
    Displaced,
    /// Another disagreement about TLS.
    #[error("TLS: {0}")]
    Tls(Error),
    /// The network.
    #[error(transparent)]
    Io(io::Error),
}

impl HandshakeError {
    pub(crate) fn from_io(error: io::Error) -> Self {
        if error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<Error>) {
            let inner = error.into_inner().and_then(|inner| inner.downcast().ok());
            return inner.map_or(Self::Closed, |error: Box<Error>| Self::from_tls(*error));
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }

    pub(crate) fn from_tls(error: Error) -> Self {
        match error {
            Error::InvalidMessage(
                InvalidMessage::InvalidContentType
                | InvalidMessage::UnknownProtocolVersion
                | InvalidMessage::MessageTooLarge
                | InvalidMessage::InvalidEmptyPayload,
            ) => Self::NotTls,
            Error::InvalidCertificate(error) => Self::from_certificate(error),
            Error::NoCertificatesPresented
            | Error::PeerIncompatible(PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon) => {
                Self::NoCertificate
            }
            Error::AlertReceived(alert) => Self::Refused(alert),
            error => Self::Tls(error),
        }
    }

    fn from_certificate(error: CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownCa,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
            CertificateError::NotValidForNameContext { expected, presented } => {
                Self::WrongName { wanted: expected.to_str().into_owned(), presented }
            }
            error => Self::Tls(Error::InvalidCertificate(error)),
        }
    }
}
