//! The model of a simulated cluster: a function of all tokens so far, computed from KV cells alone.
//!
//! A cell is a fingerprint of (all tokens up to its position, layer, position), and the next token is made from the sum
//! over all cells that the ranks hold. A token that is lost, doubled or changed, a prefix taken from another sequence, a
//! block that was given away too early: each shows at once as a wrong cell, and again as a wrong token at the client.

use longreach_types::TokenId;

use crate::rng::mix;

/// Layers: two, so that coverage has a second dimension.
pub(crate) const N_LAYERS: usize = 2;

/// Token ids are below this. Every output token ends the output in one of so many cases.
pub(crate) const VOCAB_SIZE: usize = 61;

/// The end-of-sequence token.
pub(crate) const EOS: TokenId = TokenId(0);

/// Hashes of all prefixes of a sequence: entry `p` covers the tokens up to position `p`.
pub(crate) fn prefixes(tokens: &[TokenId]) -> Vec<u64> {
    let chain = tokens.iter().scan(1, |before, token| {
        *before = mix(*before ^ u64::from(token.0).rotate_left(32));
        Some(*before)
    });
    chain.collect()
}

/// The cell of `layer` at `pos`, where the prefix up to there has hash `prefix`.
pub(crate) const fn cell(prefix: u64, layer: usize, pos: usize) -> u64 {
    mix(prefix ^ ((layer as u64) << 56) ^ pos as u64)
}

/// What one cell adds to a row's sum.
pub(crate) const fn weight(cell: u64, layer: usize, pos: usize) -> u64 {
    mix(cell.wrapping_add(((layer as u64) << 32) | pos as u64))
}

/// The token that follows the cells of this sum.
pub(crate) const fn token_of(sum: u64) -> TokenId {
    TokenId((mix(sum) % VOCAB_SIZE as u64) as u32)
}

/// The logits of a row with this sum: one token is possible. So the product's sampler is at work, whatever its noise.
pub(crate) fn logits(sum: u64) -> [f32; VOCAB_SIZE] {
    let mut row = [f32::NEG_INFINITY; VOCAB_SIZE];
    row[token_of(sum).0 as usize] = 0.0;
    row
}

/// The token that follows `tokens`, with nothing in between that could go wrong.
pub(crate) fn next_token(tokens: &[TokenId]) -> TokenId {
    let sum = prefixes(tokens).into_iter().enumerate().flat_map(|(pos, prefix)| {
        (0..N_LAYERS).map(move |layer| weight(cell(prefix, layer, pos), layer, pos))
    });
    token_of(sum.fold(0, u64::wrapping_add))
}
