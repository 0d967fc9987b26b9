//! The way into an engine: submit a sequence, get its events, drop them to cancel.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use futures::Stream;
use longreach_proto::{
    WorkerError,
    worker::{FirstToken, KvLayout, OutputToken, PoolState, Reservation},
};
use longreach_sched::SchedStats;
use longreach_types::{Epoch, FinishReason, GroupShape, Prompt, RequestId, SamplingParams, SeqId};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::core::EngineSetup;

/// Events of a sequence besides its tokens: reserved, finish, hand-off done, and room for an error.
const EVENTS_BESIDES_TOKENS: usize = 4;

/// One sequence for an engine.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The router's id, for logs.
    pub request_id: RequestId,
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub sampling: SamplingParams,
    /// Higher goes first.
    pub priority: i32,
    /// What is wanted of this engine.
    pub work: Work,
}

/// What is wanted of an engine.
#[derive(Clone, Debug)]
pub enum Work {
    /// Reserve blocks, receive the prompt's KV (or compute it here if little is missing), decode.
    Decode,
    /// Compute the prompt, send its KV to these ranks, sample the first token.
    Prefill(Reservation),
}

/// One event of a sequence.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// Decode: blocks are reserved.
    Reserved(Reservation),
    /// Decode: a token was sampled.
    Token(OutputToken),
    /// Decode: the output is complete; the last event.
    Finish(FinishReason),
    /// Prefill: the first token; the last event if it ends the output.
    FirstToken(FirstToken),
    /// Prefill: every rank has verified its share; the last event.
    HandoffDone {
        /// KV bytes sent.
        sent_bytes: u64,
    },
}

/// What an engine is and how busy it is.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Its life.
    pub epoch: Epoch,
    /// How it holds KV.
    pub layout: KvLayout,
    /// Its ranks.
    pub shape: GroupShape,
    /// The longest sequence.
    pub max_seq_len: usize,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// The scheduler's figures.
    pub stats: SchedStats,
    /// Hand-offs and pulls on their way.
    pub n_handoffs: usize,
    /// A rank whose process drains; the group is to end its epoch in good order.
    pub leaving: Option<usize>,
    /// KV bytes that were pulled from ranks since the start, those of pulls that failed included.
    pub pulled_bytes: u64,
    /// Why the engine has failed, if it has.
    pub failure: Option<String>,
}

impl EngineInfo {
    /// What is known of an engine before its first step.
    pub(crate) fn first(epoch: Epoch, setup: &EngineSetup) -> Self {
        Self {
            epoch,
            layout: setup.layout.clone(),
            shape: setup.shape,
            max_seq_len: setup.max_seq_len,
            vocab_size: setup.vocab_size,
            stats: SchedStats::default(),
            n_handoffs: 0,
            pulled_bytes: 0,
            leaving: None,
            failure: None,
        }
    }

    /// The pool of each DCP rank.
    pub fn pools(&self) -> Vec<PoolState> {
        self.stats
            .blocks
            .iter()
            .map(|pool| PoolState {
                total: pool.n_total(),
                free: pool.n_free,
                cached: pool.n_cached,
                held: longreach_kv::Reason::ALL
                    .into_iter()
                    .map(|reason| (reason.name().to_owned(), pool.n_owned_for(reason)))
                    .collect(),
            })
            .collect()
    }

    /// Whether nothing is waiting, running, held or on its way.
    pub fn is_idle(&self) -> bool {
        let stats = &self.stats;
        let n_coming = stats.n_waiting + stats.n_receiving + stats.n_pulling;
        let n_seqs = n_coming + stats.n_running + stats.n_sending + stats.n_held;
        n_seqs == 0 && self.n_handoffs == 0 && stats.blocks.iter().all(|pool| pool.n_owned() == 0)
    }
}

/// What a handle asks of its engine.
pub enum Command {
    /// To run a sequence.
    Submit(Box<Arrival>),
    /// To forget all cached prefixes.
    FlushCache,
    /// To end every sequence with an error by which its router takes it up elsewhere.
    HandOver,
    /// To end.
    Stop,
}

/// A submission on its way to the engine.
pub struct Arrival {
    pub(crate) seq: SeqId,
    pub(crate) submission: Submission,
    pub(crate) events: mpsc::Sender<Result<EngineEvent, WorkerError>>,
    pub(crate) accepted: oneshot::Sender<Result<(), WorkerError>>,
}

/// The way into an engine. Cheap to clone; the engine stops when the last one is gone, or on [`Self::stop`].
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
    next_seq: Arc<AtomicU64>,
    info: watch::Receiver<EngineInfo>,
}

impl EngineHandle {
    pub(crate) fn new(
        commands: mpsc::Sender<Command>,
        wake: Arc<Notify>,
        info: watch::Receiver<EngineInfo>,
    ) -> Self {
        Self { commands, wake, next_seq: Arc::new(AtomicU64::new(1)), info }
    }

    /// Submits a sequence. Resolves when the engine has accepted or refused it, which it does between steps.
    pub async fn submit(&self, submission: Submission) -> Result<SeqStream, WorkerError> {
        let max_tokens = submission.sampling.max_tokens.min(self.info.borrow().max_seq_len);
        // A reader however slow costs this much memory and delays nobody: the channel cannot fill up.
        let (events, receiver) = mpsc::channel(max_tokens + EVENTS_BESIDES_TOKENS);
        let stream = SeqStream { events: receiver, wake: Arc::clone(&self.wake) };
        let seq = SeqId(self.next_seq.fetch_add(1, Ordering::Relaxed));
        let (accepted, verdict) = oneshot::channel();
        let arrival = Box::new(Arrival { seq, submission, events, accepted });
        self.commands.try_send(Command::Submit(arrival)).map_err(|error| self.refusal(&error))?;
        verdict.await.map_err(|_| self.stopped())??;
        Ok(stream)
    }

    /// What the engine is and how busy it was after its last step.
    pub fn info(&self) -> EngineInfo {
        self.info.borrow().clone()
    }

    /// Resolves when `condition` holds; `false` if the engine stopped first.
    pub async fn wait_for(&self, condition: impl FnMut(&EngineInfo) -> bool) -> bool {
        self.info.clone().wait_for(condition).await.is_ok()
    }

    /// Forgets all cached prefixes.
    pub async fn flush_cache(&self) -> Result<(), WorkerError> {
        self.commands.send(Command::FlushCache).await.map_err(|_| self.stopped())
    }

    /// Ends every sequence with an error by which its router takes it up elsewhere.
    pub async fn hand_over(&self) {
        // An engine that has stopped has none.
        let _stopped = self.commands.send(Command::HandOver).await;
    }

    /// Ends the engine after its current step; sequences in flight get an error.
    pub async fn stop(&self) {
        // It has already stopped if nobody takes the command.
        let _stopped = self.commands.send(Command::Stop).await;
    }

    fn stopped(&self) -> WorkerError {
        match &self.info.borrow().failure {
            Some(failure) => WorkerError::Aborted(format!("the engine has failed: {failure}")),
            None => WorkerError::Unavailable("the engine has stopped"),
        }
    }

    fn refusal(&self, error: &mpsc::error::TrySendError<Command>) -> WorkerError {
        match error {
            mpsc::error::TrySendError::Full(_) => {
                let max = self.commands.max_capacity();
                WorkerError::QueueFull { queue: "the engine's intake", len: max, max }
            }
            mpsc::error::TrySendError::Closed(_) => self.stopped(),
        }
    }
}

/// Events of one sequence. Dropping it cancels the sequence and gives everything it holds back.
pub struct SeqStream {
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
