//! The blocks of one DCP rank and who holds them.
//!
//! ```text
//!            take                    release, not indexed
//!   free ───────────► owned(uses) ─────────────────────────► free
//!    ▲                 ▲      │
//!    │ discard  retain │      │ release, indexed
//!    └──────────────── cached ◄┘
//! ```
//!
//! A block is in exactly one of the three states, and every operation is O(1): the free blocks are a stack, the
//! cached ones a doubly linked list threaded through the slots in order of last use. A reference-counting
//! smart pointer per block was not used: the owner of a block is a *sequence*, whose whole table comes and
//! goes at once, and a drop that reaches back into the pool would need a lock in code that has no threads.
//!
//! The pool does not know what is in a block, nor evicts on its own: [`crate::KvManager`] decides, because
//! evicting a block also takes its descendants out of the prefix index, on every rank.

use longreach_types::BlockId;

use crate::audit::AuditError;

/// Why a block is held.
///
/// A block shared by several sequences is counted once, under the strongest use it has: `Running`, then
/// `Reserved`, then `Sending`. The `Sending` figure is therefore what acknowledgements would give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// A sequence computes on it.
    Running,
    /// It waits for the KV of a hand-off.
    Reserved,
    /// Pinned on the sending side until the receiver has acknowledged, or the hand-off was aborted.
    Sending,
}

impl Reason {
    /// Every reason, strongest first.
    pub const ALL: [Self; 3] = [Self::Running, Self::Reserved, Self::Sending];

    /// The label of the metric "blocks held, by reason".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Reserved => "reserved",
            Self::Sending => "sending",
        }
    }
}

/// Blocks of one rank by state; the five figures add up to the size of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Blocks that hold nothing.
    pub n_free: usize,
    /// Blocks nobody holds whose KV the prefix index still offers; evicted when blocks are needed.
    pub n_cached: usize,
    /// Blocks held, indexed by [`Reason`].
    n_owned: [usize; 3],
}

impl PoolCounts {
    /// Blocks held for `reason`.
    pub const fn n_owned_for(&self, reason: Reason) -> usize {
        self.n_owned[reason as usize]
    }

    /// Blocks held, for any reason.
    pub fn n_owned(&self) -> usize {
        self.n_owned.iter().sum()
    }

    /// Blocks that could be handed out at once: free or evictable.
    pub const fn n_available(&self) -> usize {
        self.n_free + self.n_cached
    }

    /// All blocks of the pool.
    pub fn n_total(&self) -> usize {
        self.n_available() + self.n_owned()
    }
}

/// What one block is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Holds nothing.
    Free,
    /// Held by `n_refs` sequences, the strongest of whose reasons is `reason`.
    Owned {
        /// Sequences that hold it.
        n_refs: u32,
        /// The reason under which it is counted.
        reason: Reason,
    },
    /// Held by nobody, its KV still offered by the prefix index.
    Cached,
}

/// All blocks of one rank. See the module's documentation.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    free: Vec<BlockId>,
    /// Ends of the list of cached blocks: least and most recently used.
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    counts: PoolCounts,
}

#[derive(Clone, Copy, Debug)]
enum Slot {
    Free,
    /// References by reason; at least one.
    Owned([u32; 3]),
    Cached {
        older: Option<BlockId>,
        newer: Option<BlockId>,
    },
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks, `0..n_blocks`.
    pub fn new(n_blocks: u32) -> Self {
        Self {
            slots: vec![Slot::Free; n_blocks as usize],
            // Popped from the back: an idle pool hands out the low ids first.
            free: (0..n_blocks).rev().map(BlockId).collect(),
            oldest: None,
            newest: None,
            counts: PoolCounts { n_free: n_blocks as usize, ..PoolCounts::default() },
        }
    }

    /// Blocks by state.
    pub const fn counts(&self) -> PoolCounts {
        self.counts
    }

    /// What `block` is doing; `None` if there is no such block.
    pub fn state(&self, block: BlockId) -> Option<BlockState> {
        Some(match self.slots.get(block.0 as usize)? {
            Slot::Free => BlockState::Free,
            Slot::Cached { .. } => BlockState::Cached,
            Slot::Owned(refs) => BlockState::Owned { n_refs: refs.iter().sum(), reason: strongest(refs) },
        })
    }

    /// Hands out a free block. `None` when there is none: discard a cached one first.
    pub fn take(&mut self, reason: Reason) -> Option<BlockId> {
        let block = self.free.pop()?;
        let mut refs = [0; 3];
        refs[reason as usize] = 1;
        self.slots[block.0 as usize] = Slot::Owned(refs);
        self.counts.n_free -= 1;
        self.counts.n_owned[reason as usize] += 1;
        Some(block)
    }

    /// One more holder of a block that is cached or owned. `false` if it is free, that is holds no KV.
    pub fn retain(&mut self, block: BlockId, reason: Reason) -> bool {
        let refs = match self.slots[block.0 as usize] {
            Slot::Free => return false,
            Slot::Cached { .. } => {
                self.unlink(block);
                self.counts.n_cached -= 1;
                [0; 3]
            }
            Slot::Owned(refs) => {
                self.counts.n_owned[strongest(&refs) as usize] -= 1;
                refs
            }
        };
        let mut refs = refs;
        refs[reason as usize] += 1;
        self.set_owned(block, refs);
        true
    }

    /// One holder less. With the last one the block becomes cached if `keep`, else free. `false` if no holder
    /// for `reason` exists.
    pub fn release(&mut self, block: BlockId, reason: Reason, keep: bool) -> bool {
        let Slot::Owned(mut refs) = self.slots[block.0 as usize] else { return false };
        if refs[reason as usize] == 0 {
            return false;
        }
        self.counts.n_owned[strongest(&refs) as usize] -= 1;
        refs[reason as usize] -= 1;
        if refs != [0; 3] {
            self.set_owned(block, refs);
        } else if keep {
            self.counts.n_cached += 1;
            self.link_newest(block);
        } else {
            self.set_free(block);
        }
        true
    }

    /// Moves one holder of `block` from one reason to another. `false` if no holder for `from` exists.
    pub fn change_reason(&mut self, block: BlockId, from: Reason, to: Reason) -> bool {
        let Slot::Owned(mut refs) = self.slots[block.0 as usize] else { return false };
        if refs[from as usize] == 0 {
            return false;
        }
        self.counts.n_owned[strongest(&refs) as usize] -= 1;
        refs[from as usize] -= 1;
        refs[to as usize] += 1;
        self.set_owned(block, refs);
        true
    }

    /// Makes a cached block the most recently used one. Does nothing to a block in another state.
    pub fn touch(&mut self, block: BlockId) {
        if let Slot::Cached { .. } = self.slots[block.0 as usize] {
            self.unlink(block);
            self.link_newest(block);
        }
    }

    /// The cached block that was used least recently.
    pub const fn oldest_cached(&self) -> Option<BlockId> {
        self.oldest
    }

    /// Gives up the KV of a cached block: it becomes free. Does nothing to a block in another state, so an
    /// owned block is never taken from its holder.
    pub fn discard(&mut self, block: BlockId) {
        if let Slot::Cached { .. } = self.slots[block.0 as usize] {
            self.unlink(block);
            self.counts.n_cached -= 1;
            self.set_free(block);
        }
    }

    /// The cached blocks, least recently used first.
    pub fn cached(&self) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(self.oldest, |block| match self.slots[block.0 as usize] {
            Slot::Cached { newer, .. } => newer,
            _ => None,
        })
    }

    /// Whether `block` is cached.
    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        matches!(self.slots[block.0 as usize], Slot::Cached { .. })
    }

    /// References to `block` by reason, in the order of [`Reason::ALL`].
    pub(crate) fn refs(&self, block: BlockId) -> [u32; 3] {
        match self.slots[block.0 as usize] {
            Slot::Owned(refs) => refs,
            _ => [0; 3],
        }
    }

    /// Checks that states, lists and counts agree.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut counts = PoolCounts::default();
        for slot in &self.slots {
            match slot {
                Slot::Free => counts.n_free += 1,
                Slot::Cached { .. } => counts.n_cached += 1,
                Slot::Owned(refs) if *refs == [0; 3] => {
                    return Err(AuditError::new("an owned block has no holder"));
                }
                Slot::Owned(refs) => counts.n_owned[strongest(refs) as usize] += 1,
            }
        }
        AuditError::check(counts == self.counts, || {
            format!("counts say {:?}, blocks {counts:?}", self.counts)
        })?;
        let mut seen = vec![false; self.slots.len()];
        for &block in &self.free {
            let fresh = !std::mem::replace(&mut seen[block.0 as usize], true);
            let free = matches!(self.slots[block.0 as usize], Slot::Free);
            AuditError::check(fresh && free, || format!("block {block} is wrongly on the free stack"))?;
        }
        AuditError::check(self.free.len() == counts.n_free, || "a free block is not on the stack".into())?;
        // One more than there can be, so that a cycle shows as a wrong count.
        let cached: Vec<_> = self.cached().take(counts.n_cached + 1).collect();
        AuditError::check(cached.len() == counts.n_cached, || "the list of cached blocks is broken".into())?;
        AuditError::check(cached.last() == self.newest.as_ref(), || {
            "the newest cached block is not last".into()
        })
    }

    /// `block` must be in no list.
    fn set_owned(&mut self, block: BlockId, refs: [u32; 3]) {
        self.counts.n_owned[strongest(&refs) as usize] += 1;
        self.slots[block.0 as usize] = Slot::Owned(refs);
    }

    fn set_free(&mut self, block: BlockId) {
        self.slots[block.0 as usize] = Slot::Free;
        self.free.push(block);
        self.counts.n_free += 1;
    }

    fn link_newest(&mut self, block: BlockId) {
        let older = self.newest.replace(block);
        self.slots[block.0 as usize] = Slot::Cached { older, newer: None };
        match older {
            Some(older) => self.set_newer(older, Some(block)),
            None => self.oldest = Some(block),
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let Slot::Cached { older, newer } = self.slots[block.0 as usize] else { return };
        match older {
            Some(older) => self.set_newer(older, newer),
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.set_older(newer, older),
            None => self.newest = older,
        }
    }

    fn set_newer(&mut self, block: BlockId, to: Option<BlockId>) {
        if let Slot::Cached { newer, .. } = &mut self.slots[block.0 as usize] {
            *newer = to;
        }
    }

    fn set_older(&mut self, block: BlockId, to: Option<BlockId>) {
        if let Slot::Cached { older, .. } = &mut self.slots[block.0 as usize] {
            *older = to;
        }
    }
}

/// The reason under which a block with these references is counted.
fn strongest(refs: &[u32; 3]) -> Reason {
    Reason::ALL.into_iter().find(|reason| refs[*reason as usize] > 0).unwrap_or(Reason::Sending)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_blocks_are_given_up_least_recently_used_first() {
        let mut pool = BlockPool::new(4);
        let blocks: Vec<_> = (0..4).map(|_| pool.take(Reason::Running).unwrap()).collect();
        assert_eq!(pool.take(Reason::Running), None);
        for block in [2, 0, 3, 1] {
            assert!(pool.release(blocks[block], Reason::Running, true));
        }
        pool.touch(blocks[0]);
        assert!(pool.retain(blocks[3], Reason::Sending));
        assert_eq!(pool.cached().collect::<Vec<_>>(), [blocks[2], blocks[1], blocks[0]]);
        pool.discard(pool.oldest_cached().unwrap());
        pool.discard(blocks[3]);
        assert_eq!(pool.state(blocks[3]), Some(BlockState::Owned { n_refs: 1, reason: Reason::Sending }));
        assert_eq!((pool.counts().n_free, pool.counts().n_cached), (1, 2));
        pool.audit().unwrap();
    }

    #[test]
    fn a_shared_block_counts_once_under_its_strongest_reason() {
        let mut pool = BlockPool::new(1);
        let block = pool.take(Reason::Sending).unwrap();
        assert!(pool.retain(block, Reason::Reserved));
        let owned = |pool: &BlockPool| Reason::ALL.map(|reason| pool.counts().n_owned_for(reason));
        assert_eq!(owned(&pool), [0, 1, 0]);
        assert!(pool.change_reason(block, Reason::Sending, Reason::Running));
        assert_eq!(owned(&pool), [1, 0, 0]);
        assert!(!pool.release(block, Reason::Sending, false), "nobody holds it for that reason any more");
        assert!(pool.release(block, Reason::Running, false));
        assert_eq!(owned(&pool), [0, 1, 0]);
        assert!(pool.release(block, Reason::Reserved, false));
        assert!(!pool.retain(block, Reason::Running), "a free block holds no KV to share");
        assert_eq!(pool.counts().n_free, 1);
        pool.audit().unwrap();
    }
}
