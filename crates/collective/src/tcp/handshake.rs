//! How the ranks of a group find each other.
//!
//! A rank dials every lower rank and accepts every higher one, in this order; since rank 0 only accepts, rank 1
//! waits for rank 0 only, and so on, nobody waits in a circle and the start order is free. Three greetings are
//! exchanged on each connection: the dialer's, the answer, and the dialer's confirmation, which keeps a dialer that
//! has given up meanwhile from being counted. All three have one form, and both sides compare every field. The answer
//! proves that the listener knows the group's secret, the confirmation that the dialer does; until then neither side
//! has believed anything.

use std::{
    io::{self, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token};
use thiserror::Error;
use tracing::{debug, info, warn};

use super::{
    TcpConfig,
    greeting::{GREETING_BYTES, Greeting, Kind, Said, Side, Unfit},
};
use crate::{error::CommError, transport::MAX_RANKS};

/// How long an accepted connection may keep others waiting with its greeting; a peer sends it at once.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// How soon a [`ConnectCancel`] is noticed.
pub(super) const CANCEL_PERIOD: Duration = Duration::from_millis(100);
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
    /// The process at a rank's address speaks for this group, but could not prove within the configured bound that it
    /// knows the group's secret: it belongs to another group, or is no member of any.
    #[error("rank {peer} at {addr} does not know the secret of this group")]
    Unproven {
        /// The rank that was dialed.
        peer: usize,
        /// Its address.
        addr: SocketAddr,
    },
    /// A [`ConnectCancel`] was used.
    #[error("the group is not to form any more")]
    Cancelled,
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

/// Ends a [`TcpGroup::connect`](super::TcpGroup::connect) from another thread: the group is known not to form, long
/// before its time is over. Clones end the same attempt.
#[derive(Clone, Debug, Default)]
pub struct ConnectCancel(Arc<AtomicBool>);

impl ConnectCancel {
    /// Ends the attempt.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
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
        let mut unfit = None;
        loop {
            let left = match (self.left(peer), unfit) {
                (Err(_), Some(unfit @ Unfit::Proof)) => return Err(unfit.into_error(peer, addr)),
                (left, _) => left?,
            };
            unfit = match self.try_dial(addr, peer, lane, left) {
                Ok(Ok(stream)) => {
                    self.keep(peer, lane, stream);
                    return Ok(());
                }
                Ok(Err(unfit)) if !unfit.may_pass() => return Err(unfit.into_error(peer, addr)),
                Ok(Err(unfit)) => Some(unfit),
                Err(error) => {
                    debug!(peer, %addr, %error, "peer is not reachable yet");
                    None
                }
            };
            if backoff == MAX_BACKOFF {
                info!(peer, %addr, ?unfit, "still waiting for peer");
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
    ) -> io::Result<Result<TcpStream, Unfit>> {
        let until = Instant::now() + left;
        let mut stream = TcpStream::connect_timeout(&addr, left)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(left))?;
        let hello = Greeting::new(self.config, lane.kind())?;
        stream.write_all(&hello.encode())?;
        let answer = Greeting::read(&mut stream, until, &self.config.cancel)?;
        if let Some(unfit) = Greeting::expected(self.config, peer, Kind::Welcome).difference(&answer) {
            return Ok(Err(unfit));
        }
        let (said, secret) = (Said { hello: &hello, answer: &answer }, &self.config.secret);
        if !said.is_proved(secret, Side::Listener, &answer.proof) {
            return Ok(Err(Unfit::Proof));
        }
        let proof = said.prove(secret, Side::Dialer);
        stream.write_all(&hello.confirm(proof).encode())?;
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
                    match poll.poll(&mut events, Some(left.min(CANCEL_PERIOD))) {
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
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        let hello = Greeting::read(&mut stream, Instant::now() + GREETING_TIMEOUT, &self.config.cancel)?;
        let Some((peer, lane)) = self.expected(&hello) else {
            debug!(?hello, "a stranger was refused");
            return stream.write_all(&Greeting::new(self.config, Kind::Refusal)?.encode());
        };
        let mut answer = Greeting::new(self.config, Kind::Welcome)?;
        let secret = &self.config.secret;
        answer.proof = Said { hello: &hello, answer: &answer }.prove(secret, Side::Listener);
        stream.write_all(&answer.encode())?;
        let confirm = Greeting::read(&mut stream, Instant::now() + GREETING_TIMEOUT, &self.config.cancel)?;
        if hello.confirm(confirm.proof).difference(&confirm).is_some() {
            return Ok(());
        }
        if !(Said { hello: &hello, answer: &answer }).is_proved(secret, Side::Dialer, &confirm.proof) {
            return Err(io::Error::other(format!("it speaks for rank {peer} and does not know the secret")));
        }
        self.keep(peer, lane, stream);
        Ok(())
    }

    /// Who says hello, if it is a member that dials this rank.
    fn expected(&self, hello: &Greeting) -> Option<(usize, Lane)> {
        let peer = hello.rank as usize;
        let lane = [Lane::Data, Lane::Control].into_iter().find(|lane| lane.kind() as u8 == hello.kind)?;
        let dials_us = (self.config.rank + 1..self.config.addrs.len()).contains(&peer)
            && (lane == Lane::Data || self.config.rank == 0);
        let fits = dials_us && Greeting::expected(self.config, peer, lane.kind()).difference(hello).is_none();
        fits.then_some((peer, lane))
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
        if self.config.cancel.is_cancelled() {
            return Err(ConnectError::Cancelled);
        }
        let waited = self.config.connect_timeout;
        let left = waited.saturating_sub(self.start.elapsed());
        if left.is_zero() { Err(ConnectError::Timeout { waited, missing }) } else { Ok(left) }
    }
}

/// Whether `bytes` are a greeting of a rank that could dial the one of `config`, and its proof one of this very
/// greeting.
pub(super) fn is_member(bytes: &[u8; GREETING_BYTES], config: &TcpConfig) -> bool {
    let hello = Greeting::decode(bytes);
    let meeting = Meeting { config, start: Instant::now(), found: Connections::default() };
    let said = Said { hello: &hello, answer: &hello };
    meeting.expected(&hello).is_some() && said.is_proved(&config.secret, Side::Dialer, &hello.proof)
}

/// A greeting of `config`'s rank that [`is_member`] accepts.
pub(super) fn member(config: &TcpConfig) -> [u8; GREETING_BYTES] {
    let hello = Greeting::expected(config, config.rank, Kind::Data);
    let proof = Said { hello: &hello, answer: &hello }.prove(&config.secret, Side::Dialer);
    hello.proved(proof).encode()
}

/// A pause between two attempts.
fn wait(pause: Duration) {
    // The timer's one message; the channel cannot fail before it.
    let _ = crossbeam_channel::after(pause).recv();
}
