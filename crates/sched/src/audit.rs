//! The scheduler's self-check.

use std::collections::BTreeSet;

use longreach_kv::{AuditError, Reason};
use longreach_types::SeqId;

use crate::scheduler::Scheduler;
use crate::seq::{Order, Phase, Seq};

impl Scheduler {
    /// Checks every invariant, those of the KV blocks included. O(everything); for tests.
    pub fn audit(&self) -> Result<(), AuditError> {
        self.kv.audit()?;
        let by_phase = |phase| self.seqs.values().filter(move |seq| seq.phase == phase);
        let waiting: BTreeSet<Order> = by_phase(Phase::Waiting).map(Seq::wait_order).collect();
        let running: BTreeSet<Order> = by_phase(Phase::Running).map(|seq| seq.order).collect();
        AuditError::check(waiting == self.waiting, || "the waiting set is wrong".into())?;
        AuditError::check(running == self.running, || "the running set is wrong".into())?;
        let n_receiving = by_phase(Phase::Receiving).count();
        AuditError::check(n_receiving == self.n_receiving, || "the count of receiving ones is wrong".into())?;
        let n_pulling = by_phase(Phase::Pulling).count();
        AuditError::check(n_pulling == self.n_pulling, || "the count of pulling ones is wrong".into())?;
        let tokens: usize = by_phase(Phase::Waiting).map(|seq| seq.chain.len()).sum();
        AuditError::check(tokens == self.waiting_tokens, || "the count of waiting tokens is wrong".into())?;

        let holders = self.seqs.iter().filter(|(_, seq)| seq.phase != Phase::Waiting).map(|(seq, _)| *seq);
        let holders: BTreeSet<SeqId> = holders.chain(self.leftovers.keys().copied()).collect();
        AuditError::check(self.kv.seqs().eq(holders), || "blocks are held by others than should".into())?;
        self.seqs.iter().try_for_each(|(id, seq)| self.audit_seq(*id, seq))?;
        self.audit_step()
    }

    fn audit_seq(&self, id: SeqId, seq: &Seq) -> Result<(), AuditError> {
        let (computed_len, len) = (seq.computed_len, seq.chain.len());
        let computed = match seq.phase {
            Phase::Waiting => computed_len == 0,
            Phase::Receiving => computed_len < len,
            Phase::Pulling => computed_len < seq.remote_len,
            Phase::Running => computed_len < len && Some(computed_len) == self.kv.computed_len(id),
            Phase::Sending => computed_len == seq.prompt_len,
        };
        AuditError::check(computed, || format!("sequence {id}: {computed_len} of {len} in {:?}", seq.phase))?;
        let reason = match seq.phase {
            Phase::Waiting => None,
            Phase::Receiving | Phase::Pulling => Some(Reason::Reserved),
            Phase::Running => Some(Reason::Running),
            Phase::Sending => Some(Reason::Sending),
        };
        AuditError::check(self.kv.reason(id) == reason, || {
            format!("sequence {id} is {:?} with blocks for {:?}", seq.phase, self.kv.reason(id))
        })
    }

    fn audit_step(&self) -> Result<(), AuditError> {
        let planned = self.in_flight.iter().flat_map(|step| &step.seqs).map(|planned| planned.seq);
        let planned: BTreeSet<SeqId> = planned.collect();
        let live = self.seqs.iter().filter(|(_, seq)| seq.in_step).map(|(seq, _)| *seq);
        let over = self.leftovers.iter().filter(|(_, leftover)| leftover.in_step).map(|(seq, _)| *seq);
        let in_step: BTreeSet<SeqId> = live.chain(over).collect();
        AuditError::check(planned == in_step, || "the step in flight has lost a sequence".into())?;
        let stuck = self.leftovers.values().any(|leftover| !leftover.in_step && !leftover.held);
        AuditError::check(!stuck, || "blocks are held for nothing".into())
    }
}
