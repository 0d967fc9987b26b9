//! The hand-offs a prefill engine is sending, by sequence.

use std::collections::BTreeMap;

use longreach_proto::WorkerError;
use longreach_types::{BlockId, SeqId, StepPlan};
use tokio::time::Instant;

use crate::{
    cells::CellSource,
    send::{LaneReport, Outbound, SeqCells},
};

/// All hand-offs on their way out.
#[derive(Default)]
pub(crate) struct OutboundSet {
    by_seq: BTreeMap<SeqId, Outbound>,
    /// Hand-offs that will not be used, since the first token ended the output. Their streams stay open until the
    /// group, told by the router, closes them: an early end would look like a failure there.
    unused: Vec<Outbound>,
}

impl OutboundSet {
    pub(crate) fn len(&self) -> usize {
        self.by_seq.len() + self.unused.len()
    }

    pub(crate) fn insert(&mut self, seq: SeqId, outbound: Outbound) {
        self.by_seq.insert(seq, outbound);
    }

    pub(crate) fn get_mut(&mut self, seq: SeqId) -> Option<&mut Outbound> {
        self.by_seq.get_mut(&seq)
    }

    /// Ends the hand-off of a sequence; its streams end without a commit.
    pub(crate) fn remove(&mut self, seq: SeqId) -> Option<Outbound> {
        self.by_seq.remove(&seq)
    }

    /// Stops sending without ending the streams.
    pub(crate) fn set_unused(&mut self, seq: SeqId) {
        self.unused.extend(self.by_seq.remove(&seq));
    }

    /// Forgets unused hand-offs whose streams have ended, or should have.
    pub(crate) fn sweep(&mut self, now: Instant) {
        self.unused.retain(|outbound| !outbound.is_closed() && outbound.deadline > now);
    }

    /// `layer` is final for the rows of `plan`: sends what that completes.
    pub(crate) fn on_layer(&mut self, plan: &StepPlan, layer: usize, source: &impl CellSource) {
        for step in &plan.seqs {
            let Some(outbound) = self.by_seq.get_mut(&step.seq) else { continue };
            outbound.advance(layer, step.seq_len());
            let blocks = step.tables.first().map_or(&[][..], Vec::as_slice);
            outbound.pump(&SeqCells { source, blocks });
        }
    }

    /// Sends what lanes have room for again. `blocks` finds a sequence's block table.
    pub(crate) fn pump<'a>(
        &mut self,
        source: &impl CellSource,
        blocks: impl Fn(SeqId) -> Option<&'a [BlockId]>,
    ) {
        for (&seq, outbound) in &mut self.by_seq {
            if let Some(blocks) = blocks(seq) {
                outbound.pump(&SeqCells { source, blocks });
            }
        }
    }

    /// Takes a lane's report: the sequence it belongs to, and whether its hand-off is now complete.
    pub(crate) fn report(&mut self, report: LaneReport) -> Option<(SeqId, Result<bool, WorkerError>)> {
        let found = self.by_seq.iter_mut().find(|(_, outbound)| outbound.handoff() == report.handoff);
        found.map(|(&seq, outbound)| (seq, outbound.report(report)))
    }

    /// Sequences whose hand-off stands still for too long.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<SeqId> {
        self.by_seq.iter().filter(|(_, outbound)| outbound.deadline <= now).map(|(&seq, _)| seq).collect()
    }
}
