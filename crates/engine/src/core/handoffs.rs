//! Both ways of a hand-off, and pulls, as an engine deals with them.

use std::ops::Range;

use longreach_kv::local_share;
use longreach_proto::{
    WorkerError,
    group::{ExpectKv, ExpectedBlocks, FollowerEvent, FollowerMessage, LeaderMessage},
    worker::{OutputToken, Reservation},
};
use longreach_sched::Mode;
use longreach_types::{HandoffId, SeqId, TokenId};
use tokio::time::Instant;
use tracing::info;

use super::{Core, CoreFailure};
use crate::{
    cells::KvCells,
    handle::{EngineEvent, Work},
    inbound::Progress,
    live::OutputLimits,
    pull::PullAsk,
    send::{LaneReport, Outbound},
};

impl Core {
    pub(super) fn reserved(
        &mut self,
        seq: SeqId,
        (cached_len, mode, blocks): (usize, Mode, Range<usize>),
        cells: &impl KvCells,
    ) -> Result<(), CoreFailure> {
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
        self.expect(seq, reservation, cells)
    }

    /// Prefill: opens the way to every rank, unless the first token will be the last.
    fn open_lanes(
        &mut self,
        seq: SeqId,
        cached_len: usize,
        reservation: &Reservation,
    ) -> Result<(), CoreFailure> {
        let limits = OutputLimits { eos: &self.setup.eos, max_seq_len: self.setup.max_seq_len };
        if self.live.get(&seq).is_none_or(|sequence| sequence.live.ends_with_next(&limits)) {
            return Ok(());
        }
        let prompt_len = self.sched.tokens(seq).map_or(0, <[TokenId]>::len);
        let patience = self.setup.handoff_timeout;
        match Outbound::open(reservation, &self.setup.layout, prompt_len, patience, &self.lanes) {
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
        if let Err(error) = self.pulls.start(&ask, &self.lanes) {
            self.pulled(seq, Err(error));
        }
    }

    /// Prefill: takes in what ranks have sent of prefixes.
    pub(super) fn take_pulled(&mut self, cells: &mut impl KvCells) {
        for (seq, result) in self.pulls.turn(cells, Instant::now()) {
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
    fn expect(
        &mut self,
        seq: SeqId,
        reservation: Reservation,
        cells: &impl KvCells,
    ) -> Result<(), CoreFailure> {
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
        self.receiver.expect(&expect, cells);
        self.order(&LeaderMessage::Expect(expect))?;
        let progress = self.inbound.expected(handoff);
        self.progress(progress)
    }

    pub(super) fn progress(&mut self, progress: Progress) -> Result<(), CoreFailure> {
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
    fn received(&mut self, seq: SeqId, first_token: &OutputToken) -> Result<(), CoreFailure> {
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

    pub(super) fn refused(
        &mut self,
        handoff: HandoffId,
        rank: usize,
        reason: String,
    ) -> Result<(), CoreFailure> {
        let Some(seq) = self.inbound.seq(handoff) else { return Ok(()) };
        self.abort(seq, WorkerError::Aborted(format!("rank {rank} refused the hand-off: {reason}")))
    }

    pub(super) fn lane_report(&mut self, report: LaneReport) -> Result<(), CoreFailure> {
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

    /// Takes what a follower says.
    pub fn follower(&mut self, rank: usize, message: FollowerMessage) -> Result<(), CoreFailure> {
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
}
