use std::collections::BTreeMap;

use longreach_types::TokenId;
use proptest::prelude::*;

use super::*;
use crate::PrefixSalt;

fn tokens(values: &[u32]) -> Vec<TokenId> {
    values.iter().copied().map(TokenId).collect()
}

fn salt(tenant: u8) -> PrefixSalt {
    PrefixSalt::new(b"model", b"", &[tenant])
}

fn manager(block_size: usize, dcp_size: usize, n_blocks: u32) -> KvManager {
    KvManager::new(KvConfig::new(DcpLayout::new(block_size, dcp_size).unwrap(), n_blocks))
}

fn chain(kv: &KvManager, values: impl IntoIterator<Item = u32>) -> TokenChain {
    TokenChain::new(salt(0), kv.layout().block_size(), values.into_iter().map(TokenId).collect())
}

fn request(chain: &TokenChain) -> Allocation<'_> {
    Allocation { chain, len: chain.len(), reason: Reason::Running, headroom: 0 }
}

/// Allocates, computes and commits all of `chain`; returns how much of it was cached.
fn run(kv: &mut KvManager, seq: u64, chain: &TokenChain) -> usize {
    let cached_len = kv.allocate(SeqId(seq), request(chain)).unwrap();
    kv.commit(SeqId(seq), chain, chain.len()).unwrap();
    kv.audit().unwrap();
    cached_len
}

fn n_owned(kv: &KvManager) -> usize {
    kv.counts().iter().map(PoolCounts::n_owned).sum()
}

/// What lies in one slot: the salt and all tokens up to and including its position, which is what KV depends on.
type Kv = Option<(u8, Vec<TokenId>)>;

/// A sequence and an arena of KV by rank and slot, against which every hit is compared.
struct World {
    kv: KvManager,
    arena: Vec<Vec<Kv>>,
    seqs: BTreeMap<u64, (u8, TokenChain)>,
    next_seq: u64,
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { salt: u8, tokens: Vec<u32>, extra: usize, headroom: usize, reason: Reason },
    Grow { nth: usize, by: usize },
    Compute { nth: usize, n: usize },
    Push { nth: usize, token: u32 },
    SetReason { nth: usize, reason: Reason },
    Free { nth: usize },
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    let reason = || prop::sample::select(&Reason::ALL[..]);
    let allocate = (0..2_u8, prop::collection::vec(0..2_u32, 1..24), 0..4_usize, 0..3_usize, reason());
    prop_oneof![
        5 => allocate.prop_map(|(salt, tokens, extra, headroom, reason)| {
            Op::Allocate { salt, tokens, extra, headroom, reason }
        }),
        2 => (any::<usize>(), 0..6_usize).prop_map(|(nth, by)| Op::Grow { nth, by }),
        8 => (any::<usize>(), 1..24_usize).prop_map(|(nth, n)| Op::Compute { nth, n }),
        4 => (any::<usize>(), 0..2_u32).prop_map(|(nth, token)| Op::Push { nth, token }),
        1 => (any::<usize>(), reason()).prop_map(|(nth, reason)| Op::SetReason { nth, reason }),
        4 => any::<usize>().prop_map(|nth| Op::Free { nth }),
        1 => Just(Op::Flush),
    ]
}

fn config() -> impl Strategy<Value = KvConfig> {
    (1..4_usize, 1..5_usize, 1..9_u32, prop::bool::weighted(0.9), prop::sample::select(vec![0, 4, 128]))
        .prop_map(|(block_size, dcp_size, n_blocks, prefix_cache, hash_bits)| KvConfig {
            layout: DcpLayout::new(block_size, dcp_size).unwrap(),
            n_blocks,
            prefix_cache,
            hash_bits,
        })
}

impl World {
    fn new(config: KvConfig) -> Self {
        let n_slots = config.n_blocks as usize * config.layout.block_size();
        Self {
            kv: KvManager::new(config),
            arena: vec![vec![None; n_slots]; config.layout.dcp_size()],
            seqs: BTreeMap::new(),
            next_seq: 0,
        }
    }

    fn pick(&self, nth: usize) -> Option<u64> {
        self.seqs.keys().nth(nth % self.seqs.len().max(1)).copied()
    }

    fn slot(&self, seq: u64, pos: usize) -> (usize, usize) {
        let layout = self.kv.layout();
        let rank = layout.owner(pos);
        let block = self.kv.tables(SeqId(seq)).unwrap()[rank][layout.local_block(layout.block(pos))];
        (rank, block.0 as usize * layout.block_size() + pos % layout.block_size())
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Allocate { salt, tokens, extra, headroom, reason } => {
                self.allocate(salt, &tokens, extra, headroom, reason);
            }
            Op::Grow { nth, by } => self.grow(nth, by),
            Op::Compute { nth, n } => self.compute(nth, n),
            Op::Push { nth, token } => {
                if let Some(seq) = self.pick(nth) {
                    self.seqs.get_mut(&seq).unwrap().1.push(TokenId(token));
                }
            }
            Op::SetReason { nth, reason } => {
                if let Some(seq) = self.pick(nth) {
                    self.kv.set_reason(SeqId(seq), reason).unwrap();
                }
            }
            Op::Free { nth } => {
                if let Some(seq) = self.pick(nth) {
                    self.seqs.remove(&seq);
                    assert!(self.kv.free(SeqId(seq)));
                    assert!(!self.kv.free(SeqId(seq)), "the second time there is nothing to give back");
                }
            }
            Op::Flush => self.kv.flush_cache(),
        }
    }

    fn allocate(&mut self, salt_id: u8, values: &[u32], extra: usize, headroom: usize, reason: Reason) {
        let layout = self.kv.layout();
        let chain = TokenChain::new(salt(salt_id), layout.block_size(), tokens(values));
        let len = chain.len() + extra;
        let (expected, before) = (self.kv.cached_len(&chain), self.kv.counts());
        let seq = self.next_seq;
        self.next_seq += 1;
        match self.kv.allocate(SeqId(seq), Allocation { chain: &chain, len, reason, headroom }) {
            Ok(cached_len) => {
                assert_eq!(cached_len, expected);
                assert!(cached_len < chain.len() && cached_len.is_multiple_of(layout.block_size()));
                assert_eq!(self.kv.computed_len(SeqId(seq)), Some(cached_len));
                let shared = layout.n_blocks(cached_len);
                for (rank, counts) in self.kv.counts().iter().enumerate() {
                    let took =
                        self.kv.tables(SeqId(seq)).unwrap()[rank].len() > layout.local_n_blocks(shared, rank);
                    assert!(!took || counts.n_available() >= headroom, "no headroom left on rank {rank}");
                }
                self.seqs.insert(seq, (salt_id, chain));
            }
            Err(error) => self.check_no_space(error, &before),
        }
    }

    fn grow(&mut self, nth: usize, by: usize) {
        let Some(seq) = self.pick(nth) else { return };
        let (len, before) = (self.kv.allocated_len(SeqId(seq)).unwrap() + by, self.kv.counts());
        match self.kv.grow(SeqId(seq), len) {
            Ok(()) => assert!(self.kv.allocated_len(SeqId(seq)).unwrap() >= len),
            Err(error) => self.check_no_space(error, &before),
        }
    }

    /// A failed call took nothing, and really could not be done.
    fn check_no_space(&self, error: KvError, before: &[PoolCounts]) {
        let KvError::NoSpace(NoSpace { rank, n_needed, n_available }) = error else { panic!("{error}") };
        assert_eq!(self.kv.counts(), before);
        assert_eq!(n_available, before[rank].n_available());
        assert!(n_needed > n_available);
    }

    /// Writes the KV of the next `n` positions, as far as there are tokens and blocks, and commits them.
    fn compute(&mut self, nth: usize, n: usize) {
        let Some(seq) = self.pick(nth) else { return };
        let (salt_id, chain) = self.seqs[&seq].clone();
        let start = self.kv.computed_len(SeqId(seq)).unwrap();
        let end = (start + n).min(chain.len()).min(self.kv.allocated_len(SeqId(seq)).unwrap());
        for pos in start..end {
            let (rank, slot) = self.slot(seq, pos);
            let block = BlockId((slot / self.kv.layout().block_size()) as u32);
            let refs: u32 = self.kv.pools[rank].refs(block).iter().sum();
            assert_eq!(refs, 1, "sequence {seq} would write to a block it shares");
            self.arena[rank][slot] = Some((salt_id, chain.tokens()[..=pos].to_vec()));
        }
        self.kv.commit(SeqId(seq), &chain, end).unwrap();
        self.kv.commit(SeqId(seq), &chain, start).unwrap();
        assert_eq!(self.kv.computed_len(SeqId(seq)), Some(end), "what is computed stays computed");
    }

    /// Every computed position of every sequence is backed by exactly its own KV.
    fn check(&self) {
        self.kv.audit().unwrap();
        for (&seq, (salt_id, chain)) in &self.seqs {
            for pos in 0..self.kv.computed_len(SeqId(seq)).unwrap() {
                let (rank, slot) = self.slot(seq, pos);
                let expected = Some((*salt_id, chain.tokens()[..=pos].to_vec()));
                assert_eq!(self.arena[rank][slot], expected, "sequence {seq}, position {pos}");
            }
        }
    }

    /// Nothing is lost when all is given back.
    fn check_baseline(mut self) {
        for seq in std::mem::take(&mut self.seqs).into_keys() {
            self.kv.free(SeqId(seq));
        }
        self.check();
        assert!(self.kv.is_idle() && n_owned(&self.kv) == 0);
        self.kv.flush_cache();
        self.check();
        assert!(self.kv.counts().iter().all(|counts| counts.n_free == self.kv.n_blocks_per_rank()));
        assert_eq!(self.kv.n_indexed(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// PFX-1 (with hashes cut to 4 bits and to none), PFX-4, SCH-5: no mix of calls gives a sequence another's
    /// KV, takes a block from its holder, loses one, or leaves half a failed call behind.
    #[test]
    fn every_position_keeps_its_own_kv(config in config(), ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new(config);
        for op in ops {
            world.apply(op);
            world.check();
        }
        world.check_baseline();
    }

    /// Where nothing had to be evicted, all that can be shared is.
    #[test]
    fn a_finished_prefix_is_found_again(
        block_size in 1..5_usize,
        dcp_size in 1..5_usize,
        values in prop::collection::vec(0..2_u32, 1..40),
        n_shared in 0..40_usize,
    ) {
        let mut kv = manager(block_size, dcp_size, 100);
        let first = chain(&kv, values.iter().copied());
        prop_assert_eq!(run(&mut kv, 0, &first), 0);
        kv.free(SeqId(0));
        let n_shared = n_shared.min(values.len());
        let second = chain(&kv, values[..n_shared].iter().copied().chain([7, 7, 7]));
        prop_assert_eq!(run(&mut kv, 1, &second), n_shared / block_size * block_size);
    }
}

#[test]
fn an_equal_prompt_still_computes_its_last_token() {
    let mut kv = manager(4, 2, 8);
    let prompt = chain(&kv, 0..8);
    run(&mut kv, 0, &prompt);
    assert_eq!(run(&mut kv, 1, &prompt), 4);
}

/// PFX-8: block 256, 465 tokens, 256 of them cached: the rest is 209, and the table covers 465.
#[test]
fn a_hit_counts_once() {
    let mut kv = manager(256, 1, 8);
    let shared = chain(&kv, 0..300);
    run(&mut kv, 0, &shared);
    let prompt = chain(&kv, (0..256).chain(1_000..1_209));
    assert_eq!(prompt.len(), 465);
    assert_eq!(run(&mut kv, 1, &prompt), 256);
    assert_eq!(kv.tables(SeqId(1)).unwrap()[0].len(), 2);
    assert_eq!(n_owned(&kv), 3, "the first block is shared");
}

#[test]
fn the_first_of_equal_blocks_is_the_one_that_is_offered() {
    let mut kv = manager(2, 1, 8);
    let prompt = chain(&kv, 0..5);
    for seq in [0, 1] {
        assert_eq!(kv.allocate(SeqId(seq), request(&prompt)), Ok(0), "nothing is computed yet");
    }
    for seq in [1, 0] {
        kv.commit(SeqId(seq), &prompt, 5).unwrap();
    }
    run(&mut kv, 2, &prompt);
    assert_eq!(kv.tables(SeqId(2)).unwrap()[0][..2], kv.tables(SeqId(1)).unwrap()[0][..2]);
    // The duplicates are of no use to anyone.
    kv.free(SeqId(0));
    assert_eq!((kv.counts()[0].n_cached, kv.counts()[0].n_free), (0, 4));
}

#[test]
fn the_end_of_a_cached_chain_goes_first_on_every_rank() {
    for dcp_size in [1, 2, 4] {
        let mut kv = manager(1, dcp_size, 6);
        let n_all = 6 * dcp_size as u32;
        let cached = chain(&kv, 0..n_all);
        run(&mut kv, 0, &cached);
        kv.free(SeqId(0));
        for n_taken in 1..=3 {
            // One row of blocks over the ranks.
            let other = chain(&kv, (0..dcp_size as u32).map(|i| 1_000 * n_taken + i));
            run(&mut kv, u64::from(n_taken), &other);
            let n_left = (n_all as usize) - n_taken as usize * dcp_size;
            assert_eq!(kv.cached_len(&cached), n_left, "D={dcp_size}, {n_taken} rows taken");
        }
    }
}

#[test]
fn a_used_prefix_outlives_an_unused_one() {
    let mut kv = manager(1, 1, 6);
    let (old, new) = (chain(&kv, [1, 2, 3]), chain(&kv, [4, 5, 6]));
    run(&mut kv, 0, &old);
    run(&mut kv, 1, &new);
    kv.free(SeqId(0));
    kv.free(SeqId(1));
    run(&mut kv, 2, &old);
    kv.free(SeqId(2));
    // The hit took the last block of the older chain's copy out of use: one block is free, three are evicted.
    let other = chain(&kv, [7, 8, 9]);
    run(&mut kv, 3, &other);
    assert_eq!((kv.cached_len(&old), kv.cached_len(&new)), (2, 0));
}

/// SCH-5: what an allocation that fails on the last rank had counted before stays where it was.
#[test]
fn a_failed_allocation_keeps_what_the_sequence_had() {
    let mut kv = manager(1, 3, 2);
    let prompt = chain(&kv, 0..4);
    run(&mut kv, 0, &prompt);
    let (tables, counts) = (kv.tables(SeqId(0)).unwrap().to_vec(), kv.counts());
    for len in [7, 100] {
        assert!(matches!(kv.grow(SeqId(0), len), Err(KvError::NoSpace(_))));
        assert_eq!(kv.tables(SeqId(0)), Some(&*tables));
        assert_eq!(kv.counts(), counts);
    }
    kv.grow(SeqId(0), 6).unwrap();
    kv.audit().unwrap();
}

#[test]
fn calls_that_make_no_sense_are_answered_and_change_nothing() {
    let mut kv = manager(2, 1, 4);
    let prompt = chain(&kv, 0..3);
    assert_eq!(kv.grow(SeqId(0), 1), Err(KvError::Unknown(SeqId(0))));
    assert_eq!(kv.commit(SeqId(0), &prompt, 1), Err(KvError::Unknown(SeqId(0))));
    assert_eq!(kv.set_reason(SeqId(0), Reason::Sending), Err(KvError::Unknown(SeqId(0))));
    assert!(!kv.free(SeqId(0)));
    kv.allocate(SeqId(0), request(&prompt)).unwrap();
    assert_eq!(kv.allocate(SeqId(0), request(&prompt)), Err(KvError::AlreadyAllocated(SeqId(0))));
    let beyond = KvError::BeyondEnd { seq: SeqId(0), computed_len: 4, max_len: 3 };
    assert_eq!(kv.commit(SeqId(0), &prompt, 4), Err(beyond));
    kv.audit().unwrap();
}

/// Everything a broken manager could do to itself is noticed: the audit is not a test that cannot fail.
#[test]
fn the_audit_sees_what_is_wrong() {
    type Spoil = fn(&mut KvManager);
    let broken: [(&str, Spoil); 6] = [
        ("hold it", |kv| assert!(kv.pools[0].take(Reason::Sending).is_some())),
        ("offered: true", |kv| {
            kv.free(SeqId(0));
            let oldest = kv.pools[0].oldest_cached().unwrap();
            kv.pools[0].discard(oldest);
        }),
        ("blocks on rank", |kv| kv.seqs.get_mut(&SeqId(0)).unwrap().tables[0].truncate(1)),
        ("not computed", |kv| kv.seqs.get_mut(&SeqId(0)).unwrap().computed_len = 0),
        ("than blocks", |kv| kv.seqs.get_mut(&SeqId(0)).unwrap().computed_len = 100),
        ("before its descendant", |kv| {
            kv.free(SeqId(0));
            let oldest = kv.pools[0].oldest_cached().unwrap();
            kv.pools[0].touch(oldest);
        }),
    ];
    for (words, spoil) in broken {
        let mut kv = manager(1, 2, 4);
        let prompt = chain(&kv, 0..3);
        run(&mut kv, 0, &prompt);
        spoil(&mut kv);
        let error = kv.audit().unwrap_err().to_string();
        assert!(error.contains(words), "{words:?}: {error}");
    }
}
