//! What drives a worker's engine in the simulation. The engine is the product's [`Core`]: what it takes in, plans,
//! sends, expects, samples and gives up is decided there. Here is what a thread and a device do in the product, on
//! simulated time: the turns, the duration of a step, and the collective in it.
//!
//! As with the thread, nothing is taken in while a step runs. A process that stands still does nothing at all.

use std::{sync::Arc, time::Duration};

use longreach_engine::{
    EngineHandle,
    core::{Core, CoreFailure, OrdersLost},
    intake::{Heard, Intake, MAX_INPUTS},
    receive::{ReceiveCounts, Receiver},
};
use longreach_proto::group::{FollowerMessage, LeaderMessage};
use longreach_sched::SchedTotals;
use longreach_types::{StepId, StepPlan};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{
    journal::Journal,
    model::{self, N_LAYERS},
    net::{Broken, Net, NodeId},
    rank::{Rank, RankFace, Step},
};

/// How often an engine that waits for a hand-off looks at its deadlines.
const TICK: Duration = Duration::from_millis(50);

/// How often one that waits for nothing looks around all the same.
const IDLE_TICK: Duration = Duration::from_secs(2);

/// What goes from a leader to a follower.
#[derive(Clone, Debug)]
pub(crate) enum Word {
    Order(LeaderMessage),
    /// In place of the order to run a plan.
    Step(Arc<Step>),
    /// The leader's part of the collective of a step is there.
    Part(StepId),
}

/// What goes back.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Told(FollowerMessage),
    /// Its part of the collective of a step.
    Sums(StepId, Vec<u64>),
}

/// The links to all followers.
#[derive(Clone, Default)]
pub(crate) struct Followers(pub(crate) Vec<mpsc::Sender<Word>>);

/// What comes from followers: their words, and their parts of collectives.
pub(crate) type FollowerEvent = Result<FollowerMessage, Broken>;
pub(crate) type Part = (usize, Result<(StepId, Vec<u64>), Broken>);

/// Why an engine ended. Its epoch is over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineFailure {
    #[error("rank {0} is lost")]
    Link(usize),
    #[error("a step stood still")]
    Watchdog,
    #[error("stopped")]
    Stopped,
    #[error(transparent)]
    Core(#[from] CoreFailure),
}

pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) node: NodeId,
    pub(crate) net: Net,
    pub(crate) journal: Journal,
    pub(crate) step_time: Duration,
    /// How long a step may wait for a rank.
    pub(crate) watchdog: Duration,
    pub(crate) core: Core,
    pub(crate) intake: Intake<FollowerEvent>,
    pub(crate) rank: Rank,
    pub(crate) rank_face: RankFace,
    pub(crate) followers: Followers,
    pub(crate) parts: mpsc::Receiver<Part>,
    pub(crate) seen: Seen,
    /// A process does not stop because nobody knows the way to it.
    pub(crate) _handle: EngineHandle,
}

/// What was counted when it was last looked at.
#[derive(Default)]
pub(crate) struct Seen {
    totals: SchedTotals,
    receive: ReceiveCounts,
}

impl Followers {
    /// Sends to all of them. One that does not take it is lost.
    pub(crate) fn tell(&self, word: &Word) -> Result<(), EngineFailure> {
        for (idx, follower) in self.0.iter().enumerate() {
            follower.try_send(word.clone()).map_err(|_| EngineFailure::Link(idx + 1))?;
        }
        Ok(())
    }

    /// The orders of a core.
    pub(crate) fn order(&self, order: &LeaderMessage) -> Result<(), OrdersLost> {
        Ok(self.tell(&Word::Order(order.clone()))?)
    }
}

impl Seen {
    /// Writes down what came out of order since the last time.
    pub(crate) fn look_at(&mut self, receiver: &Receiver, journal: &Journal) {
        let (now, before) = (receiver.counts(), self.receive);
        journal.count_n("late hand-off refused", now.late_opens - before.late_opens);
        journal.count_n("late chunk ignored", now.late_chunks - before.late_chunks);
        journal.count_n("repeated chunk recognised", now.repeats - before.repeats);
        journal.count_n("commit overtook a chunk", now.early_commits - before.early_commits);
        self.receive = now;
    }
}

impl Engine {
    /// Runs until it fails or is told to stop; never because it has nothing to do.
    pub(crate) async fn run(mut self) -> EngineFailure {
        let failure = match self.run_steps().await {
            Ok(never) => match never {},
            Err(failure) => failure,
        };
        let was_told = matches!(failure, EngineFailure::Stopped);
        self.core.end((!was_told).then(|| failure.to_string()));
        failure
    }

    async fn run_steps(&mut self) -> Result<std::convert::Infallible, EngineFailure> {
        loop {
            self.net.thawed(self.node).await;
            for _ in 0..MAX_INPUTS {
                let Some(heard) = self.intake.try_next() else { break };
                self.take(heard)?;
            }
            match self.core.turn(&mut self.rank)? {
                Some(plan) => self.step(plan).await?,
                None => self.wait().await?,
            }
            if self.core.is_stopping() {
                return Err(EngineFailure::Stopped);
            }
        }
    }

    async fn wait(&mut self) -> Result<(), EngineFailure> {
        self.look();
        let tick = if self.core.sched().is_idle() { IDLE_TICK } else { TICK };
        let heard = tokio::select! {
            biased;
            heard = self.intake.next() => heard,
            () = sleep(tick) => None,
        };
        // A process that stands still takes nothing in.
        self.net.thawed(self.node).await;
        heard.map_or(Ok(()), |heard| self.take(heard))
    }

    fn take(&mut self, heard: Heard<FollowerEvent>) -> Result<(), EngineFailure> {
        match heard {
            Heard::Input(input) => self.core.take(input, &mut self.rank)?,
            Heard::Follower(rank, message) => {
                self.core.follower(rank, message.map_err(|_| EngineFailure::Link(rank))?)?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, plan: StepPlan) -> Result<(), EngineFailure> {
        let tokens = |seq| self.core.sched().tokens(seq).unwrap_or_default();
        let prefixes = plan.seqs.iter().map(|step| model::prefixes(tokens(step.seq))).collect();
        let step = Arc::new(Step { plan, prefixes });
        self.followers.tell(&Word::Step(Arc::clone(&step)))?;
        let mut sums = self.rank.step(&step);
        self.net.computes(self.node, 0).await;
        for layer in 0..N_LAYERS {
            self.core.on_layer(&step.plan, layer, &self.rank);
            sleep(self.step_time / N_LAYERS as u32).await;
            self.net.thawed(self.node).await;
        }
        self.followers.tell(&Word::Part(step.plan.step))?;
        self.collect(step.plan.step, &mut sums).await?;
        let mut logits: Vec<_> = sums.into_iter().flat_map(model::logits).collect();
        self.core.complete(&step.plan, &mut logits, &self.rank)?;
        self.look();
        Ok(())
    }

    /// The collective of a step: adds the sums of the other ranks.
    async fn collect(&mut self, step: StepId, sums: &mut [u64]) -> Result<(), EngineFailure> {
        let deadline = Instant::now() + self.watchdog;
        for _ in 0..self.followers.0.len() {
            let Ok(part) = timeout_at(deadline, self.parts.recv()).await else {
                self.journal.count("watchdog ended an epoch");
                return Err(EngineFailure::Watchdog);
            };
            let (rank, part) = part.ok_or(EngineFailure::Stopped)?;
            let (of, theirs) = part.map_err(|_| EngineFailure::Link(rank))?;
            if of != step || theirs.len() != sums.len() {
                self.journal.violation(format!("{}: ranks are out of step", self.name));
            }
            sums.iter_mut().zip(theirs).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
        }
        Ok(())
    }

    /// Holds the engine against what must be, and shows it.
    fn look(&mut self) {
        let (core, journal) = (&self.core, &self.journal);
        self.rank_face.show(core.receiver().len());
        self.seen.look_at(core.receiver(), journal);
        let (sched, stats) = (core.sched(), core.sched().stats());
        let (now, before) = (stats.totals, self.seen.totals);
        journal.count_n("sequence preempted", now.preemptions - before.preemptions);
        journal.count_n("prefix pulled", now.pulls - before.pulls);
        journal.count_n("pull failed, prefix computed", now.pull_fallbacks - before.pull_fallbacks);
        self.seen.totals = now;
        // Those that were preempted wait as well, beyond what may come in.
        if stats.n_waiting > sched.config().max_waiting + sched.config().max_seqs {
            journal.violation(format!("{}: the queue has no bound: {stats:?}", self.name));
        }
        if sched.is_idle() && core.n_live() > 0 {
            journal.violation(format!("{}: {} sequences live nowhere", self.name, core.n_live()));
        }
        if (sched.is_idle() || now.steps.is_multiple_of(4))
            && let Err(error) = sched.audit()
        {
            journal.violation(format!("{}: {error}", self.name));
        }
    }
}

/// Sorts what a follower says, its loss included, and tells of that even while the engine computes.
pub(crate) async fn listen(
    rank: usize,
    mut replies: mpsc::Receiver<Result<Reply, Broken>>,
    (words, parts): (mpsc::Sender<(usize, FollowerEvent)>, mpsc::Sender<Part>),
    deserted: CancellationToken,
) {
    loop {
        let sent = match replies.recv().await {
            Some(Ok(Reply::Told(message))) => words.send((rank, Ok(message))).await.is_ok(),
            Some(Ok(Reply::Sums(step, sums))) => parts.send((rank, Ok((step, sums)))).await.is_ok(),
            Some(Err(_)) | None => {
                deserted.cancel();
                let _engine_gone = words.send((rank, Err(Broken))).await;
                let _engine_gone = parts.send((rank, Err(Broken))).await;
                return;
            }
        };
        if !sent {
            return;
        }
    }
}
