//! A follower: it runs the leader's plans in lockstep and receives its share of hand-offs in between.
//!
//! As with the leader, what is decided is apart from the thread: [`FollowerCore`] has neither thread nor link.

use longreach_collective::control::{ControlError, ControlSender};
use longreach_model::Backend;
use longreach_proto::group::{DecodeError, FollowerEvent, FollowerMessage, LeaderMessage};
use longreach_types::{Epoch, StepPlan};
use tokio::sync::mpsc;
use tracing::{error, info};

use crate::{
    cells::KvCells,
    engine::LinkEvent,
    inlet::{Deliveries, Delivery, QUEUE_LEN},
    park,
    rank::{RankWorker, StepError},
    receive::{HandoffEnd, Receiver},
};

/// What a follower does with what it is told.
#[derive(Debug)]
pub struct FollowerCore {
    rank: usize,
    receiver: Receiver,
}

/// What an order asks of who drives a follower.
#[derive(Debug)]
pub enum Obeyed {
    /// Run this step.
    Run(StepPlan),
    /// Answer the leader.
    Reply(FollowerMessage),
    /// Nothing more.
    Done,
    /// Leave the group.
    Leave,
}

impl FollowerCore {
    /// The follower of this rank in the life `epoch`.
    pub fn new(rank: usize, epoch: Epoch) -> Self {
        Self { rank, receiver: Receiver::new(epoch) }
    }

    /// Hand-offs to this rank, to be looked at.
    pub fn receiver(&self) -> &Receiver {
        &self.receiver
    }

    /// Takes an order of the leader.
    pub fn obey(&mut self, order: LeaderMessage, cells: &impl KvCells) -> Obeyed {
        match order {
            LeaderMessage::Plan(plan) => Obeyed::Run(plan),
            LeaderMessage::Expect(expect) => {
                self.receiver.expect(&expect, cells);
                let (rank, handoff) = (self.rank, expect.handoff);
                Obeyed::Reply(FollowerMessage::Kv { rank, handoff, event: FollowerEvent::Expected })
            }
            LeaderMessage::Drop(handoff) => {
                self.receiver.forget(handoff);
                Obeyed::Done
            }
            LeaderMessage::Stop => Obeyed::Leave,
        }
    }

    /// Takes what came through the door. Gives what the leader is to be told.
    pub fn deliver(&mut self, delivery: Delivery, cells: &mut impl KvCells) -> Option<FollowerMessage> {
        let HandoffEnd { handoff, result } = self.receiver.deliver(delivery, cells)?;
        let event = match result {
            Ok(_first_token_goes_to_rank_0) => FollowerEvent::Received,
            Err(reason) => FollowerEvent::Refused(reason),
        };
        Some(FollowerMessage::Kv { rank: self.rank, handoff, event })
    }
}

/// A rank's thread that follows.
pub(crate) struct Follower<B: Backend> {
    pub(crate) idx: usize,
    pub(crate) core: FollowerCore,
    pub(crate) rank: RankWorker<B>,
    pub(crate) orders: mpsc::Receiver<LinkEvent>,
    pub(crate) deliveries: Deliveries,
    pub(crate) leader: ControlSender,
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
    Order(Option<LinkEvent>),
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
                Input::Order(Some(order)) => {
                    let order = LeaderMessage::decode(&order?)?;
                    match self.core.obey(order, &self.rank.cells) {
                        Obeyed::Run(plan) => drop(self.rank.step(&plan, &mut |_, _, _| {})?),
                        Obeyed::Reply(message) => self.tell(&message)?,
                        Obeyed::Done => {}
                        Obeyed::Leave => return Ok(()),
                    }
                }
                Input::Delivery(delivery) => self.deliver(delivery)?,
            }
            // What came during a step is taken in before the next order. More may come meanwhile, and waits: the whole
            // group waits for an order.
            for _ in 0..QUEUE_LEN {
                let Some(delivery) = self.deliveries.try_recv() else { break };
                self.deliver(delivery)?;
            }
        }
    }

    /// Both arms are cancel-safe. Orders go first: the whole group waits for a plan, a chunk only for its sender.
    fn next(&mut self) -> Input {
        let Self { orders, deliveries, .. } = self;
        park::wait(async {
            tokio::select! {
                biased;
                order = orders.recv() => Input::Order(order),
                Some(delivery) = deliveries.recv() => Input::Delivery(delivery),
            }
        })
    }

    fn deliver(&mut self, delivery: Delivery) -> Result<(), FollowerFailure> {
        let told = self.core.deliver(delivery, &mut self.rank.cells);
        told.map_or(Ok(()), |message| self.tell(&message))
    }

    fn tell(&self, message: &FollowerMessage) -> Result<(), FollowerFailure> {
        Ok(self.leader.send(&message.encode())?)
    }
}
