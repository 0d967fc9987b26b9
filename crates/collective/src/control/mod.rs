//! The control link: ordered messages from the leader of a group to its followers, and events back.
//!
//! Step plans, reservations and aborts go one way, "hand-off complete" the other. Collectives are no place for
//! them: a follower must hear of a reservation while no step runs, and the leader must not wait for a rendezvous
//! to say something. What a message means is the engine's business; here it is bytes with a bound.
//!
//! Messages of one direction of one link arrive complete and in order, or the link ends with one
//! [`ControlError`]. Between processes a link beats: once its reader runs, each end says periodically that it is
//! alive, and an end that hears nothing for [`Heartbeat::silence`] ends the link. So a host that is stopped or cut
//! off is noticed while no step runs, and while one does, sooner than by the bound of a collective, which must allow
//! for slow steps. The beat has a thread of its own: a rank that computes for long is not a silent one.

mod beat;
mod half;

use std::{fmt, io, sync::Arc, thread, time::Duration};

use thiserror::Error;

use beat::Beat;
pub(crate) use half::tcp_link;
use half::{Receiver, StopSignal, local_pair};

/// Bounds of a control link. Both ends of a link use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// Longest message. A plan needs 4 bytes a token and block, so 4 MiB is a million of them; a peer that announces
    /// more is cut off.
    pub max_message_bytes: usize,
    /// Messages that may wait for a receiver within one process. More hides a slow follower for longer.
    pub queue_len: usize,
    /// How long a send may wait for a receiver that does not keep up before the link ends.
    pub send_timeout: Duration,
    /// How a silent peer is noticed; links within one process have no use for it.
    pub heartbeat: Heartbeat,
}

/// When an end of a link speaks although it has nothing to say, and when silence is the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Pause between beats.
    pub interval: Duration,
    /// How long a peer may be silent. Longer bears hosts that stand still for a while (a starved machine, a live
    /// migration); shorter ends the wait for a dead one sooner. Several intervals, or a late beat ends the epoch.
    pub silence: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_secs(1), silence: Duration::from_secs(10) }
    }
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self {
            max_message_bytes: 4 << 20,
            queue_len: 256,
            send_timeout: Duration::from_secs(5),
            heartbeat: Heartbeat::default(),
        }
    }
}

/// Why a control message was not delivered. `peer` is a rank of the group.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ControlError {
    /// The peer closed the link or died; nothing more will arrive.
    #[error("rank {peer} closed the control link")]
    Closed {
        /// The peer.
        peer: usize,
    },
    /// Nothing arrived in time. The link is as good as before.
    #[error("no control message within {waited:?}")]
    Timeout {
        /// The time given.
        waited: Duration,
    },
    /// The peer did not take a message in time. The link has ended.
    #[error("rank {peer} took no control message for {waited:?}")]
    Stalled {
        /// The peer.
        peer: usize,
        /// The configured bound.
        waited: Duration,
    },
    /// The peer neither said anything nor beat for too long: its host is stopped, starved or cut off. The link has
    /// ended.
    #[error("rank {peer} was silent for {waited:?}")]
    Silent {
        /// The peer.
        peer: usize,
        /// The configured bound.
        waited: Duration,
    },
    /// A message over the bound: to be sent (the link stays), or announced by the peer (the link has ended).
    #[error("control message of {n_bytes} bytes is longer than the bound of {max_message_bytes}")]
    TooLong {
        /// Its length.
        n_bytes: usize,
        /// The configured bound.
        max_message_bytes: usize,
    },
    /// There is no such follower.
    #[error("rank {rank} is no follower: the group has ranks 1 to {n_followers} besides its leader")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// Followers of the group.
        n_followers: usize,
    },
    /// The operating system refused something. The link has ended.
    #[error("control link to rank {peer}: i/o error of kind {kind}")]
    Io {
        /// The peer.
        peer: usize,
        /// What the operating system said.
        kind: io::ErrorKind,
    },
}

/// The sending half of a link. Clones send on the same link; each message goes out whole.
#[derive(Clone, Debug)]
pub struct ControlSender(half::Sender);

impl ControlSender {
    /// Sends one message.
    pub fn send(&self, message: &[u8]) -> Result<(), ControlError> {
        self.0.send(&Arc::from(message))
    }
}

/// Both halves of a link to one peer.
#[derive(Debug)]
pub struct ControlLink {
    sender: ControlSender,
    receiver: Receiver,
}

impl ControlLink {
    fn new((sender, receiver): (half::Sender, Receiver)) -> Self {
        Self { sender: ControlSender(sender), receiver }
    }

    /// The peer's rank.
    pub fn peer(&self) -> usize {
        self.receiver.peer()
    }

    /// Sends one message.
    pub fn send(&self, message: &[u8]) -> Result<(), ControlError> {
        self.sender.send(message)
    }

    /// Another handle on the sending half.
    pub fn sender(&self) -> ControlSender {
        self.sender.clone()
    }

    /// The next message, or [`ControlError::Timeout`].
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Vec<u8>, ControlError> {
        self.receiver.recv_timeout(timeout)
    }

    /// Hands every message to `sink` on a thread of its own, in order, and at last the error that ended the link.
    ///
    /// `sink` is where messages meet a worker's other inputs (a channel that the engine drains). While it blocks,
    /// nothing is received and the peer is slowed down; it must not block on the thread that calls
    /// [`Reader::stop`].
    pub fn spawn_reader<F>(self, sink: F) -> io::Result<(ControlSender, Reader)>
    where
        F: Fn(Result<Vec<u8>, ControlError>) + Send + 'static,
    {
        let Self { sender, mut receiver } = self;
        let stop = receiver.stop_signal()?;
        let beat = Beat::start(&sender.0)?;
        let name = format!("control-{}", receiver.peer());
        let thread = thread::Builder::new().name(name).spawn(move || {
            loop {
                match receiver.recv() {
                    Some(Ok(message)) => sink(Ok(message)),
                    Some(Err(end)) => return sink(Err(end)),
                    None => return,
                }
            }
        })?;
        Ok((sender, Reader { stop, thread: Some(thread), _beat: beat }))
    }
}

/// A running reader thread and the beat of its link. Dropping it tells the thread to end; [`Reader::stop`] also waits for that.
pub struct Reader {
    stop: StopSignal,
    thread: Option<thread::JoinHandle<()>>,
    _beat: Option<Beat>,
}

impl Reader {
    /// Ends the thread, and this side's receiving, without a last error to the sink.
    pub fn stop(mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            // A sink that panicked has ended the thread, which is what was asked for.
            let _ = thread.join();
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.signal();
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reader")
    }
}

/// The leader's links to all followers: ranks 1 to n.
#[derive(Debug)]
pub struct Leader {
    links: Vec<ControlLink>,
}

impl Leader {
    /// A leader of the followers at the other ends of `links`, in rank order.
    pub(crate) fn new(links: Vec<ControlLink>) -> Self {
        Self { links }
    }

    /// Ranks besides the leader.
    pub fn n_followers(&self) -> usize {
        self.links.len()
    }

    /// The link to `rank` (1 to n).
    pub fn link(&mut self, rank: usize) -> Result<&mut ControlLink, ControlError> {
        let n_followers = self.links.len();
        let link = rank.checked_sub(1).and_then(|idx| self.links.get_mut(idx));
        link.ok_or(ControlError::NoSuchRank { rank, n_followers })
    }

    /// The sending half to all followers.
    pub fn broadcaster(&self) -> Broadcaster {
        Broadcaster { senders: self.links.iter().map(ControlLink::sender).collect() }
    }

    /// Sends one message to all followers.
    pub fn broadcast(&self, message: &[u8]) -> Result<(), ControlError> {
        self.broadcaster().broadcast(message)
    }

    /// Hands every event of every follower to `sink`, with the follower's rank: [`ControlLink::spawn_reader`] for
    /// all links.
    pub fn spawn_readers<F>(self, sink: F) -> io::Result<(Broadcaster, Vec<Reader>)>
    where
        F: Fn(usize, Result<Vec<u8>, ControlError>) + Send + Clone + 'static,
    {
        let broadcaster = self.broadcaster();
        let spawn = |link: ControlLink| {
            let (rank, sink) = (link.peer(), sink.clone());
            link.spawn_reader(move |event| sink(rank, event)).map(|(_, reader)| reader)
        };
        Ok((broadcaster, self.links.into_iter().map(spawn).collect::<io::Result<_>>()?))
    }
}

/// Sends to all followers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Broadcaster {
    senders: Vec<ControlSender>,
}

impl Broadcaster {
    /// Sends one message to every follower, also when one of them fails; the first failure is returned.
    pub fn broadcast(&self, message: &[u8]) -> Result<(), ControlError> {
        let message: Arc<[u8]> = Arc::from(message);
        self.senders.iter().map(|sender| sender.0.send(&message)).fold(Ok(()), Result::and)
    }

    /// Sends one message to the follower `rank` (1 to n).
    pub fn send(&self, rank: usize, message: &[u8]) -> Result<(), ControlError> {
        let sender = rank.checked_sub(1).and_then(|idx| self.senders.get(idx));
        sender.ok_or(ControlError::NoSuchRank { rank, n_followers: self.senders.len() })?.send(message)
    }
}

/// Control links between the threads of one process: the leader's end, and the followers' in rank order.
pub fn local_control(n_ranks: usize, config: ControlConfig) -> (Leader, Vec<ControlLink>) {
    let pairs = (1..n_ranks).map(|rank| {
        let (leader, follower) = local_pair(rank, 0, config);
        (ControlLink::new(leader), ControlLink::new(follower))
    });
    let (leader, followers) = pairs.unzip();
    (Leader::new(leader), followers)
}

#[cfg(test)]
mod tests;
