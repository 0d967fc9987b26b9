//! Why a collective failed. Ranks in these errors are numbered in the whole group, also where a part of it
//! (see [`Communicator::split`](crate::Communicator::split)) failed.

use std::{fmt, time::Duration};

use thiserror::Error;

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Every rank gets every rank's part.
    AllGather = 1,
    /// Every rank sends a different part to every rank.
    AllToAll = 2,
    /// Every rank gets the root's data.
    Broadcast = 3,
    /// No data; nobody leaves before everybody came.
    Barrier = 4,
    /// [`Op::AllGather`] of a few bytes of control data.
    AllGatherBytes = 5,
    /// The group is cut into parts.
    Split = 6,
}

impl Op {
    /// The operation with wire code `code`.
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::AllGather,
            2 => Self::AllToAll,
            3 => Self::Broadcast,
            4 => Self::Barrier,
            5 => Self::AllGatherBytes,
            6 => Self::Split,
            _ => return None,
        })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGather => "all_gather",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::AllGatherBytes => "all_gather_bytes",
            Self::Split => "split",
        })
    }
}

/// What one rank passes to another in one collective, as both must see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The collective.
    pub op: Op,
    /// The communicator: 0 is the whole group, every split has a number of its own.
    pub group: u32,
    /// The collective's number in the life of the communicator.
    pub seq: u64,
    /// Bytes that pass from the one to the other.
    pub n_bytes: u64,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} number {} of communicator {} with {} bytes",
            self.op, self.seq, self.group, self.n_bytes
        )
    }
}

/// Why a collective did not complete. Any of these ends the epoch of the group.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CommError {
    /// A peer did not take part within the bound.
    #[error("{op} did not complete within {waited:?}: waiting for rank {missing}; the group must form again")]
    Timeout {
        /// What was called.
        op: Op,
        /// The configured bound.
        waited: Duration,
        /// The lowest rank that had not come.
        missing: usize,
    },
    /// A peer dropped its communicator, closed its connection, or died.
    #[error("rank {rank} left the group")]
    PeerLost {
        /// The peer.
        rank: usize,
    },
    /// An [`AbortHandle`](crate::AbortHandle) was used, here or on a peer.
    #[error("the group was aborted")]
    Aborted,
    /// A peer ended the epoch for a reason that its own log tells.
    #[error("rank {rank} ended the group")]
    PeerFailed {
        /// The peer.
        rank: usize,
    },
    /// Two ranks took part in the same place with different calls: their plans differ.
    #[error("ranks disagree: rank {peer} sent {theirs}, rank {rank} expected {ours}")]
    Disagree {
        /// The rank that found out.
        rank: usize,
        /// The rank it disagrees with.
        peer: usize,
        /// What `rank` expected.
        ours: Call,
        /// What `peer` sent.
        theirs: Call,
    },
    /// Ranks passed different parts to `split`.
    #[error("ranks disagree: rank {peer} splits the group into other parts than rank {rank}")]
    SplitDisagrees {
        /// The rank that found out.
        rank: usize,
        /// The rank it disagrees with.
        peer: usize,
    },
    /// The caller's buffers or counts do not fit together.
    #[error("{op}: {what} is {got}, must be {want}")]
    Argument {
        /// What was called.
        op: Op,
        /// Which argument.
        what: &'static str,
        /// Its value.
        got: usize,
        /// The value that fits the others.
        want: usize,
    },
    /// A peer sent bytes that are no frame of this protocol.
    #[error("rank {peer} sent a malformed frame: {field} is {value}")]
    Malformed {
        /// The peer.
        peer: usize,
        /// The field that makes no sense.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The operating system refused something that is no peer's fault.
    #[error("i/o error of kind {kind}")]
    Io {
        /// What the operating system said.
        kind: std::io::ErrorKind,
    },
}
