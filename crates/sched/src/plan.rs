//! Planning: what the next step computes.
//!
//! Rows are given out in this order, within `max_batch_tokens`:
//! 1. one row to every sequence that decodes, so that no prefill makes a stream stall;
//! 2. chunks of prompts, in the order of service, at most `max_chunk_len` each, so that a short prompt shares
//!    the steps of a long one;
//! 3. proposed tokens, with the decode rows they follow; while prompts are there they take at most half of what
//!    1 left.
//!
//! A sequence that decodes into a new block and finds none takes it from the last in the order of service:
//! lowest priority, latest arrival. That one loses *all* its blocks and returns to the front of the queue: the
//! first in the order is never the victim of another, so every step moves at least one sequence on. Receiving and
//! sending sequences are no victims, for a transfer uses their blocks.

use longreach_types::{SeqId, SeqStep, StepPlan};

use crate::events::{End, Event};
use crate::scheduler::{InFlight, Scheduler};
use crate::seq::{Order, Phase, SeqKind};

impl Scheduler {
    /// Admits what fits, and plans the next step. `None` when there is nothing to compute, or while a step is in
    /// flight.
    pub fn next_plan(&mut self) -> Option<StepPlan> {
        self.admit();
        if self.in_flight.is_some() {
            return None;
        }
        let mut n_left = self.config.max_batch_tokens;
        let mut seqs = self.plan_decode(&mut n_left);
        self.plan_prefill(&mut n_left, &mut seqs);
        if seqs.is_empty() {
            return None;
        }
        let step = self.next_step;
        self.next_step.0 += 1;
        self.totals.steps += 1;
        for planned in &seqs {
            if let Some(seq) = self.seqs.get_mut(&planned.seq) {
                seq.in_step = true;
                seq.drafts.clear();
            }
        }
        self.in_flight = Some(InFlight::of(step, &seqs));
        Some(StepPlan { step, epoch: self.epoch, seqs })
    }

    /// Rows of the sequences that decode, drafts included; takes them off `n_left`.
    fn plan_decode(&mut self, n_left: &mut usize) -> Vec<SeqStep> {
        let (decoding, prefilling): (Vec<Order>, Vec<Order>) =
            self.running.iter().copied().partition(|order| self.pending_len(order.seq) == 1);
        // `max_batch_tokens` is at least `max_seqs`, so there is a row for each.
        let n_spare = n_left.saturating_sub(decoding.len());
        let mut n_drafts_left = if prefilling.is_empty() { n_spare } else { n_spare / 2 };
        let mut steps = Vec::with_capacity(decoding.len());
        for order in decoding {
            // It may have been preempted in favour of one before it.
            let Some(n_drafts) = self.n_drafts(order.seq, n_drafts_left) else { continue };
            let Some(n_drafts) = self.make_room(order, n_drafts) else { continue };
            let Some(step) = self.seq_step(order.seq, 1 + n_drafts, 1 + n_drafts) else { continue };
            n_drafts_left -= n_drafts;
            *n_left -= step.query_len();
            steps.push(step);
        }
        steps
    }

    /// Chunks of prompts, as far as `n_left` rows go. Their blocks were taken at admission.
    fn plan_prefill(&self, n_left: &mut usize, steps: &mut Vec<SeqStep>) {
        for order in &self.running {
            let pending_len = self.pending_len(order.seq);
            if pending_len == 1 {
                continue;
            }
            let n_rows = pending_len.min(self.config.max_chunk_len).min(*n_left);
            if n_rows == 0 {
                break;
            }
            let n_logits = usize::from(n_rows == pending_len);
            if let Some(step) = self.seq_step(order.seq, n_rows, n_logits) {
                *n_left -= n_rows;
                steps.push(step);
            }
        }
    }

    fn pending_len(&self, seq: SeqId) -> usize {
        self.seqs.get(&seq).map_or(0, |seq| seq.pending_len())
    }

    /// Drafts of a running sequence that may be verified; none beyond its length. `None` if it does not run.
    fn n_drafts(&self, seq: SeqId, max_drafts: usize) -> Option<usize> {
        let state = self.seqs.get(&seq).filter(|state| state.phase == Phase::Running)?;
        let max_new = state.max_len.saturating_sub(state.chain.len() + 1);
        Some(state.drafts.len().min(max_drafts).min(max_new))
    }

    /// Blocks for the next row of a sequence and for `n_drafts` more, preempting others if need be, but not for
    /// drafts. Returns the drafts there is room for; `None` if the sequence had to yield itself.
    fn make_room(&mut self, order: Order, n_drafts: usize) -> Option<usize> {
        let len = self.seqs.get(&order.seq)?.chain.len();
        if n_drafts > 0 && self.kv.grow(order.seq, len + n_drafts).is_ok() {
            return Some(n_drafts);
        }
        while self.kv.grow(order.seq, len).is_err() {
            // Sequences are planned best first, so the victim comes after this one in the order, or is it.
            let victim = self.victim().unwrap_or(order);
            if victim != order {
                self.preempt(victim);
                continue;
            }
            let alone = self.kv.seqs().eq([order.seq]);
            if alone {
                self.end(order.seq, End::OutOfBlocks, false);
            } else {
                self.preempt(order);
            }
            return None;
        }
        Some(0)
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

    fn seq_step(&self, seq: SeqId, n_rows: usize, n_logits: usize) -> Option<SeqStep> {
        let state = self.seqs.get(&seq)?;
        let context_len = state.computed_len;
        let drafts = state.drafts.iter();
        let rows = state.chain.tokens()[context_len..].iter().chain(drafts).copied().take(n_rows);
        let tables = self.kv.tables(seq)?.to_vec();
        Some(SeqStep { seq, context_len, tokens: rows.collect(), n_logits, tables })
    }
}
