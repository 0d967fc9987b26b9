//! The connections of a rank with all its peers, and one exchange over them.
//!
//! Sends and receives of all peers advance together on the calling thread, without blocking, until all are done:
//! ranks that all send megabytes at once cannot wait for each other's receive, and no message passes through
//! another thread. A received part goes straight into the caller's buffer; nothing is allocated for a peer's word.
//!
//! A rank that ends the epoch says why to its peers (a farewell frame) and closes. So the loss of one rank is known
//! to all as what it is, not as the loss of the messenger.

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    net::Shutdown,
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, net::TcpStream};
use tracing::debug;

use super::frame::{self, HEADER_BYTES, Header};
use crate::{
    comm::WaitPolicy,
    error::{Call, CommError},
    transport::Exchange,
};

const WAKE: Token = Token(usize::MAX);

#[derive(Debug)]
pub(super) struct Mesh {
    rank: usize,
    /// By rank; none for itself.
    peers: Vec<Option<Peer>>,
    poll: Poll,
    events: Events,
    policy: WaitPolicy,
    pub(super) timeout: Duration,
    fate: Arc<Fate>,
    closed: bool,
}

/// How a mesh ended; shared with those who may end it.
#[derive(Debug)]
pub(super) struct Fate {
    failed: AtomicBool,
    cause: OnceLock<CommError>,
    waker: Waker,
}

impl Fate {
    /// Records the end and wakes the waiting thread; returns the first cause.
    pub(super) fn fail(&self, cause: CommError) -> CommError {
        let first = self.cause.get_or_init(|| cause).clone();
        self.failed.store(true, Ordering::SeqCst);
        if let Err(error) = self.waker.wake() {
            debug!(%error, "cannot wake a waiting rank; its bound will");
        }
        first
    }

    pub(super) fn cause(&self) -> Option<CommError> {
        if self.failed.load(Ordering::SeqCst) { self.cause.get().cloned() } else { None }
    }
}

#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    out: Outgoing,
    inc: Incoming,
}

/// How much of the current frame is out.
#[derive(Debug, Default)]
struct Outgoing {
    header: [u8; HEADER_BYTES],
    /// Bytes of header and body.
    len: usize,
    n_done: usize,
    /// The peer takes nothing more; what it has sent may still say why.
    broken: bool,
}

/// How much of the current frame is in.
#[derive(Debug, Default)]
struct Incoming {
    header: [u8; HEADER_BYTES],
    want: Option<Call>,
    len: usize,
    n_done: usize,
}

/// What one attempt to move bytes did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    Some,
    /// The socket is full or empty.
    Blocked,
    /// The peer has closed this direction.
    Ended,
}

impl Mesh {
    pub(super) fn new(
        rank: usize,
        streams: Vec<Option<std::net::TcpStream>>,
        policy: WaitPolicy,
        timeout: Duration,
    ) -> io::Result<Self> {
        let poll = Poll::new()?;
        let register = |(peer, stream): (usize, Option<std::net::TcpStream>)| {
            let Some(stream) = stream else { return Ok(None) };
            stream.set_nonblocking(true)?;
            let mut stream = TcpStream::from_std(stream);
            poll.registry().register(&mut stream, Token(peer), Interest::READABLE | Interest::WRITABLE)?;
            Ok(Some(Peer { stream, out: Outgoing::default(), inc: Incoming::default() }))
        };
        let peers = streams.into_iter().enumerate().map(register).collect::<io::Result<_>>()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        let fate = Arc::new(Fate { failed: AtomicBool::new(false), cause: OnceLock::new(), waker });
        Ok(Self {
            rank,
            peers,
            poll,
            events: Events::with_capacity(64),
            policy,
            timeout,
            fate,
            closed: false,
        })
    }

    pub(super) fn fate(&self) -> Arc<Fate> {
        Arc::clone(&self.fate)
    }

    /// Passes the parts of `exchange` among the ranks `ranks`. `group` and `seq` name the collective.
    pub(super) fn exchange(
        &mut self,
        ranks: Range<usize>,
        (group, seq): (u32, u64),
        mut exchange: Exchange<'_>,
    ) -> Result<(), CommError> {
        if let Some(cause) = self.fate.cause() {
            return Err(self.end(cause));
        }
        let first = ranks.start;
        for (idx, peer) in peers(&mut self.peers, &ranks) {
            let call = |n_bytes: usize| Call { op: exchange.op, group, seq, n_bytes: n_bytes as u64 };
            peer.begin(
                call(exchange.send_to(idx - first).len()),
                call(exchange.recv_range(idx - first).len()),
            );
        }
        self.advance(ranks, &mut exchange).map_err(|cause| self.end(cause))
    }

    /// Moves bytes until all frames are out and in.
    fn advance(&mut self, ranks: Range<usize>, exchange: &mut Exchange<'_>) -> Result<(), CommError> {
        let mut idle_since = None;
        loop {
            let (mut moved, mut missing) = (false, None);
            for (idx, peer) in peers(&mut self.peers, &ranks) {
                let part = idx - ranks.start;
                moved |= peer.send(exchange.send_to(part));
                moved |= peer.recv(exchange.recv_from(part), self.rank, idx, self.timeout)?;
                if !peer.is_done() {
                    missing = missing.or(Some(idx));
                }
            }
            let Some(missing) = missing else { return Ok(()) };
            if let Some(cause) = self.fate.cause() {
                return Err(cause);
            }
            // The clock is read only where there is time to: nothing could be moved.
            let start = *idle_since.get_or_insert_with(Instant::now);
            if !moved || start.elapsed() >= self.timeout {
                let (op, waited) = (exchange.op, self.timeout);
                self.wait(start, || CommError::Timeout { op, waited, missing })?;
            }
        }
    }

    /// Lets time pass until bytes may move again.
    fn wait(&mut self, start: Instant, late: impl FnOnce() -> CommError) -> Result<(), CommError> {
        let waited = start.elapsed();
        if waited < self.policy.spin {
            thread::yield_now();
            return Ok(());
        }
        let Some(left) = self.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
            return Err(late());
        };
        self.hear_farewells()?;
        match self.poll.poll(&mut self.events, Some(left)) {
            Err(err) if err.kind() != ErrorKind::Interrupted => Err(CommError::Io { kind: err.kind() }),
            _ => Ok(()),
        }
    }

    /// Looks whether a peer from which nothing more is wanted now has ended the epoch. The end of its stream alone
    /// says nothing: it may have all it came for, while another's part is still on the way.
    fn hear_farewells(&mut self) -> Result<(), CommError> {
        let waited = self.timeout;
        let told = |(idx, peer): (usize, &Option<Peer>)| peer.as_ref()?.farewell(idx, waited);
        self.peers.iter().enumerate().find_map(told).map_or(Ok(()), Err)
    }

    /// Ends the epoch: says farewell where a frame boundary allows it, and closes. Returns the first cause.
    pub(super) fn end(&mut self, cause: CommError) -> CommError {
        let first = self.fate.fail(cause);
        if !self.closed {
            self.closed = true;
            let farewell = frame::encode_farewell(&first);
            for peer in self.peers.iter_mut().flatten() {
                peer.close(&farewell);
            }
        }
        first
    }
}

/// The peers among `ranks`, with their ranks in the whole group.
fn peers<'a>(
    peers: &'a mut [Option<Peer>],
    ranks: &Range<usize>,
) -> impl Iterator<Item = (usize, &'a mut Peer)> {
    let first = ranks.start;
    let members = peers[ranks.clone()].iter_mut().enumerate();
    members.filter_map(move |(idx, peer)| Some((first + idx, peer.as_mut()?)))
}

impl Peer {
    fn begin(&mut self, send: Call, recv: Call) {
        let len = |call: Call| HEADER_BYTES + call.n_bytes as usize;
        self.out =
            Outgoing { header: frame::encode(send), len: len(send), n_done: 0, broken: self.out.broken };
        self.inc = Incoming { header: [0; HEADER_BYTES], want: Some(recv), len: len(recv), n_done: 0 };
    }

    fn is_done(&self) -> bool {
        self.out.n_done == self.out.len && self.inc.n_done == self.inc.len
    }

    /// Sends what the socket takes; whether that was anything.
    fn send(&mut self, body: &[u8]) -> bool {
        let mut moved = false;
        while self.out.n_done < self.out.len && !self.out.broken {
            let header = &self.out.header[self.out.n_done.min(HEADER_BYTES)..];
            let body = &body[self.out.n_done.saturating_sub(HEADER_BYTES)..];
            match (&self.stream).write_vectored(&[IoSlice::new(header), IoSlice::new(body)]) {
                Ok(n) => self.out.n_done += n,
                Err(err) if err.kind() == ErrorKind::Interrupted => {}
                Err(err) if err.kind() == ErrorKind::WouldBlock => break,
                // Whatever happened to the connection, the other direction says more.
                Err(_) => self.out.broken = true,
            }
            moved = true;
        }
        moved
    }

    /// Receives what is there; whether that was anything.
    fn recv(
        &mut self,
        body: &mut [u8],
        rank: usize,
        idx: usize,
        waited: Duration,
    ) -> Result<bool, CommError> {
        let mut moved = false;
        while self.inc.n_done < self.inc.len {
            let was = self.inc.n_done;
            match self.recv_some(body) {
                Moved::Some => {}
                Moved::Blocked => break,
                Moved::Ended => return Err(CommError::PeerLost { rank: idx }),
            }
            moved = true;
            if was < HEADER_BYTES && self.inc.n_done >= HEADER_BYTES {
                self.check_header(rank, idx, waited)?;
            }
        }
        if self.out.broken && self.inc.n_done == self.inc.len {
            // It has sent its part and takes none: it is gone, and may have said why.
            return Err(self.farewell(idx, waited).unwrap_or(CommError::PeerLost { rank: idx }));
        }
        Ok(moved)
    }

    fn recv_some(&mut self, body: &mut [u8]) -> Moved {
        let header = &mut self.inc.header[self.inc.n_done.min(HEADER_BYTES)..];
        let body = &mut body[self.inc.n_done.saturating_sub(HEADER_BYTES)..];
        match (&self.stream).read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(body)]) {
            Ok(0) => Moved::Ended,
            Ok(n) => {
                self.inc.n_done += n;
                Moved::Some
            }
            Err(err) if err.kind() == ErrorKind::Interrupted => Moved::Some,
            Err(err) if err.kind() == ErrorKind::WouldBlock => Moved::Blocked,
            Err(_) => Moved::Ended,
        }
    }

    fn check_header(&self, rank: usize, peer: usize, waited: Duration) -> Result<(), CommError> {
        match frame::decode(&self.inc.header, peer, waited)? {
            Header::Farewell(cause) => Err(cause),
            Header::Data(theirs) => match self.inc.want {
                Some(ours) if ours != theirs => Err(CommError::Disagree { rank, peer, ours, theirs }),
                _ => Ok(()),
            },
        }
    }

    /// The cause in the peer's farewell, if that is what comes next.
    fn farewell(&self, idx: usize, waited: Duration) -> Option<CommError> {
        if self.inc.n_done < self.inc.len {
            return None;
        }
        let mut header = [0; HEADER_BYTES];
        match self.stream.peek(&mut header) {
            Ok(HEADER_BYTES) => {}
            _ => return None,
        }
        match frame::decode(&header, idx, waited) {
            Ok(Header::Farewell(cause)) | Err(cause) => Some(cause),
            Ok(Header::Data(_)) => None,
        }
    }

    fn close(&mut self, farewell: &[u8; HEADER_BYTES]) {
        if self.out.n_done == 0 || self.out.n_done == self.out.len {
            // The peer that is lost, or whose socket is full, learns from the end of the stream.
            let _ = (&self.stream).write(farewell);
        }
        // Reading stays open: closing it on unread bytes would reset the connection under the farewell.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}
