//! The way into an engine, and what goes between it and its ranks.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use futures::Stream;
use longreach_proto::{
    WorkerError,
    worker::{FirstToken, OutputToken, PoolState, Reservation},
};
use longreach_sched::SchedStats;
use longreach_types::{Epoch, FinishReason, HandoffId, Prompt, SamplingParams, SeqId, StepId};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::{
    net::Broken,
    rank::{Delivery, ExpectKv, Order},
};

/// Events of a sequence besides its tokens.
const EVENTS_BESIDES_TOKENS: usize = 4;

/// What may wait at an engine's door.
const INTAKE_LEN: usize = 256;

pub(crate) struct Submission {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: SamplingParams,
    pub(crate) priority: i32,
    pub(crate) work: Work,
}

#[derive(Clone, Debug)]
pub(crate) enum Work {
    Decode,
    Prefill(Reservation),
}

#[derive(Clone, Debug)]
pub(crate) enum EngineEvent {
    Reserved(Reservation),
    Token(OutputToken),
    Finish(FinishReason),
    FirstToken(FirstToken),
    HandoffDone,
}

pub(crate) struct Arrival {
    pub(crate) seq: SeqId,
    pub(crate) submission: Submission,
    pub(crate) events: mpsc::Sender<Result<EngineEvent, WorkerError>>,
    pub(crate) accepted: oneshot::Sender<Result<(), WorkerError>>,
}

/// One thing that an engine takes in.
pub(crate) enum Input {
    Submit(Box<Arrival>),
    Delivery(Delivery),
    Report(LaneReport),
    Follower(usize, Result<FollowerMessage, Broken>),
    /// A lane has room again.
    Nudge,
}

/// A lane's end.
#[derive(Debug)]
pub(crate) struct LaneReport {
    pub(crate) handoff: HandoffId,
    pub(crate) rank: usize,
    pub(crate) result: Result<(), WorkerError>,
}

/// What a leader says to its followers.
#[derive(Clone, Debug)]
pub(crate) enum LeaderMessage {
    Plan(Order),
    Expect(ExpectKv),
    Drop(HandoffId),
    Stop,
}

/// What a follower says to its leader.
#[derive(Clone, Debug)]
pub(crate) enum FollowerMessage {
    Joined,
    Done { step: StepId, sums: Vec<u64> },
    Handoff { handoff: HandoffId, event: FollowerEvent },
}

#[derive(Clone, Debug)]
pub(crate) enum FollowerEvent {
    Expected,
    Received,
    Refused(String),
}

/// What an engine shows of itself after each step.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineInfo {
    pub(crate) epoch: Epoch,
    pub(crate) stats: SchedStats,
    pub(crate) n_handoffs: usize,
    pub(crate) n_live: usize,
}

impl EngineInfo {
    /// Whether nothing is waiting, running, held or on its way.
    pub(crate) fn is_idle(&self) -> bool {
        let stats = &self.stats;
        let n_seqs = stats.n_waiting + stats.n_receiving + stats.n_running + stats.n_sending + stats.n_held;
        let owned = stats.blocks.iter().any(|pool| pool.n_owned() > 0);
        n_seqs == 0 && self.n_handoffs == 0 && self.n_live == 0 && !owned
    }

    /// The pool of each rank.
    pub(crate) fn pools(&self) -> Vec<PoolState> {
        let reasons = longreach_kv::Reason::ALL;
        let pools = self.stats.blocks.iter().map(|pool| PoolState {
            total: pool.n_total(),
            free: pool.n_free,
            cached: pool.n_cached,
            held: reasons.iter().map(|&why| (why.name().to_owned(), pool.n_owned_for(why))).collect(),
        });
        pools.collect()
    }
}

/// Shared between an engine and those who look at it.
#[derive(Clone, Default)]
pub(crate) struct EngineFace(Arc<Mutex<EngineInfo>>);

impl EngineFace {
    pub(crate) fn show(&self, info: EngineInfo) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = info;
    }

    pub(crate) fn info(&self) -> EngineInfo {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The way into an engine. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    inputs: mpsc::Sender<Input>,
    wake: Arc<Notify>,
    next_seq: Arc<AtomicU64>,
    pub(crate) face: EngineFace,
}

impl EngineHandle {
    pub(crate) fn new(face: EngineFace) -> (Self, mpsc::Receiver<Input>) {
        let (inputs, receiver) = mpsc::channel(INTAKE_LEN);
        (Self { inputs, wake: Arc::default(), next_seq: Arc::new(AtomicU64::new(1)), face }, receiver)
    }

    pub(crate) fn inputs(&self) -> mpsc::Sender<Input> {
        self.inputs.clone()
    }

    pub(crate) fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Submits a sequence; resolves when the engine has accepted or refused it, which it does between steps.
    pub(crate) async fn submit(&self, submission: Submission) -> Result<SeqStream, WorkerError> {
        let (events, receiver) = mpsc::channel(submission.sampling.max_tokens + EVENTS_BESIDES_TOKENS);
        let stream = SeqStream { events: receiver, wake: Arc::clone(&self.wake) };
        let seq = SeqId(self.next_seq.fetch_add(1, Ordering::Relaxed));
        let (accepted, verdict) = oneshot::channel();
        let arrival = Box::new(Arrival { seq, submission, events, accepted });
        self.inputs.try_send(Input::Submit(arrival)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                WorkerError::QueueFull { queue: "the engine's intake", len: INTAKE_LEN, max: INTAKE_LEN }
            }
            mpsc::error::TrySendError::Closed(_) => WorkerError::Unavailable("the engine has stopped"),
        })?;
        verdict.await.map_err(|_| WorkerError::Unavailable("the engine has stopped"))??;
        Ok(stream)
    }
}

/// Events of one sequence. Dropping it cancels the sequence and gives everything it holds back.
pub(crate) struct SeqStream {
    events: mpsc::Receiver<Result<EngineEvent, WorkerError>>,
    wake: Arc<Notify>,
}

impl Stream for SeqStream {
    type Item = Result<EngineEvent, WorkerError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(context)
    }
}

impl Drop for SeqStream {
    fn drop(&mut self) {
        self.events.close();
        self.wake.notify_one();
    }
}

impl Delivery {
    /// The hand-off that KV has come for.
    pub(crate) fn handoff(&self) -> Option<HandoffId> {
        match self {
            Self::Open { open, .. } => Some(open.handoff),
            Self::Chunk { handoff, .. } | Self::Commit { handoff, .. } | Self::Broken(handoff) => {
                Some(*handoff)
            }
        }
    }
}
