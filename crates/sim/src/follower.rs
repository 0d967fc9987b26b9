//! What drives a rank that follows, in one life of its group: orders of its leader, and KV in between. What it does with
//! them is the product's.

use std::time::Duration;

use longreach_engine::{
    follower::{FollowerCore, Obeyed},
    inlet::Deliveries,
};
use longreach_proto::group::LeaderMessage;
use longreach_types::StepId;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    engine::{Reply, Seen, Word},
    journal::Journal,
    net::{Net, NodeId},
    rank::{Rank, RankFace},
};

pub(crate) struct Follower {
    pub(crate) net: Net,
    pub(crate) node: NodeId,
    pub(crate) journal: Journal,
    pub(crate) idx: usize,
    pub(crate) name: String,
    pub(crate) step_time: Duration,
    /// How long a step may wait for the leader.
    pub(crate) watchdog: Duration,
    pub(crate) core: FollowerCore,
    pub(crate) rank: Rank,
    pub(crate) face: RankFace,
    pub(crate) seen: Seen,
    pub(crate) orders: mpsc::Receiver<Word>,
    pub(crate) replies: mpsc::Sender<Reply>,
}

/// The rank has left its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Left;

impl Follower {
    /// Runs until the leader says stop, there are no more orders, or a step stands still.
    pub(crate) async fn run(mut self, mut deliveries: Deliveries) {
        loop {
            self.face.show(self.core.receiver().len());
            // Orders go first: the whole group waits for a plan, a chunk only for its sender.
            let told = tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    None => break,
                    Some(order) => self.obey(order).await,
                },
                Some(delivery) = deliveries.recv() => match self.core.deliver(delivery, &mut self.rank) {
                    None => Ok(()),
                    Some(message) => self.tell(Reply::Told(message)).await,
                },
            };
            self.seen.look_at(self.core.receiver(), &self.journal);
            if told == Err(Left) {
                break;
            }
        }
        self.face.show(0);
    }

    async fn obey(&mut self, word: Word) -> Result<(), Left> {
        match word {
            Word::Step(step) => {
                let sums = self.rank.step(&step);
                self.net.computes(self.node, self.idx).await;
                sleep(self.step_time).await;
                self.tell(Reply::Sums(step.plan.step, sums)).await?;
                self.collect(step.plan.step).await
            }
            Word::Order(order) => match self.core.obey(order, &self.rank) {
                Obeyed::Reply(message) => self.tell(Reply::Told(message)).await,
                Obeyed::Done => Ok(()),
                Obeyed::Run(_) | Obeyed::Leave => Err(Left),
            },
            Word::Part(step) => Err(self.out_of_step(step)),
        }
    }

    /// The collective of a step, as a follower bounds it: the leader's part comes in time, or the epoch is over.
    async fn collect(&mut self, step: StepId) -> Result<(), Left> {
        match timeout(self.watchdog, self.orders.recv()).await {
            Ok(Some(Word::Part(of))) if of == step => Ok(()),
            Ok(Some(Word::Order(LeaderMessage::Stop)) | None) => Err(Left),
            Ok(Some(_)) => Err(self.out_of_step(step)),
            Err(_late) => {
                self.journal.count("watchdog of a follower ended an epoch");
                Err(Left)
            }
        }
    }

    fn out_of_step(&self, step: StepId) -> Left {
        self.journal.violation(format!("{}: out of step with its leader at {step}", self.name));
        Left
    }

    async fn tell(&self, reply: Reply) -> Result<(), Left> {
        self.replies.send(reply).await.map_err(|_| Left)
    }
}
