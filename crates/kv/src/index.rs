//! The prefix index: which block holds the KV of which prefix.
//!
//! A forest. A node is one full block of computed KV; its parent is the node of the block before it, or the salt
//! for the first block. A node is found by its hash, but taken only if its parent *is* the node matched so far
//! and its token ids are equal. So by induction the whole prefix was compared, and a hash cut to four bits
//! still gives no wrong hit: see the property test, which runs with exactly that.
//!
//! Invariants: at most one node a prefix; a node's ancestors are all present. Taking a node out takes out its
//! descendants, which could never be reached again and would only look like cached KV. A radix tree over
//! tokens was not used: sharing is by whole blocks anyway, and hashes are what the router compares.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use longreach_types::{BlockHash, BlockId, TokenId};

use crate::audit::AuditError;
use crate::chain::PrefixSalt;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) block: BlockId,
}

/// One registration of one prefix. A place may be registered again for another prefix; then the serial differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeRef {
    pub(crate) place: Place,
    serial: u64,
}

/// What stands before a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(PrefixSalt),
    Node(NodeRef),
}

/// A block's prefix as it is looked up and registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefix<'a> {
    pub(crate) hash: BlockHash,
    pub(crate) parent: &'a Parent,
    pub(crate) tokens: &'a [TokenId],
}

#[derive(Debug)]
pub(crate) struct PrefixIndex {
    by_hash: HashMap<BlockHash, Vec<Place>, BuildHasherDefault<DigestHasher>>,
    /// By rank, then block.
    nodes: Vec<Vec<Option<Node>>>,
    n_nodes: usize,
    next_serial: u64,
    hash_bits: u32,
}

#[derive(Debug)]
struct Node {
    serial: u64,
    hash: BlockHash,
    parent: Parent,
    tokens: Box<[TokenId]>,
    first_child: Option<Place>,
    prev_sibling: Option<Place>,
    next_sibling: Option<Place>,
}

/// Keys are digests already, so their own bytes are the hash. It has no random seed: a simulation that runs
/// twice does the same thing twice.
#[derive(Debug, Default)]
pub(crate) struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(1) ^ u64::from_le_bytes(word);
        }
    }
}

impl PrefixIndex {
    /// An empty index over `n_ranks` pools of `n_blocks`, comparing the first `hash_bits` bits of hashes.
    pub(crate) fn new(n_ranks: usize, n_blocks: usize, hash_bits: u32) -> Self {
        let nodes = (0..n_ranks).map(|_| (0..n_blocks).map(|_| None).collect()).collect();
        Self { by_hash: HashMap::default(), nodes, n_nodes: 0, next_serial: 0, hash_bits }
    }

    pub(crate) fn n_nodes(&self) -> usize {
        self.n_nodes
    }

    /// The node of exactly this prefix.
    pub(crate) fn find(&self, prefix: Prefix<'_>) -> Option<NodeRef> {
        let places = self.by_hash.get(&self.cut(prefix.hash))?;
        places.iter().find_map(|&place| {
            let node = self.node(place)?;
            let same = node.parent == *prefix.parent && *node.tokens == *prefix.tokens;
            same.then_some(NodeRef { place, serial: node.serial })
        })
    }

    /// Registers `place` for `prefix`, which must not be registered, nor `place` for another one.
    pub(crate) fn insert(&mut self, place: Place, prefix: Prefix<'_>) -> NodeRef {
        debug_assert!(!self.contains(place) && self.find(prefix).is_none());
        let (serial, hash) = (self.next_serial, self.cut(prefix.hash));
        self.next_serial += 1;
        let next_sibling = match prefix.parent {
            Parent::Root(_) => None,
            Parent::Node(parent) => {
                self.node_mut(parent.place).and_then(|node| node.first_child.replace(place))
            }
        };
        if let Some(sibling) = next_sibling.and_then(|sibling| self.node_mut(sibling)) {
            sibling.prev_sibling = Some(place);
        }
        self.by_hash.entry(hash).or_default().push(place);
        self.n_nodes += 1;
        self.nodes[place.rank][place.block.0 as usize] = Some(Node {
            serial,
            hash,
            parent: prefix.parent.clone(),
            tokens: prefix.tokens.into(),
            first_child: None,
            prev_sibling: None,
            next_sibling,
        });
        NodeRef { place, serial }
    }

    /// Whether `place` is registered for some prefix.
    pub(crate) fn contains(&self, place: Place) -> bool {
        self.node(place).is_some()
    }

    /// Whether this very registration still stands.
    pub(crate) fn is_alive(&self, node: NodeRef) -> bool {
        self.node(node.place).is_some_and(|found| found.serial == node.serial)
    }

    /// Takes out the node at `place` and all its descendants; returns their places, `place` first.
    pub(crate) fn remove(&mut self, place: Place) -> Vec<Place> {
        self.unlink_from_siblings(place);
        let (mut removed, mut next) = (vec![place], 0);
        while let Some(&place) = removed.get(next) {
            next += 1;
            let Some(node) = self.nodes[place.rank][place.block.0 as usize].take() else { continue };
            self.n_nodes -= 1;
            self.unlink_from_hash(node.hash, place);
            let siblings = |&child: &Place| self.node(child).and_then(|node| node.next_sibling);
            removed.extend(std::iter::successors(node.first_child, siblings));
        }
        removed
    }

    /// Takes out everything.
    pub(crate) fn clear(&mut self) {
        self.by_hash.clear();
        self.nodes.iter_mut().flatten().for_each(|node| *node = None);
        self.n_nodes = 0;
    }

    /// The node before `place`; `None` for a first block, or when `place` is not registered.
    pub(crate) fn parent(&self, place: Place) -> Option<NodeRef> {
        match self.node(place)?.parent {
            Parent::Root(_) => None,
            Parent::Node(parent) => Some(parent),
        }
    }

    /// Checks that map, nodes and links agree. O(everything).
    pub(crate) fn audit(&self) -> Result<(), AuditError> {
        let mut n_nodes = 0;
        for (rank, nodes) in self.nodes.iter().enumerate() {
            for (block, node) in nodes.iter().enumerate() {
                let Some(node) = node else { continue };
                n_nodes += 1;
                self.audit_node(Place { rank, block: BlockId(block as u32) }, node)?;
            }
        }
        let n_hashed = self.by_hash.values().map(Vec::len).sum::<usize>();
        AuditError::check(n_nodes == self.n_nodes && n_hashed == n_nodes, || {
            format!("{n_nodes} nodes, counted {}, found by hash {n_hashed}", self.n_nodes)
        })
    }

    fn audit_node(&self, place: Place, node: &Node) -> Result<(), AuditError> {
        let prefix = Prefix { hash: node.hash, parent: &node.parent, tokens: &node.tokens };
        let found = self.find(prefix);
        AuditError::check(found == Some(NodeRef { place, serial: node.serial }), || {
            format!("{place:?} is not found by its own prefix, but {found:?}")
        })?;
        let Parent::Node(parent) = node.parent else { return Ok(()) };
        AuditError::check(self.is_alive(parent), || format!("{place:?} has lost its parent"))?;
        let first = self.node(parent.place).and_then(|node| node.first_child);
        let after_prev = match node.prev_sibling {
            None => first,
            Some(prev) => self.node(prev).and_then(|node| node.next_sibling),
        };
        AuditError::check(after_prev == Some(place), || format!("{place:?} has a wrong sibling before it"))?;
        let siblings = |&child: &Place| self.node(child).and_then(|node| node.next_sibling);
        let listed =
            std::iter::successors(first, siblings).take(self.n_nodes).filter(|child| *child == place);
        AuditError::check(listed.count() == 1, || {
            format!("{place:?} is not once among its parent's children")
        })
    }

    fn node(&self, place: Place) -> Option<&Node> {
        self.nodes[place.rank][place.block.0 as usize].as_ref()
    }

    fn node_mut(&mut self, place: Place) -> Option<&mut Node> {
        self.nodes[place.rank][place.block.0 as usize].as_mut()
    }

    fn cut(&self, hash: BlockHash) -> BlockHash {
        let shift = 128 - self.hash_bits.min(128);
        let kept = u128::from_be_bytes(hash.0).checked_shr(shift).unwrap_or(0);
        BlockHash(kept.checked_shl(shift).unwrap_or(0).to_be_bytes())
    }

    fn unlink_from_siblings(&mut self, place: Place) {
        let Some(node) = self.node(place) else { return };
        let (prev, next, parent) = (node.prev_sibling, node.next_sibling, self.parent(place));
        if let Some(node) = next.and_then(|next| self.node_mut(next)) {
            node.prev_sibling = prev;
        }
        if let Some(node) = prev.and_then(|prev| self.node_mut(prev)) {
            node.next_sibling = next;
        } else if let Some(node) = parent.and_then(|parent| self.node_mut(parent.place)) {
            node.first_child = next;
        }
    }

    fn unlink_from_hash(&mut self, hash: BlockHash, place: Place) {
        let Some(places) = self.by_hash.get_mut(&hash) else { return };
        places.retain(|&other| other != place);
        if places.is_empty() {
            self.by_hash.remove(&hash);
        }
    }
}
