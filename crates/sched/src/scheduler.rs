//! The scheduler's state and the calls that change it; admission and planning are in modules of their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use longreach_kv::{KvManager, Reason};
use longreach_types::{BlockId, Epoch, SeqId, SeqStep, StepId, TokenId};

use crate::config::{ConfigError, SchedConfig};
use crate::events::{End, Event, NotReceiving, Refused, StepOutcome, WrongStep};
use crate::seq::{NewSeq, Order, Phase, Seq, SeqKind};
use crate::stats::{SchedStats, SchedTotals};

/// Decides which sequences hold KV blocks and what each step computes. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedConfig,
    pub(crate) kv: KvManager,
    pub(crate) epoch: Epoch,
    pub(crate) seqs: BTreeMap<SeqId, Seq>,
    pub(crate) waiting: BTreeSet<Order>,
    pub(crate) running: BTreeSet<Order>,
    pub(crate) n_receiving: usize,
    pub(crate) n_pulling: usize,
    pub(crate) waiting_tokens: usize,
    /// Ended sequences that still hold blocks.
    pub(crate) leftovers: BTreeMap<SeqId, Leftover>,
    pub(crate) in_flight: Option<InFlight>,
    pub(crate) next_step: StepId,
    pub(crate) events: Vec<Event>,
    pub(crate) totals: SchedTotals,
    next_arrival: u64,
}

/// Why an ended sequence still holds blocks; they go back when neither is true.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leftover {
    /// The step in flight writes to them.
    pub(crate) in_step: bool,
    /// The caller holds them, for a transfer that has not stopped.
    pub(crate) held: bool,
}

/// The step that was planned and not yet reported.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: StepId,
    pub(crate) seqs: Vec<Planned>,
}

/// What a step computes for one sequence.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) seq: SeqId,
    /// Positions computed after the step, if nothing but the first of its sampled tokens is taken.
    pub(crate) seq_len: usize,
    pub(crate) n_logits: usize,
    /// The rows that are only proposed: the last `n_logits − 1`.
    pub(crate) drafts: Vec<TokenId>,
}

impl Scheduler {
    /// A scheduler over empty pools. A new epoch of a group takes a new scheduler, since its KV is gone.
    pub fn new(config: SchedConfig, kv: KvManager, epoch: Epoch) -> Result<Self, ConfigError> {
        config.validate(&kv)?;
        Ok(Self {
            config,
            kv,
            epoch,
            seqs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            n_receiving: 0,
            n_pulling: 0,
            waiting_tokens: 0,
            leftovers: BTreeMap::new(),
            in_flight: None,
            next_step: StepId(0),
            events: Vec::new(),
            totals: SchedTotals::default(),
            next_arrival: 0,
        })
    }

    /// Accepts a sequence into the queue, or refuses it at once.
    pub fn submit(&mut self, new: NewSeq) -> Result<(), Refused> {
        if let Err(refused) = self.check_new(&new) {
            self.totals.refused += 1;
            return Err(refused);
        }
        let seq = Seq::new(new, self.next_arrival, self.kv.layout().block_size());
        self.next_arrival += 1;
        self.totals.accepted += 1;
        self.waiting_tokens += seq.chain.len();
        self.waiting.insert(seq.wait_order());
        self.seqs.insert(seq.order.seq, seq);
        Ok(())
    }

    /// The KV of the whole prompt has come and was verified on every rank; `first_token` came with it.
    pub fn received(&mut self, seq: SeqId, first_token: TokenId) -> Result<(), NotReceiving> {
        let state = self.seqs.get_mut(&seq).filter(|state| state.phase == Phase::Receiving);
        let state = state.ok_or(NotReceiving(seq))?;
        state.phase = Phase::Running;
        state.computed_len = state.chain.len();
        self.n_receiving -= 1;
        self.running.insert(state.order);
        self.kv.set_reason(seq, Reason::Running).expect("a receiving sequence holds blocks");
        self.register(seq);
        self.append(seq, &[first_token]);
        Ok(())
    }

    /// The prefix of a pulling sequence, see [`NewSeq::remote_len`], is in its blocks and was verified.
    pub fn pulled(&mut self, seq: SeqId) -> Result<(), NotReceiving> {
        let state = self.end_pull(seq)?;
        let cached_len = std::mem::replace(&mut state.computed_len, state.remote_len);
        let n_pulled = state.remote_len - cached_len;
        self.totals.pulls += 1;
        self.totals.pulled_tokens += n_pulled as u64;
        self.register(seq);
        Ok(())
    }

    /// The prefix of a pulling sequence did not come, or not all of it: it is computed here, from the end of what was
    /// cached. Whatever the pull wrote into the blocks is written over before it is read; nothing may be written for
    /// the pull from now on.
    pub fn pull_failed(&mut self, seq: SeqId) -> Result<(), NotReceiving> {
        self.end_pull(seq)?;
        self.totals.pull_fallbacks += 1;
        Ok(())
    }

    /// Lets a pulling sequence compute.
    fn end_pull(&mut self, seq: SeqId) -> Result<&mut Seq, NotReceiving> {
        let state = self.seqs.get_mut(&seq).filter(|state| state.phase == Phase::Pulling);
        let state = state.ok_or(NotReceiving(seq))?;
        state.phase = Phase::Running;
        self.n_pulling -= 1;
        self.running.insert(state.order);
        self.kv.set_reason(seq, Reason::Running).expect("a pulling sequence holds blocks");
        Ok(state)
    }

    /// Proposes the next tokens of a sequence that decodes. The next step verifies as many as fit the budget,
    /// as further rows with logits; the proposal is used once. Returns whether it was taken.
    pub fn set_drafts(&mut self, seq: SeqId, drafts: Vec<TokenId>) -> bool {
        match self.seqs.get_mut(&seq) {
            Some(state) if state.takes_drafts() => {
                state.drafts = drafts;
                true
            }
            _ => false,
        }
    }

    /// Reports the step in flight. Sequences that ended while it ran are skipped and counted.
    pub fn complete(&mut self, outcome: &StepOutcome) -> Result<(), WrongStep> {
        let in_flight = self.in_flight.as_ref().map(|step| step.step);
        let step = self.in_flight.take_if(|step| step.step == outcome.step);
        let planned = step.ok_or(WrongStep { in_flight, got: outcome.step })?.seqs;

        let mut sampled: BTreeMap<SeqId, &[TokenId]> = BTreeMap::new();
        for entry in &outcome.sampled {
            let repeated = sampled.insert(entry.seq, &entry.tokens).is_some();
            self.totals.ignored_outcomes += u64::from(repeated);
        }
        for planned in planned {
            let tokens = sampled.remove(&planned.seq).unwrap_or_default();
            self.leave_step(planned.seq);
            self.advance(&planned, tokens);
        }
        self.totals.ignored_outcomes += sampled.len() as u64;
        Ok(())
    }

    /// The step in flight failed: nothing of it counts, and its sequences are planned again unless the caller
    /// ends them. Does nothing when no step is in flight.
    pub fn abandon_step(&mut self) {
        for planned in self.in_flight.take().map(|step| step.seqs).unwrap_or_default() {
            self.leave_step(planned.seq);
        }
    }

    /// Ends a sequence that has all its tokens. Its full computed blocks become cached. Returns whether it was
    /// there; like all four ways to end one, it may be called at any moment and any number of times.
    pub fn finish(&mut self, seq: SeqId) -> bool {
        self.end(seq, End::Finished, false)
    }

    /// Ends a sequence wherever it is, and any hold on its blocks.
    pub fn abort(&mut self, seq: SeqId) -> bool {
        self.end(seq, End::Aborted, false)
    }

    /// Ends a sequence, but keeps its blocks until [`Scheduler::release`]: for a hand-off whose transfer still
    /// reads or writes them.
    pub fn abort_held(&mut self, seq: SeqId) -> bool {
        self.end(seq, End::Aborted, true)
    }

    /// The transfer of a hand-off is over: ends a sequence of kind `Send`, or gives back the blocks that
    /// [`Scheduler::abort_held`] kept.
    pub fn release(&mut self, seq: SeqId) -> bool {
        self.end(seq, End::Released, false)
    }

    /// What happened since the last call, in order.
    #[must_use = "events are told once"]
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Where a sequence is; `None` once it has ended.
    pub fn phase(&self, seq: SeqId) -> Option<Phase> {
        self.seqs.get(&seq).map(|state| state.phase)
    }

    /// Positions of a sequence whose KV is computed and final, cached ones included: what may be sent. `None`
    /// once it has ended; 0 while it waits.
    pub fn computed_len(&self, seq: SeqId) -> Option<usize> {
        self.seqs.get(&seq).map(|state| state.computed_len)
    }

    /// The positions that are to be pulled for a sequence, whole blocks; `None` unless it waits for them.
    pub fn pull_range(&self, seq: SeqId) -> Option<Range<usize>> {
        let state = self.seqs.get(&seq).filter(|state| state.phase == Phase::Pulling)?;
        Some(state.computed_len..state.remote_len)
    }

    /// Tokens of a sequence, prompt and output; `None` once it has ended.
    pub fn tokens(&self, seq: SeqId) -> Option<&[TokenId]> {
        self.seqs.get(&seq).map(|state| state.chain.tokens())
    }

    /// Block tables of a sequence by DCP rank, while it holds blocks, even after its end.
    pub fn tables(&self, seq: SeqId) -> Option<&[Vec<BlockId>]> {
        self.kv.tables(seq)
    }

    /// The step in flight.
    pub fn in_flight(&self) -> Option<StepId> {
        self.in_flight.as_ref().map(|step| step.step)
    }

    /// Whether there is neither a sequence, nor a block held, nor a step in flight.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty() && self.leftovers.is_empty() && self.in_flight.is_none()
    }

    /// The KV blocks, to look at.
    pub const fn kv(&self) -> &KvManager {
        &self.kv
    }

    /// The configuration.
    pub const fn config(&self) -> &SchedConfig {
        &self.config
    }

    /// The epoch its plans carry.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Forgets all cached prefixes.
    pub fn flush_cache(&mut self) {
        self.kv.flush_cache();
    }

    /// Figures for metrics. O(sequences).
    pub fn stats(&self) -> SchedStats {
        let is_pending = |phase| matches!(phase, Phase::Waiting | Phase::Pulling | Phase::Running);
        let pending = self.seqs.values().filter(|seq| is_pending(seq.phase));
        SchedStats {
            n_waiting: self.waiting.len(),
            n_receiving: self.n_receiving,
            n_pulling: self.n_pulling,
            n_running: self.running.len(),
            n_sending: self.seqs.values().filter(|seq| seq.phase == Phase::Sending).count(),
            n_held: self.leftovers.len(),
            waiting_tokens: self.waiting_tokens,
            pending_tokens: pending.map(Seq::pending_len).sum(),
            blocks: self.kv.counts(),
            totals: self.totals,
        }
    }

    fn check_new(&self, new: &NewSeq) -> Result<(), Refused> {
        let (prompt_len, max_len) = (new.tokens.len(), new.max_len);
        let (need, have) = (new.need_len(), self.config.max_seq_len);
        let (n_waiting, max_waiting) = (self.waiting.len(), self.config.max_waiting);
        let (waiting_tokens, max_waiting_tokens) = (self.waiting_tokens, self.config.max_waiting_tokens);
        if self.seqs.contains_key(&new.seq) || self.leftovers.contains_key(&new.seq) {
            return Err(Refused::Duplicate(new.seq));
        }
        if prompt_len == 0 {
            return Err(Refused::EmptyPrompt);
        }
        if prompt_len >= max_len {
            return Err(Refused::NoOutput { prompt_len, max_len });
        }
        if need > have {
            return Err(Refused::TooLarge { need, have });
        }
        let too_many_tokens = n_waiting > 0 && waiting_tokens + prompt_len > max_waiting_tokens;
        if n_waiting >= max_waiting || too_many_tokens {
            return Err(Refused::QueueFull { n_waiting, max_waiting, waiting_tokens, max_waiting_tokens });
        }
        Ok(())
    }

    /// The one place where sequences end. A second call for the same one can only lift a hold.
    pub(crate) fn end(&mut self, seq: SeqId, end: End, hold: bool) -> bool {
        let Some(state) = self.seqs.remove(&seq) else { return !hold && self.unhold(seq) };
        match state.phase {
            Phase::Waiting => {
                self.waiting.remove(&state.wait_order());
                self.waiting_tokens -= state.chain.len();
            }
            Phase::Receiving => self.n_receiving -= 1,
            Phase::Pulling => self.n_pulling -= 1,
            Phase::Running => {
                self.running.remove(&state.order);
            }
            Phase::Sending => {}
        }
        if state.phase != Phase::Waiting {
            if hold && state.kind == SeqKind::Send {
                // What keeps them from now on is the transfer.
                self.kv.set_reason(seq, Reason::Sending).expect("a sequence past admission holds blocks");
            }
            self.leftovers.insert(seq, Leftover { in_step: state.in_step, held: hold });
            self.free_if_over(seq);
        }
        self.totals.ended += 1;
        self.events.push(Event::Ended { seq, end });
        true
    }

    /// Ends the caller's hold on an ended sequence's blocks; whether there was one.
    fn unhold(&mut self, seq: SeqId) -> bool {
        let Some(leftover) = self.leftovers.get_mut(&seq) else { return false };
        let held = std::mem::replace(&mut leftover.held, false);
        self.free_if_over(seq);
        held
    }

    /// The step that wrote to the sequence's blocks is over.
    fn leave_step(&mut self, seq: SeqId) {
        if let Some(state) = self.seqs.get_mut(&seq) {
            state.in_step = false;
        } else if let Some(leftover) = self.leftovers.get_mut(&seq) {
            leftover.in_step = false;
            self.free_if_over(seq);
        }
    }

    fn free_if_over(&mut self, seq: SeqId) {
        if self.leftovers.get(&seq).is_some_and(|leftover| !leftover.in_step && !leftover.held) {
            self.leftovers.remove(&seq);
            self.kv.free(seq);
        }
    }

    /// Takes over what a step computed and sampled for one sequence.
    fn advance(&mut self, planned: &Planned, tokens: &[TokenId]) {
        let Some(state) = self.seqs.get_mut(&planned.seq) else {
            self.totals.ignored_outcomes += u64::from(!tokens.is_empty());
            return;
        };
        let fits = if planned.n_logits == 0 { 0..=0 } else { 1..=planned.n_logits };
        if !fits.contains(&tokens.len()) {
            self.totals.ignored_outcomes += 1;
            return;
        }
        // A draft's row counts if the token that was taken in its place is the same.
        let taken = tokens.iter().take(tokens.len().saturating_sub(1));
        let n_accepted = taken.zip(&planned.drafts).take_while(|(token, draft)| token == draft).count();
        state.computed_len = planned.seq_len - planned.drafts.len() + n_accepted;
        let (kind, order) = (state.kind, state.order);
        // Output tokens first: the blocks they complete can be registered only with them.
        state.chain.extend(tokens);
        self.register(planned.seq);
        if tokens.is_empty() {
            return;
        }
        self.tell_sampled(planned.seq, tokens.len());
        if kind == SeqKind::Send {
            self.running.remove(&order);
            self.start_sending(planned.seq);
        } else {
            self.end_if_full(planned.seq);
        }
    }

    fn append(&mut self, seq: SeqId, tokens: &[TokenId]) {
        if let Some(state) = self.seqs.get_mut(&seq) {
            state.chain.extend(tokens);
            self.end_if_full(seq);
        }
    }

    fn tell_sampled(&mut self, seq: SeqId, n_new: usize) {
        if let Some(state) = self.seqs.get(&seq) {
            self.events.push(Event::Sampled { seq, n_new, output_len: state.output_len() });
        }
    }

    fn end_if_full(&mut self, seq: SeqId) {
        if self.seqs.get(&seq).is_some_and(|state| state.chain.len() >= state.max_len) {
            self.end(seq, End::Length, false);
        }
    }

    fn start_sending(&mut self, seq: SeqId) {
        if let Some(state) = self.seqs.get_mut(&seq) {
            state.phase = Phase::Sending;
            self.kv.set_reason(seq, Reason::Sending).expect("a computed sequence holds blocks");
            self.events.push(Event::Sending { seq });
        }
    }

    /// Offers the computed blocks of a sequence to later ones.
    fn register(&mut self, seq: SeqId) {
        if let Some(state) = self.seqs.get(&seq) {
            let registered = self.kv.commit(seq, &state.chain, state.computed_len);
            debug_assert_eq!(registered, Ok(()), "a sequence computes only what it has blocks for");
        }
    }
}

impl InFlight {
    pub(crate) fn of(step: StepId, seqs: &[SeqStep]) -> Self {
        let planned = seqs.iter().map(|seq| Planned {
            seq: seq.seq,
            seq_len: seq.seq_len(),
            n_logits: seq.n_logits,
            drafts: seq.tokens[seq.tokens.len() - seq.n_logits.saturating_sub(1)..].to_vec(),
        });
        Self { step, seqs: planned.collect() }
    }
}
