//! What two ranks say to each other before they are a group: 88 bytes, little endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic |
//! | 4..6 | version |
//! | 6 | kind |
//! | 8..12 | rank |
//! | 12..16 | ranks of the group |
//! | 16..24 | epoch |
//! | 24..56 | challenge: random bytes of this connection |
//! | 56..88 | proof of the secret; zeros where it is too early for one |
//!
//! The secret itself is never sent. A proof is an HMAC-SHA256 under it over everything that both sides said, their
//! challenges included, so a recorded proof fits no other connection; and it begins with the side that makes it, so
//! none can be sent back to its maker.

use std::{
    io::{self, Read},
    net::{SocketAddr, TcpStream},
    time::Instant,
};

use hmac::{Hmac, KeyInit, Mac};
use longreach_types::GroupSecret;
use sha2::Sha256;

use super::{
    TcpConfig,
    handshake::{CANCEL_PERIOD, ConnectCancel, ConnectError, Lane},
};

/// Version of the greeting and of all frames after it.
const VERSION: u16 = 2;
const MAGIC: u32 = 0x4f4c_524c;
pub(super) const GREETING_BYTES: usize = 88;
/// What is proved: all but the proof.
const SAID_BYTES: usize = 56;

/// A secret for the next life of a group, from the system's source of randomness.
pub fn random_secret() -> io::Result<GroupSecret> {
    random().map(GroupSecret::new)
}

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Data = 1,
    Control = 2,
    Welcome = 3,
    Refusal = 4,
    Confirm = 5,
}

/// Who makes a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Side {
    Dialer = 1,
    Listener = 2,
}

impl Lane {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Data => Kind::Data,
            Self::Control => Kind::Control,
        }
    }
}

/// Who speaks. Fields are compared, never trusted, so every byte string is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    magic: u32,
    version: u16,
    pub(super) kind: u8,
    pub(super) rank: u32,
    n_ranks: u32,
    epoch: u64,
    challenge: [u8; 32],
    pub(super) proof: [u8; 32],
}

/// Why the process at the other end is not the wanted rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// A field of its greeting differs.
    Field { field: &'static str, ours: u64, theirs: u64 },
    /// All fields fit, but it does not know the secret.
    Proof,
}

impl Unfit {
    /// Whether the peer may come to fit: it is still in an earlier life, or its address still belongs to another.
    pub(super) fn may_pass(self) -> bool {
        match self {
            Self::Field { field: "epoch", ours, theirs } => theirs < ours,
            Self::Field { field, .. } => field == "rank" || field == "kind",
            Self::Proof => true,
        }
    }

    pub(super) fn into_error(self, peer: usize, addr: SocketAddr) -> ConnectError {
        match self {
            Self::Field { field, ours, theirs } => ConnectError::Refused { peer, addr, field, ours, theirs },
            Self::Proof => ConnectError::Unproven { peer, addr },
        }
    }
}

impl Greeting {
    /// What this rank says first on a connection, with a challenge of its own and no proof yet.
    pub(super) fn new(config: &TcpConfig, kind: Kind) -> io::Result<Self> {
        let challenge = random()?;
        Ok(Self { challenge, ..Self::expected(config, config.rank, kind) })
    }

    /// What a rank of this group would say, but for challenge and proof.
    pub(super) fn expected(config: &TcpConfig, rank: usize, kind: Kind) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            kind: kind as u8,
            rank: rank as u32,
            n_ranks: config.addrs.len() as u32,
            epoch: config.epoch,
            challenge: [0; 32],
            proof: [0; 32],
        }
    }

    /// The same greeting with another proof.
    pub(super) fn proved(self, proof: [u8; 32]) -> Self {
        Self { proof, ..self }
    }

    /// The greeting that confirms this one.
    pub(super) fn confirm(self, proof: [u8; 32]) -> Self {
        Self { kind: Kind::Confirm as u8, proof, ..self }
    }

    /// The first field in which `theirs` is not `self`; the kind, which only says that another differs, is last.
    pub(super) fn difference(&self, theirs: &Self) -> Option<Unfit> {
        let fields = |greeting: &Self| {
            [
                ("magic", u64::from(greeting.magic)),
                ("version", u64::from(greeting.version)),
                ("epoch", greeting.epoch),
                ("n_ranks", u64::from(greeting.n_ranks)),
                ("rank", u64::from(greeting.rank)),
                ("kind", u64::from(greeting.kind)),
            ]
        };
        let mut pairs = fields(self).into_iter().zip(fields(theirs));
        let ((field, ours), (_, theirs)) = pairs.find(|(ours, theirs)| ours != theirs)?;
        Some(Unfit::Field { field, ours, theirs })
    }

    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&self.magic.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6] = self.kind;
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.n_ranks.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.challenge);
        bytes[56..].copy_from_slice(&self.proof);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; GREETING_BYTES]) -> Self {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self {
            magic: half(0),
            version: u16::from_le_bytes([bytes[4], bytes[5]]),
            kind: bytes[6],
            rank: half(8),
            n_ranks: half(12),
            epoch: u64::from_le_bytes(std::array::from_fn(|i| bytes[16 + i])),
            challenge: std::array::from_fn(|i| bytes[24 + i]),
            proof: std::array::from_fn(|i| bytes[56 + i]),
        }
    }

    /// Reads a greeting that must be complete by `until`, however slowly its bytes come.
    pub(super) fn read(stream: &mut TcpStream, until: Instant, cancel: &ConnectCancel) -> io::Result<Self> {
        let mut bytes = [0; GREETING_BYTES];
        let mut n_read = 0;
        while n_read < GREETING_BYTES {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || cancel.is_cancelled() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left.min(CANCEL_PERIOD)))?;
            match stream.read(&mut bytes[n_read..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => n_read += n,
                Err(error) if is_transient(error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self::decode(&bytes))
    }
}

fn is_transient(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The first two greetings of a connection, over which both proofs are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said<'a> {
    pub(super) hello: &'a Greeting,
    pub(super) answer: &'a Greeting,
}

impl Said<'_> {
    /// The proof that `side` knows `secret`.
    pub(super) fn prove(self, secret: &GroupSecret, side: Side) -> [u8; 32] {
        self.mac(secret, side).finalize().into_bytes().into()
    }

    /// Whether `proof` is that of `side`; takes equally long whatever is wrong with it.
    pub(super) fn is_proved(self, secret: &GroupSecret, side: Side, proof: &[u8; 32]) -> bool {
        self.mac(secret, side).verify_slice(proof).is_ok()
    }

    fn mac(self, secret: &GroupSecret, side: Side) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("any length of key will do");
        mac.update(&[side as u8]);
        mac.update(&self.hello.encode()[..SAID_BYTES]);
        mac.update(&self.answer.encode()[..SAID_BYTES]);
        mac
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting() -> impl Strategy<Value = Greeting> {
        any::<[u8; 44]>().prop_flat_map(|head| {
            any::<[u8; 44]>().prop_map(move |tail| {
                let mut bytes = [0; GREETING_BYTES];
                bytes[..44].copy_from_slice(&head);
                bytes[44..].copy_from_slice(&tail);
                Greeting::decode(&bytes)
            })
        })
    }

    proptest! {
        /// A proof holds for exactly one secret, one side, and one pair of greetings.
        #[test]
        fn a_proof_fits_nothing_else(
            hello in greeting(), answer in greeting(), secret: [u8; 32], (at, bit) in (0..2 * SAID_BYTES, 0..8_u32),
        ) {
            let secret = GroupSecret::new(secret);
            let said = Said { hello: &hello, answer: &answer };
            let proof = said.prove(&secret, Side::Dialer);
            prop_assert!(said.is_proved(&secret, Side::Dialer, &proof));
            prop_assert!(!said.is_proved(&secret, Side::Listener, &proof));

            let mut other = *secret.bytes();
            other[at % 32] ^= 1 << bit;
            prop_assert!(!said.is_proved(&GroupSecret::new(other), Side::Dialer, &proof));

            let flip = |greeting: &Greeting, at: usize| {
                let mut bytes = greeting.encode();
                bytes[at] ^= 1 << bit;
                Greeting::decode(&bytes)
            };
            // The eighth byte of a greeting is padding.
            prop_assume!(at % SAID_BYTES != 7);
            let (changed_hello, changed_answer) = if at < SAID_BYTES {
                (flip(&hello, at), answer)
            } else {
                (hello, flip(&answer, at - SAID_BYTES))
            };
            let changed = Said { hello: &changed_hello, answer: &changed_answer };
            prop_assert!(!changed.is_proved(&secret, Side::Dialer, &proof));
        }

        #[test]
        fn greetings_keep_their_fields(greeting in greeting()) {
            prop_assert_eq!(Greeting::decode(&greeting.encode()), greeting);
        }
    }

    /// HMAC-SHA256 as RFC 4231 gives it (test case 2): the proof is the standard construction and not our own.
    #[test]
    fn the_mac_is_the_standard_one() {
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }
}
