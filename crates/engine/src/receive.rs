//! The hand-offs that a rank is receiving, and what may be pulled of them meanwhile.
//!
//! ```text
//! expect ──► open ──► chunks, the commit, in any order ──► verified: the sender's call is answered
//!    └───────────┴── refused, the stream ended too early, or forgotten ──► whatever comes later is ignored
//! ```
//!
//! Only who runs the rank's steps calls it, between them; it writes cells at once, so nothing is written for a hand-off
//! that was forgotten.

use std::collections::BTreeMap;

use longreach_kv::{
    Commit, CoverageDigest, CoverageError, DropReason, Incoming, IncomingError, IncomingState, Inserted,
};
use longreach_proto::{
    WorkerError,
    group::ExpectKv,
    worker::{KvAck, KvChunk, KvCommit, KvOpen, OutputToken, PullRequest},
};
use longreach_types::{BlockId, Epoch, HandoffId};
use tokio::sync::oneshot;

use crate::{
    cells::KvCells,
    inlet::Delivery,
    offer::{Offer, PullSender},
};

/// All hand-offs on their way into one rank.
#[derive(Debug)]
pub struct Receiver {
    epoch: Epoch,
    by_handoff: BTreeMap<HandoffId, Receiving>,
    counts: ReceiveCounts,
}

/// What came out of order since the start of the rank's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveCounts {
    /// Streams opened for a hand-off that had ended or was never reserved.
    pub late_opens: u64,
    /// Chunks of one that had ended.
    pub late_chunks: u64,
    /// Chunks that had come before.
    pub repeats: u64,
    /// Commits that overtook chunks.
    pub early_commits: u64,
}

/// A hand-off on its way in.
#[derive(Debug)]
struct Receiving {
    incoming: Incoming,
    /// The share of this rank: where cells go.
    blocks: Vec<BlockId>,
    prompt_len: usize,
    prompt_hash: [u8; 16],
    outcome: Option<oneshot::Sender<Result<KvAck, WorkerError>>>,
    first_token: Option<OutputToken>,
    /// What may be pulled meanwhile.
    offer: Offer,
}

/// The end of a hand-off on this rank.
#[derive(Debug)]
pub struct HandoffEnd {
    /// Which.
    pub handoff: HandoffId,
    /// How: the first token came with the commit (to rank 0), or why it was refused.
    pub result: Result<Option<OutputToken>, String>,
}

impl Receiver {
    /// Receives nothing yet, in the life `epoch`.
    pub fn new(epoch: Epoch) -> Self {
        Self { epoch, by_handoff: BTreeMap::new(), counts: ReceiveCounts::default() }
    }

    /// Makes ready for a hand-off.
    pub fn expect(&mut self, expect: &ExpectKv, cells: &impl KvCells) {
        let shape = cells.shape();
        // A rank whose head group has no heads stores nothing, whatever positions it owns.
        let stores = shape.n_kv_heads > 0;
        let share = expect.blocks.get(shape.dcp_rank).filter(|_| stores).cloned().unwrap_or_default();
        let blocks = share.missing;
        let incoming = Incoming::new(expect.handoff, self.epoch, shape.n_layers, blocks.len());
        let receiving = Receiving {
            incoming,
            blocks,
            prompt_len: expect.prompt_len,
            prompt_hash: expect.prompt_hash,
            outcome: None,
            first_token: None,
            offer: Offer::new(share.cached),
        };
        self.by_handoff.insert(expect.handoff, receiving);
    }

    /// Ends a hand-off; whatever comes for it later is refused.
    pub fn forget(&mut self, handoff: HandoffId) {
        if let Some(mut receiving) = self.by_handoff.remove(&handoff) {
            receiving.incoming.close(DropReason::Cancelled);
            receiving.answer(Err(WorkerError::Aborted("the request has ended".to_owned())));
        }
    }

    /// Hand-offs that have not ended.
    pub fn len(&self) -> usize {
        self.by_handoff.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_handoff.is_empty()
    }

    /// What came out of order.
    pub fn counts(&self) -> ReceiveCounts {
        self.counts
    }

    /// Takes one delivery of the inlet. Returns the hand-off's end if this was it.
    pub fn deliver(&mut self, delivery: Delivery, cells: &mut impl KvCells) -> Option<HandoffEnd> {
        let (handoff, result) = match delivery {
            Delivery::Open { open, outcome } => (open.handoff, self.open(&open, outcome)),
            Delivery::Chunk(handoff, chunk) => (handoff, self.fill(handoff, &chunk, cells)),
            Delivery::Commit(handoff, commit) => (handoff, self.commit(handoff, commit)),
            Delivery::Ended(handoff) => (handoff, self.ended(handoff)),
            // It is the leader who waits, and who has heard of it.
            Delivery::Alive(_) => return None,
            Delivery::Pull { request, messages } => {
                self.pull(&request, messages, cells);
                return None;
            }
            Delivery::PullMore(handoff) => {
                if let Some(receiving) = self.by_handoff.get_mut(&handoff) {
                    receiving.offer.send_next(cells);
                }
                return None;
            }
        };
        self.settle(handoff, result)
    }

    /// Starts giving back a part of a hand-off's cached prefix. A refusal is the caller's affair alone.
    fn pull(&mut self, request: &PullRequest, messages: PullSender, cells: &impl KvCells) {
        let refusal = match self.by_handoff.get_mut(&request.handoff) {
            Some(receiving) if receiving.prompt_hash == request.prompt_hash => {
                return receiving.offer.open(request, messages, cells);
            }
            Some(_) => WorkerError::Invalid("another prompt than was reserved".to_owned()),
            None => WorkerError::Aborted("the hand-off has ended or was never reserved".to_owned()),
        };
        let _caller_gone = messages.try_send(Err(refusal));
    }

    fn open(
        &mut self,
        open: &KvOpen,
        outcome: oneshot::Sender<Result<KvAck, WorkerError>>,
    ) -> Result<(), WorkerError> {
        let Some(receiving) = self.by_handoff.get_mut(&open.handoff) else {
            // Nobody waits for this one: a late message of a hand-off that has ended, or a stranger's.
            self.counts.late_opens += 1;
            let error = WorkerError::Aborted("the hand-off has ended or was never reserved".to_owned());
            let _sender_gone = outcome.send(Err(error));
            return Ok(());
        };
        if receiving.outcome.is_some() {
            let _sender_gone =
                outcome.send(Err(WorkerError::Invalid("the hand-off is already open".to_owned())));
            return Ok(());
        }
        receiving.outcome = Some(outcome);
        if open.prompt_len != receiving.prompt_len {
            let (want, got) = (receiving.prompt_len, open.prompt_len);
            return Err(WorkerError::Invalid(format!(
                "{want} prompt tokens are expected, the sender has {got}"
            )));
        }
        Ok(())
    }

    fn fill(
        &mut self,
        handoff: HandoffId,
        chunk: &KvChunk,
        cells: &mut impl KvCells,
    ) -> Result<(), WorkerError> {
        let Some(receiving) = self.by_handoff.get_mut(&handoff) else {
            self.counts.late_chunks += 1;
            return Ok(());
        };
        let (layers, blocks) = (chunk.layers.clone(), chunk.blocks.clone());
        let inserted = receiving
            .incoming
            .insert(self.epoch, layers.clone(), blocks.clone(), &chunk.crc32c)
            .map_err(incoming_error)?;
        if inserted == Inserted::Repeat {
            self.counts.repeats += 1;
            return Ok(());
        }
        let n_heads = cells.shape().n_kv_heads;
        let cell_bytes = cells.shape().cell_bytes(n_heads);
        let places = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block)));
        for ((layer, block), bytes) in places.zip(chunk.payload.chunks_exact(cell_bytes)) {
            cells.import(layer, receiving.blocks[block], 0..n_heads, bytes);
        }
        Ok(())
    }

    fn commit(&mut self, handoff: HandoffId, commit: KvCommit) -> Result<(), WorkerError> {
        let Some(receiving) = self.by_handoff.get_mut(&handoff) else { return Ok(()) };
        if commit.prompt_hash != receiving.prompt_hash {
            return Err(WorkerError::Invalid(
                "the sender computed another prompt than was reserved".to_owned(),
            ));
        }
        let totals = Commit { n_cells: commit.n_cells, digest: CoverageDigest(commit.digest) };
        receiving.first_token = commit.first_token;
        let state = receiving.incoming.commit(self.epoch, totals).map_err(incoming_error)?;
        self.counts.early_commits += u64::from(matches!(state, IncomingState::Filling { .. }));
        Ok(())
    }

    /// Nothing more comes. A hand-off that is not complete never will be.
    fn ended(&mut self, handoff: HandoffId) -> Result<(), WorkerError> {
        let Some(receiving) = self.by_handoff.get_mut(&handoff) else { return Ok(()) };
        let n_missing = receiving.incoming.coverage().n_missing();
        let has_commit = matches!(receiving.incoming.state(), IncomingState::Filling { commit: Some(_) });
        receiving.incoming.close(DropReason::StreamClosed);
        Err(WorkerError::Aborted(if has_commit {
            format!("the KV stream ended with {n_missing} cells missing")
        } else {
            "the KV stream ended before its commit".to_owned()
        }))
    }

    /// Answers the sender once the hand-off has come to an end.
    fn settle(&mut self, handoff: HandoffId, result: Result<(), WorkerError>) -> Option<HandoffEnd> {
        if let Err(error) = result {
            let mut receiving = self.by_handoff.remove(&handoff)?;
            receiving.incoming.close(DropReason::Mismatch);
            let reason = error.to_string();
            receiving.answer(Err(error));
            return Some(HandoffEnd { handoff, result: Err(reason) });
        }
        if !matches!(self.by_handoff.get(&handoff)?.incoming.state(), IncomingState::Complete) {
            return None;
        }
        let mut receiving = self.by_handoff.remove(&handoff)?;
        let n_cells = receiving.incoming.coverage().n_seen();
        receiving.answer(Ok(KvAck { n_cells }));
        Some(HandoffEnd { handoff, result: Ok(receiving.first_token) })
    }
}

impl Receiving {
    fn answer(&mut self, verdict: Result<KvAck, WorkerError>) {
        if let Some(outcome) = self.outcome.take() {
            // The sender may have gone away; its stream's end is reported separately.
            let _sender_gone = outcome.send(verdict);
        }
    }
}

/// What the sender is told when its cells are refused.
fn incoming_error(error: IncomingError) -> WorkerError {
    match error {
        IncomingError::StaleEpoch { .. } | IncomingError::Late(_) => WorkerError::Aborted(error.to_string()),
        IncomingError::Coverage(CoverageError::Conflict { .. }) | IncomingError::CommitMismatch { .. } => {
            WorkerError::DataLoss(error.to_string())
        }
        IncomingError::Coverage(CoverageError::OutOfRange { .. } | CoverageError::WrongCount { .. }) => {
            WorkerError::Invalid(error.to_string())
        }
    }
}
