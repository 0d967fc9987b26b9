//! Planning: what the next step computes.
//!
//! Rows are given out in this order, within `max_batch_tokens`:
//! 1. one row to every sequence that decodes, so that no prefill makes a stream stall;
//! 2. chunks of prompts, in the order of service, at most `max_chunk_len` each, so that a short prompt shares
//!    the steps of a long one;
//! 3. proposed tokens, added to the decode rows they follow, from what is left.
//!
//! Sequences that decode get their blocks before anyone is admitted. One that needs a new block and finds none
//! takes it from the last in the order of service: lowest priority, latest arrival. That one loses *all* its
//! blocks and returns to the front of the queue; the first in the order is never the victim of another, so the
//! work done always grows. Receiving and sending sequences are no victims, for a transfer uses their blocks.

use longreach_types::{SeqId, SeqStep, StepPlan};

use crate::events::{End, Event};
use crate::scheduler::{InFlight, Scheduler};
use crate::seq::{Order, Phase, SeqKind};

impl Scheduler {
    /// Plans the next step, and admits what fits. `None` when there is nothing to compute, or while a step is in
    /// flight.
    pub fn next_plan(&mut self) -> Option<StepPlan> {
        if self.in_flight.is_some() {
            self.admit();
            return None;
        }
        let mut seqs = self.plan_decode();
        self.admit();
        // `max_batch_tokens` is at least `max_seqs`: there was a row for each.
        let mut n_left = self.config.max_batch_tokens.saturating_sub(seqs.len());
        self.plan_prefill(&mut n_left, &mut seqs);
        self.plan_drafts(&mut n_left, &mut seqs);
        if seqs.is_empty() {
            return None;
        }
        let step = self.next_step;
        self.next_step.0 += 1;
        self.totals.steps += 1;
        self.in_flight = Some(InFlight::of(step, &seqs));
        Some(StepPlan { step, epoch: self.epoch, seqs })
    }

    /// A row for each sequence that decodes, and a block where it needs one.
    fn plan_decode(&mut self) -> Vec<SeqStep> {
        let running = self.running.iter().copied();
        let decoding: Vec<Order> = running.filter(|order| self.pending_len(order.seq) == Some(1)).collect();
        let mut steps = Vec::with_capacity(decoding.len());
        for order in decoding {
            // It may have been preempted in favour of one before it.
            if self.pending_len(order.seq) == Some(1) && self.make_room(order) {
                steps.extend(self.plan_rows(order.seq, 1));
            }
        }
        steps
    }

    /// Chunks of prompts, as far as `n_left` rows go. Their blocks were taken at admission.
    fn plan_prefill(&mut self, n_left: &mut usize, steps: &mut Vec<SeqStep>) {
        let rest = self.running.iter().filter_map(|order| {
            let state = self.seqs.get(&order.seq).filter(|state| !state.in_step)?;
            Some((state.pending_len(), order.seq))
        });
        // Those that lack one row, admitted just now, decode from here on: they come first.
        let (decoding, prefilling): (Vec<_>, Vec<_>) = rest.partition(|(pending_len, _)| *pending_len == 1);
        for (pending_len, seq) in decoding.into_iter().chain(prefilling) {
            let n_rows = pending_len.min(self.config.max_chunk_len).min(*n_left);
            if n_rows == 0 {
                break;
            }
            *n_left -= n_rows;
            steps.extend(self.plan_rows(seq, n_rows));
        }
    }

    /// Adds proposed tokens to the sequences that decode, where rows and blocks are left.
    fn plan_drafts(&mut self, n_left: &mut usize, steps: &mut [SeqStep]) {
        for step in steps {
            let Some(state) = self.seqs.get_mut(&step.seq) else { continue };
            let mut drafts = std::mem::take(&mut state.drafts);
            // The token after the last draft is still within the length.
            let max_drafts = state.max_len.saturating_sub(state.chain.len() + 1);
            drafts.truncate(max_drafts.min(*n_left));
            if drafts.is_empty() || self.kv.grow(step.seq, step.seq_len() + drafts.len()).is_err() {
                continue;
            }
            *n_left -= drafts.len();
            step.n_logits += drafts.len();
            step.tokens.extend(drafts);
            step.tables = self.kv.tables(step.seq).unwrap_or_default().to_vec();
        }
    }

    /// The next `n_rows` known tokens of a running sequence, which is part of the step from now on.
    fn plan_rows(&mut self, seq: SeqId, n_rows: usize) -> Option<SeqStep> {
        let state = self.seqs.get_mut(&seq)?;
        state.in_step = true;
        let context_len = state.computed_len;
        let tokens = state.chain.tokens()[context_len..context_len + n_rows].to_vec();
        let n_logits = usize::from(n_rows == state.pending_len());
        let tables = self.kv.tables(seq)?.to_vec();
        Some(SeqStep { seq, context_len, tokens, n_logits, tables })
    }

    /// Tokens of a running sequence that are not computed; `None` if it does not run.
    fn pending_len(&self, seq: SeqId) -> Option<usize> {
        self.seqs.get(&seq).filter(|state| state.phase == Phase::Running).map(|state| state.pending_len())
    }

    /// A block for the next row of a sequence that decodes, taken from others if need be. `false` if it had to
    /// yield itself.
    fn make_room(&mut self, order: Order) -> bool {
        let len = self.seqs.get(&order.seq).map_or(0, |state| state.chain.len());
        while self.kv.grow(order.seq, len).is_err() {
            // Sequences are planned best first, so the victim comes after this one in the order, or is it.
            let victim = self.victim().unwrap_or(order);
            let alone = victim == order && self.kv.seqs().eq([order.seq]);
            if alone {
                self.end(order.seq, End::OutOfBlocks, false);
            } else {
                self.preempt(victim);
            }
            if victim == order {
                return false;
            }
        }
        true
    }

    /// The running sequence that is served last. A `Send` is left alone: what it has computed may be on its way.
    fn victim(&self) -> Option<Order> {
        let preemptible =
            |order: &&Order| self.seqs.get(&order.seq).is_some_and(|seq| seq.kind != SeqKind::Send);
        self.running.iter().rev().find(preemptible).copied()
    }

    /// Takes all blocks of a running sequence, which no step may be using, and puts it to the front of the queue.
    fn preempt(&mut self, order: Order) {
        let Some(state) = self.seqs.get_mut(&order.seq) else { return };
        state.phase = Phase::Waiting;
        state.computed_len = 0;
        state.drafts.clear();
        state.wait.preempted = true;
        self.running.remove(&order);
        self.waiting.insert(state.wait_order());
        self.waiting_tokens += state.chain.len();
        self.kv.free(order.seq);
        self.totals.preemptions += 1;
        self.events.push(Event::Preempted { seq: order.seq });
    }
}
