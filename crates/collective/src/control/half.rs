//! The two halves of a link, within a process and over TCP. On TCP a message is its length as 32-bit little-endian
//! word and its bytes, written by the sending thread itself: a writer thread would only add a hop to every step. A
//! beat is a length that no message has, and nothing more.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_channel as channel;

use super::{ControlConfig, ControlError};

pub(super) const HEADER_BYTES: usize = 4;

/// The header of a beat.
const BEAT: u32 = u32::MAX;

/// Sends to `peer`.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    peer: usize,
    config: ControlConfig,
    way: SendWay,
}

#[derive(Clone, Debug)]
enum SendWay {
    Local(channel::Sender<Arc<[u8]>>),
    Tcp(Arc<Mutex<TcpStream>>),
}

/// Receives from `peer`.
#[derive(Debug)]
pub(super) struct Receiver {
    peer: usize,
    way: RecvWay,
}

#[derive(Debug)]
enum RecvWay {
    Local { messages: channel::Receiver<Arc<[u8]>>, stop: channel::Receiver<()> },
    Tcp { reader: FrameReader, stopped: Arc<AtomicBool> },
}

/// Ends a blocking receive from another thread.
pub(super) enum StopSignal {
    Local(Option<channel::Sender<()>>),
    Tcp { stream: TcpStream, stopped: Arc<AtomicBool> },
}

/// Both ends of a link between ranks `a` and `b` of one process: the end that `b` is the peer of comes second.
pub(super) fn local_pair(
    b: usize,
    a: usize,
    config: ControlConfig,
) -> ((Sender, Receiver), (Sender, Receiver)) {
    let (to_b, at_b) = channel::bounded(config.queue_len);
    let (to_a, at_a) = channel::bounded(config.queue_len);
    let sender = |peer, messages| Sender { peer, config, way: SendWay::Local(messages) };
    let receiver =
        |peer, messages| Receiver { peer, way: RecvWay::Local { messages, stop: channel::never() } };
    ((sender(b, to_b), receiver(b, at_a)), (sender(a, to_a), receiver(a, at_b)))
}

/// This end of a link to `peer` over an established connection.
pub(crate) fn tcp_link(
    peer: usize,
    stream: TcpStream,
    config: ControlConfig,
) -> io::Result<super::ControlLink> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(config.send_timeout.max(Duration::from_millis(1))))?;
    let writer = stream.try_clone()?;
    let sender = Sender { peer, config, way: SendWay::Tcp(Arc::new(Mutex::new(writer))) };
    let reader = FrameReader { peer, stream, frame: Vec::new(), n_filled: 0, config };
    Ok(super::ControlLink::new((
        sender,
        Receiver { peer, way: RecvWay::Tcp { reader, stopped: Arc::default() } },
    )))
}

impl Sender {
    pub(super) fn send(&self, message: &Arc<[u8]>) -> Result<(), ControlError> {
        let ControlConfig { max_message_bytes, send_timeout, .. } = self.config;
        if message.len() > max_message_bytes {
            return Err(ControlError::TooLong { n_bytes: message.len(), max_message_bytes });
        }
        match &self.way {
            SendWay::Local(messages) => {
                messages.send_timeout(Arc::clone(message), send_timeout).map_err(|err| match err {
                    channel::SendTimeoutError::Timeout(_) => self.stalled(),
                    channel::SendTimeoutError::Disconnected(_) => ControlError::Closed { peer: self.peer },
                })
            }
            SendWay::Tcp(stream) => {
                self.write(&stream.lock().unwrap_or_else(PoisonError::into_inner), message)
            }
        }
    }

    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    /// How often this end must beat; a link within a process need not.
    pub(super) fn beat_interval(&self) -> Option<Duration> {
        match self.way {
            SendWay::Local(_) => None,
            SendWay::Tcp(_) => Some(self.config.heartbeat.interval),
        }
    }

    /// Says that this end is alive.
    pub(super) fn beat(&self) -> Result<(), ControlError> {
        match &self.way {
            SendWay::Local(_) => Ok(()),
            SendWay::Tcp(stream) => {
                self.put(&stream.lock().unwrap_or_else(PoisonError::into_inner), &BEAT.to_le_bytes())
            }
        }
    }

    fn write(&self, stream: &TcpStream, message: &[u8]) -> Result<(), ControlError> {
        let n_bytes = u32::try_from(message.len())
            .ok()
            .filter(|&n_bytes| n_bytes != BEAT)
            .ok_or(ControlError::TooLong { n_bytes: message.len(), max_message_bytes: BEAT as usize - 1 })?;
        self.put(stream, &[&n_bytes.to_le_bytes(), message].concat())
    }

    fn put(&self, mut stream: &TcpStream, frame: &[u8]) -> Result<(), ControlError> {
        stream.write_all(frame).map_err(|err| {
            // Part of the frame may be out: nothing can follow it.
            let _ = stream.shutdown(Shutdown::Both);
            match err.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => self.stalled(),
                kind => link_error(self.peer, kind),
            }
        })
    }

    fn stalled(&self) -> ControlError {
        ControlError::Stalled { peer: self.peer, waited: self.config.send_timeout }
    }
}

impl Receiver {
    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    pub(super) fn recv_timeout(&mut self, timeout: Duration) -> Result<Vec<u8>, ControlError> {
        match &mut self.way {
            RecvWay::Local { messages, .. } => {
                messages.recv_timeout(timeout).map(|message| message.to_vec()).map_err(|err| match err {
                    channel::RecvTimeoutError::Timeout => ControlError::Timeout { waited: timeout },
                    channel::RecvTimeoutError::Disconnected => ControlError::Closed { peer: self.peer },
                })
            }
            RecvWay::Tcp { reader, .. } => reader.recv_timeout(timeout),
        }
    }

    /// The next message, however long it takes; `None` once the stop signal was given.
    pub(super) fn recv(&mut self) -> Option<Result<Vec<u8>, ControlError>> {
        match &mut self.way {
            RecvWay::Local { messages, stop } => {
                channel::select_biased! {
                    // First, so that a busy sender cannot keep a stopped reader running.
                    recv(stop) -> _ => None,
                    recv(messages) -> message => {
                        let closed = ControlError::Closed { peer: self.peer };
                        Some(message.map(|message| message.to_vec()).map_err(|_| closed))
                    }
                }
            }
            RecvWay::Tcp { reader, stopped } => {
                let message = reader.recv();
                // The signal closes the stream to wake the reader; that is no news of the peer.
                (!stopped.load(Ordering::SeqCst)).then_some(message)
            }
        }
    }

    /// From now on [`Receiver::recv`] ends when the signal is given.
    pub(super) fn stop_signal(&mut self) -> io::Result<StopSignal> {
        match &mut self.way {
            RecvWay::Local { stop, .. } => {
                let (signal, heard) = channel::bounded(0);
                *stop = heard;
                Ok(StopSignal::Local(Some(signal)))
            }
            RecvWay::Tcp { reader, stopped } => {
                Ok(StopSignal::Tcp { stream: reader.stream.try_clone()?, stopped: Arc::clone(stopped) })
            }
        }
    }
}

impl StopSignal {
    pub(super) fn signal(&mut self) {
        match self {
            // The reader hears the disconnection.
            Self::Local(signal) => drop(signal.take()),
            Self::Tcp { stream, stopped } => {
                stopped.store(true, Ordering::SeqCst);
                // An error says that the connection is gone already.
                let _ = stream.shutdown(Shutdown::Read);
            }
        }
    }
}

/// What one read brought.
enum Arrived {
    /// The rest of a message.
    Message(Vec<u8>),
    /// Part of one, or a beat.
    Part,
    /// Nothing.
    Nothing,
}

/// Puts messages together from a stream. An interrupted receive goes on where it stopped.
#[derive(Debug)]
struct FrameReader {
    peer: usize,
    stream: TcpStream,
    /// Header and body of the message that is coming in, as far as known; `n_filled` bytes have arrived.
    frame: Vec<u8>,
    n_filled: usize,
    config: ControlConfig,
}

impl FrameReader {
    /// The next message, or the end of a link whose peer has gone silent.
    fn recv(&mut self) -> Result<Vec<u8>, ControlError> {
        let silence = self.config.heartbeat.silence.max(Duration::from_millis(1));
        self.stream.set_read_timeout(Some(silence)).map_err(|err| link_error(self.peer, err.kind()))?;
        let mut heard = Instant::now();
        loop {
            match self.read_some()? {
                Arrived::Message(message) => return Ok(message),
                Arrived::Part => heard = Instant::now(),
                Arrived::Nothing if heard.elapsed() >= silence => {
                    let _ = self.stream.shutdown(Shutdown::Both);
                    return Err(ControlError::Silent { peer: self.peer, waited: silence });
                }
                Arrived::Nothing => {}
            }
        }
    }

    fn recv_timeout(&mut self, timeout: Duration) -> Result<Vec<u8>, ControlError> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(ControlError::Timeout { waited: timeout });
            }
            // The kernel's clock for this is coarse; below its resolution the call would be refused.
            let left = left.max(Duration::from_micros(1));
            self.stream.set_read_timeout(Some(left)).map_err(|err| link_error(self.peer, err.kind()))?;
            if let Arrived::Message(message) = self.read_some()? {
                return Ok(message);
            }
        }
    }

    /// One read.
    fn read_some(&mut self) -> Result<Arrived, ControlError> {
        if self.frame.is_empty() {
            self.frame.resize(HEADER_BYTES, 0);
        }
        match self.stream.read(&mut self.frame[self.n_filled..]) {
            Ok(0) => return Err(ControlError::Closed { peer: self.peer }),
            Ok(n) => self.n_filled += n,
            Err(err) if is_transient(err.kind()) => return Ok(Arrived::Nothing),
            Err(err) => return Err(link_error(self.peer, err.kind())),
        }
        if self.n_filled == HEADER_BYTES && self.frame.len() == HEADER_BYTES {
            self.open_body()?;
        }
        let is_complete = self.n_filled > 0 && self.n_filled == self.frame.len();
        Ok(if is_complete { Arrived::Message(self.take()) } else { Arrived::Part })
    }

    fn open_body(&mut self) -> Result<(), ControlError> {
        let header = *self.frame.first_chunk::<HEADER_BYTES>().expect("a frame holds at least its header");
        if header == BEAT.to_le_bytes() {
            self.n_filled = 0;
            return Ok(());
        }
        let n_bytes = u32::from_le_bytes(header) as usize;
        let max_message_bytes = self.config.max_message_bytes;
        if n_bytes > max_message_bytes {
            // The stream cannot be followed any further.
            let _ = self.stream.shutdown(Shutdown::Both);
            return Err(ControlError::TooLong { n_bytes, max_message_bytes });
        }
        self.frame.resize(HEADER_BYTES + n_bytes, 0);
        Ok(())
    }

    fn take(&mut self) -> Vec<u8> {
        self.n_filled = 0;
        let mut frame = std::mem::take(&mut self.frame);
        frame.drain(..HEADER_BYTES);
        frame
    }
}

fn is_transient(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn link_error(peer: usize, kind: ErrorKind) -> ControlError {
    match kind {
        ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe
        | ErrorKind::NotConnected
        | ErrorKind::UnexpectedEof => ControlError::Closed { peer },
        kind => ControlError::Io { peer, kind },
    }
}
