//! The engine's thread: it drives the [`Core`] at its own pace, and computes.

use std::time::Duration;

use longreach_collective::control::ControlError;
use longreach_model::Backend;
use longreach_proto::group::{DecodeError, FollowerMessage, LeaderMessage};
use longreach_types::StepPlan;
use tracing::error;

use crate::{
    cells::DeviceCells,
    core::{Core, CoreFailure},
    intake::{Heard, Intake, MAX_INPUTS},
    park,
    rank::{RankWorker, StepError},
};

/// How long an idle engine sleeps before it looks at its deadlines.
const IDLE_TICK: Duration = Duration::from_millis(50);

/// What a follower's link gives: a message, or its end.
pub(crate) type LinkEvent = Result<Vec<u8>, ControlError>;

/// Why an engine ended before it was told to. Its epoch is over.
#[derive(Debug, thiserror::Error)]
enum EngineFailure {
    #[error("step failed: {0}")]
    Step(#[from] StepError),
    #[error("rank {rank}: {source}")]
    Link { rank: usize, source: ControlError },
    #[error("rank {rank} sent nonsense: {source}")]
    Message { rank: usize, source: DecodeError },
    #[error(transparent)]
    Core(#[from] CoreFailure),
}

/// The state of an engine's thread.
pub(crate) struct Engine<B: Backend> {
    pub(crate) core: Core,
    pub(crate) rank: RankWorker<B>,
    pub(crate) intake: Intake<LinkEvent>,
}

impl<B: Backend> Engine<B> {
    /// Runs until told to stop, abandoned by all handles, or failed.
    pub(crate) fn run(mut self) {
        let outcome = self.run_steps();
        if let Err(failure) = &outcome {
            error!(%failure, "engine failed; its epoch is over");
        }
        self.core.end(outcome.err().map(|failure| failure.to_string()));
    }

    fn run_steps(&mut self) -> Result<(), EngineFailure> {
        loop {
            for _ in 0..MAX_INPUTS {
                let Some(heard) = self.intake.try_next() else { break };
                self.take(heard)?;
                if self.core.is_stopping() {
                    return Ok(());
                }
            }
            match self.core.turn(&mut self.rank.cells)? {
                Some(plan) => self.step(&plan)?,
                None => {
                    if let Some(Some(heard)) = park::wait_for(IDLE_TICK, self.intake.next()) {
                        self.take(heard)?;
                    }
                }
            }
            if self.core.is_stopping() {
                return Ok(());
            }
        }
    }

    fn take(&mut self, heard: Heard<LinkEvent>) -> Result<(), EngineFailure> {
        match heard {
            Heard::Input(input) => self.core.take(input, &mut self.rank.cells)?,
            Heard::Follower(rank, message) => {
                let message = message.map_err(|source| EngineFailure::Link { rank, source })?;
                let message = FollowerMessage::decode(&message)
                    .map_err(|source| EngineFailure::Message { rank, source })?;
                self.core.follower(rank, message)?;
            }
        }
        Ok(())
    }

    fn step(&mut self, plan: &StepPlan) -> Result<(), EngineFailure> {
        let (core, rank) = (&mut self.core, &mut self.rank);
        core.order(&LeaderMessage::Plan(plan.clone()))?;
        let mut logits = rank.step(plan, &mut |backend, layer, kv| {
            core.on_layer(plan, layer, &DeviceCells { backend, kv });
        })?;
        Ok(core.complete(plan, &mut logits, &rank.cells)?)
    }
}
