//! One rank's thread-side state: its shard, its KV, and the hand-offs it is receiving.
//!
//! Leader and followers own one each; what differs between them is who decides, not what a rank does.

use std::{collections::HashMap, sync::Arc};

use longreach_kv::{
    Commit, CoverageDigest, CoverageError, DropReason, Incoming, IncomingError, IncomingState, Inserted,
};
use longreach_model::{
    Backend, Comms, ForwardError, ModelShard,
    forward::{LayerHook, Scratch},
};
use longreach_proto::{
    WorkerError,
    group::ExpectKv,
    worker::{KvAck, KvChunk, KvCommit, KvOpen, OutputToken, PullRequest},
};
use longreach_types::{BlockId, Epoch, HandoffId, StepId, StepPlan};
use tokio::sync::oneshot;

use crate::{
    inlet::Delivery,
    offer::{Offer, PullSender},
};

/// A rank that can run steps and receive KV.
pub struct RankWorker<B: Backend> {
    shard: Arc<ModelShard<B>>,
    kv: B::Kv,
    comms: Comms<B::Comm>,
    scratch: Scratch<B::Tensor>,
    epoch: Epoch,
    last_step: Option<StepId>,
    receiving: HashMap<HandoffId, Receiving>,
}

/// A hand-off on its way in.
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

/// A plan that this rank must not run.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Another life of the group.
    #[error("plan of epoch {got} came to a rank of epoch {have}")]
    StaleEpoch {
        /// The plan's.
        got: Epoch,
        /// The rank's.
        have: Epoch,
    },
    /// Not the step after the last one.
    #[error("plan of step {got} came after step {last}")]
    OutOfOrder {
        /// The plan's.
        got: StepId,
        /// The rank's.
        last: StepId,
    },
    /// The forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

impl<B: Backend> RankWorker<B> {
    /// A rank whose KV holds nothing.
    pub fn new(shard: Arc<ModelShard<B>>, kv: B::Kv, comms: Comms<B::Comm>, epoch: Epoch) -> Self {
        let receiving = HashMap::new();
        Self { shard, kv, comms, scratch: Scratch::default(), epoch, last_step: None, receiving }
    }

    /// The rank's shard.
    pub fn shard(&self) -> &ModelShard<B> {
        &self.shard
    }

    /// The rank's KV.
    pub fn kv(&self) -> &B::Kv {
        &self.kv
    }

    /// The rank's KV, to be overwritten: tests poison it.
    pub fn kv_mut(&mut self) -> &mut B::Kv {
        &mut self.kv
    }

    /// The rank's shard, and its KV to be written.
    pub(crate) fn shard_and_kv_mut(&mut self) -> (&ModelShard<B>, &mut B::Kv) {
        (&self.shard, &mut self.kv)
    }

    /// Runs one step; see [`ModelShard::forward`].
    pub fn step(&mut self, plan: &StepPlan, on_layer: &mut LayerHook<'_, B>) -> Result<Vec<f32>, StepError> {
        if plan.epoch != self.epoch {
            return Err(StepError::StaleEpoch { got: plan.epoch, have: self.epoch });
        }
        if let Some(last) = self.last_step.filter(|last| plan.step.0 != last.0 + 1) {
            return Err(StepError::OutOfOrder { got: plan.step, last });
        }
        self.last_step = Some(plan.step);
        let Self { shard, kv, comms, scratch, .. } = self;
        Ok(shard.forward(plan, kv, comms, scratch, on_layer)?)
    }

    /// Makes ready for a hand-off.
    pub fn expect(&mut self, expect: &ExpectKv) {
        let dcp_rank = self.shard.kv_shape.dcp_rank;
        // A rank whose head group has no heads stores nothing, whatever positions it owns.
        let stores = self.shard.kv_shape.n_kv_heads > 0;
        let share = expect.blocks.get(dcp_rank).filter(|_| stores).cloned().unwrap_or_default();
        let blocks = share.missing;
        let n_layers = self.shard.kv_shape.n_layers;
        let incoming = Incoming::new(expect.handoff, self.epoch, n_layers, blocks.len());
        let receiving = Receiving {
            incoming,
            blocks,
            prompt_len: expect.prompt_len,
            prompt_hash: expect.prompt_hash,
            outcome: None,
            first_token: None,
            offer: Offer::new(share.cached),
        };
        self.receiving.insert(expect.handoff, receiving);
    }

    /// Ends a hand-off; whatever comes for it later is refused.
    pub fn forget(&mut self, handoff: HandoffId) {
        if let Some(mut receiving) = self.receiving.remove(&handoff) {
            receiving.incoming.close(DropReason::Cancelled);
            receiving.answer(Err(WorkerError::Aborted("the request has ended".to_owned())));
        }
    }

    /// Hand-offs that have not ended.
    pub fn n_receiving(&self) -> usize {
        self.receiving.len()
    }

    /// Takes one delivery of the inlet. Returns the hand-off's end if this was it.
    pub fn deliver(&mut self, delivery: Delivery) -> Option<HandoffEnd> {
        let (handoff, result) = match delivery {
            Delivery::Open { open, outcome } => (open.handoff, self.open(&open, outcome)),
            Delivery::Chunk(handoff, chunk) => (handoff, self.fill(handoff, &chunk)),
            Delivery::Commit(handoff, commit) => (handoff, self.commit(handoff, commit)),
            Delivery::Broken(handoff) => (handoff, self.broken(handoff)),
            Delivery::Pull { request, messages } => {
                self.pull(&request, messages);
                return None;
            }
            Delivery::PullMore(handoff) => {
                if let Some(receiving) = self.receiving.get_mut(&handoff) {
                    receiving.offer.send_next(&self.shard, &self.kv);
                }
                return None;
            }
        };
        self.settle(handoff, result)
    }

    /// Starts giving back a part of a hand-off's cached prefix. A refusal is the caller's affair alone.
    fn pull(&mut self, request: &PullRequest, messages: PullSender) {
        let refusal = match self.receiving.get_mut(&request.handoff) {
            Some(receiving) if receiving.prompt_hash == request.prompt_hash => {
                return receiving.offer.open(request, messages, (&self.shard, &self.kv));
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
        let Some(receiving) = self.receiving.get_mut(&open.handoff) else {
            // Nobody waits for this one: a late message of a hand-off that has ended, or a stranger's.
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

    fn fill(&mut self, handoff: HandoffId, chunk: &KvChunk) -> Result<(), WorkerError> {
        let Some(receiving) = self.receiving.get_mut(&handoff) else { return Ok(()) };
        let (layers, blocks) = (chunk.layers.clone(), chunk.blocks.clone());
        let inserted = receiving
            .incoming
            .insert(self.epoch, layers.clone(), blocks.clone(), &chunk.crc32c)
            .map_err(incoming_error)?;
        if inserted == Inserted::Repeat {
            return Ok(());
        }
        let cell_bytes = self.shard.kv_shape.cell_bytes(self.shard.kv_shape.n_kv_heads);
        let cells = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block)));
        for ((layer, block), bytes) in cells.zip(chunk.payload.chunks_exact(cell_bytes)) {
            let heads = 0..self.shard.kv_shape.n_kv_heads;
            self.shard.backend.import_kv(&mut self.kv, layer, receiving.blocks[block], heads, bytes);
        }
        Ok(())
    }

    fn commit(&mut self, handoff: HandoffId, commit: KvCommit) -> Result<(), WorkerError> {
        let Some(receiving) = self.receiving.get_mut(&handoff) else { return Ok(()) };
        if commit.prompt_hash != receiving.prompt_hash {
            return Err(WorkerError::Invalid(
                "the sender computed another prompt than was reserved".to_owned(),
            ));
        }
        let totals = Commit { n_cells: commit.n_cells, digest: CoverageDigest(commit.digest) };
        receiving.first_token = commit.first_token;
        receiving.incoming.commit(self.epoch, totals).map_err(incoming_error)?;
        Ok(())
    }

    fn broken(&mut self, handoff: HandoffId) -> Result<(), WorkerError> {
        if let Some(receiving) = self.receiving.get_mut(&handoff) {
            receiving.incoming.close(DropReason::StreamClosed);
            return Err(WorkerError::Aborted("the KV stream ended early".to_owned()));
        }
        Ok(())
    }

    /// Answers the sender once the hand-off has come to an end.
    fn settle(&mut self, handoff: HandoffId, result: Result<(), WorkerError>) -> Option<HandoffEnd> {
        if let Err(error) = result {
            let mut receiving = self.receiving.remove(&handoff)?;
            receiving.incoming.close(DropReason::Mismatch);
            let reason = error.to_string();
            receiving.answer(Err(error));
            return Some(HandoffEnd { handoff, result: Err(reason) });
        }
        if !matches!(self.receiving.get(&handoff)?.incoming.state(), IncomingState::Complete) {
            return None;
        }
        let mut receiving = self.receiving.remove(&handoff)?;
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
