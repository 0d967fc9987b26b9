//! A worker's engine in the simulation: intake, plan, step, outcome, over the product's [`Scheduler`].
//!
//! It takes the place of the engine's thread, which blocks and computes and so cannot run on simulated time, and it
//! keeps that thread's order of doing things: everything that arrived, then what is overdue, then one step, during which
//! nothing else happens. As in the product one engine serves both roles.

mod handle;
mod handoff;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use longreach_kv::PrefixSalt;
use longreach_proto::{
    WorkerError,
    worker::{FirstToken, KvLayout, OutputToken, RankTarget, Reservation},
};
use longreach_sched::{End, Event, Mode, NewSeq, Refused, Sampled, Scheduler, SeqKind, StepOutcome};
use longreach_types::{DcpLayout, FinishReason, HandoffId, SamplingParams, SeqId, StepPlan, TokenId};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};

pub(crate) use self::handle::{
    Arrival, EngineEvent, EngineFace, EngineHandle, EngineInfo, FollowerEvent, FollowerMessage, Input,
    LaneReport, LeaderMessage, SeqStream, Submission, Work,
};
use self::handoff::{Inbound, Outbound};
use crate::{
    journal::Journal,
    lane::LaneContext,
    model::{self, EOS},
    net::{Net, NodeId},
    rank::{HandoffEnd, Order, Rank, RankFace},
};

/// How often an engine that waits for a hand-off looks at its deadlines.
const TICK: Duration = Duration::from_millis(50);

/// How often one that waits for nothing looks around all the same.
const IDLE_TICK: Duration = Duration::from_secs(2);

/// Fixed facts of an engine.
#[derive(Clone)]
pub(crate) struct EngineSetup {
    pub(crate) name: String,
    pub(crate) node: NodeId,
    pub(crate) net: Net,
    pub(crate) journal: Journal,
    pub(crate) kv_layout: KvLayout,
    pub(crate) dcp: DcpLayout,
    pub(crate) targets: Vec<RankTarget>,
    pub(crate) max_seq_len: usize,
    pub(crate) handoff_timeout: Duration,
    /// How long a step may wait for a rank.
    pub(crate) watchdog: Duration,
    pub(crate) nonce: u64,
    pub(crate) step_time: Duration,
    pub(crate) lanes: LaneContext,
}

/// Why an engine ended. Its epoch is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EngineFailure {
    #[error("rank {0} is lost")]
    Link(usize),
    #[error("a step stood still")]
    Watchdog,
    #[error("stopped")]
    Stopped,
    #[error("scheduler: {0}")]
    Sched(String),
}

pub(crate) struct Engine {
    pub(crate) setup: EngineSetup,
    pub(crate) rank: Rank,
    pub(crate) rank_face: RankFace,
    pub(crate) sched: Scheduler,
    pub(crate) followers: Vec<mpsc::Sender<LeaderMessage>>,
    pub(crate) inputs: mpsc::Receiver<Input>,
    pub(crate) handle: EngineHandle,
    pub(crate) deferred: VecDeque<Input>,
    pub(crate) live: BTreeMap<SeqId, Live>,
    pub(crate) inbound: BTreeMap<HandoffId, Inbound>,
    pub(crate) outbound: BTreeMap<SeqId, Outbound>,
    /// Hand-offs that were opened for nothing: their streams end when the group closes them.
    pub(crate) unused: Vec<Outbound>,
    pub(crate) n_steps: u64,
}

/// What an engine keeps of a sequence besides its blocks.
pub(crate) struct Live {
    sampling: SamplingParams,
    prompt_len: usize,
    output_len: usize,
    prompt_hash: [u8; 16],
    cached_len: usize,
    prefixes: Vec<u64>,
    work: Work,
    events: mpsc::Sender<Result<EngineEvent, WorkerError>>,
}

impl Live {
    fn send(&self, event: Result<EngineEvent, WorkerError>) {
        let _listener_gone = self.events.try_send(event);
    }

    /// Adds a token; why the output ends with it, if it does.
    fn push(&mut self, token: TokenId, max_seq_len: usize) -> Option<FinishReason> {
        self.output_len += 1;
        if !self.sampling.ignore_eos && token == EOS {
            return Some(FinishReason::Eos(token));
        }
        if self.sampling.stop_token_ids.contains(&token) {
            return Some(FinishReason::StopToken(token));
        }
        self.is_full(self.output_len, max_seq_len).then_some(FinishReason::Length)
    }

    fn is_full(&self, output_len: usize, max_seq_len: usize) -> bool {
        output_len >= self.sampling.max_tokens || self.prompt_len + output_len >= max_seq_len
    }
}

impl Engine {
    /// Runs until it fails; never because it has nothing to do.
    pub(crate) async fn run(mut self) -> EngineFailure {
        let failure = match self.run_steps().await {
            Ok(never) => match never {},
            Err(failure) => failure,
        };
        for live in std::mem::take(&mut self.live).into_values() {
            live.send(Err(WorkerError::Aborted(format!("the epoch is over: {failure}"))));
        }
        for follower in &self.followers {
            let _closed = follower.try_send(LeaderMessage::Stop);
        }
        failure
    }

    async fn run_steps(&mut self) -> Result<std::convert::Infallible, EngineFailure> {
        loop {
            self.setup.net.thawed(self.setup.node).await;
            while let Some(input) = self.try_next() {
                self.take(input)?;
            }
            self.reap()?;
            self.pump();
            let plan = self.sched.next_plan();
            self.handle_events()?;
            match plan {
                Some(plan) => self.step(plan).await?,
                None => {
                    self.publish();
                    let waits = !self.inbound.is_empty() || !self.outbound.is_empty();
                    let tick = if waits { TICK } else { IDLE_TICK };
                    let wake = self.handle.wake();
                    // All arms are cancel-safe; biased, so that a seed repeats its run.
                    let input = tokio::select! {
                        biased;
                        input = self.inputs.recv() => Some(input.ok_or(EngineFailure::Stopped)?),
                        () = wake.notified() => None,
                        () = sleep(tick) => None,
                    };
                    // A process that stands still takes nothing in.
                    self.setup.net.thawed(self.setup.node).await;
                    if let Some(input) = input {
                        self.take(input)?;
                    }
                }
            }
        }
    }

    fn try_next(&mut self) -> Option<Input> {
        self.deferred.pop_front().or_else(|| self.inputs.try_recv().ok())
    }

    fn take(&mut self, input: Input) -> Result<(), EngineFailure> {
        match input {
            Input::Submit(arrival) => self.arrive(*arrival),
            Input::Delivery(delivery) => {
                if let Some(handoff) = delivery.handoff() {
                    self.extend(handoff);
                }
                if let Some(HandoffEnd { handoff, result }) = self.rank.deliver(delivery) {
                    match result {
                        Ok(first_token) => self.received_share(handoff, first_token)?,
                        Err(reason) => self.refused(handoff, 0, &reason)?,
                    }
                }
            }
            Input::Report(report) => self.lane_report(report)?,
            Input::Follower(rank, message) => self.follower(rank, message)?,
            Input::Nudge => {}
        }
        Ok(())
    }

    fn arrive(&mut self, arrival: Arrival) {
        let Arrival { seq, submission, events, accepted } = arrival;
        let verdict = self.accept(seq, &submission);
        if verdict.is_ok() {
            let Submission { prompt, sampling, work, .. } = submission;
            let live = Live {
                sampling,
                prompt_len: prompt.prompt_len(),
                output_len: prompt.n_resumed,
                prompt_hash: model::prompt_hash(&prompt.tokens),
                cached_len: 0,
                prefixes: model::prefixes(&prompt.tokens),
                work,
                events,
            };
            self.live.insert(seq, live);
        }
        let _caller_gone = accepted.send(verdict);
    }

    fn accept(&mut self, seq: SeqId, submission: &Submission) -> Result<(), WorkerError> {
        let prompt = &submission.prompt;
        if submission.sampling.max_tokens <= prompt.n_resumed || prompt.tokens.len() >= self.setup.max_seq_len
        {
            return Err(WorkerError::Invalid("no room for a token".to_owned()));
        }
        let max_len = prompt.prompt_len() + submission.sampling.max_tokens;
        let new = NewSeq {
            seq,
            tokens: prompt.tokens.clone(),
            salt: PrefixSalt::new(&self.setup.kv_layout.model_fingerprint, b"", &prompt.cache_salt),
            max_len: max_len.min(self.setup.max_seq_len),
            priority: submission.priority,
            kind: match submission.work {
                Work::Decode => SeqKind::Receive,
                Work::Prefill(_) => SeqKind::Send,
            },
            // Prefixes are not pulled back from ranks here: every prefill computes what its own cache lacks.
            remote_len: 0,
        };
        self.sched.submit(new).map_err(|refused| match refused {
            Refused::QueueFull { n_waiting, max_waiting, .. } => {
                WorkerError::QueueFull { queue: "the waiting queue", len: n_waiting, max: max_waiting }
            }
            Refused::TooLarge { need, have } => WorkerError::TooLarge { need, have },
            refused => WorkerError::Invalid(refused.to_string()),
        })
    }

    /// Ends sequences whose listener has gone, and hand-offs that stand still.
    fn reap(&mut self) -> Result<(), EngineFailure> {
        let gone: Vec<_> =
            self.live.iter().filter(|(_, live)| live.events.is_closed()).map(|(&seq, _)| seq).collect();
        for seq in gone {
            self.abort(seq, WorkerError::Cancelled)?;
        }
        let now = Instant::now();
        self.unused.retain(|outbound| outbound.deadline > now);
        let inbound = self.inbound.values().filter(|i| i.deadline <= now).map(|i| i.seq);
        let outbound = self.outbound.iter().filter(|(_, o)| o.deadline <= now).map(|(&seq, _)| seq);
        let overdue: Vec<_> = inbound.chain(outbound).collect();
        for seq in overdue {
            self.setup.journal.count("hand-off stood still");
            self.abort(seq, WorkerError::Aborted("the hand-off stood still".to_owned()))?;
        }
        Ok(())
    }

    async fn step(&mut self, plan: StepPlan) -> Result<(), EngineFailure> {
        let prefixes = plan.seqs.iter().map(|step| self.prefixes(step.seq)).collect();
        let order = Order { plan, prefixes };
        self.broadcast(&LeaderMessage::Plan(order.clone()))?;
        let mut sums = self.rank.step(&order);
        sleep(self.setup.step_time).await;
        self.setup.net.thawed(self.setup.node).await;
        self.collect(&order, &mut sums).await?;
        let plan = &order.plan;
        let sampling = plan.seqs.iter().filter(|step| step.n_logits > 0);
        let tokens: Vec<_> = sampling
            .zip(sums)
            .filter(|(step, _)| self.live.contains_key(&step.seq))
            .map(|(step, sum)| (step.seq, model::token_of(sum)))
            .collect();
        let sampled = tokens.iter().map(|&(seq, token)| Sampled { seq, tokens: vec![token] }).collect();
        self.sched
            .complete(&StepOutcome { step: plan.step, sampled })
            .map_err(|error| EngineFailure::Sched(error.to_string()))?;
        for step in &plan.seqs {
            if let Some(outbound) = self.outbound.get_mut(&step.seq) {
                outbound.advance(step.seq_len());
            }
        }
        for (seq, token) in tokens {
            self.emit(seq, token);
        }
        self.pump();
        self.handle_events()?;
        self.n_steps += 1;
        self.audit(self.n_steps.is_multiple_of(4));
        self.publish();
        Ok(())
    }

    /// The collective of a step: adds the sums of the other ranks. What else arrives meanwhile waits.
    async fn collect(&mut self, order: &Order, sums: &mut [u64]) -> Result<(), EngineFailure> {
        let deadline = Instant::now() + self.setup.watchdog;
        let mut n_missing = self.followers.len();
        while n_missing > 0 {
            let Ok(input) = timeout_at(deadline, self.inputs.recv()).await else {
                self.setup.journal.count("watchdog ended an epoch");
                return Err(EngineFailure::Watchdog);
            };
            match input.ok_or(EngineFailure::Stopped)? {
                Input::Follower(_, Ok(FollowerMessage::Done { step, sums: theirs })) => {
                    if step != order.plan.step || theirs.len() != sums.len() {
                        self.setup.journal.violation(format!("{}: ranks are out of step", self.setup.name));
                    }
                    sums.iter_mut().zip(theirs).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
                    n_missing -= 1;
                }
                Input::Follower(rank, Err(_)) => return Err(EngineFailure::Link(rank)),
                other => self.deferred.push_back(other),
            }
        }
        Ok(())
    }

    fn prefixes(&mut self, seq: SeqId) -> Arc<[u64]> {
        let (Some(live), Some(tokens)) = (self.live.get_mut(&seq), self.sched.tokens(seq)) else {
            self.setup.journal.violation(format!("{}: a step has unknown sequence {seq}", self.setup.name));
            return Arc::default();
        };
        model::extend_prefixes(&mut live.prefixes, tokens);
        live.prefixes.clone().into()
    }

    /// A token of this engine: to the listener, and perhaps the end.
    fn emit(&mut self, seq: SeqId, token: TokenId) {
        let Some(live) = self.live.get_mut(&seq) else { return };
        let token = OutputToken { output_idx: live.output_len, token, logprobs: None };
        let finish = live.push(token.token, self.setup.max_seq_len);
        match live.work {
            Work::Decode => {
                live.send(Ok(EngineEvent::Token(token)));
                if let Some(reason) = finish {
                    self.finish(seq, EngineEvent::Finish(reason));
                }
            }
            Work::Prefill(_) => {
                let cached_len = live.cached_len;
                let event = EngineEvent::FirstToken(FirstToken { token: token.clone(), finish, cached_len });
                if finish.is_some() {
                    self.unused.extend(self.outbound.remove(&seq));
                    self.finish(seq, event);
                } else {
                    live.send(Ok(event));
                    let prompt_hash = live.prompt_hash;
                    if let Some(outbound) = self.outbound.get_mut(&seq) {
                        outbound.commit(prompt_hash, &token);
                    }
                }
            }
        }
    }

    fn finish(&mut self, seq: SeqId, last: EngineEvent) {
        if let Some(live) = self.live.remove(&seq) {
            live.send(Ok(last));
        }
        self.sched.finish(seq);
    }

    /// Ends a sequence wherever it is, on every rank.
    fn abort(&mut self, seq: SeqId, error: WorkerError) -> Result<(), EngineFailure> {
        if let Some(live) = self.live.remove(&seq) {
            live.send(Err(error));
        }
        self.outbound.remove(&seq);
        let handoff = self.inbound.iter().find(|(_, inbound)| inbound.seq == seq).map(|(&id, _)| id);
        if let Some(handoff) = handoff {
            self.inbound.remove(&handoff);
            self.rank.forget(handoff);
            self.broadcast(&LeaderMessage::Drop(handoff))?;
        }
        self.sched.abort(seq);
        Ok(())
    }

    fn handle_events(&mut self) -> Result<(), EngineFailure> {
        for event in self.sched.take_events() {
            match event {
                Event::Reserved { seq, cached_len, mode, blocks } => {
                    let here = self.live.get(&seq).is_some_and(|live| matches!(live.work, Work::Prefill(_)));
                    self.setup.journal.count(match (mode, here) {
                        (_, true) => "prompt at a prefill worker",
                        (Mode::Receive, false) => "hand-off reserved",
                        (Mode::Local | Mode::Pull, false) => "prompt computed by its decode group",
                    });
                    self.setup.journal.count_n("prompt tokens found in a cache", cached_len as u64);
                    self.reserved(seq, cached_len, mode, blocks)?;
                }
                Event::Ended { seq, end: End::OutOfBlocks } => {
                    self.setup.journal.violation(format!("{}: sequence {seq} had no room", self.setup.name));
                }
                Event::Preempted { .. } => self.setup.journal.count("sequence preempted"),
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
        let Some(live) = self.live.get_mut(&seq) else { return Ok(()) };
        live.cached_len = cached_len;
        if let Work::Prefill(reservation) = &live.work {
            let reservation = reservation.clone();
            return self.open_lanes(seq, cached_len, &reservation);
        }
        let reservation = Reservation {
            handoff: HandoffId((u128::from(self.setup.nonce) << 64) | u128::from(seq.0)),
            epoch: self.sched.epoch(),
            cached_len,
            prefilled_here: mode == Mode::Local,
            layout: self.setup.kv_layout.clone(),
            blocks,
            dcp_size: self.setup.dcp.dcp_size(),
            ranks: self.setup.targets.clone(),
        };
        if mode == Mode::Local {
            live.send(Ok(EngineEvent::Reserved(reservation)));
            return Ok(());
        }
        self.expect(seq, reservation)
    }

    pub(crate) fn broadcast(&self, message: &LeaderMessage) -> Result<(), EngineFailure> {
        for (idx, follower) in self.followers.iter().enumerate() {
            follower.try_send(message.clone()).map_err(|_| EngineFailure::Link(idx + 1))?;
        }
        Ok(())
    }

    fn audit(&self, now: bool) {
        if now && let Err(error) = self.sched.audit() {
            self.setup.journal.violation(format!("{}: {error}", self.setup.name));
        }
    }

    fn publish(&self) {
        self.rank_face.show(Some(self.sched.epoch()), self.rank.n_receiving());
        let n_handoffs = self.inbound.len() + self.outbound.len() + self.rank.n_receiving();
        let (config, stats) = (self.sched.config(), self.sched.stats());
        // Those that were preempted wait as well, beyond what may come in.
        if stats.n_waiting > config.max_waiting + config.max_seqs {
            self.setup.journal.violation(format!("{}: the queue has no bound: {stats:?}", self.setup.name));
        }
        self.handle.face.show(EngineInfo {
            epoch: self.sched.epoch(),
            stats,
            n_handoffs,
            n_live: self.live.len(),
        });
        if self.sched.is_idle() {
            self.audit(true);
        }
    }
}
