//! The engine thread: intake, plan, forward, outcome, at its own pace.
//!
//! One engine serves both roles. On a prefill worker it is a group of one that sends hand-offs; in a decode group it is
//! the leader, with rank 0's shard, and commands the followers. What a sequence wants of it is in its [`Work`].

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use longreach_collective::control::{Broadcaster, ControlError};
use longreach_kv::{PrefixSalt, local_share};
use longreach_model::Backend;
use longreach_proto::{
    WorkerError,
    group::{DecodeError, ExpectKv, ExpectedBlocks, FollowerEvent, FollowerMessage, LeaderMessage},
    worker::{FirstToken, KvLayout, OutputToken, RankTarget, Reservation},
};
use longreach_sched::{
    End, Event, Mode, NewSeq, Refused, Sampled, Scheduler, SeqKind, StepOutcome, WrongStep,
};
use longreach_types::{DcpLayout, GroupShape, HandoffId, SeqId, StepPlan, TokenId};
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinError,
};
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info};

use crate::{
    handle::{Arrival, Command, EngineEvent, EngineInfo, Work},
    inbound::{InboundSet, Progress},
    inlet::QUEUE_LEN,
    intake::{Input, Intake},
    live::{self, Live, OutputLimits},
    outbound::OutboundSet,
    pull::{PullAsk, PullSet},
    rank::{HandoffEnd, RankWorker, StepError},
    send::{LaneContext, LaneReport, Outbound},
    transport::KvTransport,
};

/// Inputs taken in between two steps. KV that comes or is pulled while the engine takes it in would otherwise hold up
/// the sequences that decode, for as long as its peer is quick enough.
const MAX_INPUTS: usize = 2 * QUEUE_LEN;

/// Fixed facts of an engine.
pub(crate) struct EngineSetup {
    pub(crate) layout: KvLayout,
    pub(crate) dcp: DcpLayout,
    pub(crate) shape: GroupShape,
    /// Ranks as receivers of KV; empty on a prefill worker.
    pub(crate) targets: Vec<RankTarget>,
    pub(crate) eos: Vec<TokenId>,
    pub(crate) vocab_size: usize,
    pub(crate) max_seq_len: usize,
    /// How long one hand-off may stand still on this side.
    pub(crate) handoff_timeout: Duration,
    /// Makes hand-off ids unique across the lives of all groups.
    pub(crate) nonce: u64,
}

/// What lanes run on.
pub(crate) struct LaneSetup {
    pub(crate) transport: Arc<dyn KvTransport>,
    pub(crate) wake: Arc<Notify>,
    pub(crate) reports: mpsc::Sender<LaneReport>,
    pub(crate) tasks: TaskTracker,
    pub(crate) runtime: tokio::runtime::Handle,
}

impl LaneSetup {
    fn context(&self) -> LaneContext<'_> {
        LaneContext {
            transport: &self.transport,
            wake: &self.wake,
            reports: &self.reports,
            tasks: &self.tasks,
            runtime: &self.runtime,
        }
    }
}

/// Why an engine ended before it was told to. Its epoch is over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineFailure {
    #[error("step failed: {0}")]
    Step(#[from] StepError),
    #[error("rank {rank}: {source}")]
    Link { rank: usize, source: ControlError },
    #[error("control link: {0}")]
    Broadcast(#[from] ControlError),
    #[error("rank {rank} sent nonsense: {source}")]
    Message { rank: usize, source: DecodeError },
    #[error("scheduler: {0}")]
    Sched(#[from] WrongStep),
    #[error("a task was lost: {0}")]
    Task(#[from] JoinError),
}

/// The state of an engine thread.
pub(crate) struct Engine<B: Backend> {
    pub(crate) rank: RankWorker<B>,
    pub(crate) followers: Option<Broadcaster>,
    pub(crate) sched: Scheduler,
    pub(crate) setup: EngineSetup,
    pub(crate) lanes: LaneSetup,
    pub(crate) intake: Intake,
    pub(crate) info: watch::Sender<EngineInfo>,
    pub(crate) live: HashMap<SeqId, Sequence>,
    pub(crate) inbound: InboundSet,
    pub(crate) outbound: OutboundSet,
    pub(crate) pulls: PullSet,
    pub(crate) is_stopping: bool,
}

/// A sequence in flight and what it wants.
pub(crate) struct Sequence {
    live: Live,
    work: Work,
}

impl<B: Backend> Engine<B> {
    /// Runs until told to stop, abandoned by all handles, or failed.
    pub(crate) fn run(mut self) {
        let outcome = self.run_steps();
        let reason = match &outcome {
            Ok(()) => "the engine has stopped".to_owned(),
            Err(failure) => {
                error!(%failure, "engine failed; its epoch is over");
                failure.to_string()
            }
        };
        for (_, sequence) in self.live.drain() {
            sequence.live.fail(WorkerError::Aborted(reason.clone()));
        }
        if let Some(followers) = &self.followers {
            // Followers also leave when their link closes; this only saves them the surprise.
            let _closed = followers.broadcast(&LeaderMessage::Stop.encode());
        }
        self.info.send_modify(|info| info.failure = outcome.err().map(|failure| failure.to_string()));
    }

    fn run_steps(&mut self) -> Result<(), EngineFailure> {
        loop {
            for _ in 0..MAX_INPUTS {
                let Some(input) = self.intake.try_next() else { break };
                self.take(input)?;
                if self.is_stopping {
                    return Ok(());
                }
            }
            self.reap()?;
            self.take_pulled();
            self.pump();
            let plan = self.sched.next_plan();
            self.handle_events()?;
            match plan {
                Some(plan) => self.step(&plan)?,
                None => {
                    self.publish();
                    if let Some(input) = self.intake.wait() {
                        self.take(input)?;
                    }
                }
            }
            if self.is_stopping {
                return Ok(());
            }
        }
    }

    fn take(&mut self, input: Input) -> Result<(), EngineFailure> {
        match input {
            Input::Command(Command::Submit(arrival)) => self.arrive(*arrival),
            Input::Command(Command::FlushCache) => self.sched.flush_cache(),
            Input::Command(Command::HandOver) => self.hand_over()?,
            Input::Command(Command::Stop) | Input::Abandoned => self.is_stopping = true,
            Input::Delivery(delivery) => {
                // A rank without KV heads sees only begin and end; other ranks tell nobody how far they are.
                let deadline = Instant::now() + self.setup.handoff_timeout;
                self.inbound.extend(delivery.handoff(), deadline);
                if let Some(HandoffEnd { handoff, result }) = self.rank.deliver(delivery) {
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
            Input::Follower(rank, message) => self.follower(rank, message)?,
        }
        Ok(())
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

    fn accept(&mut self, seq: SeqId, submission: &crate::handle::Submission) -> Result<(), WorkerError> {
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
    fn reap(&mut self) -> Result<(), EngineFailure> {
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

    fn pump(&mut self) {
        let (rank, sched) = (&self.rank, &self.sched);
        self.outbound.pump(&rank.shard().backend, rank.kv(), |seq| {
            sched.tables(seq).and_then(|tables| tables.first()).map(Vec::as_slice)
        });
    }

    fn step(&mut self, plan: &StepPlan) -> Result<(), EngineFailure> {
        self.broadcast(&LeaderMessage::Plan(plan.clone()))?;
        let (rank, outbound) = (&mut self.rank, &mut self.outbound);
        let mut logits =
            rank.step(plan, &mut |backend, layer, kv| outbound.on_layer(plan, backend, layer, kv))?;
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
        self.handle_events()?;
        self.publish();
        Ok(())
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
    fn abort(&mut self, seq: SeqId, error: WorkerError) -> Result<(), EngineFailure> {
        if let Some(sequence) = self.live.remove(&seq) {
            debug!(request = %sequence.live.request_id, %seq, %error, "ended early");
            sequence.live.fail(error);
        }
        self.outbound.remove(seq);
        self.pulls.remove(seq);
        if let Some(handoff) = self.inbound.remove(seq) {
            self.rank.forget(handoff);
            self.broadcast(&LeaderMessage::Drop(handoff))?;
        }
        // Writes of a dropped hand-off cannot land later: ranks copy cells in their own threads, and every rank
        // takes the drop before any plan that could use the blocks again.
        self.sched.abort(seq);
        Ok(())
    }

    /// Ends every sequence as a death of the group would, but first: nothing is left half done, and routers need not
    /// find out.
    fn hand_over(&mut self) -> Result<(), EngineFailure> {
        let seqs: Vec<_> = self.live.keys().copied().collect();
        info!(n_seqs = seqs.len(), "handing sequences over");
        for seq in seqs {
            self.abort(seq, WorkerError::Unavailable("draining, the output goes on elsewhere"))?;
        }
        Ok(())
    }

    fn handle_events(&mut self) -> Result<(), EngineFailure> {
        for event in self.sched.take_events() {
            match event {
                Event::Reserved { seq, cached_len, mode, blocks } => {
                    self.reserved(seq, cached_len, mode, blocks)?;
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

    fn reserved(
        &mut self,
        seq: SeqId,
        cached_len: usize,
        mode: Mode,
        blocks: std::ops::Range<usize>,
    ) -> Result<(), EngineFailure> {
        let Some(sequence) = self.live.get_mut(&seq) else { return Ok(()) };
        sequence.live.cached_len = cached_len;
        if let Work::Prefill(reservation) = &sequence.work {
            let reservation = reservation.clone();
            self.open_lanes(seq, cached_len, &reservation)?;
            if mode == Mode::Pull {
                self.start_pull(seq, &reservation);
            }
            return Ok(());
        }
        let reservation = Reservation {
            handoff: HandoffId((u128::from(self.setup.nonce) << 64) | u128::from(seq.0)),
            epoch: self.sched.epoch(),
            cached_len,
            prefilled_here: mode == Mode::Local,
            layout: self.setup.layout.clone(),
            blocks,
            dcp_size: self.setup.shape.dcp_size(),
            ranks: self.setup.targets.clone(),
        };
        if mode == Mode::Local {
            sequence.live.send(EngineEvent::Reserved(reservation));
            return Ok(());
        }
        self.expect(seq, reservation)
    }

    /// Prefill: opens the way to every rank, unless the first token will be the last.
    fn open_lanes(
        &mut self,
        seq: SeqId,
        cached_len: usize,
        reservation: &Reservation,
    ) -> Result<(), EngineFailure> {
        let limits = OutputLimits { eos: &self.setup.eos, max_seq_len: self.setup.max_seq_len };
        if self.live.get(&seq).is_none_or(|sequence| sequence.live.ends_with_next(&limits)) {
            return Ok(());
        }
        let context = self.lanes.context();
        let prompt_len = self.sched.tokens(seq).map_or(0, <[TokenId]>::len);
        let patience = self.setup.handoff_timeout;
        match Outbound::open(reservation, &self.setup.layout, prompt_len, patience, &context) {
            Ok(mut outbound) => {
                outbound.advance_all(cached_len);
                self.outbound.insert(seq, outbound);
                Ok(())
            }
            Err(error) => self.abort(seq, error),
        }
    }

    /// Prefill: asks the ranks for the prefix that they hold; the scheduler has found it cheaper than computing.
    fn start_pull(&mut self, seq: SeqId, reservation: &Reservation) {
        // It has ended already if its lanes could not be opened.
        let (Some(sequence), Some(wanted)) = (self.live.get(&seq), self.sched.pull_range(seq)) else {
            return;
        };
        let layout = self.setup.dcp;
        let ask = PullAsk {
            seq,
            reservation,
            ours: &self.setup.layout,
            prompt_hash: sequence.live.prompt_hash,
            wanted: layout.n_blocks(wanted.start)..layout.n_blocks(wanted.end),
            blocks: self.sched.tables(seq).and_then(|tables| tables.first()).map_or(&[][..], Vec::as_slice),
            patience: self.sched.config().reuse.pull_patience(wanted.len()),
        };
        if let Err(error) = self.pulls.start(&ask, &self.lanes.context()) {
            self.pulled(seq, Err(error));
        }
    }

    /// Prefill: takes in what ranks have sent of prefixes.
    fn take_pulled(&mut self) {
        let (shard, kv) = self.rank.shard_and_kv_mut();
        for (seq, result) in self.pulls.turn(&shard.backend, kv, Instant::now()) {
            self.pulled(seq, result);
        }
    }

    /// Prefill: a pull has ended. If it failed, the prefix is computed; the client learns nothing of it.
    fn pulled(&mut self, seq: SeqId, result: Result<(), WorkerError>) {
        let told = match result {
            Ok(()) => self.sched.pulled(seq),
            Err(error) => {
                info!(%seq, %error, "a prefix could not be pulled; it is computed");
                self.sched.pull_failed(seq)
            }
        };
        debug_assert!(told.is_ok(), "a pull is forgotten when its sequence ends");
    }

    /// Decode: tells every rank which blocks the hand-off may fill.
    fn expect(&mut self, seq: SeqId, reservation: Reservation) -> Result<(), EngineFailure> {
        let tables = self.sched.tables(seq).unwrap_or_default();
        let blocks = tables.iter().enumerate().map(|(dcp_rank, table)| {
            let share = local_share(self.setup.dcp, reservation.blocks.clone(), dcp_rank);
            ExpectedBlocks { cached: table[..share.start].to_vec(), missing: table[share].to_vec() }
        });
        let expect = ExpectKv {
            handoff: reservation.handoff,
            prompt_len: self.sched.tokens(seq).map_or(0, <[TokenId]>::len),
            prompt_hash: self.live.get(&seq).map_or([0; 16], |sequence| sequence.live.prompt_hash),
            blocks: blocks.collect(),
        };
        let (handoff, n_ranks) = (reservation.handoff, reservation.ranks.len());
        let deadline = Instant::now() + self.setup.handoff_timeout;
        self.inbound.insert(seq, reservation, n_ranks, deadline);
        self.rank.expect(&expect);
        self.broadcast(&LeaderMessage::Expect(expect))?;
        let progress = self.inbound.expected(handoff);
        self.progress(progress)
    }

    fn progress(&mut self, progress: Progress) -> Result<(), EngineFailure> {
        match progress {
            Progress::Waiting => Ok(()),
            Progress::Reserved(seq, reservation) => {
                if let Some(sequence) = self.live.get(&seq) {
                    sequence.live.send(EngineEvent::Reserved(*reservation));
                }
                Ok(())
            }
            Progress::Complete(seq, Some(first_token)) => self.received(seq, &first_token),
            Progress::Complete(seq, None) => {
                let message = "the hand-off was committed without a first token".to_owned();
                self.abort(seq, WorkerError::Invalid(message))
            }
        }
    }

    /// All KV of a prompt is here: the sequence decodes from the token that its prefill sampled.
    fn received(&mut self, seq: SeqId, first_token: &OutputToken) -> Result<(), EngineFailure> {
        let token = first_token.token;
        if token.0 as usize >= self.setup.vocab_size {
            let message =
                format!("first token {token} is outside the vocabulary of {}", self.setup.vocab_size);
            return self.abort(seq, WorkerError::Invalid(message));
        }
        let Some(sequence) = self.live.get_mut(&seq) else { return Ok(()) };
        if self.sched.received(seq, token).is_err() {
            return self.abort(seq, WorkerError::Aborted("the hand-off came too late".to_owned()));
        }
        let limits = OutputLimits { eos: &self.setup.eos, max_seq_len: self.setup.max_seq_len };
        if let Some(reason) = sequence.live.push(token, &limits) {
            self.finish(seq, EngineEvent::Finish(reason));
        }
        Ok(())
    }

    fn refused(&mut self, handoff: HandoffId, rank: usize, reason: String) -> Result<(), EngineFailure> {
        let Some(seq) = self.inbound.seq(handoff) else { return Ok(()) };
        self.abort(seq, WorkerError::Aborted(format!("rank {rank} refused the hand-off: {reason}")))
    }

    fn lane_report(&mut self, report: LaneReport) -> Result<(), EngineFailure> {
        match self.outbound.report(report) {
            None | Some((_, Ok(false))) => Ok(()),
            Some((seq, Ok(true))) => {
                let sent_bytes = self.outbound.remove(seq).map_or(0, |outbound| outbound.sent_bytes());
                if let Some(sequence) = self.live.remove(&seq) {
                    sequence.live.send(EngineEvent::HandoffDone { sent_bytes });
                }
                self.sched.release(seq);
                Ok(())
            }
            Some((seq, Err(error))) => self.abort(seq, error),
        }
    }

    fn follower(&mut self, rank: usize, message: Result<Vec<u8>, ControlError>) -> Result<(), EngineFailure> {
        let message = message.map_err(|source| EngineFailure::Link { rank, source })?;
        let message =
            FollowerMessage::decode(&message).map_err(|source| EngineFailure::Message { rank, source })?;
        let (handoff, event) = match message {
            FollowerMessage::Kv { handoff, event, .. } => (handoff, event),
            FollowerMessage::Leaving { .. } => {
                self.info.send_modify(|info| info.leaving = Some(rank));
                return Ok(());
            }
        };
        match event {
            FollowerEvent::Expected => {
                let progress = self.inbound.expected(handoff);
                self.progress(progress)
            }
            FollowerEvent::Received => {
                let progress = self.inbound.received(handoff, None);
                self.progress(progress)
            }
            FollowerEvent::Refused(reason) => self.refused(handoff, rank, reason),
        }
    }

    fn broadcast(&self, message: &LeaderMessage) -> Result<(), EngineFailure> {
        match &self.followers {
            Some(followers) => Ok(followers.broadcast(&message.encode())?),
            None => Ok(()),
        }
    }

    fn publish(&self) {
        let stats = self.sched.stats();
        let n_sending = self.outbound.len() + self.pulls.len();
        let n_handoffs = self.inbound.len() + n_sending + self.rank.n_receiving();
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
