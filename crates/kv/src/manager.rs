//! All KV blocks of one engine: D pools, the prefix index over them, and the block table of every sequence.
//!
//! Logical block g of any sequence lies on rank `g mod D`, so its cached copy can serve any sequence with the
//! same prefix. All changes are all-or-nothing over the D pools: what a call needs is counted on every rank
//! before anything is taken, hence there is no half-done work to roll back.
//!
//! **Eviction order.** A sequence's blocks are given back last block first, and the blocks of its prefix that it
//! only duplicated are touched in the same order. So on each rank no cached block is older than its descendants:
//! eviction takes the end of a chain before its start, and what stays cached stays reachable.
//!
//! The manager does not know when a block is being read or written. Whoever runs steps or transfers must not
//! call [`KvManager::free`] before they have ended; `longreach-sched` keeps that rule for steps.

mod audit;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use longreach_types::{BlockId, DcpLayout, SeqId};

use crate::chain::TokenChain;
use crate::index::{NodeRef, Parent, Place, Prefix, PrefixIndex};
use crate::pool::{BlockPool, PoolCounts, Reason};

/// What a [`KvManager`] is built from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// How positions are split over ranks.
    pub layout: DcpLayout,
    /// Blocks of each rank's pool.
    pub n_blocks: u32,
    /// Whether finished blocks are kept for later sequences of the same prefix. Off costs recomputation; on
    /// costs a hash a block, and nothing when nothing is shared.
    pub prefix_cache: bool,
    /// Bits of the block hash the index compares, 128 at most. Fewer serve only to provoke collisions in tests.
    pub hash_bits: u32,
}

impl KvConfig {
    /// Prefix cache on, whole hashes.
    pub const fn new(layout: DcpLayout, n_blocks: u32) -> Self {
        Self { layout, n_blocks, prefix_cache: true, hash_bits: 128 }
    }
}

/// What [`KvManager::allocate`] is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Allocation<'a> {
    /// The sequence's tokens: their prefix is looked up.
    pub chain: &'a TokenChain,
    /// Positions the table must cover; at least the chain's length.
    pub len: usize,
    /// Why the blocks are held.
    pub reason: Reason,
    /// Blocks that must stay available on every rank afterwards.
    pub headroom: usize,
}

/// Blocks are missing on `rank`; nothing was taken on any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} has {n_available} blocks available, {n_needed} are needed; wait until sequences end")]
pub struct NoSpace {
    /// The first rank that is short of blocks.
    pub rank: usize,
    /// Blocks needed there, headroom included.
    pub n_needed: usize,
    /// Blocks free or evictable there.
    pub n_available: usize,
}

/// A call that could not be done. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// Too few blocks.
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
    /// The sequence already has a table.
    #[error("sequence {0} already holds blocks")]
    AlreadyAllocated(SeqId),
    /// The sequence has no table.
    #[error("sequence {0} holds no blocks")]
    Unknown(SeqId),
    /// KV cannot be computed where there is no block, nor of tokens that are not there.
    #[error("sequence {seq}: {computed_len} positions computed, but there are {max_len}")]
    BeyondEnd {
        /// The sequence.
        seq: SeqId,
        /// What the caller says is computed.
        computed_len: usize,
        /// Positions for which there are both a block and a token.
        max_len: usize,
    },
}

/// All KV blocks of one engine. See the module's documentation.
#[derive(Debug)]
pub struct KvManager {
    config: KvConfig,
    pools: Vec<BlockPool>,
    index: PrefixIndex,
    seqs: BTreeMap<SeqId, SeqBlocks>,
    version: u64,
}

#[derive(Debug)]
struct SeqBlocks {
    /// By DCP rank.
    tables: Vec<Vec<BlockId>>,
    n_blocks: usize,
    reason: Reason,
    computed_len: usize,
    /// The node of each full computed block's prefix: the own block, or the one that was registered first. Nodes
    /// may have been evicted since; as a node's descendants go with it, the dead ones are a suffix.
    nodes: Vec<NodeRef>,
}

impl KvManager {
    /// Pools of free blocks and an empty index.
    pub fn new(config: KvConfig) -> Self {
        let n_ranks = config.layout.dcp_size();
        Self {
            config,
            pools: (0..n_ranks).map(|_| BlockPool::new(config.n_blocks)).collect(),
            index: PrefixIndex::new(n_ranks, config.n_blocks as usize, config.hash_bits),
            seqs: BTreeMap::new(),
            version: 0,
        }
    }

    /// How positions are split over ranks.
    pub const fn layout(&self) -> DcpLayout {
        self.config.layout
    }

    /// The longest sequence that an empty cache could hold.
    pub const fn max_seq_len(&self) -> usize {
        self.config.n_blocks as usize * self.config.layout.dcp_size() * self.config.layout.block_size()
    }

    /// Blocks of each rank's pool.
    pub const fn n_blocks_per_rank(&self) -> usize {
        self.config.n_blocks as usize
    }

    /// Blocks by state and reason, by rank.
    pub fn counts(&self) -> Vec<PoolCounts> {
        self.pools.iter().map(BlockPool::counts).collect()
    }

    /// Blocks that could be handed out at once (free or evictable) on the rank that has the fewest.
    pub fn min_available(&self) -> usize {
        self.pools.iter().map(|pool| pool.counts().n_available()).min().unwrap_or(0)
    }

    /// Whether no sequence holds a block.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Sequences that hold blocks, ascending.
    pub fn seqs(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.seqs.keys().copied()
    }

    /// Changes whenever an allocation that failed might succeed: blocks were given back or prefixes registered.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Block tables of `seq` by DCP rank.
    pub fn tables(&self, seq: SeqId) -> Option<&[Vec<BlockId>]> {
        self.seqs.get(&seq).map(|blocks| &*blocks.tables)
    }

    /// Why the blocks of `seq` are held; `None` if it holds none.
    pub fn reason(&self, seq: SeqId) -> Option<Reason> {
        self.seqs.get(&seq).map(|blocks| blocks.reason)
    }

    /// Positions of `seq` whose KV is computed, as far as [`KvManager::commit`] was told; cached ones included.
    pub fn computed_len(&self, seq: SeqId) -> Option<usize> {
        self.seqs.get(&seq).map(|blocks| blocks.computed_len)
    }

    /// Positions of `seq` for which there are blocks.
    pub fn allocated_len(&self, seq: SeqId) -> Option<usize> {
        self.seqs.get(&seq).map(|blocks| blocks.n_blocks * self.config.layout.block_size())
    }

    /// How many leading positions of `chain` an allocation made now would find in the cache: a multiple of the
    /// block size, and short of the last token, which must run to give logits. Takes nothing.
    pub fn cached_len(&self, chain: &TokenChain) -> usize {
        self.matched(chain).len() * self.config.layout.block_size()
    }

    /// Gives `seq` a table for `request.len` positions, sharing the blocks of the longest cached prefix, and
    /// returns the number of positions it covers. All or nothing.
    pub fn allocate(&mut self, seq: SeqId, request: Allocation<'_>) -> Result<usize, KvError> {
        if self.seqs.contains_key(&seq) {
            return Err(KvError::AlreadyAllocated(seq));
        }
        let layout = self.config.layout;
        let nodes = self.matched(request.chain);
        let n_blocks = layout.n_blocks(request.len.max(request.chain.len()));
        self.check_space(nodes.len()..n_blocks, &nodes, request.headroom)?;

        let mut tables = vec![Vec::new(); layout.dcp_size()];
        for node in &nodes {
            self.pools[node.place.rank].retain(node.place.block, request.reason);
            tables[node.place.rank].push(node.place.block);
        }
        let cached_len = nodes.len() * layout.block_size();
        let n_cached = nodes.len();
        let blocks =
            SeqBlocks { tables, n_blocks: n_cached, reason: request.reason, computed_len: cached_len, nodes };
        self.seqs.insert(seq, blocks);
        self.extend(seq, n_cached..n_blocks, request.reason);
        Ok(cached_len)
    }

    /// Extends the table of `seq` to cover `len` positions; does nothing if it does. All or nothing.
    pub fn grow(&mut self, seq: SeqId, len: usize) -> Result<(), KvError> {
        let blocks = self.seqs.get(&seq).ok_or(KvError::Unknown(seq))?;
        let new = blocks.n_blocks..self.config.layout.n_blocks(len);
        let reason = blocks.reason;
        self.check_space(new.clone(), &[], 0)?;
        self.extend(seq, new, reason);
        Ok(())
    }

    /// Takes note that the KV of the first `computed_len` positions is computed, or received and verified, and
    /// offers newly completed full blocks to later sequences. `chain` holds the sequence's tokens. Where the
    /// same prefix was registered before, the earlier block stays the one that is offered.
    pub fn commit(&mut self, seq: SeqId, chain: &TokenChain, computed_len: usize) -> Result<(), KvError> {
        let layout = self.config.layout;
        let blocks = self.seqs.get_mut(&seq).ok_or(KvError::Unknown(seq))?;
        let max_len = chain.len().min(blocks.n_blocks * layout.block_size());
        if computed_len > max_len {
            return Err(KvError::BeyondEnd { seq, computed_len, max_len });
        }
        blocks.computed_len = blocks.computed_len.max(computed_len);
        let n_full = blocks.computed_len / layout.block_size();
        if !self.config.prefix_cache || n_full == blocks.nodes.len() {
            return Ok(());
        }
        // Prefixes evicted since they were registered are registered again, now with the own blocks.
        while blocks.nodes.pop_if(|node| !self.index.is_alive(*node)).is_some() {}
        for block in blocks.nodes.len()..n_full {
            let parent = parent_of(blocks.nodes.last(), chain);
            let prefix =
                Prefix { hash: chain.hashes()[block], parent: &parent, tokens: chain.block_tokens(block) };
            let rank = layout.block_owner(block);
            let own = Place { rank, block: blocks.tables[rank][layout.local_block(block)] };
            let node = self.index.find(prefix).unwrap_or_else(|| self.index.insert(own, prefix));
            blocks.nodes.push(node);
        }
        self.version += 1;
        Ok(())
    }

    /// Gives back everything `seq` holds: blocks whose prefix is offered become cached, the others free.
    /// Idempotent; returns whether there was anything.
    pub fn free(&mut self, seq: SeqId) -> bool {
        let Some(blocks) = self.seqs.remove(&seq) else { return false };
        let layout = self.config.layout;
        for block in (0..blocks.n_blocks).rev() {
            let rank = layout.block_owner(block);
            let own = Place { rank, block: blocks.tables[rank][layout.local_block(block)] };
            let indexed = self.index.contains(own);
            let held = self.pools[rank].release(own.block, blocks.reason, indexed);
            debug_assert!(held, "a table names only blocks its sequence holds");
            // The block that is offered in place of the own one was used as well.
            if let Some(node) = blocks.nodes.get(block).filter(|node| self.index.is_alive(**node)) {
                self.pools[rank].touch(node.place.block);
            }
        }
        self.version += 1;
        true
    }

    /// Changes why the blocks of `seq` are held.
    pub fn set_reason(&mut self, seq: SeqId, reason: Reason) -> Result<(), KvError> {
        let blocks = self.seqs.get_mut(&seq).ok_or(KvError::Unknown(seq))?;
        let from = std::mem::replace(&mut blocks.reason, reason);
        for (pool, table) in self.pools.iter_mut().zip(&blocks.tables) {
            for &block in table {
                let held = pool.change_reason(block, from, reason);
                debug_assert!(held, "a table names only blocks its sequence holds");
            }
        }
        Ok(())
    }

    /// Forgets all cached prefixes. Sequences keep their blocks, and register them again as they go on.
    pub fn flush_cache(&mut self) {
        self.index.clear();
        for pool in &mut self.pools {
            while let Some(block) = pool.oldest_cached() {
                pool.discard(block);
            }
        }
    }

    /// Number of blocks whose prefix is offered, held ones included.
    pub fn n_indexed(&self) -> usize {
        self.index.n_nodes()
    }

    /// The nodes of the longest cached prefix that leaves at least one token to compute.
    fn matched(&self, chain: &TokenChain) -> Vec<NodeRef> {
        debug_assert_eq!(
            chain.block_size(),
            self.config.layout.block_size(),
            "hashes are of the pools' blocks"
        );
        let max_blocks = chain.len().saturating_sub(1) / self.config.layout.block_size();
        let mut nodes = Vec::new();
        for (block, &hash) in chain.hashes().iter().enumerate().take(max_blocks) {
            let parent = parent_of(nodes.last(), chain);
            let prefix = Prefix { hash, parent: &parent, tokens: chain.block_tokens(block) };
            match self.index.find(prefix) {
                Some(node) => nodes.push(node),
                None => break,
            }
        }
        nodes
    }

    /// Whether logical blocks `new` can be taken while `hits` are held, leaving `headroom` on each rank.
    fn check_space(
        &self,
        new: std::ops::Range<usize>,
        hits: &[NodeRef],
        headroom: usize,
    ) -> Result<(), NoSpace> {
        let layout = self.config.layout;
        // A hit that nobody holds yet stops being evictable.
        let mut n_needed = vec![headroom; layout.dcp_size()];
        for node in hits {
            n_needed[node.place.rank] += usize::from(self.pools[node.place.rank].is_cached(node.place.block));
        }
        for (rank, (pool, n_needed)) in self.pools.iter().zip(n_needed).enumerate() {
            let n_new =
                layout.local_n_blocks(new.end, rank).saturating_sub(layout.local_n_blocks(new.start, rank));
            let (n_needed, n_available) = (n_needed + n_new, pool.counts().n_available());
            if n_new > 0 && n_needed > n_available {
                return Err(NoSpace { rank, n_needed, n_available });
            }
        }
        Ok(())
    }

    /// Takes logical blocks `new` for `seq`, evicting where nothing is free. Space must have been checked.
    fn extend(&mut self, seq: SeqId, new: std::ops::Range<usize>, reason: Reason) {
        for block in new {
            let rank = self.config.layout.block_owner(block);
            if self.pools[rank].counts().n_free == 0 {
                self.evict_on(rank);
            }
            let taken = self.pools[rank].take(reason).expect("space was counted before anything was taken");
            let blocks = self.seqs.get_mut(&seq).expect("the caller has made or found the table");
            blocks.tables[rank].push(taken);
            blocks.n_blocks = block + 1;
        }
    }

    /// Evicts the least recently used cached block of `rank`, with the descendants that lose their prefix.
    fn evict_on(&mut self, rank: usize) {
        let Some(block) = self.pools[rank].oldest_cached() else { return };
        for place in self.index.remove(Place { rank, block }) {
            // A descendant that is held by a sequence stays with it; it is only no longer offered.
            self.pools[place.rank].discard(place.block);
        }
    }
}

fn parent_of(node: Option<&NodeRef>, chain: &TokenChain) -> Parent {
    node.map_or_else(|| Parent::Root(chain.salt().clone()), |node| Parent::Node(*node))
}
