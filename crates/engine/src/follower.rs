//! A follower's thread: it runs the leader's plans in lockstep and receives its share of hand-offs in between.

use std::sync::Arc;

use longreach_collective::control::{ControlError, ControlSender};
use longreach_model::Backend;
use longreach_proto::group::{DecodeError, FollowerEvent, FollowerMessage, LeaderMessage};
use longreach_types::HandoffId;
use tokio::{runtime::Handle, sync::mpsc};
use tracing::{error, info};

use crate::{
    inlet::{Delivery, QUEUE_LEN},
    rank::{HandoffEnd, RankWorker, StepError},
};

/// A rank that follows.
pub(crate) struct Follower<B: Backend> {
    pub(crate) idx: usize,
    pub(crate) rank: RankWorker<B>,
    pub(crate) runtime: Handle,
    pub(crate) orders: mpsc::Receiver<Result<Vec<u8>, ControlError>>,
    pub(crate) deliveries: mpsc::Receiver<Delivery>,
    pub(crate) leader: Arc<ControlSender>,
}

/// Why a follower left its group before it was told to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FollowerFailure {
    #[error("control link: {0}")]
    Link(#[from] ControlError),
    #[error("the leader sent nonsense: {0}")]
    Message(#[from] DecodeError),
    #[error("step failed: {0}")]
    Step(#[from] StepError),
}

enum Input {
    Order(Option<Result<Vec<u8>, ControlError>>),
    Delivery(Delivery),
}

impl<B: Backend> Follower<B> {
    /// Runs until the leader says stop, the link closes, or a step fails. Leaving drops this rank's communicators,
    /// which ends the epoch for its peers.
    pub(crate) fn run(mut self) -> Result<(), String> {
        let outcome = self.follow();
        match &outcome {
            Ok(()) => info!(rank = self.idx, "left the group"),
            Err(FollowerFailure::Link(ControlError::Closed { .. })) => {
                info!(rank = self.idx, "the leader is gone");
                return Ok(());
            }
            Err(failure) => error!(rank = self.idx, %failure, "left the group; its epoch is over"),
        }
        outcome.map_err(|failure| failure.to_string())
    }

    fn follow(&mut self) -> Result<(), FollowerFailure> {
        loop {
            match self.next() {
                Input::Order(None) => return Ok(()),
                Input::Order(Some(order)) => match LeaderMessage::decode(&order?)? {
                    LeaderMessage::Stop => return Ok(()),
                    order => self.obey(order)?,
                },
                Input::Delivery(delivery) => self.deliver(delivery)?,
            }
            // What came during a step is taken in before the next order. More may come meanwhile, and waits: the whole
            // group waits for an order.
            for _ in 0..QUEUE_LEN {
                let Ok(delivery) = self.deliveries.try_recv() else { break };
                self.deliver(delivery)?;
            }
        }
    }

    /// Both arms are cancel-safe. Orders go first: the whole group waits for a plan, a chunk only for its sender.
    fn next(&mut self) -> Input {
        let Self { runtime, orders, deliveries, .. } = self;
        runtime.block_on(async {
            tokio::select! {
                biased;
                order = orders.recv() => Input::Order(order),
                Some(delivery) = deliveries.recv() => Input::Delivery(delivery),
            }
        })
    }

    fn obey(&mut self, order: LeaderMessage) -> Result<(), FollowerFailure> {
        match order {
            LeaderMessage::Plan(plan) => {
                self.rank.step(&plan, &mut |_, _, _| {})?;
            }
            LeaderMessage::Expect(expect) => {
                self.rank.expect(&expect);
                self.tell(expect.handoff, FollowerEvent::Expected)?;
            }
            LeaderMessage::Drop(handoff) => self.rank.forget(handoff),
            LeaderMessage::Stop => {}
        }
        Ok(())
    }

    fn deliver(&mut self, delivery: Delivery) -> Result<(), FollowerFailure> {
        let Some(HandoffEnd { handoff, result }) = self.rank.deliver(delivery) else { return Ok(()) };
        let event = match result {
            Ok(_first_token_goes_to_rank_0) => FollowerEvent::Received,
            Err(reason) => FollowerEvent::Refused(reason),
        };
        self.tell(handoff, event)
    }

    fn tell(&self, handoff: HandoffId, event: FollowerEvent) -> Result<(), FollowerFailure> {
        Ok(self.leader.send(&FollowerMessage::Kv { rank: self.idx, handoff, event }.encode())?)
    }
}
