//! Prefix keys: the tokens of a sequence with the hashes of its full blocks.
//!
//! A block's hash is the first 16 bytes of SHA-256 over a version tag, the parent block's hash and the block's
//! token ids; the first block's parent is the hash of the salt fields, each tagged and length-prefixed so that
//! no two sets of fields give the same bytes. It names a *prefix*, not a window. The hash is fixed and
//! versioned, so two processes give equal keys, and [`self_check`] proves at start that this build does.
//!
//! A seeded or fast hash was not used: keys would differ between processes, or could be forged by a tenant who
//! wants another's KV. Hashes are computed once, as tokens arrive, and kept beside them: admission looks the
//! prompt up again on every try.

use std::sync::Arc;

use longreach_types::{BlockHash, TokenId};
use sha2::{Digest, Sha256};

/// Names the form of the hash input. Another form gets another tag.
const VERSION_TAG: &[u8] = b"longreach block hash v1";

/// Third bytes of the input, so that a root can never equal a block.
const ROOT: u8 = 0;
const BLOCK: u8 = 1;

/// Separates prefix caches: sequences of different salts share no blocks.
///
/// Cheap to clone; equality compares the fields, not the hash.
#[derive(Clone, Debug)]
pub struct PrefixSalt {
    fields: Arc<SaltFields>,
    root: BlockHash,
}

#[derive(Debug, PartialEq, Eq)]
struct SaltFields {
    model: Vec<u8>,
    adapter: Vec<u8>,
    tenant: Vec<u8>,
}

/// This build's block hash differs from the fixed test vector; it must not share keys with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block hash of the test vector is {got}, expected {expected}; this build must not be used")]
pub struct HashMismatch {
    /// The fixed vector.
    pub expected: BlockHash,
    /// What this build computes.
    pub got: BlockHash,
}

/// The tokens of one sequence, prompt and output, and the hashes of all its full blocks.
#[derive(Clone, Debug)]
pub struct TokenChain {
    salt: PrefixSalt,
    block_size: usize,
    tokens: Vec<TokenId>,
    hashes: Vec<BlockHash>,
}

impl PrefixSalt {
    /// `model` is the fingerprint of the weights; `adapter` and `tenant` are empty where there is none.
    pub fn new(model: &[u8], adapter: &[u8], tenant: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(VERSION_TAG);
        hash.update([ROOT]);
        for (tag, field) in [(b'm', model), (b'a', adapter), (b't', tenant)] {
            hash.update([tag]);
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field);
        }
        let fields = SaltFields { model: model.to_vec(), adapter: adapter.to_vec(), tenant: tenant.to_vec() };
        Self { fields: Arc::new(fields), root: truncated(hash) }
    }

    /// The hash that stands for "no block before this one".
    pub const fn root(&self) -> BlockHash {
        self.root
    }
}

impl PartialEq for PrefixSalt {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fields, &other.fields) || self.fields == other.fields
    }
}

impl Eq for PrefixSalt {}

impl TokenChain {
    /// The chain of `tokens` in blocks of `block_size`, which must be at least 1.
    pub fn new(salt: PrefixSalt, block_size: usize, tokens: Vec<TokenId>) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        let mut chain = Self { salt, block_size, tokens, hashes: Vec::new() };
        chain.hash_full_blocks();
        chain
    }

    /// Appends one token.
    pub fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.hash_full_blocks();
    }

    /// Appends tokens in order.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
        self.hash_full_blocks();
    }

    /// All tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Number of tokens.
    pub const fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Hashes of the full blocks, in order.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// The salt under which the chain is hashed.
    pub const fn salt(&self) -> &PrefixSalt {
        &self.salt
    }

    /// Tokens a block.
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// The tokens of full block `block`.
    pub(crate) fn block_tokens(&self, block: usize) -> &[TokenId] {
        &self.tokens[block * self.block_size..(block + 1) * self.block_size]
    }

    fn hash_full_blocks(&mut self) {
        while (self.hashes.len() + 1) * self.block_size <= self.tokens.len() {
            let parent = self.hashes.last().copied().unwrap_or(self.salt.root);
            let hash = block_hash(parent, self.block_tokens(self.hashes.len()));
            self.hashes.push(hash);
        }
    }
}

/// The hash of the block that holds `tokens` and follows the one called `parent`.
pub fn block_hash(parent: BlockHash, tokens: &[TokenId]) -> BlockHash {
    let mut hash = Sha256::new();
    hash.update(VERSION_TAG);
    hash.update([BLOCK]);
    hash.update(parent.0);
    hash.update((tokens.len() as u64).to_le_bytes());
    for token in tokens {
        hash.update(token.0.to_le_bytes());
    }
    truncated(hash)
}

/// Compares this build's hash with the fixed test vector. Call it once at start.
pub fn self_check() -> Result<(), HashMismatch> {
    let salt = PrefixSalt::new(b"model", b"adapter", b"tenant");
    let chain = TokenChain::new(salt, 4, (0..8).map(|i| TokenId(i * 1_000)).collect());
    let got = chain.hashes[1];
    if got == TEST_VECTOR { Ok(()) } else { Err(HashMismatch { expected: TEST_VECTOR, got }) }
}

/// Second block of model "model", adapter "adapter", tenant "tenant", tokens 0, 1000, … 7000, four a block;
/// computed independently of this code.
const TEST_VECTOR: BlockHash = BlockHash([
    0xa5, 0x16, 0x40, 0x89, 0x08, 0xfd, 0xa1, 0x76, 0x2f, 0x82, 0xe8, 0xc1, 0xca, 0xc0, 0xce, 0x33,
]);

fn truncated(hash: Sha256) -> BlockHash {
    let digest = hash.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    BlockHash(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_build_gives_the_fixed_vector() {
        self_check().unwrap();
    }

    #[test]
    fn salt_fields_do_not_run_into_each_other() {
        let salts = [
            PrefixSalt::new(b"m", b"X", b""),
            PrefixSalt::new(b"m", b"", b"X"),
            PrefixSalt::new(b"m", b"a", b"bc"),
            PrefixSalt::new(b"m", b"ab", b"c"),
            PrefixSalt::new(b"mX", b"", b""),
        ];
        for (i, left) in salts.iter().enumerate() {
            for (j, right) in salts.iter().enumerate() {
                assert_eq!(left == right, i == j);
                assert_eq!(left.root() == right.root(), i == j);
            }
        }
    }

    #[test]
    fn pushing_tokens_gives_the_chain_of_the_whole() {
        let salt = PrefixSalt::new(b"m", b"", b"");
        let tokens: Vec<_> = (0..11).map(TokenId).collect();
        let whole = TokenChain::new(salt.clone(), 3, tokens.clone());
        let mut pushed = TokenChain::new(salt, 3, Vec::new());
        tokens.into_iter().for_each(|token| pushed.push(token));
        assert_eq!(whole.hashes(), pushed.hashes());
        assert_eq!(whole.hashes().len(), 3);
    }
}
