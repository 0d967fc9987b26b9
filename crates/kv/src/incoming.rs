//! One hand-off as a receiving rank sees it.
//!
//! ```text
//!   Reserved ──chunk or commit──► Filling ──all there, digest equal──► Complete
//!      │                            │
//!      └────────── close ───────────┴──────► Dropped(reason)
//! ```
//!
//! `Complete` and `Dropped` are final. A chunk that conflicts, or a commit that does not match, drops the
//! hand-off by itself; what only the caller can see (a wrong payload checksum, a closed stream, a time-out) it
//! reports with [`Incoming::close`]. Nothing here frees blocks: the scheduler does, when the stream that owns
//! them has ended and the transfer is closed.

use std::ops::Range;

use longreach_types::{Epoch, HandoffId};

use crate::coverage::{Coverage, CoverageDigest, CoverageError, Inserted};

/// One hand-off on one rank. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Incoming {
    handoff: HandoffId,
    epoch: Epoch,
    coverage: Coverage,
    state: IncomingState,
}

/// How far a hand-off is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncomingState {
    /// Blocks are reserved, nothing has come.
    Reserved,
    /// Chunks are coming, or the commit came before some of them.
    Filling {
        /// The sender's totals, once known.
        commit: Option<Commit>,
    },
    /// Everything is there and verified.
    Complete,
    /// Nothing of it may become visible.
    Dropped(DropReason),
}

/// The sender's totals for one rank, its last message there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Cells (layer × block) sent to this rank.
    pub n_cells: usize,
    /// Their digest.
    pub digest: CoverageDigest,
}

/// Why a hand-off was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// The request was cancelled, or its stream ended.
    Cancelled,
    /// The hand-off took longer than its deadline.
    Deadline,
    /// The sender gave up.
    PeerAborted,
    /// The KV stream ended before everything was there.
    StreamClosed,
    /// A payload does not have the checksum it came with.
    Checksum,
    /// The same cell came with other bytes.
    Conflict,
    /// A chunk or commit does not fit what was reserved or received.
    Mismatch,
    /// The decode group ended its epoch.
    EpochEnded,
}

/// Why a message of a hand-off was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IncomingError {
    /// The message belongs to another life of the group. The hand-off itself is not harmed.
    #[error("hand-off {handoff:?} is of epoch {expected}, the message of {got}; start again from prefill")]
    StaleEpoch {
        /// The hand-off.
        handoff: HandoffId,
        /// Its epoch.
        expected: Epoch,
        /// The message's.
        got: Epoch,
    },
    /// The hand-off was dropped: count the message and ignore it.
    #[error("hand-off was dropped before: {0:?}")]
    Late(DropReason),
    /// The chunk was refused and the hand-off dropped.
    #[error(transparent)]
    Coverage(#[from] CoverageError),
    /// The sender's totals are not those of what came; the hand-off was dropped.
    #[error("commit of {expected:?}, received {got:?}")]
    CommitMismatch {
        /// What the sender says it sent.
        expected: Commit,
        /// What has arrived or was reserved.
        got: Commit,
    },
}

/// A change of state that the diagram does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BadTransition;

impl Incoming {
    /// A hand-off for which `n_layers` × `n_blocks` cells are reserved on this rank; none for an empty share.
    pub fn new(handoff: HandoffId, epoch: Epoch, n_layers: usize, n_blocks: usize) -> Self {
        let coverage = Coverage::new(n_layers, n_blocks);
        Self { handoff, epoch, coverage, state: IncomingState::Reserved }
    }

    /// Which hand-off this is.
    pub const fn handoff(&self) -> HandoffId {
        self.handoff
    }

    /// The epoch its messages must carry.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// How far it is.
    pub const fn state(&self) -> IncomingState {
        self.state
    }

    /// Whether everything is there and verified.
    pub const fn is_complete(&self) -> bool {
        matches!(self.state, IncomingState::Complete)
    }

    /// What has arrived.
    pub const fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// Whether a message of `epoch` is still of interest. [`Incoming::insert`] checks this, too; asking first
    /// saves the checksums of a payload that nobody wants.
    pub fn check_open(&self, epoch: Epoch) -> Result<(), IncomingError> {
        match self.state {
            IncomingState::Dropped(reason) => Err(IncomingError::Late(reason)),
            _ if epoch != self.epoch => {
                Err(IncomingError::StaleEpoch { handoff: self.handoff, expected: self.epoch, got: epoch })
            }
            _ => Ok(()),
        }
    }

    /// Records a verified chunk: layers × blocks of the share, one checksum a cell.
    ///
    /// On [`Inserted::New`] the caller writes the payload to the blocks before anyone acts on the state;
    /// otherwise it must not: after completion a repeat is the only possible success, and the blocks are in use.
    pub fn insert(
        &mut self,
        epoch: Epoch,
        layers: Range<usize>,
        blocks: Range<usize>,
        crcs: &[u32],
    ) -> Result<Inserted, IncomingError> {
        self.check_open(epoch)?;
        let inserted = self.coverage.insert(layers, blocks, crcs).map_err(|error| self.refuse(error))?;
        match self.state {
            IncomingState::Reserved => self.advance(IncomingState::Filling { commit: None }),
            IncomingState::Filling { commit: Some(commit) } => self.settle(commit)?,
            _ => {}
        }
        Ok(inserted)
    }

    /// Takes the sender's totals. An empty share is complete with this; a commit that overtook chunks is kept
    /// until they are there.
    pub fn commit(&mut self, epoch: Epoch, commit: Commit) -> Result<IncomingState, IncomingError> {
        self.check_open(epoch)?;
        let n_reserved = self.coverage.n_seen() + self.coverage.n_missing();
        if commit.n_cells != n_reserved {
            return Err(self.mismatch(commit, Commit { n_cells: n_reserved, digest: self.coverage.digest() }));
        }
        match self.state {
            IncomingState::Filling { commit: Some(first) } if first != commit => {
                return Err(self.mismatch(commit, first));
            }
            IncomingState::Complete if commit.digest != self.coverage.digest() => {
                // Final states stay: what was verified is in use. The sender still learns of its error.
                let got = Commit { n_cells: n_reserved, digest: self.coverage.digest() };
                return Err(IncomingError::CommitMismatch { expected: commit, got });
            }
            IncomingState::Complete => {}
            _ => {
                self.advance(IncomingState::Filling { commit: Some(commit) });
                self.settle(commit)?;
            }
        }
        Ok(self.state)
    }

    /// Drops the hand-off, unless it has already come to an end. Returns the state it is in now.
    pub fn close(&mut self, reason: DropReason) -> IncomingState {
        self.advance(IncomingState::Dropped(reason));
        self.state
    }

    /// Completes the hand-off if everything is there.
    fn settle(&mut self, commit: Commit) -> Result<(), IncomingError> {
        if !self.coverage.is_complete() {
            return Ok(());
        }
        let got = Commit { n_cells: self.coverage.n_seen(), digest: self.coverage.digest() };
        if got != commit {
            return Err(self.mismatch(commit, got));
        }
        self.advance(IncomingState::Complete);
        Ok(())
    }

    fn refuse(&mut self, error: CoverageError) -> IncomingError {
        let conflict = matches!(error, CoverageError::Conflict { .. });
        self.close(if conflict { DropReason::Conflict } else { DropReason::Mismatch });
        error.into()
    }

    fn mismatch(&mut self, expected: Commit, got: Commit) -> IncomingError {
        self.close(DropReason::Mismatch);
        IncomingError::CommitMismatch { expected, got }
    }

    /// Changes state where the diagram allows it, and stays otherwise: only final states refuse.
    fn advance(&mut self, to: IncomingState) {
        if let Ok(state) = transition(self.state, to) {
            self.state = state;
        }
    }
}

/// The one place that says which changes of state exist.
const fn transition(from: IncomingState, to: IncomingState) -> Result<IncomingState, BadTransition> {
    use IncomingState::{Complete, Dropped, Filling, Reserved};
    match (from, to) {
        (Reserved | Filling { .. }, Filling { .. } | Dropped(_)) | (Filling { .. }, Complete) => Ok(to),
        (Complete | Dropped(_), _) | (_, Reserved) | (Reserved, Complete) => Err(BadTransition),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch(3);

    fn incoming(n_blocks: usize) -> Incoming {
        Incoming::new(HandoffId(1), EPOCH, 2, n_blocks)
    }

    fn commit_of(cells: &[(usize, usize, u32)]) -> Commit {
        let mut digest = CoverageDigest::default();
        cells.iter().for_each(|&(layer, block, crc)| digest.add(layer, block, crc));
        Commit { n_cells: cells.len(), digest }
    }

    #[test]
    fn an_empty_share_is_complete_with_its_commit_and_not_before() {
        let mut empty = incoming(0);
        assert_eq!(empty.state(), IncomingState::Reserved);
        assert_eq!(empty.commit(EPOCH, commit_of(&[])), Ok(IncomingState::Complete));
        assert_eq!(empty.commit(EPOCH, commit_of(&[])), Ok(IncomingState::Complete), "a repeat is harmless");
    }

    #[test]
    fn completes_when_chunks_and_commit_are_there_in_any_order() {
        let commit = commit_of(&[(0, 0, 10), (1, 0, 11)]);
        let steps: [fn(&mut Incoming, Commit); 3] = [
            |i, _| assert_eq!(i.insert(EPOCH, 0..1, 0..1, &[10]), Ok(Inserted::New)),
            |i, _| assert_eq!(i.insert(EPOCH, 1..2, 0..1, &[11]), Ok(Inserted::New)),
            |i, commit| assert!(i.commit(EPOCH, commit).is_ok()),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut incoming = incoming(1);
            for (n_done, step) in order.into_iter().enumerate() {
                assert!(!incoming.is_complete(), "complete after {n_done} of {order:?}");
                steps[step](&mut incoming, commit);
            }
            assert!(incoming.is_complete(), "{order:?}");
            assert_eq!(incoming.insert(EPOCH, 0..1, 0..1, &[10]), Ok(Inserted::Repeat));
        }
    }

    #[test]
    fn other_bytes_or_totals_drop_the_hand_off() {
        let mut conflict = incoming(1);
        conflict.insert(EPOCH, 0..1, 0..1, &[10]).unwrap();
        assert!(matches!(conflict.insert(EPOCH, 0..2, 0..1, &[12, 11]), Err(IncomingError::Coverage(_))));
        assert_eq!(conflict.state(), IncomingState::Dropped(DropReason::Conflict));

        let mut wrong_digest = incoming(1);
        wrong_digest.insert(EPOCH, 0..2, 0..1, &[10, 11]).unwrap();
        let error = wrong_digest.commit(EPOCH, commit_of(&[(0, 0, 10), (1, 0, 12)])).unwrap_err();
        assert!(matches!(error, IncomingError::CommitMismatch { .. }));
        assert_eq!(wrong_digest.state(), IncomingState::Dropped(DropReason::Mismatch));

        let mut wrong_total = incoming(1);
        wrong_total.commit(EPOCH, commit_of(&[(0, 0, 10)])).unwrap_err();
        assert_eq!(wrong_total.state(), IncomingState::Dropped(DropReason::Mismatch));
    }

    #[test]
    fn late_and_stale_messages_change_nothing() {
        let mut incoming = incoming(1);
        let stale = incoming.insert(Epoch(2), 0..1, 0..1, &[10]).unwrap_err();
        assert_eq!(
            stale,
            IncomingError::StaleEpoch { handoff: HandoffId(1), expected: EPOCH, got: Epoch(2) }
        );
        assert_eq!(incoming.state(), IncomingState::Reserved);

        assert_eq!(incoming.close(DropReason::Cancelled), IncomingState::Dropped(DropReason::Cancelled));
        assert_eq!(incoming.close(DropReason::Deadline), IncomingState::Dropped(DropReason::Cancelled));
        let late = IncomingError::Late(DropReason::Cancelled);
        assert_eq!(incoming.insert(EPOCH, 0..1, 0..1, &[10]), Err(late));
        assert_eq!(incoming.commit(EPOCH, commit_of(&[])), Err(late));
        assert_eq!(incoming.coverage().n_seen(), 0);
    }

    #[test]
    fn a_complete_hand_off_stays_complete() {
        let mut incoming = incoming(0);
        incoming.commit(EPOCH, commit_of(&[])).unwrap();
        assert_eq!(incoming.close(DropReason::Cancelled), IncomingState::Complete);
    }
}
