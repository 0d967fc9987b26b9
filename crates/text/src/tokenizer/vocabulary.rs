//! The vocabulary as a table from token id to bytes.

use longreach_types::TokenId;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// No token has this id.
    Hole,
    /// Stands for text.
    Text,
    /// Structure, not text: beginning, end, a turn. Text never becomes one.
    Control,
}

/// One row of a [`Vocabulary`] under construction.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) bytes: Vec<u8>,
    pub(crate) kind: TokenKind,
}

/// All tokens, their bytes in one piece of memory.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    kinds: Vec<TokenKind>,
}

impl Vocabulary {
    pub(crate) fn new(entries: impl IntoIterator<Item = Entry>) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: Vec::new(), kinds: Vec::new() };
        for entry in entries {
            table.bytes.extend_from_slice(&entry.bytes);
            table.ends.push(table.bytes.len());
            table.kinds.push(entry.kind);
        }
        table
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token, `None` above the last id.
    pub(crate) fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        let idx = token.0 as usize;
        let end = *self.ends.get(idx)?;
        let start = if idx == 0 { 0 } else { self.ends[idx - 1] };
        Some(&self.bytes[start..end])
    }

    pub(crate) fn kind(&self, token: TokenId) -> TokenKind {
        self.kinds.get(token.0 as usize).copied().unwrap_or(TokenKind::Hole)
    }
}
