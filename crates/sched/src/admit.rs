//! Admission: giving blocks to waiting sequences.
//!
//! A sequence is admitted when the blocks of *all* its tokens can be had at once. So a half-computed prompt never
//! has to be thrown away for its own rest, and a hand-off is told all its destinations in one message; the
//! price is that blocks of a long prompt stand empty while its first chunks are computed.
//!
//! **Order.** By priority; within one, preempted sequences first, then by arrival. A sequence that does not fit is
//! passed by later ones that do: a 49-token request does not wait behind a 33k-token one. **Ageing:** each such
//! admission is a pass for every sequence it overtook; with `max_passes` of them a sequence has an exclusive
//! claim: nobody behind it is admitted until it is, so the blocks that come free add up to what it needs. Those
//! before it in the order (higher priority, preempted) are not held back, and finite in number unless higher
//! priorities arrive without end, which is what strict priority means.

use longreach_kv::{Allocation, KvError, Reason};
use longreach_types::SeqId;

use crate::events::{Event, Mode};
use crate::reuse::{GroupLoad, KvSource, PromptReuse};
use crate::scheduler::Scheduler;
use crate::seq::{Order, Phase, Seq, SeqKind};

/// A sequence that there were too few blocks for.
struct Blocked {
    seq: SeqId,
    n_passes: u32,
}

impl Scheduler {
    /// Admits what fits. [`Scheduler::next_plan`] does it first of all; call it as well when blocks or sequences
    /// came while a step runs, to have reservations out sooner.
    pub fn admit(&mut self) {
        let mut blocked: Vec<Blocked> = Vec::new();
        let (mut n_tried, mut most_passes) = (0, None);
        let candidates: Vec<Order> = self.waiting.iter().copied().collect();
        for order in candidates {
            if self.running.len() + self.n_receiving + self.n_pulling >= self.config.max_seqs {
                break;
            }
            let known_blocked = self.is_known_blocked(order.seq);
            n_tried += usize::from(!known_blocked);
            if n_tried > self.config.admission_window {
                break;
            }
            if !known_blocked && self.try_admit(order) {
                blocked.iter_mut().for_each(|other| other.n_passes += 1);
                most_passes = most_passes.map(|n_passes| n_passes + 1);
            } else {
                let n_passes = self.seqs.get(&order.seq).map_or(0, |seq| seq.wait.n_passes);
                blocked.push(Blocked { seq: order.seq, n_passes });
                most_passes = most_passes.max(Some(n_passes));
            }
            if most_passes.is_some_and(|n_passes| n_passes >= self.config.max_passes) {
                break;
            }
        }
        for Blocked { seq, n_passes } in blocked {
            if let Some(seq) = self.seqs.get_mut(&seq) {
                seq.wait.n_passes = n_passes;
            }
        }
    }

    /// Whether nothing came free since the sequence was tried last.
    fn is_known_blocked(&self, seq: SeqId) -> bool {
        self.seqs.get(&seq).is_some_and(|seq| seq.wait.blocked_at == Some(self.kv.version()))
    }

    /// Moves a sequence out of the waiting set if there are blocks for it.
    fn try_admit(&mut self, order: Order) -> bool {
        let Some(state) = self.seqs.get_mut(&order.seq) else { return false };
        let idle = self.kv.is_idle();
        let request = Allocation {
            chain: &state.chain,
            len: state.chain.len(),
            reason: Reason::Running,
            headroom: if idle { 0 } else { self.config.headroom(self.kv.n_blocks_per_rank()) },
        };
        match self.kv.allocate(order.seq, request) {
            Ok(cached_len) => {
                self.place(order, cached_len);
                true
            }
            Err(error) => {
                debug_assert!(matches!(error, KvError::NoSpace(_)), "a waiting sequence holds no blocks");
                state.wait.blocked_at = Some(self.kv.version());
                false
            }
        }
    }

    /// The sequence has its blocks: where it goes now.
    fn place(&mut self, order: Order, cached_len: usize) {
        let mode = self.mode(order.seq, cached_len);
        let Some(state) = self.seqs.get_mut(&order.seq) else { return };
        let (seq, len) = (order.seq, state.chain.len());
        state.computed_len = cached_len;
        let preempted = std::mem::take(&mut state.wait).preempted;
        self.waiting.remove(&order);
        self.waiting_tokens -= len;
        state.phase = match mode {
            Mode::Local => Phase::Running,
            Mode::Receive => Phase::Receiving,
            Mode::Pull => Phase::Pulling,
        };
        match mode {
            Mode::Local => {
                self.running.insert(state.order);
            }
            Mode::Receive => self.n_receiving += 1,
            Mode::Pull => self.n_pulling += 1,
        }
        if mode != Mode::Local {
            self.kv.set_reason(seq, Reason::Reserved).expect("blocks were just allocated");
        }
        if preempted {
            self.totals.recomputed_tokens += (len - cached_len) as u64;
            self.events.push(Event::Resumed { seq, cached_len });
            return;
        }
        self.totals.prefix_lookup_tokens += len as u64;
        self.totals.prefix_hit_tokens += cached_len as u64;
        let layout = self.kv.layout();
        let blocks = layout.n_blocks(cached_len)..layout.n_blocks(len);
        self.events.push(Event::Reserved { seq, cached_len, mode, blocks });
    }

    /// Where the KV of a sequence comes from, of whose prompt `cached_len` tokens are here.
    fn mode(&self, seq: SeqId, cached_len: usize) -> Mode {
        let Some(state) = self.seqs.get(&seq).filter(|state| !state.wait.preempted) else {
            return Mode::Local;
        };
        let prompt_len = state.chain.len();
        let prompt = match state.kind {
            SeqKind::Local => return Mode::Local,
            SeqKind::Receive => {
                PromptReuse { prompt_len, group_len: cached_len, prefill_len: 0, group: Some(self.load()) }
            }
            SeqKind::Send => {
                PromptReuse { prompt_len, group_len: state.remote_len, prefill_len: cached_len, group: None }
            }
        };
        match (state.kind, self.config.reuse.choose(&prompt)) {
            (SeqKind::Receive, KvSource::Push | KvSource::Pull) => Mode::Receive,
            (SeqKind::Send, KvSource::Pull) => Mode::Pull,
            _ => Mode::Local,
        }
    }

    /// What a prompt that is computed here meets.
    fn load(&self) -> GroupLoad {
        let running = self.running.iter().filter_map(|order| self.seqs.get(&order.seq));
        let (decoding, prefilling): (Vec<_>, Vec<_>) =
            running.map(Seq::pending_len).partition(|pending_len| *pending_len == 1);
        GroupLoad {
            max_len: self.config.local_prefill_max,
            pending_tokens: prefilling.iter().sum(),
            n_decoding: decoding.len(),
        }
    }
}
