//! All collectives as one primitive: every rank passes a run of bytes, perhaps none, to every other rank.
//!
//! A backend implements [`Transport`] alone. What the collectives mean, the checks of their arguments and the copy
//! of a rank's own part are here once, so backends cannot differ in them.

use std::ops::Range;

use crate::{
    comm::{AbortHandle, Communicator},
    error::{CommError, Op},
};

/// The most ranks of one group.
pub(crate) const MAX_RANKS: usize = 64;

// Frames and shared slots carry the memory image of `f32`; the wire is little endian.
const _: () = assert!(cfg!(target_endian = "little"), "longreach-collective needs a little-endian machine");

/// How a buffer is cut into one part a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parts<'a> {
    /// Every rank's part is the whole buffer.
    Whole,
    /// Equal parts in rank order.
    Even { n_ranks: usize },
    /// `counts[r]` elements of `elem_bytes` for rank `r`, in rank order.
    Counts { counts: &'a [usize], elem_bytes: usize },
    /// The whole buffer is this rank's part; the others' are empty.
    Only { rank: usize },
}

impl Parts<'_> {
    /// The byte range of `rank` in a buffer of `len` bytes.
    pub(crate) fn range(&self, rank: usize, len: usize) -> Range<usize> {
        match *self {
            Self::Whole => 0..len,
            Self::Even { n_ranks } => {
                let part = len / n_ranks;
                rank * part..(rank + 1) * part
            }
            Self::Counts { counts, elem_bytes } => {
                let start: usize = counts[..rank].iter().sum::<usize>() * elem_bytes;
                start..start + counts[rank] * elem_bytes
            }
            Self::Only { rank: only } => 0..if rank == only { len } else { 0 },
        }
    }
}

/// One rank's part in one exchange.
pub(crate) struct Exchange<'a> {
    pub(crate) op: Op,
    pub(crate) send: &'a [u8],
    pub(crate) send_parts: Parts<'a>,
    pub(crate) recv: &'a mut [u8],
    pub(crate) recv_parts: Parts<'a>,
}

impl Exchange<'_> {
    pub(crate) fn send_to(&self, rank: usize) -> &[u8] {
        &self.send[self.send_parts.range(rank, self.send.len())]
    }

    pub(crate) fn recv_range(&self, rank: usize) -> Range<usize> {
        self.recv_parts.range(rank, self.recv.len())
    }

    pub(crate) fn recv_from(&mut self, rank: usize) -> &mut [u8] {
        let range = self.recv_range(rank);
        &mut self.recv[range]
    }

    /// Copies the rank's own part. Where only one side has one (a broadcast), there is nothing to copy.
    fn copy_own(&mut self, rank: usize) {
        let sent = self.send_parts.range(rank, self.send.len());
        let range = self.recv_range(rank);
        if sent.len() == range.len() {
            self.recv[range].copy_from_slice(&self.send[sent]);
        }
    }
}

/// What a backend provides.
pub(crate) trait Transport: Send + Sized + 'static {
    fn own_rank(&self) -> usize;
    fn group_size(&self) -> usize;
    /// Passes all parts but the rank's own. Lengths of both sides are compared before anything is delivered.
    fn exchange(&mut self, exchange: Exchange<'_>) -> Result<(), CommError>;
    /// The transport among the ranks of `parts[part_idx]`, to which this rank belongs. Called by all ranks alike.
    fn subset(&mut self, parts: &[Range<usize>], part_idx: usize) -> Result<Self, CommError>;
    /// Records the end of the epoch; the first cause is kept and returned.
    fn fail(&self, cause: CommError) -> CommError;
    fn handle(&self) -> AbortHandle;

    /// A call that does not make sense leaves the ranks out of step, so it ends the epoch too.
    fn require(&self, op: Op, what: &'static str, got: usize, want: usize) -> Result<(), CommError> {
        if got == want { Ok(()) } else { Err(self.fail(CommError::Argument { op, what, got, want })) }
    }

    fn run(&mut self, mut exchange: Exchange<'_>) -> Result<(), CommError> {
        exchange.copy_own(self.own_rank());
        self.exchange(exchange)
    }

    fn gather_even(&mut self, op: Op, send: &[u8], recv: &mut [u8]) -> Result<(), CommError> {
        let n_ranks = self.group_size();
        self.require(op, "length of recv in bytes", recv.len(), send.len() * n_ranks)?;
        let recv_parts = Parts::Even { n_ranks };
        self.run(Exchange { op, send, send_parts: Parts::Whole, recv, recv_parts })
    }
}

impl<X: Transport> Communicator<[f32]> for X {
    fn rank(&self) -> usize {
        self.own_rank()
    }

    fn n_ranks(&self) -> usize {
        self.group_size()
    }

    fn all_gather(&mut self, send: &[f32], recv: &mut [f32]) -> Result<(), CommError> {
        self.gather_even(Op::AllGather, bytemuck::cast_slice(send), bytemuck::cast_slice_mut(recv))
    }

    fn all_gather_v(&mut self, send: &[f32], recv: &mut [f32], counts: &[usize]) -> Result<(), CommError> {
        let op = Op::AllGather;
        self.require(op, "number of counts", counts.len(), self.group_size())?;
        self.require(op, "length of send", send.len(), counts[self.own_rank()])?;
        self.require(op, "length of recv", recv.len(), total(counts))?;
        self.run(Exchange {
            op,
            send: bytemuck::cast_slice(send),
            send_parts: Parts::Whole,
            recv: bytemuck::cast_slice_mut(recv),
            recv_parts: Parts::Counts { counts, elem_bytes: size_of::<f32>() },
        })
    }

    fn all_to_all(
        &mut self,
        send: &[f32],
        send_counts: &[usize],
        recv: &mut [f32],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        let (op, n_ranks, rank) = (Op::AllToAll, self.group_size(), self.own_rank());
        self.require(op, "number of send counts", send_counts.len(), n_ranks)?;
        self.require(op, "number of recv counts", recv_counts.len(), n_ranks)?;
        self.require(op, "length of send", send.len(), total(send_counts))?;
        self.require(op, "length of recv", recv.len(), total(recv_counts))?;
        self.require(op, "own recv count", recv_counts[rank], send_counts[rank])?;
        let elem_bytes = size_of::<f32>();
        self.run(Exchange {
            op,
            send: bytemuck::cast_slice(send),
            send_parts: Parts::Counts { counts: send_counts, elem_bytes },
            recv: bytemuck::cast_slice_mut(recv),
            recv_parts: Parts::Counts { counts: recv_counts, elem_bytes },
        })
    }

    fn broadcast(&mut self, data: &mut [f32], root: usize) -> Result<(), CommError> {
        let op = Op::Broadcast;
        self.require(op, "root", root, root.min(self.group_size() - 1))?;
        let data: &mut [u8] = bytemuck::cast_slice_mut(data);
        let (send, recv): (&[u8], &mut [u8]) =
            if self.own_rank() == root { (data, &mut []) } else { (&[], data) };
        self.run(Exchange {
            op,
            send,
            send_parts: Parts::Whole,
            recv,
            recv_parts: Parts::Only { rank: root },
        })
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.gather_even(Op::Barrier, &[], &mut [])
    }

    fn all_gather_bytes(&mut self, send: &[u8], recv: &mut [u8]) -> Result<(), CommError> {
        self.gather_even(Op::AllGatherBytes, send, recv)
    }

    fn split(&mut self, parts: &[Range<usize>]) -> Result<Box<dyn Communicator<[f32]>>, CommError> {
        let (op, rank) = (Op::Split, self.own_rank());
        let mut next = 0;
        for part in parts {
            self.require(op, "start of a part", part.start, next)?;
            self.require(
                op,
                "end of a part",
                part.end,
                part.end.clamp(next + 1, self.group_size().max(next + 1)),
            )?;
            next = part.end;
        }
        self.require(op, "end of the last part", next, self.group_size())?;
        let ends: Vec<u8> = parts.iter().flat_map(|part| (part.end as u64).to_le_bytes()).collect();
        let mut all = vec![0; ends.len() * self.group_size()];
        self.gather_even(op, &ends, &mut all)?;
        if let Some(peer) = all.chunks_exact(ends.len()).position(|theirs| theirs != ends) {
            return Err(self.fail(CommError::SplitDisagrees { rank, peer }));
        }
        let part_idx = parts.iter().position(|part| part.contains(&rank)).expect("the parts cover all ranks");
        Ok(Box::new(self.subset(parts, part_idx)?))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.handle()
    }
}

/// The number of the communicators that collective `seq` of communicator `group` splits it into. Nested splits are
/// known to their members only, so it is computed, not counted.
pub(crate) fn part_id(group: u32, seq: u64) -> u32 {
    (group.wrapping_mul(0x9e37_79b1).wrapping_add(seq as u32)).max(1)
}

/// The sum of counts; saturating, so that nonsense fails the comparison with a buffer's length.
fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
}
