//! The hand-offs of an engine, both ways, in the order in which the product's engine deals with them.

use longreach_kv::local_share;
use longreach_proto::{
    WorkerError,
    worker::{OutputToken, Reservation},
};
use longreach_types::{DcpLayout, HandoffId, SeqId, TokenId};
use tokio::time::Instant;

use super::{Engine, EngineEvent, EngineFailure, FollowerEvent, FollowerMessage, LaneReport, LeaderMessage};
use crate::{
    lane::{CellSource, Lane},
    net::Broken,
    rank::ExpectKv,
};

/// One hand-off on its way in, as the leader sees it.
pub(crate) struct Inbound {
    pub(crate) seq: SeqId,
    /// Until every rank is ready for it; then it is told to the router.
    reservation: Option<Reservation>,
    n_missing: usize,
    first_token: Option<OutputToken>,
    pub(crate) deadline: Instant,
}

/// One hand-off on its way out.
pub(crate) struct Outbound {
    handoff: HandoffId,
    prompt_len: usize,
    layout: DcpLayout,
    n_ready: usize,
    lanes: Vec<Lane>,
    pub(crate) deadline: Instant,
}

impl Outbound {
    /// Positions below `len` are final.
    pub(crate) fn advance(&mut self, len: usize) {
        let n_blocks = if len >= self.prompt_len {
            self.layout.n_blocks(self.prompt_len)
        } else {
            self.layout.block(len)
        };
        self.n_ready = self.n_ready.max(n_blocks);
    }

    pub(crate) fn commit(&mut self, prompt_hash: [u8; 16], first_token: &OutputToken) {
        self.lanes.iter_mut().for_each(|lane| lane.commit(prompt_hash, first_token));
    }
}

impl Engine {
    pub(super) fn open_lanes(
        &mut self,
        seq: SeqId,
        cached_len: usize,
        reservation: &Reservation,
    ) -> Result<(), EngineFailure> {
        let ends_with_next =
            self.live.get(&seq).is_none_or(|live| live.is_full(live.output_len + 1, self.setup.max_seq_len));
        if ends_with_next {
            return Ok(());
        }
        let prompt_len = self.sched.tokens(seq).map_or(0, <[TokenId]>::len);
        let layout = DcpLayout::new(self.setup.dcp.block_size(), reservation.dcp_size);
        let Ok(layout) = layout else {
            return self.abort(seq, WorkerError::Invalid("no such layout".to_owned()));
        };
        if reservation.blocks.end != layout.n_blocks(prompt_len) {
            self.setup.journal.violation("a reservation does not end with its prompt");
        }
        let open =
            |target: &_| Lane::open(Clone::clone(target), reservation, layout, prompt_len, &self.setup.lanes);
        let mut outbound = Outbound {
            handoff: reservation.handoff,
            prompt_len,
            layout,
            n_ready: reservation.blocks.start,
            lanes: reservation.ranks.iter().map(open).collect(),
            deadline: Instant::now() + self.setup.handoff_timeout,
        };
        outbound.advance(cached_len);
        self.outbound.insert(seq, outbound);
        Ok(())
    }

    /// Sends what is final and fits.
    pub(super) fn pump(&mut self) {
        let chunk_len = self.setup.lanes.chunk_len;
        for (&seq, outbound) in &mut self.outbound {
            let Some(blocks) = self.sched.tables(seq).and_then(|tables| tables.first()) else { continue };
            let source = CellSource { rank: &self.rank, blocks, prompt_len: outbound.prompt_len, chunk_len };
            for lane in &mut outbound.lanes {
                if lane.pump(outbound.n_ready, &source) {
                    outbound.deadline = Instant::now() + self.setup.handoff_timeout;
                }
            }
        }
    }

    pub(super) fn lane_report(&mut self, report: LaneReport) -> Result<(), EngineFailure> {
        let found = self.outbound.iter_mut().find(|(_, outbound)| outbound.handoff == report.handoff);
        let Some((&seq, outbound)) = found else { return Ok(()) };
        match report.result {
            Err(error) => self.abort(seq, error),
            Ok(()) => {
                if let Some(lane) = outbound.lanes.iter_mut().find(|lane| lane.target.rank == report.rank) {
                    lane.verified = true;
                }
                if outbound.lanes.iter().all(|lane| lane.verified) {
                    self.outbound.remove(&seq);
                    if let Some(live) = self.live.remove(&seq) {
                        live.send(Ok(EngineEvent::HandoffDone));
                    }
                    self.sched.release(seq);
                    self.setup.journal.count("hand-off done");
                }
                Ok(())
            }
        }
    }

    /// Tells every rank which blocks the hand-off of `seq` may fill.
    pub(super) fn expect(&mut self, seq: SeqId, reservation: Reservation) -> Result<(), EngineFailure> {
        let tables = self.sched.tables(seq).unwrap_or_default();
        let shares = tables.iter().enumerate().map(|(dcp_rank, table)| {
            table[local_share(self.setup.dcp, reservation.blocks.clone(), dcp_rank)].to_vec()
        });
        let expect = ExpectKv {
            handoff: reservation.handoff,
            prompt_len: self.sched.tokens(seq).map_or(0, <[TokenId]>::len),
            prompt_hash: self.live.get(&seq).map_or([0; 16], |live| live.prompt_hash),
            blocks: shares.collect(),
        };
        let handoff = reservation.handoff;
        let inbound = Inbound {
            seq,
            n_missing: reservation.ranks.len(),
            reservation: Some(reservation),
            first_token: None,
            deadline: Instant::now() + self.setup.handoff_timeout,
        };
        self.inbound.insert(handoff, inbound);
        self.rank.expect(&expect);
        self.broadcast(&LeaderMessage::Expect(expect))?;
        self.expected(handoff);
        Ok(())
    }

    /// A rank is ready for a hand-off.
    fn expected(&mut self, handoff: HandoffId) {
        let Some(inbound) = self.inbound.get_mut(&handoff) else { return };
        inbound.n_missing -= 1;
        if inbound.n_missing > 0 {
            return;
        }
        let Some(reservation) = inbound.reservation.take() else { return };
        inbound.n_missing = reservation.ranks.len();
        if let Some(live) = self.live.get(&inbound.seq) {
            live.send(Ok(EngineEvent::Reserved(reservation)));
        }
    }

    /// KV of a hand-off came: it has all its time again.
    pub(super) fn extend(&mut self, handoff: HandoffId) {
        if let Some(inbound) = self.inbound.get_mut(&handoff) {
            inbound.deadline = Instant::now() + self.setup.handoff_timeout;
        }
    }

    /// A rank has verified its share.
    pub(super) fn received_share(
        &mut self,
        handoff: HandoffId,
        first_token: Option<OutputToken>,
    ) -> Result<(), EngineFailure> {
        let Some(inbound) = self.inbound.get_mut(&handoff) else { return Ok(()) };
        if inbound.reservation.is_some() {
            self.setup.journal.violation("KV came before every rank was ready for it");
        }
        inbound.n_missing -= 1;
        inbound.first_token = first_token.or(inbound.first_token.take());
        if inbound.n_missing > 0 {
            return Ok(());
        }
        let (seq, first_token) = (inbound.seq, inbound.first_token.take());
        self.inbound.remove(&handoff);
        let Some(first_token) = first_token else {
            return self.abort(seq, WorkerError::Invalid("no first token".to_owned()));
        };
        let Some(live) = self.live.get_mut(&seq) else { return Ok(()) };
        if self.sched.received(seq, first_token.token).is_err() {
            return self.abort(seq, WorkerError::Aborted("the hand-off came too late".to_owned()));
        }
        if let Some(reason) = live.push(first_token.token, self.setup.max_seq_len) {
            self.finish(seq, EngineEvent::Finish(reason));
        }
        Ok(())
    }

    pub(super) fn refused(
        &mut self,
        handoff: HandoffId,
        rank: usize,
        reason: &str,
    ) -> Result<(), EngineFailure> {
        let Some(inbound) = self.inbound.get(&handoff) else { return Ok(()) };
        let error = WorkerError::Aborted(format!("rank {rank} refused the hand-off: {reason}"));
        self.abort(inbound.seq, error)
    }

    pub(super) fn follower(
        &mut self,
        rank: usize,
        message: Result<FollowerMessage, Broken>,
    ) -> Result<(), EngineFailure> {
        match message.map_err(|_| EngineFailure::Link(rank))? {
            FollowerMessage::Handoff { handoff, event: FollowerEvent::Expected } => self.expected(handoff),
            FollowerMessage::Handoff { handoff, event: FollowerEvent::Received } => {
                self.received_share(handoff, None)?;
            }
            FollowerMessage::Handoff { handoff, event: FollowerEvent::Refused(reason) } => {
                self.refused(handoff, rank, &reason)?;
            }
            FollowerMessage::Joined | FollowerMessage::Done { .. } => {
                self.setup.journal.violation(format!("rank {rank} spoke out of turn"));
            }
        }
        Ok(())
    }
}
