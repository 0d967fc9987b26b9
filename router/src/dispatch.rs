//! The life of one output: from a checked request to its last token, whatever dies on the way.
//!
//! [`Choice`] is pulled: it has no task and no queue of its own. Dropping it drops the worker streams, which cancels
//! the work behind them at once; a client that reads slowly slows the workers through HTTP/2's flow control.
//!
//! One attempt is a [`Leg`](leg::Leg). When it fails for a reason that another may not have, the output is taken up
//! again from the tokens that the client already has; noise and penalties count from the true start of the output, so
//! it goes on as if nothing had happened.

mod fault;
mod leg;

use std::{sync::Arc, time::Duration};

use longreach_proto::worker::{KvLayout, OutputToken};
use longreach_types::{FinishReason, Prompt, SamplingParams, TokenId, WorkerId};
use tokio::time::Instant;

use self::{
    fault::Fault,
    leg::{Leg, LegEvent, Work},
};
use crate::{
    call::CallContext,
    error::{ServiceError, Stage},
    metrics::Metrics,
    random::Random,
    workers::{Decode, Pool, Prefill},
};

/// The first pause before the same workers are tried again.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest such pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Tokens in a row after which earlier failures count no more: the workers are well, and the request is no poison. More
/// than the one that a prefill worker gives before a decode group is tried.
const WELL: u32 = 16;

/// How hard an output is fought for.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryConfig {
    /// Attempts at one output that may fail, one after the other, before it is given up. More survive worse days; fewer
    /// spare workers that a poisonous request kills.
    pub max_attempts: u32,
    /// How long an interrupted output waits for a worker that can take it up. Longer outlasts the restart of a decode
    /// group; shorter tells the client sooner.
    pub recovery_window: Duration,
    /// The hint given to a client that is turned away.
    pub retry_after: Duration,
}

impl Default for RecoveryConfig {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            recovery_window: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
        }
    }
}

/// The workers, and how they are used.
pub(crate) struct Dispatcher {
    pub(crate) decodes: Arc<Pool<Decode>>,
    pub(crate) prefills: Arc<Pool<Prefill>>,
    pub(crate) recovery: RecoveryConfig,
    pub(crate) metrics: Metrics,
    pub(crate) random: Random,
}

impl Dispatcher {
    /// Whether somebody else than `worker` could do its part who has not `failed`.
    fn has_alternative(&self, worker: &WorkerId, failed: &[WorkerId]) -> bool {
        let decode = self.decodes.has_alternative(worker, failed);
        decode.or_else(|| self.prefills.has_alternative(worker, failed)).unwrap_or(false)
    }
}

/// What one output is made from.
#[derive(Clone, Debug)]
pub(crate) struct ChoiceSpec {
    pub(crate) prompt: Arc<[TokenId]>,
    pub(crate) cache_salt: Vec<u8>,
    pub(crate) sampling: SamplingParams,
    pub(crate) priority: i32,
    pub(crate) session: Option<String>,
    /// The model's end-of-sequence tokens.
    pub(crate) eos: Arc<[TokenId]>,
}

/// One output in the making.
pub(crate) struct Choice {
    dispatcher: Arc<Dispatcher>,
    call: Arc<CallContext>,
    spec: ChoiceSpec,
    emitted: Vec<TokenId>,
    leg: Option<Leg>,
    /// How the tokens that are out were computed.
    layout: Option<KvLayout>,
    stage: Stage,
    failures: Failures,
    done: bool,
}

/// What happens to an output.
#[derive(Clone, Debug)]
pub(crate) enum ChoiceEvent {
    /// A decode group has reserved blocks. Comes again when the output is taken up elsewhere.
    Accepted {
        /// Prompt tokens found in the group's prefix cache.
        cached_len: usize,
    },
    /// A token.
    Token {
        token: OutputToken,
        /// Prompt tokens found in the prefill worker's prefix cache, with the token it sampled.
        cached_len: usize,
    },
    /// The output is complete; comes last, once.
    Finish(FinishReason),
}

/// What went wrong so far.
#[derive(Default)]
struct Failures {
    /// Attempts that failed with workers at work on them.
    n_attempts: u32,
    /// Attempts in a row that some worker did not take up.
    n_starts: u32,
    /// Tokens since the last failure.
    n_tokens: u32,
    /// Whether the output is interrupted.
    is_interrupted: bool,
    /// Since when nobody has been at work on it: the last time that workers were.
    idle_since: Option<Instant>,
    workers: Vec<WorkerId>,
}

impl Failures {
    /// Takes note of workers that are better avoided.
    fn blame(&mut self, workers: impl Iterator<Item = WorkerId>) {
        for worker in workers {
            if !self.workers.contains(&worker) {
                self.workers.push(worker);
            }
        }
    }
}

impl Choice {
    /// An output of `spec`, not begun.
    pub(crate) fn new(dispatcher: Arc<Dispatcher>, call: Arc<CallContext>, spec: ChoiceSpec) -> Self {
        Self {
            dispatcher,
            call,
            spec,
            emitted: Vec::new(),
            leg: None,
            layout: None,
            stage: Stage::Queue,
            failures: Failures::default(),
            done: false,
        }
    }

    /// The next event, or `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<ChoiceEvent>, ServiceError> {
        while !self.done {
            let event = match &mut self.leg {
                Some(leg) => leg.next().await,
                None => self.open().await,
            };
            match event {
                Ok(event) => return Ok(Some(self.note(event))),
                Err(fault) => {
                    if let Some(event) = self.recover(fault).await? {
                        return Ok(Some(event));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Starts a leg from the tokens that are there.
    async fn open(&mut self) -> Result<LegEvent, Fault> {
        let tokens = self.spec.prompt.iter().chain(&self.emitted).copied().collect();
        let prompt =
            Prompt { tokens, n_resumed: self.emitted.len(), cache_salt: self.spec.cache_salt.clone() };
        let work = Work {
            prompt,
            sampling: &self.spec.sampling,
            priority: self.spec.priority,
            session: self.spec.session.as_deref(),
            failed: &self.failures.workers,
            layout: self.layout.as_ref().filter(|_| !self.emitted.is_empty()),
        };
        let (leg, cached_len) = Leg::open(&self.dispatcher, &self.call, work).await?;
        self.layout = Some(leg.layout().clone());
        self.leg = Some(leg);
        Ok(LegEvent::Accepted { cached_len })
    }

    fn note(&mut self, event: LegEvent) -> ChoiceEvent {
        match event {
            LegEvent::Accepted { cached_len } => {
                self.stage = Stage::Prefill;
                ChoiceEvent::Accepted { cached_len }
            }
            LegEvent::Token { token, cached_len } => {
                if std::mem::take(&mut self.failures.is_interrupted) {
                    self.dispatcher.metrics.resumed();
                }
                self.failures.idle_since = None;
                self.stage = Stage::Decode;
                self.failures.n_tokens += 1;
                if self.failures.n_tokens == WELL {
                    self.failures = Failures { n_tokens: WELL, ..Failures::default() };
                }
                self.emitted.push(token.token);
                ChoiceEvent::Token { token, cached_len }
            }
            // A worker does not know all tokens that end an output as such.
            LegEvent::Finish(FinishReason::StopToken(token)) if self.is_eos(token) => {
                self.finish(FinishReason::Eos(token))
            }
            LegEvent::Finish(reason) => self.finish(reason),
        }
    }

    fn finish(&mut self, reason: FinishReason) -> ChoiceEvent {
        self.done = true;
        self.leg = None;
        ChoiceEvent::Finish(reason)
    }

    /// Prepares another attempt after `fault`, or says why there is none. An output that lost its workers after its
    /// last token is complete all the same.
    async fn recover(&mut self, fault: Fault) -> Result<Option<ChoiceEvent>, ServiceError> {
        let leg = self.leg.take();
        if !fault.is_retryable() {
            return Err(fault.into_error(self.dispatcher.recovery.retry_after, self.stage));
        }
        if let Some(reason) = self.reason_to_end() {
            return Ok(Some(self.finish(reason)));
        }
        self.log(&fault);
        self.failures.n_tokens = 0;
        if !std::mem::replace(&mut self.failures.is_interrupted, true) {
            self.dispatcher.metrics.interrupted();
        }
        let is_elsewhere = self.exclude(&fault, leg.as_ref());
        let was_at_work = leg.is_some_and(|leg| leg.was_at_work());
        if was_at_work && !fault.is_refusal() {
            self.failures.n_attempts += 1;
            self.failures.n_starts = 0;
        } else {
            self.failures.n_starts += 1;
        }
        let now = Instant::now();
        let idle_since = self.failures.idle_since.get_or_insert(now);
        if was_at_work {
            *idle_since = now;
        }
        if self.is_hopeless(&fault, is_elsewhere) {
            return Err(self.give_up(fault));
        }
        if !is_elsewhere {
            tokio::time::sleep(self.pause()).await;
        }
        Ok(None)
    }

    /// Excludes the workers that failed. Says whether the next attempt may be made at once: somebody else is there who
    /// has not failed yet, or one that was only lost gets another try. After a worker's second failure never: whoever
    /// else is there was not chosen, so the next attempt may well meet the same worker again.
    fn exclude(&mut self, fault: &Fault, leg: Option<&Leg>) -> bool {
        // An output that the client has tokens of waits for room, wherever it comes first.
        if fault.is_busy() && !self.emitted.is_empty() {
            return false;
        }
        let failures = &mut self.failures;
        let has_alternative = |worker| self.dispatcher.has_alternative(worker, &failures.workers);
        let has_alternative = fault.worker.as_ref().is_some_and(has_alternative);
        let n_failed = failures.workers.len();
        // Who declines says so for itself.
        let suspects = leg.filter(|_| !fault.is_refusal()).map_or_else(Vec::new, Leg::suspects);
        failures.blame(suspects.into_iter().chain(fault.worker.clone()));
        failures.workers.len() > n_failed && (has_alternative || !fault.needs_another())
    }

    /// The first failure in a row is news; that the search goes on is not.
    fn log(&self, fault: &Fault) {
        let Fault { worker, cause } = fault;
        let worker = worker.as_ref().map(tracing::field::display);
        let (request, n_emitted) = (&self.call.request_id, self.emitted.len());
        if !self.failures.is_interrupted {
            tracing::warn!(%request, worker, %cause, n_emitted, "output interrupted, looking for another worker");
        } else {
            tracing::debug!(%request, worker, %cause, n_emitted, "output still interrupted");
        }
    }

    /// Whether no further attempt is made.
    fn is_hopeless(&self, fault: &Fault, is_elsewhere: bool) -> bool {
        let (failures, recovery) = (&self.failures, &self.dispatcher.recovery);
        if failures.n_attempts >= recovery.max_attempts {
            return true;
        }
        // A full queue is an answer, not a wait, while nothing is out; an output that has begun is worth a wait.
        if fault.needs_another() && !is_elsewhere && self.emitted.is_empty() {
            return true;
        }
        match self.stage {
            // Nothing was promised yet, so the client may choose where to try again.
            Stage::Text | Stage::Queue => {
                fault.worker.is_none() || failures.n_starts >= recovery.max_attempts
            }
            Stage::Prefill | Stage::Decode => {
                failures.idle_since.is_some_and(|since| since.elapsed() >= recovery.recovery_window)
            }
        }
    }

    /// Longer after every failure, and of random length: the outputs of a worker that died all come here at once.
    fn pause(&self) -> Duration {
        let n_failures = self.failures.n_starts + self.failures.n_attempts;
        let most = FIRST_PAUSE.saturating_mul(1 << n_failures.saturating_sub(1).min(10)).min(MAX_PAUSE);
        let share = (self.dispatcher.random.next_u64() >> 32) as u32;
        most / 2 + (most / 2).mul_f64(f64::from(share) / f64::from(u32::MAX))
    }

    fn give_up(&mut self, fault: Fault) -> ServiceError {
        self.done = true;
        if self.emitted.is_empty() {
            return fault.into_error(self.dispatcher.recovery.retry_after, self.stage);
        }
        ServiceError::Lost { n_emitted: self.emitted.len(), cause: fault.cause.to_string() }
    }

    fn is_eos(&self, token: TokenId) -> bool {
        !self.spec.sampling.ignore_eos && self.spec.eos.contains(&token)
    }

    /// Why the output is complete with the tokens it has, if it is.
    fn reason_to_end(&self) -> Option<FinishReason> {
        let last = *self.emitted.last()?;
        let sampling = &self.spec.sampling;
        if self.is_eos(last) {
            Some(FinishReason::Eos(last))
        } else if sampling.stop_token_ids.contains(&last) {
            Some(FinishReason::StopToken(last))
        } else if self.emitted.len() >= sampling.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}
