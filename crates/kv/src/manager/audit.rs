//! The manager's self-check: every invariant of its documentation, from first principles.

use std::collections::BTreeMap;

use longreach_types::{BlockId, SeqId};

use super::{KvManager, SeqBlocks};
use crate::audit::AuditError;
use crate::index::Place;
use crate::pool::{BlockState, Reason};

impl KvManager {
    /// Checks every invariant. O(all blocks); for tests, and for a worker that suspects itself.
    pub fn audit(&self) -> Result<(), AuditError> {
        self.pools.iter().try_for_each(|pool| pool.audit())?;
        self.index.audit()?;
        self.seqs.iter().try_for_each(|(seq, blocks)| self.audit_seq(*seq, blocks))?;
        self.audit_refs()?;
        self.audit_states()?;
        (0..self.pools.len()).try_for_each(|rank| self.audit_eviction_order(rank))
    }

    fn audit_seq(&self, seq: SeqId, blocks: &SeqBlocks) -> Result<(), AuditError> {
        let layout = self.config.layout;
        for (rank, table) in blocks.tables.iter().enumerate() {
            AuditError::check(table.len() == layout.local_n_blocks(blocks.n_blocks, rank), || {
                format!("sequence {seq} has {} blocks on rank {rank} of {}", table.len(), blocks.n_blocks)
            })?;
        }
        AuditError::check(blocks.computed_len <= blocks.n_blocks * layout.block_size(), || {
            format!("sequence {seq} has more positions computed than blocks for them")
        })?;
        AuditError::check(blocks.nodes.len() <= blocks.computed_len / layout.block_size(), || {
            format!("sequence {seq} offers blocks that are not computed")
        })?;
        let mut parent = None;
        for (block, node) in blocks.nodes.iter().enumerate() {
            if !self.index.is_alive(*node) {
                parent = None;
                continue;
            }
            let rank = layout.block_owner(block);
            AuditError::check(node.place.rank == rank && self.index.parent(node.place) == parent, || {
                format!(
                    "sequence {seq}: the prefix of block {block} is {node:?}, not after {parent:?} on {rank}"
                )
            })?;
            parent = Some(*node);
        }
        Ok(())
    }

    /// Every reference a pool counts is that of a table, and the other way round.
    fn audit_refs(&self) -> Result<(), AuditError> {
        for (rank, pool) in self.pools.iter().enumerate() {
            let mut refs: BTreeMap<BlockId, [u32; 3]> = BTreeMap::new();
            for blocks in self.seqs.values() {
                for &block in &blocks.tables[rank] {
                    refs.entry(block).or_default()[blocks.reason as usize] += 1;
                }
            }
            for block in (0..self.config.n_blocks).map(BlockId) {
                let (held, counted) = (refs.get(&block).copied().unwrap_or_default(), pool.refs(block));
                AuditError::check(held == counted, || {
                    let names = Reason::ALL.map(Reason::name);
                    format!("rank {rank} block {block}: {names:?} hold it {held:?}, counted {counted:?}")
                })?;
            }
        }
        Ok(())
    }

    /// A cached block is offered; a free one is not.
    fn audit_states(&self) -> Result<(), AuditError> {
        for (rank, pool) in self.pools.iter().enumerate() {
            for block in (0..self.config.n_blocks).map(BlockId) {
                let offered = self.index.contains(Place { rank, block });
                let right = match pool.state(block) {
                    Some(BlockState::Free) => !offered,
                    Some(BlockState::Cached) => offered,
                    Some(BlockState::Owned { .. }) => true,
                    None => false,
                };
                AuditError::check(right, || {
                    format!("rank {rank} block {block} is {:?}, offered: {offered}", pool.state(block))
                })?;
            }
        }
        Ok(())
    }

    /// On one rank no cached block would be evicted before a cached descendant.
    fn audit_eviction_order(&self, rank: usize) -> Result<(), AuditError> {
        let age: BTreeMap<BlockId, usize> = self.pools[rank].cached().zip(0..).collect();
        for (&block, order) in &age {
            let mut place = Place { rank, block };
            while let Some(parent) = self.index.parent(place) {
                place = parent.place;
                let later = place.rank != rank || age.get(&place.block).is_none_or(|other| other > order);
                AuditError::check(later, || {
                    format!("rank {rank} would evict block {} before its descendant {block}", place.block)
                })?;
            }
        }
        Ok(())
    }
}
