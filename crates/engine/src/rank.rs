//! What a rank computes with: its shard, its KV, and its way to the other ranks.
//!
//! Leader and followers own one each; what differs between them is who decides, not what a rank does.

use std::sync::Arc;

use longreach_model::{
    Backend, Comms, ForwardError, ModelShard,
    forward::{LayerHook, Scratch},
};
use longreach_types::{Epoch, StepId, StepPlan};

use crate::cells::ShardCells;

/// A rank that can run steps.
pub struct RankWorker<B: Backend> {
    pub(crate) cells: ShardCells<B>,
    comms: Comms<B::Comm>,
    scratch: Scratch<B::Tensor>,
    order: StepOrder,
}

/// Which plans a rank may run: those of its own life, each once, in order.
#[derive(Clone, Copy, Debug)]
pub struct StepOrder {
    epoch: Epoch,
    last: Option<StepId>,
}

/// A plan that this rank must not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongPlan {
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
}

/// A step that did not happen.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Its plan.
    #[error(transparent)]
    Plan(#[from] WrongPlan),
    /// The forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

impl StepOrder {
    /// No step has run in the life `epoch`.
    pub fn new(epoch: Epoch) -> Self {
        Self { epoch, last: None }
    }

    /// Takes `plan` as the next step.
    pub fn check(&mut self, plan: &StepPlan) -> Result<(), WrongPlan> {
        if plan.epoch != self.epoch {
            return Err(WrongPlan::StaleEpoch { got: plan.epoch, have: self.epoch });
        }
        if let Some(last) = self.last.filter(|last| plan.step.0 != last.0 + 1) {
            return Err(WrongPlan::OutOfOrder { got: plan.step, last });
        }
        self.last = Some(plan.step);
        Ok(())
    }
}

impl<B: Backend> RankWorker<B> {
    /// A rank whose KV holds nothing.
    pub fn new(shard: Arc<ModelShard<B>>, kv: B::Kv, comms: Comms<B::Comm>, epoch: Epoch) -> Self {
        let cells = ShardCells { shard, kv };
        Self { cells, comms, scratch: Scratch::default(), order: StepOrder::new(epoch) }
    }

    /// Runs one step; see [`ModelShard::forward`].
    pub fn step(&mut self, plan: &StepPlan, on_layer: &mut LayerHook<'_, B>) -> Result<Vec<f32>, StepError> {
        self.order.check(plan)?;
        let Self { cells: ShardCells { shard, kv }, comms, scratch, .. } = self;
        Ok(shard.forward(plan, kv, comms, scratch, on_layer)?)
    }
}
