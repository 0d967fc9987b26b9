//! The leader's view of the hand-offs its group is receiving.
//!
//! ```text
//! Expecting ──every rank is ready──► Filling ──every rank has its share──► the sequence may decode
//!     └───────── any rank refused, the deadline passed, or the request ended ─────────► dropped on every rank
//! ```

use std::collections::BTreeMap;

use longreach_proto::worker::{OutputToken, Reservation};
use longreach_types::{HandoffId, SeqId};
use tokio::time::Instant;

/// One hand-off.
pub(crate) struct Inbound {
    seq: SeqId,
    state: State,
    first_token: Option<OutputToken>,
    /// After this the hand-off is given up. There is none from the reservation until the sender opens it: the prompt may
    /// wait there as long as the router lets it.
    deadline: Option<Instant>,
}

enum State {
    /// Ranks are being told; the reservation goes out when all of them are ready, so that no chunk can overtake the
    /// news that it is expected.
    Expecting { n_missing: usize, reservation: Box<Reservation> },
    /// KV is coming.
    Filling { n_missing: usize },
}

/// What a rank's message led to.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Nothing yet.
    Waiting,
    /// Every rank is ready: tell the router.
    Reserved(SeqId, Box<Reservation>),
    /// Every rank has its share.
    Complete(SeqId, Option<OutputToken>),
}

/// All hand-offs on their way in.
#[derive(Default)]
pub(crate) struct InboundSet {
    by_handoff: BTreeMap<HandoffId, Inbound>,
}

impl InboundSet {
    pub(crate) fn len(&self) -> usize {
        self.by_handoff.len()
    }

    /// A hand-off that `n_ranks` ranks take part in, of which this one is ready already.
    pub(crate) fn insert(&mut self, seq: SeqId, reservation: Reservation, n_ranks: usize, deadline: Instant) {
        let handoff = reservation.handoff;
        let state = State::Expecting { n_missing: n_ranks, reservation: Box::new(reservation) };
        self.by_handoff.insert(handoff, Inbound { seq, state, first_token: None, deadline: Some(deadline) });
    }

    /// A rank is ready to receive.
    pub(crate) fn expected(&mut self, handoff: HandoffId) -> Progress {
        let Some(inbound) = self.by_handoff.get_mut(&handoff) else { return Progress::Waiting };
        let State::Expecting { n_missing, reservation } = &mut inbound.state else {
            return Progress::Waiting;
        };
        *n_missing -= 1;
        if *n_missing > 0 {
            return Progress::Waiting;
        }
        let reservation = reservation.clone();
        inbound.deadline = None;
        inbound.state = State::Filling { n_missing: reservation.ranks.len() };
        Progress::Reserved(inbound.seq, reservation)
    }

    /// A rank has verified its share.
    pub(crate) fn received(&mut self, handoff: HandoffId, first_token: Option<OutputToken>) -> Progress {
        let Some(inbound) = self.by_handoff.get_mut(&handoff) else { return Progress::Waiting };
        let State::Filling { n_missing } = &mut inbound.state else { return Progress::Waiting };
        *n_missing -= 1;
        let is_complete = *n_missing == 0;
        inbound.first_token = first_token.or(inbound.first_token.take());
        if !is_complete {
            return Progress::Waiting;
        }
        let (seq, first_token) = (inbound.seq, inbound.first_token.take());
        self.by_handoff.remove(&handoff);
        Progress::Complete(seq, first_token)
    }

    /// Something of a hand-off came, so that it has until `deadline` again. Only where it `opens` the hand-off does the time
    /// begin to count: a prefix is also pulled for a prompt of which nothing will be sent, since one token ends its output.
    pub(crate) fn heard(&mut self, handoff: HandoffId, opens: bool, deadline: Instant) {
        if let Some(inbound) = self.by_handoff.get_mut(&handoff)
            && (opens || inbound.deadline.is_some())
        {
            inbound.deadline = Some(deadline);
        }
    }

    /// The sequence of a hand-off.
    pub(crate) fn seq(&self, handoff: HandoffId) -> Option<SeqId> {
        self.by_handoff.get(&handoff).map(|inbound| inbound.seq)
    }

    /// Forgets the hand-off of a sequence; it must then be dropped on every rank.
    pub(crate) fn remove(&mut self, seq: SeqId) -> Option<HandoffId> {
        let handoff = self.by_handoff.iter().find(|(_, inbound)| inbound.seq == seq).map(|(&id, _)| id)?;
        self.by_handoff.remove(&handoff);
        Some(handoff)
    }

    /// Sequences whose hand-off stands still for too long.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<SeqId> {
        self.by_handoff
            .values()
            .filter(|inbound| inbound.deadline.is_some_and(|deadline| deadline <= now))
            .map(|inbound| inbound.seq)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use longreach_proto::{
        WIRE_VERSION,
        worker::{KvLayout, RankTarget},
    };
    use longreach_types::{Epoch, KvDtype};

    use super::*;

    fn reservation() -> Reservation {
        let layout = KvLayout {
            model_fingerprint: [0; 16],
            n_layers: 1,
            n_kv_heads: 1,
            head_dim: 1,
            kv_dtype: KvDtype::F32,
            block_size: 1,
            n_shards: 8,
            wire_version: WIRE_VERSION,
        };
        let rank = RankTarget { rank: 0, dcp_rank: 0, endpoint: String::new(), kv_heads: 0..1 };
        Reservation {
            handoff: HandoffId(1),
            epoch: Epoch(1),
            cached_len: 0,
            prefilled_here: false,
            layout,
            blocks: 0..1,
            dcp_size: 1,
            ranks: vec![rank],
        }
    }

    #[test]
    fn time_counts_while_ranks_get_ready_and_again_once_the_sender_has_opened() {
        let (seq, handoff, start) = (SeqId(7), HandoffId(1), Instant::now());
        let after = |secs| start + Duration::from_secs(secs);
        let mut inbound = InboundSet::default();
        inbound.insert(seq, reservation(), 1, after(1));
        assert_eq!((inbound.overdue(start), inbound.overdue(after(1))), (vec![], vec![seq]));
        assert!(matches!(inbound.expected(handoff), Progress::Reserved(..)));
        inbound.heard(handoff, false, after(2));
        assert_eq!(inbound.overdue(after(1000)), [], "a pull is no promise of more");
        inbound.heard(handoff, true, after(3));
        inbound.heard(handoff, false, after(4));
        assert_eq!((inbound.overdue(after(3)), inbound.overdue(after(4))), (vec![], vec![seq]));
    }
}
