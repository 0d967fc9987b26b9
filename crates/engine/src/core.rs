//! What an engine decides, one turn after the other: intake, plan, outcome, and both ways of a hand-off.
//!
//! One core serves both roles. On a prefill worker it is a group of one that sends hand-offs; in a decode group it is
//! the leader's, and commands the followers. What a sequence wants of it is in its [`Work`].
//!
//! It has no thread, waits for nothing and computes nothing. Who drives it brings what came, runs the steps that it
//! plans, and lends it the cells of its rank. A worker's thread drives it, and so does the simulation of a cluster:
//! what is true of one is true of the other. The only clock is tokio's, which a simulation may own.
//!
//! ```text
//! take* ► turn ──plan──► the driver's step, with on_layer as layers become final ► complete ► take* …
//!            └──nothing to do──► the driver waits
//! ```

mod handoffs;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longreach_kv::PrefixSalt;
use longreach_proto::{
    WorkerError,
    group::LeaderMessage,
    worker::{FirstToken, KvLayout, OutputToken, RankTarget},
};
use longreach_sched::{End, Event, NewSeq, Refused, Sampled, Scheduler, SeqKind, StepOutcome, WrongStep};
use longreach_types::{DcpLayout, GroupShape, SeqId, StepPlan, TokenId};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, watch},
    time::Instant,
};
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info};

use crate::{
    cells::{CellSource, KvCells},
    handle::{Arrival, Command, EngineEvent, EngineHandle, EngineInfo, Submission, Work},
    inbound::InboundSet,
    inlet::{Deliveries, Delivery},
    intake::{Input, Intake},
    live::{self, Live, OutputLimits},
    outbound::OutboundSet,
    pull::PullSet,
    receive::{HandoffEnd, Receiver},
    send::LaneSetup,
    transport::KvTransport,
};

/// Lane reports that may wait for the engine; it drains them every turn.
const REPORTS_LEN: usize = 1024;

/// Fixed facts of an engine.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// How KV is held.
    pub layout: KvLayout,
    /// How positions are split over ranks.
    pub dcp: DcpLayout,
    /// The group's ranks.
    pub shape: GroupShape,
    /// Ranks as receivers of KV; empty on a prefill worker.
    pub targets: Vec<RankTarget>,
    /// Tokens that end an output.
    pub eos: Vec<TokenId>,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// The longest sequence.
    pub max_seq_len: usize,
    /// How long one hand-off may stand still on this side.
    pub handoff_timeout: Duration,
    /// The most payload of one message of a hand-off, where a cell is not larger.
    pub max_chunk_bytes: usize,
    /// Makes hand-off ids unique across the lives of all groups.
    pub nonce: u64,
    /// Submissions that may wait between two turns.
    pub intake_len: usize,
}

/// Why orders do not reach every follower.
pub type OrdersLost = Box<dyn std::error::Error + Send + Sync>;

/// Takes an order for all followers, to arrive in this order or to end the epoch.
pub type Orders = Box<dyn Fn(&LeaderMessage) -> Result<(), OrdersLost> + Send + Sync>;

/// What a core is made of. `F` is what comes over the links to followers.
pub struct CoreParts<F> {
    /// Fixed facts.
    pub setup: EngineSetup,
    /// The scheduler, over empty pools.
    pub sched: Scheduler,
    /// The way to followers, if there are any.
    pub orders: Orders,
    /// How KV travels.
    pub transport: Arc<dyn KvTransport>,
    /// Where lanes run and are awaited at shutdown.
    pub tasks: TaskTracker,
    /// The runtime of those tasks.
    pub runtime: Handle,
    /// What comes through the door of the engine's own rank.
    pub deliveries: Deliveries,
    /// What comes from followers.
    pub followers: mpsc::Receiver<(usize, F)>,
}

/// Why an engine cannot go on. Its epoch is over.
#[derive(Debug, thiserror::Error)]
pub enum CoreFailure {
    /// A follower cannot be reached.
    #[error("control link: {0}")]
    Orders(OrdersLost),
    /// The outcome of a step that was not planned.
    #[error("scheduler: {0}")]
    Sched(#[from] WrongStep),
}

/// The state of an engine.
pub struct Core {
    setup: EngineSetup,
    sched: Scheduler,
    orders: Orders,
    lanes: LaneSetup,
    info: watch::Sender<EngineInfo>,
    live: BTreeMap<SeqId, Sequence>,
    inbound: InboundSet,
    outbound: OutboundSet,
    pulls: PullSet,
    /// Hand-offs to the engine's own rank.
    receiver: Receiver,
    is_stopping: bool,
}

/// A sequence in flight and what it wants.
struct Sequence {
    live: Live,
    work: Work,
}

impl Core {
    /// An engine that has done nothing yet, the way into it, and the ears by which its driver hears for it.
    pub fn new<F>(parts: CoreParts<F>) -> (Self, Intake<F>, EngineHandle) {
        let CoreParts { setup, sched, orders, transport, tasks, runtime, deliveries, followers } = parts;
        let (commands_in, commands) = mpsc::channel(setup.intake_len);
        let (reports_in, reports) = mpsc::channel(REPORTS_LEN);
        let wake = Arc::new(Notify::new());
        let (info, info_out) = watch::channel(EngineInfo::first(sched.epoch(), &setup));
        let core = Self {
            lanes: LaneSetup {
                transport,
                wake: Arc::clone(&wake),
                reports: reports_in,
                tasks,
                runtime,
                max_chunk_bytes: setup.max_chunk_bytes,
            },
            receiver: Receiver::new(sched.epoch()),
            setup,
            sched,
            orders,
            info,
            live: BTreeMap::new(),
            inbound: InboundSet::default(),
            outbound: OutboundSet::default(),
            pulls: PullSet::default(),
            is_stopping: false,
        };
        let intake = Intake { commands, reports, wake: Arc::clone(&wake), deliveries, followers };
        (core, intake, EngineHandle::new(commands_in, wake, info_out))
    }

    /// The scheduler, to be looked at.
    pub fn sched(&self) -> &Scheduler {
        &self.sched
    }

    /// Hand-offs to the engine's own rank, to be looked at.
    pub fn receiver(&self) -> &Receiver {
        &self.receiver
    }

    /// Sequences whose listeners have not had their last event.
    pub fn n_live(&self) -> usize {
        self.live.len()
    }

    /// Whether the engine was told to stop, or nobody can reach it any more.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Takes one thing in.
    pub fn take(&mut self, input: Input, cells: &mut impl KvCells) -> Result<(), CoreFailure> {
        match input {
            Input::Command(Command::Submit(arrival)) => self.arrive(*arrival),
            Input::Command(Command::FlushCache) => self.sched.flush_cache(),
            Input::Command(Command::HandOver) => self.hand_over()?,
            Input::Command(Command::Stop) | Input::Abandoned => self.is_stopping = true,
            Input::Delivery(delivery) => {
                // A rank without KV heads sees only begin and end; other ranks tell nobody how far they are.
                let deadline = Instant::now() + self.setup.handoff_timeout;
                let opens = matches!(delivery, Delivery::Open { .. });
                self.inbound.heard(delivery.handoff(), opens, deadline);
                if let Some(HandoffEnd { handoff, result }) = self.receiver.deliver(delivery, cells) {
                    match result {
                        Ok(first_token) => {
                            let progress = self.inbound.received(handoff, first_token);
                            self.progress(progress)?;
                        }
                        Err(reason) => self.refused(handoff, 0, reason)?,
                    }
                }
            }
            Input::Report(report) => self.lane_report(report)?,
        }
        Ok(())
    }

    /// Clean-up, hand-offs, and the next step if there is one: the driver runs it on all ranks, and then calls
    /// [`Self::complete`].
    pub fn turn(&mut self, cells: &mut impl KvCells) -> Result<Option<StepPlan>, CoreFailure> {
        self.reap()?;
        self.take_pulled(cells);
        self.pump(cells);
        let plan = self.sched.next_plan();
        self.handle_events(cells)?;
        if plan.is_none() {
            self.publish();
        }
        Ok(plan)
    }

    /// `layer` of the rows of `plan` is final: what that completes leaves while the step goes on.
    pub fn on_layer(&mut self, plan: &StepPlan, layer: usize, source: &impl CellSource) {
        self.outbound.on_layer(plan, layer, source);
    }

    /// Takes the logits of a step, a row for each that the plan asks for, in its order.
    pub fn complete(
        &mut self,
        plan: &StepPlan,
        logits: &mut [f32],
        cells: &impl KvCells,
    ) -> Result<(), CoreFailure> {
        let mut tokens = Vec::new();
        let mut rows = logits.chunks_exact_mut(self.setup.vocab_size);
        for seq in plan.seqs.iter().filter(|seq| seq.n_logits > 0) {
            let row = rows.by_ref().nth(seq.n_logits - 1);
            let (Some(row), Some(sequence)) = (row, self.live.get(&seq.seq)) else { continue };
            let limits = OutputLimits { eos: &self.setup.eos, max_seq_len: self.setup.max_seq_len };
            match sequence.live.sample(row, &limits) {
                Ok(token) => tokens.push((seq.seq, token)),
                Err(error) => {
                    error!(request = %sequence.live.request_id, %error, "sampling failed");
                    self.abort(seq.seq, WorkerError::Internal(error.to_string()))?;
                }
            }
        }
        let sampled =
            tokens.iter().map(|(seq, token)| Sampled { seq: *seq, tokens: vec![token.token] }).collect();
        self.sched.complete(&StepOutcome { step: plan.step, sampled })?;
        for (seq, token) in tokens {
            self.emit(seq, token);
        }
        self.handle_events(cells)?;
        self.publish();
        Ok(())
    }

    /// Tells every follower.
    pub fn order(&self, order: &LeaderMessage) -> Result<(), CoreFailure> {
        (self.orders)(order).map_err(CoreFailure::Orders)
    }

    /// Ends everything, because of `failure` if there is one.
    pub fn end(mut self, failure: Option<String>) {
        let reason = failure.as_deref().unwrap_or("the engine has stopped");
        for sequence in std::mem::take(&mut self.live).into_values() {
            sequence.live.fail(WorkerError::Aborted(reason.to_owned()));
        }
        // Followers also leave when their link closes; this only saves them the surprise.
        let _closed = self.order(&LeaderMessage::Stop);
        self.info.send_modify(|info| info.failure = failure);
    }

    fn arrive(&mut self, arrival: Arrival) {
        let Arrival { seq, submission, events, accepted } = arrival;
        let verdict = self.accept(seq, &submission);
        if verdict.is_ok() {
            debug!(request = %submission.request_id, %seq, tokens = submission.prompt.tokens.len(), "accepted");
            let live = Live::new(&submission, events);
            self.live.insert(seq, Sequence { live, work: submission.work });
        }
        // A caller that has gone is found by `reap`.
        let _caller_gone = accepted.send(verdict);
    }

    fn accept(&mut self, seq: SeqId, submission: &Submission) -> Result<(), WorkerError> {
        live::check(submission, self.setup.vocab_size, self.setup.max_seq_len)?;
        let prompt = &submission.prompt;
        let max_len = prompt.prompt_len().saturating_add(submission.sampling.max_tokens);
        let (kind, remote_len) = match &submission.work {
            Work::Decode => (SeqKind::Receive, 0),
            Work::Prefill(reservation) => (SeqKind::Send, reservation.cached_len),
        };
        let new = NewSeq {
            seq,
            tokens: prompt.tokens.clone(),
            salt: PrefixSalt::new(&self.setup.layout.model_fingerprint, b"", &prompt.cache_salt),
            max_len: max_len.min(self.setup.max_seq_len),
            priority: submission.priority,
            kind,
            remote_len,
        };
        self.sched.submit(new).map_err(refusal)
    }

    /// Ends sequences whose listener has gone, and hand-offs that stand still. Runs every turn: nothing waits for
    /// other work to be cleaned up.
    fn reap(&mut self) -> Result<(), CoreFailure> {
        let gone: Vec<_> =
            self.live.iter().filter(|(_, s)| s.live.is_cancelled()).map(|(&seq, _)| seq).collect();
        for seq in gone {
            self.abort(seq, WorkerError::Cancelled)?;
        }
        let now = Instant::now();
        self.outbound.sweep(now);
        let overdue = [self.inbound.overdue(now), self.outbound.overdue(now)].concat();
        for seq in overdue {
            let message = format!("the hand-off stood still for {:?}", self.setup.handoff_timeout);
            self.abort(seq, WorkerError::Aborted(message))?;
        }
        Ok(())
    }

    fn pump(&mut self, source: &impl CellSource) {
        let sched = &self.sched;
        self.outbound
            .pump(source, |seq| sched.tables(seq).and_then(|tables| tables.first()).map(Vec::as_slice));
    }

    /// A token of this engine: to the listener, and perhaps the end.
    fn emit(&mut self, seq: SeqId, token: OutputToken) {
        let Some(sequence) = self.live.get_mut(&seq) else { return };
        let limits = OutputLimits { eos: &self.setup.eos, max_seq_len: self.setup.max_seq_len };
        let finish = sequence.live.push(token.token, &limits);
        match sequence.work {
            Work::Decode => {
                sequence.live.send(EngineEvent::Token(token));
                if let Some(reason) = finish {
                    self.finish(seq, EngineEvent::Finish(reason));
                }
            }
            Work::Prefill(_) => {
                let cached_len = sequence.live.cached_len;
                let event = EngineEvent::FirstToken(FirstToken { token: token.clone(), finish, cached_len });
                if finish.is_some() {
                    self.outbound.set_unused(seq);
                    self.finish(seq, event);
                } else {
                    sequence.live.send(event);
                    let prompt_hash = sequence.live.prompt_hash;
                    if let Some(outbound) = self.outbound.get_mut(seq) {
                        outbound.commit(prompt_hash, token);
                    }
                }
            }
        }
    }

    /// Ends a sequence well; its blocks become cached.
    fn finish(&mut self, seq: SeqId, last: EngineEvent) {
        if let Some(sequence) = self.live.remove(&seq) {
            sequence.live.send(last);
        }
        self.sched.finish(seq);
    }

    /// Ends a sequence wherever it is, on every rank.
    fn abort(&mut self, seq: SeqId, error: WorkerError) -> Result<(), CoreFailure> {
        if let Some(sequence) = self.live.remove(&seq) {
            debug!(request = %sequence.live.request_id, %seq, %error, "ended early");
            sequence.live.fail(error);
        }
        self.outbound.remove(seq);
        self.pulls.remove(seq);
        if let Some(handoff) = self.inbound.remove(seq) {
            self.receiver.forget(handoff);
            self.order(&LeaderMessage::Drop(handoff))?;
        }
        // Writes of a dropped hand-off cannot land later: ranks copy cells in their own threads, and every rank
        // takes the drop before any plan that could use the blocks again.
        self.sched.abort(seq);
        Ok(())
    }

    /// Ends every sequence as a death of the group would, but first: nothing is left half done, and routers need not
    /// find out.
    fn hand_over(&mut self) -> Result<(), CoreFailure> {
        let seqs: Vec<_> = self.live.keys().copied().collect();
        info!(n_seqs = seqs.len(), "handing sequences over");
        for seq in seqs {
            self.abort(seq, WorkerError::Unavailable("draining, the output goes on elsewhere"))?;
        }
        Ok(())
    }

    fn handle_events(&mut self, cells: &impl KvCells) -> Result<(), CoreFailure> {
        for event in self.sched.take_events() {
            match event {
                Event::Reserved { seq, cached_len, mode, blocks } => {
                    self.reserved(seq, (cached_len, mode, blocks), cells)?;
                }
                Event::Ended { seq, end: End::OutOfBlocks } => {
                    let message = "a sequence alone in the pool could not grow".to_owned();
                    self.abort(seq, WorkerError::Internal(message))?;
                }
                Event::Preempted { seq } => info!(%seq, "preempted: its blocks go to others"),
                Event::Resumed { .. }
                | Event::Sampled { .. }
                | Event::Sending { .. }
                | Event::Ended { .. } => {}
            }
        }
        Ok(())
    }

    fn publish(&self) {
        let stats = self.sched.stats();
        let n_sending = self.outbound.len() + self.pulls.len();
        let n_handoffs = self.inbound.len() + n_sending + self.receiver.len();
        let pulled_bytes = self.pulls.n_bytes();
        self.info.send_modify(|info| {
            info.stats = stats;
            info.n_handoffs = n_handoffs;
            info.pulled_bytes = pulled_bytes;
        });
    }
}

fn refusal(refused: Refused) -> WorkerError {
    match refused {
        Refused::QueueFull { n_waiting, max_waiting, .. } => {
            WorkerError::QueueFull { queue: "the waiting queue", len: n_waiting, max: max_waiting }
        }
        Refused::TooLarge { need, have } => WorkerError::TooLarge { need, have },
        Refused::EmptyPrompt | Refused::NoOutput { .. } => WorkerError::Invalid(refused.to_string()),
        Refused::Duplicate(_) => WorkerError::Internal(refused.to_string()),
    }
}
