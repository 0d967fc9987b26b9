//! One rank: its KV cells and the hand-offs it is receiving. It does what a rank's thread does in the engine, over the
//! same [`Incoming`]; what is simulated is the arena and the forward pass.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use longreach_kv::{Commit, CoverageDigest, DropReason, Incoming, IncomingError, IncomingState, Inserted};
use longreach_proto::{
    WorkerError,
    worker::{KvAck, KvChunk, KvCommit, KvOpen, OutputToken},
};
use longreach_types::{BlockId, DcpLayout, Epoch, HandoffId, SeqStep, StepId, StepPlan};
use tokio::sync::oneshot;

use crate::{
    journal::Journal,
    model::{self, N_LAYERS},
};

/// Bytes of one cell: all positions of a block in one layer.
pub(crate) const fn cell_bytes(layout: DcpLayout) -> usize {
    layout.block_size() * 8
}

/// What a rank's thread gets from its door.
#[derive(Debug)]
pub(crate) enum Delivery {
    Open { open: KvOpen, outcome: oneshot::Sender<Result<KvAck, WorkerError>> },
    Chunk { handoff: HandoffId, epoch: Epoch, chunk: KvChunk },
    Commit { handoff: HandoffId, epoch: Epoch, commit: KvCommit },
    Broken(HandoffId),
}

/// Where the hand-off of a sequence goes on one rank.
#[derive(Clone, Debug)]
pub(crate) struct ExpectKv {
    pub(crate) handoff: HandoffId,
    pub(crate) prompt_len: usize,
    pub(crate) prompt_hash: [u8; 16],
    /// Of each DCP rank.
    pub(crate) blocks: Vec<Vec<BlockId>>,
}

/// A step with what the simulated forward pass needs besides: the prefixes of each sequence, from which cells are made
/// and against which they are checked.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) plan: StepPlan,
    pub(crate) prefixes: Vec<Arc<[u64]>>,
}

/// The end of a hand-off on one rank.
#[derive(Debug)]
pub(crate) struct HandoffEnd {
    pub(crate) handoff: HandoffId,
    pub(crate) result: Result<Option<OutputToken>, String>,
}

pub(crate) struct Rank {
    name: String,
    dcp_rank: usize,
    layout: DcpLayout,
    epoch: Epoch,
    last_step: Option<StepId>,
    /// By layer, then slot.
    arena: Vec<Vec<u64>>,
    receiving: BTreeMap<HandoffId, Receiving>,
    journal: Journal,
}

struct Receiving {
    incoming: Incoming,
    blocks: Vec<BlockId>,
    prompt_len: usize,
    prompt_hash: [u8; 16],
    outcome: Option<oneshot::Sender<Result<KvAck, WorkerError>>>,
    first_token: Option<OutputToken>,
}

/// What of a rank others may see: which life of its group it is in, and what it holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankFace(Arc<Mutex<(Option<Epoch>, usize)>>);

impl RankFace {
    pub(crate) fn epoch(&self) -> Option<Epoch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn n_receiving(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    pub(crate) fn show(&self, epoch: Option<Epoch>, n_receiving: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (epoch, n_receiving);
    }
}

impl Rank {
    /// A rank whose arena holds what it may not rely on.
    pub(crate) fn new(
        (name, dcp_rank): (String, usize),
        layout: DcpLayout,
        n_blocks: usize,
        epoch: Epoch,
        journal: Journal,
    ) -> Self {
        let arena = vec![vec![0xdead; n_blocks * layout.block_size()]; N_LAYERS];
        let (last_step, receiving) = (None, BTreeMap::new());
        Self { name, dcp_rank, layout, epoch, last_step, arena, receiving, journal }
    }

    pub(crate) fn n_receiving(&self) -> usize {
        self.receiving.len()
    }

    /// Runs one step. Gives the sums over this rank's cells, one for each row that needs logits.
    pub(crate) fn step(&mut self, order: &Order) -> Vec<u64> {
        let plan = &order.plan;
        let in_order = self.last_step.is_none_or(|last| plan.step.0 == last.0 + 1);
        if plan.epoch != self.epoch || !in_order {
            let (have, last) = (self.epoch, self.last_step);
            self.journal.violation(format!(
                "{}: step {} of epoch {} came after {last:?} of epoch {have}",
                self.name, plan.step, plan.epoch
            ));
        }
        self.last_step = Some(plan.step);
        let mut sums = Vec::new();
        for (seq, prefixes) in plan.seqs.iter().zip(&order.prefixes) {
            self.forward(seq, prefixes, &mut sums);
        }
        sums
    }

    fn forward(&mut self, seq: &SeqStep, prefixes: &[u64], sums: &mut Vec<u64>) {
        let first_logits = seq.seq_len() - seq.n_logits;
        let mut sum = 0_u64;
        for (pos, &prefix) in prefixes.iter().enumerate().take(seq.seq_len()) {
            if self.layout.owner(pos) == self.dcp_rank {
                let slot = self.slot(&seq.tables[self.dcp_rank], pos);
                for layer in 0..N_LAYERS {
                    let expected = model::cell(prefix, layer, pos);
                    if pos >= seq.context_len {
                        self.arena[layer][slot] = expected;
                    } else if self.arena[layer][slot] != expected {
                        self.journal.violation(format!(
                            "{}: sequence {} reads foreign KV at layer {layer}, position {pos}",
                            self.name, seq.seq
                        ));
                    }
                    sum = sum.wrapping_add(model::weight(self.arena[layer][slot], layer, pos));
                }
            }
            if pos >= first_logits {
                sums.push(sum);
            }
        }
    }

    /// The bytes of one block in one layer, cut at the end of a prompt of `len`.
    pub(crate) fn export(&self, layer: usize, block: BlockId, n_valid: usize) -> Vec<u8> {
        let start = block.0 as usize * self.layout.block_size();
        let cells = &self.arena[layer][start..start + self.layout.block_size()];
        let valid = cells.iter().enumerate().map(|(i, &cell)| if i < n_valid { cell } else { 0 });
        valid.flat_map(u64::to_le_bytes).collect()
    }

    pub(crate) fn expect(&mut self, expect: &ExpectKv) {
        let blocks = expect.blocks[self.dcp_rank].clone();
        let receiving = Receiving {
            incoming: Incoming::new(expect.handoff, self.epoch, N_LAYERS, blocks.len()),
            blocks,
            prompt_len: expect.prompt_len,
            prompt_hash: expect.prompt_hash,
            outcome: None,
            first_token: None,
        };
        if self.receiving.insert(expect.handoff, receiving).is_some() {
            self.journal.violation(format!("{}: hand-off {} is expected twice", self.name, expect.handoff));
        }
    }

    pub(crate) fn forget(&mut self, handoff: HandoffId) {
        if let Some(mut receiving) = self.receiving.remove(&handoff) {
            receiving.incoming.close(DropReason::Cancelled);
            receiving.answer(Err(WorkerError::Aborted("the request has ended".to_owned())));
        }
    }

    pub(crate) fn deliver(&mut self, delivery: Delivery) -> Option<HandoffEnd> {
        let (handoff, result) = match delivery {
            Delivery::Open { open, outcome } => (open.handoff, self.open(&open, outcome)),
            Delivery::Chunk { handoff, epoch, chunk } => (handoff, self.fill(handoff, epoch, &chunk)),
            Delivery::Commit { handoff, epoch, commit } => (handoff, self.commit(handoff, epoch, commit)),
            Delivery::Broken(handoff) => (handoff, self.broken(handoff)),
        };
        self.settle(handoff, result)
    }

    fn open(
        &mut self,
        open: &KvOpen,
        outcome: oneshot::Sender<Result<KvAck, WorkerError>>,
    ) -> Result<(), WorkerError> {
        let Some(receiving) = self.receiving.get_mut(&open.handoff) else {
            self.journal.count("late hand-off refused");
            let _sender_gone = outcome.send(Err(WorkerError::Aborted("never reserved, or over".to_owned())));
            return Ok(());
        };
        if receiving.outcome.is_some() {
            let _sender_gone = outcome.send(Err(WorkerError::Invalid("already open".to_owned())));
            return Ok(());
        }
        receiving.outcome = Some(outcome);
        if open.prompt_len != receiving.prompt_len {
            return Err(WorkerError::Invalid("another length of the prompt".to_owned()));
        }
        Ok(())
    }

    fn fill(&mut self, handoff: HandoffId, epoch: Epoch, chunk: &KvChunk) -> Result<(), WorkerError> {
        let Some(receiving) = self.receiving.get_mut(&handoff) else {
            self.journal.count("late chunk ignored");
            return Ok(());
        };
        let (layers, blocks) = (chunk.layers.clone(), chunk.blocks.clone());
        let inserted = receiving
            .incoming
            .insert(epoch, layers.clone(), blocks.clone(), &chunk.crc32c)
            .map_err(|error| incoming_error(&error))?;
        if inserted == Inserted::Repeat {
            self.journal.count("repeated chunk recognised");
            return Ok(());
        }
        let cells = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block)));
        let (block_size, bytes) = (self.layout.block_size(), cell_bytes(self.layout));
        for ((layer, block), bytes) in cells.zip(chunk.payload.chunks_exact(bytes)) {
            let start = receiving.blocks[block].0 as usize * block_size;
            let (words, _) = bytes.as_chunks::<8>();
            for (slot, word) in self.arena[layer][start..start + block_size].iter_mut().zip(words) {
                *slot = u64::from_le_bytes(*word);
            }
        }
        Ok(())
    }

    fn commit(&mut self, handoff: HandoffId, epoch: Epoch, commit: KvCommit) -> Result<(), WorkerError> {
        let Some(receiving) = self.receiving.get_mut(&handoff) else { return Ok(()) };
        if commit.prompt_hash != receiving.prompt_hash {
            return Err(WorkerError::Invalid("another prompt than was reserved".to_owned()));
        }
        let totals = Commit { n_cells: commit.n_cells, digest: CoverageDigest(commit.digest) };
        receiving.first_token = commit.first_token;
        let state = receiving.incoming.commit(epoch, totals).map_err(|error| incoming_error(&error))?;
        if matches!(state, IncomingState::Filling { .. }) {
            self.journal.count("commit overtook a chunk");
        }
        Ok(())
    }

    fn broken(&mut self, handoff: HandoffId) -> Result<(), WorkerError> {
        if let Some(receiving) = self.receiving.get_mut(&handoff) {
            receiving.incoming.close(DropReason::StreamClosed);
            return Err(WorkerError::Aborted("the KV stream ended early".to_owned()));
        }
        Ok(())
    }

    fn settle(&mut self, handoff: HandoffId, result: Result<(), WorkerError>) -> Option<HandoffEnd> {
        if let Err(error) = result {
            let mut receiving = self.receiving.remove(&handoff)?;
            receiving.incoming.close(DropReason::Mismatch);
            let reason = error.to_string();
            receiving.answer(Err(error));
            return Some(HandoffEnd { handoff, result: Err(reason) });
        }
        if !self.receiving.get(&handoff)?.incoming.is_complete() {
            return None;
        }
        let mut receiving = self.receiving.remove(&handoff)?;
        let n_cells = receiving.incoming.coverage().n_seen();
        receiving.answer(Ok(KvAck { n_cells }));
        Some(HandoffEnd { handoff, result: Ok(receiving.first_token) })
    }

    fn slot(&self, table: &[BlockId], pos: usize) -> usize {
        let block = table[self.layout.local_block(self.layout.block(pos))];
        block.0 as usize * self.layout.block_size() + pos % self.layout.block_size()
    }
}

impl Receiving {
    fn answer(&mut self, verdict: Result<KvAck, WorkerError>) {
        if let Some(outcome) = self.outcome.take() {
            let _sender_gone = outcome.send(verdict);
        }
    }
}

fn incoming_error(error: &IncomingError) -> WorkerError {
    match error {
        IncomingError::StaleEpoch { .. } | IncomingError::Late(_) => WorkerError::Aborted(error.to_string()),
        IncomingError::Coverage(_) | IncomingError::CommitMismatch { .. } => {
            WorkerError::DataLoss(error.to_string())
        }
    }
}
