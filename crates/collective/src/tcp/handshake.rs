//! How the ranks of a group find each other.
//!
//! A rank dials every lower rank and accepts every higher one, in this order; since rank 0 only accepts, rank 1
//! waits for rank 0 only, and so on, nobody waits in a circle and the start order is free. Three greetings are
//! exchanged on each connection: the dialer's, the answer, and the dialer's confirmation, which keeps a dialer that
//! has given up meanwhile from being counted. All three have one form, and both sides compare every field.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token};
use thiserror::Error;
use tracing::{debug, info, warn};

use super::TcpConfig;
use crate::{error::CommError, transport::MAX_RANKS};

/// Version of the greeting and of all frames after it.
const VERSION: u16 = 1;
const MAGIC: u32 = 0x4f4c_524c;
const GREETING_BYTES: usize = 32;
/// How long an accepted connection may keep others waiting with its greeting; a peer sends it at once.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// Why a group did not form.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Not all ranks came in time.
    #[error("the group did not form within {waited:?}: no connection with rank {missing}")]
    Timeout {
        /// The configured bound.
        waited: Duration,
        /// The lowest rank that is missing.
        missing: usize,
    },
    /// The process at a rank's address is no member of this group, or of another life of it.
    #[error("rank {peer} at {addr} does not fit: its {field} is {theirs}, ours is {ours}")]
    Refused {
        /// The rank that was dialed.
        peer: usize,
        /// Its address.
        addr: SocketAddr,
        /// The field of the greeting that differs.
        field: &'static str,
        /// This rank's value.
        ours: u64,
        /// The peer's value.
        theirs: u64,
    },
    /// The configuration describes no group.
    #[error("rank {rank} of {n_ranks} ranks: a group has 1 to 64 ranks, and a rank is one of them")]
    Config {
        /// The configured rank.
        rank: usize,
        /// The number of configured addresses.
        n_ranks: usize,
    },
    /// All connections were made, but the first barrier over them failed.
    #[error("the first barrier of the group failed")]
    SelfCheck(#[source] CommError),
    /// The operating system refused something that repeating does not help.
    #[error("cannot use a socket")]
    Io(#[from] io::Error),
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Frames of collectives.
    Data,
    /// Control messages between rank 0 and another.
    Control,
}

/// The connections of a rank, by peer; none with itself.
#[derive(Debug, Default)]
pub(super) struct Connections {
    pub(super) data: Vec<Option<TcpStream>>,
    pub(super) control: Vec<Option<TcpStream>>,
}

/// Connects with all peers before `config.connect_timeout` has passed since `start`.
pub(super) fn meet(
    listener: &TcpListener,
    config: &TcpConfig,
    start: Instant,
) -> Result<Connections, ConnectError> {
    let n_ranks = config.addrs.len();
    if config.rank >= n_ranks || n_ranks > MAX_RANKS {
        return Err(ConnectError::Config { rank: config.rank, n_ranks });
    }
    let mut meeting = Meeting { config, start, found: Connections::default() };
    meeting.found.data.resize_with(n_ranks, || None);
    meeting.found.control.resize_with(n_ranks, || None);
    for peer in 0..config.rank {
        meeting.dial(peer, Lane::Data)?;
    }
    if config.rank > 0 {
        meeting.dial(0, Lane::Control)?;
    }
    meeting.accept_all(listener)?;
    Ok(meeting.found)
}

struct Meeting<'a> {
    config: &'a TcpConfig,
    start: Instant,
    found: Connections,
}

impl Meeting<'_> {
    fn dial(&mut self, peer: usize, lane: Lane) -> Result<(), ConnectError> {
        let addr = self.config.addrs[peer];
        let mut backoff = FIRST_BACKOFF;
        loop {
            let left = self.left(peer)?;
            let refusal = match self.try_dial(addr, peer, lane, left) {
                Ok(Ok(stream)) => {
                    self.keep(peer, lane, stream);
                    return Ok(());
                }
                Ok(Err(refusal)) if !refusal.may_pass() => return Err(refusal.into_error(peer, addr)),
                Ok(Err(refusal)) => Some(refusal),
                Err(error) => {
                    debug!(peer, %addr, %error, "peer is not reachable yet");
                    None
                }
            };
            if backoff == MAX_BACKOFF {
                info!(peer, %addr, ?refusal, "still waiting for peer");
            }
            wait(backoff.min(left));
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    /// One attempt. The peer may answer late: it accepts only after it has found its own lower ranks.
    fn try_dial(
        &self,
        addr: SocketAddr,
        peer: usize,
        lane: Lane,
        left: Duration,
    ) -> io::Result<Result<TcpStream, Difference>> {
        let mut stream = TcpStream::connect_timeout(&addr, left)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))?;
        let own = Greeting::of(self.config, lane.kind());
        stream.write_all(&own.encode())?;
        let answer = read_greeting(&mut stream)?;
        let want = Greeting { rank: peer as u32, kind: Kind::Welcome as u8, ..own };
        if let Some(difference) = want.difference(&answer) {
            return Ok(Err(difference));
        }
        stream.write_all(&Greeting { kind: Kind::Confirm as u8, ..own }.encode())?;
        Ok(Ok(stream))
    }

    fn accept_all(&mut self, listener: &TcpListener) -> Result<(), ConnectError> {
        if self.missing().is_none() {
            return Ok(());
        }
        listener.set_nonblocking(true)?;
        let mut poll = Poll::new()?;
        let mut watched = mio::net::TcpListener::from_std(listener.try_clone()?);
        poll.registry().register(&mut watched, Token(0), Interest::READABLE)?;
        let mut events = Events::with_capacity(8);
        while let Some(missing) = self.missing() {
            match listener.accept() {
                Ok((stream, from)) => {
                    if let Err(error) = self.welcome(stream) {
                        warn!(%from, %error, "a connection ended during its greeting");
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    let left = self.left(missing)?;
                    match poll.poll(&mut events, Some(left)) {
                        Err(err) if err.kind() != io::ErrorKind::Interrupted => return Err(err.into()),
                        _ => {}
                    }
                }
                // The connection died in the queue, or we are out of descriptors: neither is the group's end.
                Err(error) => {
                    debug!(%error, "accept failed");
                    wait(FIRST_BACKOFF.min(self.left(missing)?));
                }
            }
        }
        Ok(())
    }

    /// Answers one dialer. A stranger is told what differs and forgotten.
    fn welcome(&mut self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        let hello = read_greeting(&mut stream)?;
        let own = Greeting::of(self.config, Kind::Welcome);
        let Some((peer, lane)) = self.expected(&hello) else {
            debug!(?hello, "a stranger was refused");
            return stream.write_all(&Greeting { kind: Kind::Refusal as u8, ..own }.encode());
        };
        stream.write_all(&own.encode())?;
        let confirm = read_greeting(&mut stream)?;
        if (Greeting { kind: Kind::Confirm as u8, ..hello }).difference(&confirm).is_none() {
            self.keep(peer, lane, stream);
        }
        Ok(())
    }

    /// Who says hello, if it is a member that dials this rank.
    fn expected(&self, hello: &Greeting) -> Option<(usize, Lane)> {
        let peer = hello.rank as usize;
        let lane = [Lane::Data, Lane::Control].into_iter().find(|lane| lane.kind() as u8 == hello.kind)?;
        let want = Greeting { rank: hello.rank, ..Greeting::of(self.config, lane.kind()) };
        let dials_us = (self.config.rank + 1..self.config.addrs.len()).contains(&peer)
            && (lane == Lane::Data || self.config.rank == 0);
        (want.difference(hello).is_none() && dials_us).then_some((peer, lane))
    }

    fn keep(&mut self, peer: usize, lane: Lane, stream: TcpStream) {
        match lane {
            Lane::Data => self.found.data[peer] = Some(stream),
            Lane::Control => self.found.control[peer] = Some(stream),
        }
    }

    fn missing(&self) -> Option<usize> {
        let rank = self.config.rank;
        (rank + 1..self.config.addrs.len()).find(|&peer| {
            self.found.data[peer].is_none() || (rank == 0 && self.found.control[peer].is_none())
        })
    }

    fn left(&self, missing: usize) -> Result<Duration, ConnectError> {
        let waited = self.config.connect_timeout;
        let left = waited.saturating_sub(self.start.elapsed());
        if left.is_zero() { Err(ConnectError::Timeout { waited, missing }) } else { Ok(left) }
    }
}

/// A pause between two attempts.
fn wait(pause: Duration) {
    // The timer's one message; the channel cannot fail before it.
    let _ = crossbeam_channel::after(pause).recv();
}

fn read_greeting(stream: &mut TcpStream) -> io::Result<Greeting> {
    let mut bytes = [0; GREETING_BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(Greeting::decode(&bytes))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Data = 1,
    Control = 2,
    Welcome = 3,
    Refusal = 4,
    Confirm = 5,
}

impl Lane {
    fn kind(self) -> Kind {
        match self {
            Self::Data => Kind::Data,
            Self::Control => Kind::Control,
        }
    }
}

/// Who speaks. Fields are compared, never trusted, so every byte string is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Greeting {
    magic: u32,
    version: u16,
    kind: u8,
    rank: u32,
    n_ranks: u32,
    nonce: u64,
    epoch: u64,
}

/// A field in which a peer's greeting differs from what fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Difference {
    field: &'static str,
    ours: u64,
    theirs: u64,
}

impl Difference {
    /// Whether the peer may come to fit: it is still in an earlier life, or its address still belongs to another.
    fn may_pass(self) -> bool {
        match self.field {
            "epoch" => self.theirs < self.ours,
            "nonce" | "rank" | "kind" => true,
            _ => false,
        }
    }

    fn into_error(self, peer: usize, addr: SocketAddr) -> ConnectError {
        let Self { field, ours, theirs } = self;
        ConnectError::Refused { peer, addr, field, ours, theirs }
    }
}

impl Greeting {
    fn of(config: &TcpConfig, kind: Kind) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            kind: kind as u8,
            rank: config.rank as u32,
            n_ranks: config.addrs.len() as u32,
            nonce: config.nonce,
            epoch: config.epoch,
        }
    }

    /// The first field in which `theirs` is not `self`; the kind, which only says that another differs, is last.
    fn difference(&self, theirs: &Self) -> Option<Difference> {
        let fields = |greeting: &Self| {
            [
                ("magic", u64::from(greeting.magic)),
                ("version", u64::from(greeting.version)),
                ("nonce", greeting.nonce),
                ("epoch", greeting.epoch),
                ("n_ranks", u64::from(greeting.n_ranks)),
                ("rank", u64::from(greeting.rank)),
                ("kind", u64::from(greeting.kind)),
            ]
        };
        let mut pairs = fields(self).into_iter().zip(fields(theirs));
        let ((field, ours), (_, theirs)) = pairs.find(|(ours, theirs)| ours != theirs)?;
        Some(Difference { field, ours, theirs })
    }

    fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&self.magic.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6] = self.kind;
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.n_ranks.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[24..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; GREETING_BYTES]) -> Self {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self {
            magic: half(0),
            version: u16::from_le_bytes([bytes[4], bytes[5]]),
            kind: bytes[6],
            rank: half(8),
            n_ranks: half(12),
            nonce: word(16),
            epoch: word(24),
        }
    }
}
