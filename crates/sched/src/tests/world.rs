//! A toy engine around a scheduler. Its "KV" of a position is a digest of salt and tokens up to there, and the next
//! token is a function of the last digest. It reads and writes through the block tables of the plans, and
//! compares every context position it reads: a block that is shared, reused or freed wrongly shows as foreign KV.
//! A sequence's tokens depend on its prompt alone, so preemption, chunking and batch mates must not change them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use longreach_kv::{KvConfig, KvManager, PoolCounts, PrefixSalt, Reason};
use longreach_types::{BlockId, DcpLayout, Epoch, SeqId, SeqStep, StepPlan, TokenId};

use crate::{
    End, Event, Mode, NewSeq, NotReceiving, Phase, Refused, ReuseCosts, Sampled, SchedConfig, Scheduler,
    SeqKind, StepOutcome,
};

/// Small, so that sequences share prefixes by chance.
pub(super) const VOCAB: u64 = 3;

pub(super) struct World {
    pub(super) sched: Scheduler,
    arena: Vec<Vec<u64>>,
    pub(super) seqs: BTreeMap<SeqId, Record>,
    pub(super) plan: Option<StepPlan>,
    next_seq: u64,
}

/// What the caller of the scheduler knows about a sequence it submitted.
pub(super) struct Record {
    tenant: u8,
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_len: usize,
    pub(super) max_len: usize,
    pub(super) kind: SeqKind,
    /// Whole blocks of the prompt that can be pulled.
    remote_len: usize,
    pub(super) reserved: Option<(usize, Mode)>,
    pub(super) n_preempted: usize,
    waits_again: bool,
    /// A transfer that reads or writes these blocks, until it is stopped.
    transfer: Option<Vec<Vec<BlockId>>>,
    pub(super) end: Option<End>,
}

/// What to submit.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) tenant: u8,
    pub(super) prompt: Vec<u32>,
    pub(super) n_output: usize,
    pub(super) priority: i32,
    pub(super) kind: SeqKind,
    pub(super) remote_len: usize,
}

/// A share of the calls that go wrong, as a function of a counter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Every n-th sampled entry of an outcome is left out.
    pub(super) lose_every: Option<usize>,
}

impl Spec {
    pub(super) fn new(prompt: impl IntoIterator<Item = u32>, n_output: usize, kind: SeqKind) -> Self {
        Self { tenant: 0, prompt: prompt.into_iter().collect(), n_output, priority: 0, kind, remote_len: 0 }
    }
}

/// Limits that never bind by themselves.
pub(super) fn wide_config(max_seq_len: usize) -> SchedConfig {
    SchedConfig {
        max_seq_len,
        local_prefill_max: 0,
        watermark_frac: 0.0,
        reuse: pulls_pay(),
        ..SchedConfig::default()
    }
}

/// What can be computed here is, and what can be pulled is.
pub(super) fn pulls_pay() -> ReuseCosts {
    ReuseCosts {
        pull_latency: Duration::ZERO,
        handoff_latency: Duration::from_secs(3600),
        stall_weight: 0.0,
        ..ReuseCosts::default()
    }
}

pub(super) fn kv(block_size: usize, dcp_size: usize, n_blocks: u32) -> KvManager {
    KvManager::new(KvConfig::new(DcpLayout::new(block_size, dcp_size).unwrap(), n_blocks))
}

/// The digests after each of `tokens`.
fn digests(tenant: u8, tokens: &[TokenId]) -> Vec<u64> {
    let step = |digest: &mut u64, token: &TokenId| {
        *digest = (*digest ^ u64::from(token.0 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        Some(*digest)
    };
    tokens.iter().scan(u64::from(tenant) + 1, step).collect()
}

/// The token that follows `tokens`.
pub(super) fn next_token(tenant: u8, tokens: &[TokenId]) -> TokenId {
    let digest = digests(tenant, tokens).last().copied().unwrap_or_default();
    TokenId(((digest >> 7) % VOCAB) as u32)
}

impl World {
    pub(super) fn new(config: SchedConfig, kv: KvManager) -> Self {
        let n_slots = kv.n_blocks_per_rank() * kv.layout().block_size();
        let arena = vec![vec![0; n_slots]; kv.layout().dcp_size()];
        let sched = Scheduler::new(config, kv, Epoch(7)).unwrap();
        Self { sched, arena, seqs: BTreeMap::new(), plan: None, next_seq: 0 }
    }

    pub(super) fn submit(&mut self, spec: &Spec) -> Result<SeqId, Refused> {
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        let tokens: Vec<_> = spec.prompt.iter().copied().map(TokenId).collect();
        let (prompt_len, max_len) = (tokens.len(), spec.prompt.len() + spec.n_output);
        self.sched.submit(NewSeq {
            seq,
            tokens: tokens.clone(),
            salt: PrefixSalt::new(b"toy", b"", &[spec.tenant]),
            max_len,
            priority: spec.priority,
            kind: spec.kind,
            remote_len: spec.remote_len,
        })?;
        let block_size = self.sched.kv().layout().block_size();
        let remote_len = spec.remote_len.min(prompt_len - 1) / block_size * block_size;
        let record = Record {
            tenant: spec.tenant,
            tokens,
            prompt_len,
            max_len,
            kind: spec.kind,
            remote_len,
            reserved: None,
            n_preempted: 0,
            waits_again: false,
            transfer: None,
            end: None,
        };
        self.seqs.insert(seq, record);
        self.settle();
        Ok(seq)
    }

    /// Plans a step if none is in flight; whether one is now.
    pub(super) fn plan(&mut self) -> bool {
        let planned = self.sched.next_plan();
        assert!(planned.is_none() || self.plan.is_none(), "one step at a time");
        self.settle();
        if let Some(plan) = planned {
            self.check_plan(&plan);
            self.plan = Some(plan);
        }
        self.plan.is_some()
    }

    /// Runs the step in flight and reports it; nothing if there is none.
    pub(super) fn complete(&mut self, faults: Faults) {
        let Some(plan) = self.plan.take() else { return };
        for seq in &plan.seqs {
            self.run(seq);
        }
        let mut outcome = StepOutcome { step: plan.step, sampled: Vec::new() };
        for (i, seq) in plan.seqs.iter().filter(|seq| seq.n_logits > 0).enumerate() {
            if faults.lose_every.is_none_or(|n| i % n != n - 1) {
                outcome.sampled.push(self.sample(seq));
            }
        }
        self.sched.complete(&outcome).unwrap();
        self.take_over(&outcome);
    }

    /// The forward pass of one sequence: reads its context, writes its rows.
    fn run(&mut self, step: &SeqStep) {
        assert_eq!(
            self.sched.tables(step.seq),
            Some(&*step.tables),
            "blocks of a running step were given away"
        );
        let record = &self.seqs[&step.seq];
        let mut tokens = record.tokens[..step.context_len].to_vec();
        tokens.extend_from_slice(&step.tokens);
        let digests = digests(record.tenant, &tokens);
        for (pos, &digest) in digests.iter().enumerate() {
            let (rank, slot) = self.slot(&step.tables, pos);
            if pos < step.context_len {
                assert_eq!(self.arena[rank][slot], digest, "sequence {} reads foreign KV at {pos}", step.seq);
            } else {
                self.arena[rank][slot] = digest;
            }
        }
    }

    /// Verifies the drafts of a step as an engine would: accepts those the model would have sampled, and adds
    /// the token it samples after them.
    fn sample(&self, step: &SeqStep) -> Sampled {
        let record = &self.seqs[&step.seq];
        let first = step.seq_len() + 1 - step.n_logits;
        let mut tokens = record.tokens[..step.context_len].to_vec();
        tokens.extend_from_slice(&step.tokens);
        let mut sampled = Vec::new();
        for len in first..=step.seq_len() {
            let next = next_token(record.tenant, &tokens[..len]);
            sampled.push(next);
            if tokens.get(len) != Some(&next) {
                break;
            }
        }
        Sampled { seq: step.seq, tokens: sampled }
    }

    /// What the caller learns of a step: its events say which of the outcome's tokens count.
    fn take_over(&mut self, outcome: &StepOutcome) {
        let events = self.sched.take_events();
        let told: BTreeSet<SeqId> = events
            .iter()
            .filter_map(|event| if let Event::Sampled { seq, .. } = event { Some(*seq) } else { None })
            .collect();
        for sampled in &outcome.sampled {
            let record = self.seqs.get_mut(&sampled.seq).unwrap();
            assert_eq!(told.contains(&sampled.seq), record.end.is_none(), "sequence {}", sampled.seq);
            if record.end.is_none() {
                record.tokens.extend_from_slice(&sampled.tokens);
            }
        }
        events.into_iter().for_each(|event| self.note(event));
        self.check();
    }

    /// Handles events, then checks everything.
    pub(super) fn settle(&mut self) {
        self.sched.take_events().into_iter().for_each(|event| self.note(event));
        self.check();
    }

    fn note(&mut self, event: Event) {
        let layout = self.sched.kv().layout();
        match event {
            Event::Reserved { seq, cached_len, mode, blocks } => {
                let tables = self.sched.tables(seq).map(<[_]>::to_vec);
                let record = self.live(seq);
                assert!(record.reserved.replace((cached_len, mode)).is_none(), "reserved once");
                assert!(cached_len < record.prompt_len);
                assert_eq!(blocks, layout.n_blocks(cached_len)..layout.n_blocks(record.prompt_len));
                match mode {
                    Mode::Local => {}
                    Mode::Receive => {
                        assert_eq!(record.kind, SeqKind::Receive);
                        record.transfer = tables;
                    }
                    Mode::Pull => {
                        assert_eq!(record.kind, SeqKind::Send);
                        assert!(cached_len < record.remote_len, "there is something to pull");
                    }
                }
            }
            Event::Preempted { seq } => {
                let record = self.live(seq);
                assert_ne!(record.kind, SeqKind::Send, "what is sent is not taken back");
                record.n_preempted += 1;
                assert!(!std::mem::replace(&mut record.waits_again, true));
            }
            Event::Resumed { seq, .. } => assert!(std::mem::take(&mut self.live(seq).waits_again)),
            Event::Sampled { seq, n_new, output_len } => {
                let record = self.live(seq);
                assert_eq!(output_len, record.tokens.len() - record.prompt_len);
                assert!(n_new >= 1);
            }
            Event::Sending { seq } => {
                let tables = self.sched.tables(seq).map(<[_]>::to_vec);
                let record = self.live(seq);
                assert_eq!((record.kind, record.tokens.len()), (SeqKind::Send, record.prompt_len + 1));
                record.transfer = tables;
            }
            Event::Ended { seq, end } => {
                let record = self.live(seq);
                assert_ne!(end, End::OutOfBlocks, "an accepted sequence fits");
                assert_eq!(end == End::Length, record.tokens.len() == record.max_len && end == End::Length);
                record.end = Some(end);
            }
        }
    }

    fn live(&mut self, seq: SeqId) -> &mut Record {
        let record = self.seqs.get_mut(&seq).unwrap();
        assert_eq!(record.end, None, "the end of sequence {seq} was told before");
        record
    }

    /// The hand-off of a receiving sequence arrives in full.
    pub(super) fn deliver(&mut self, seq: SeqId) {
        let record = self.seqs.get_mut(&seq).unwrap();
        let Some(tables) = record.transfer.clone() else { return };
        let first = next_token(record.tenant, &record.tokens);
        let expected = digests(record.tenant, &record.tokens);
        assert_eq!(
            self.sched.tables(seq),
            Some(&*tables),
            "a transfer writes to blocks that were given away"
        );
        let cached_len = record.reserved.map_or(0, |(cached_len, _)| cached_len);
        for (pos, &digest) in expected.iter().enumerate() {
            let (rank, slot) = self.slot(&tables, pos);
            if pos >= cached_len {
                self.arena[rank][slot] = digest;
            }
        }
        let received = self.sched.received(seq, first);
        let record = self.seqs.get_mut(&seq).unwrap();
        record.transfer = None;
        assert_eq!(received.is_ok(), record.end.is_none());
        if received.is_ok() {
            record.tokens.push(first);
        }
        self.settle();
    }

    /// The prefix of a pulling sequence arrives in full, or only some of it, and not what it should be.
    pub(super) fn pull(&mut self, seq: SeqId, arrives: bool) {
        let record = &self.seqs[&seq];
        let (cached_len, remote_len) = (self.sched.computed_len(seq).unwrap(), record.remote_len);
        let tables = self.sched.tables(seq).unwrap().to_vec();
        let expected = digests(record.tenant, &record.tokens);
        for (pos, &digest) in expected.iter().enumerate().take(remote_len).skip(cached_len) {
            let (rank, slot) = self.slot(&tables, pos);
            self.arena[rank][slot] = if arrives { digest } else { !digest };
        }
        let told = if arrives { self.sched.pulled(seq) } else { self.sched.pull_failed(seq) };
        told.unwrap();
        assert_eq!(self.sched.computed_len(seq), Some(if arrives { remote_len } else { cached_len }));
        assert_eq!(self.sched.pulled(seq), Err(NotReceiving(seq)), "once");
        assert_eq!(self.sched.pull_failed(seq), Err(NotReceiving(seq)), "once");
        self.settle();
    }

    /// A transfer stops, whichever way it went; its sequence's blocks are not needed any more.
    pub(super) fn stop_transfer(&mut self, seq: SeqId) {
        let record = &self.seqs[&seq];
        let Some(tables) = &record.transfer else { return };
        assert_eq!(self.sched.tables(seq), Some(&**tables), "a transfer uses blocks that were given away");
        if self.sched.phase(seq) == Some(Phase::Sending) {
            for (pos, &digest) in
                digests(record.tenant, &record.tokens[..record.prompt_len]).iter().enumerate()
            {
                let (rank, slot) = self.slot(tables, pos);
                assert_eq!(self.arena[rank][slot], digest, "sequence {seq} sends foreign KV at {pos}");
            }
        }
        self.seqs.get_mut(&seq).unwrap().transfer = None;
        self.sched.release(seq);
        self.settle();
    }

    /// Ends a sequence in one of the four ways, twice: the second time changes nothing.
    pub(super) fn end(&mut self, seq: SeqId, how: fn(&mut Scheduler, SeqId) -> bool) {
        let was_live = self.seqs[&seq].end.is_none();
        // The caller's duty: blocks that a transfer uses are given back when it has stopped.
        if self.seqs[&seq].transfer.is_some() {
            assert_eq!(self.sched.abort_held(seq), was_live);
            assert!(!self.sched.abort_held(seq));
        } else {
            assert_eq!(how(&mut self.sched, seq), was_live);
            let counts = self.sched.kv().counts();
            assert!(!how(&mut self.sched, seq));
            assert_eq!(self.sched.kv().counts(), counts);
        }
        self.settle();
    }

    /// Delivers what is to be received, stops what is being sent, and steps, until nothing is left.
    pub(super) fn run_to_idle(&mut self, max_steps: usize) {
        for _ in 0..max_steps {
            self.move_transfers();
            self.plan();
            self.complete(Faults::default());
            if self.sched.is_idle() {
                return;
            }
        }
        panic!("not idle after {max_steps} steps: {:?}", self.sched.stats());
    }

    pub(super) fn move_transfers(&mut self) {
        let seqs: Vec<_> = self.seqs.keys().copied().collect();
        for seq in seqs {
            match self.sched.phase(seq) {
                Some(Phase::Receiving) => self.deliver(seq),
                Some(Phase::Pulling) => self.pull(seq, true),
                _ => self.stop_transfer(seq),
            }
        }
    }

    /// Nothing is held, and every sequence has had its end.
    pub(super) fn check_baseline(&mut self) {
        assert!(self.sched.is_idle());
        assert!(self.seqs.values().all(|record| record.end.is_some() && record.transfer.is_none()));
        let total = self.sched.kv().n_blocks_per_rank();
        let all = |counts: &[PoolCounts], f: fn(&PoolCounts) -> usize| counts.iter().all(|c| f(c) == total);
        assert!(all(&self.sched.kv().counts(), PoolCounts::n_available));
        self.sched.flush_cache();
        self.check();
        assert!(all(&self.sched.kv().counts(), |counts| counts.n_free));
        let totals = self.sched.stats().totals;
        assert_eq!((totals.accepted, totals.ended), (self.seqs.len() as u64, self.seqs.len() as u64));
    }

    /// The sequence's tokens are those its prompt alone determines.
    pub(super) fn check_history(&self, seq: SeqId) {
        let record = &self.seqs[&seq];
        for len in record.prompt_len..record.tokens.len() {
            let expected = next_token(record.tenant, &record.tokens[..len]);
            assert_eq!(record.tokens[len], expected, "sequence {seq}, token {len}");
        }
        if record.end == Some(End::Length) {
            assert_eq!(record.tokens.len(), record.max_len);
        }
    }

    /// Drops the records of sequences that are over, so that a long run stays quick.
    pub(super) fn forget_ended(&mut self) {
        self.seqs.retain(|_, record| record.end.is_none() || record.transfer.is_some());
    }

    pub(super) fn n_owned_for(&self, reason: Reason) -> usize {
        self.sched.kv().counts().iter().map(|counts| counts.n_owned_for(reason)).sum()
    }

    fn check(&self) {
        self.sched.audit().unwrap();
        for (&seq, record) in &self.seqs {
            let expected = record.end.is_none().then_some(&*record.tokens);
            assert_eq!(self.sched.tokens(seq), expected, "sequence {seq}");
        }
    }

    fn check_plan(&self, plan: &StepPlan) {
        let (config, layout) = (self.sched.config(), self.sched.kv().layout());
        assert!((1..=config.max_batch_tokens).contains(&plan.n_rows()));
        assert_eq!((plan.epoch, Some(plan.step)), (Epoch(7), self.sched.in_flight()));
        let planned: BTreeSet<SeqId> = plan.seqs.iter().map(|seq| seq.seq).collect();
        assert_eq!(planned.len(), plan.seqs.len(), "each sequence once");
        assert!(planned.len() <= config.max_seqs);
        for step in &plan.seqs {
            let tokens = &self.seqs[&step.seq].tokens;
            assert_eq!(Some(step.context_len), self.sched.computed_len(step.seq));
            let known = tokens.len().min(step.seq_len());
            assert_eq!(step.tokens[..known - step.context_len], tokens[step.context_len..known]);
            assert!(
                step.seq_len() < self.seqs[&step.seq].max_len,
                "no row without a token to sample from it"
            );
            let n_logits = (step.seq_len() + 1).saturating_sub(tokens.len());
            assert_eq!(step.n_logits, n_logits, "logits from the last known token on");
            for (rank, table) in step.tables.iter().enumerate() {
                assert!(table.len() >= layout.local_n_blocks(layout.n_blocks(step.seq_len()), rank));
            }
        }
        for (seq, record) in &self.seqs {
            let decodes = self.sched.phase(*seq) == Some(Phase::Running)
                && self.sched.computed_len(*seq) == Some(record.tokens.len() - 1);
            assert!(!decodes || planned.contains(seq), "sequence {seq} decodes and was left out");
        }
    }

    fn slot(&self, tables: &[Vec<BlockId>], pos: usize) -> (usize, usize) {
        let layout = self.sched.kv().layout();
        let rank = layout.owner(pos);
        let block = tables[rank][layout.local_block(layout.block(pos))];
        (rank, block.0 as usize * layout.block_size() + pos % layout.block_size())
    }
}
