//! Finding control tokens in a rendered prompt, those of the template only.

use aho_corasick::{AhoCorasick, MatchKind};
use longreach_types::TokenId;
use tokenizers::AddedToken;

use crate::TextError;

/// The control tokens of a vocabulary, as patterns.
#[derive(Debug)]
pub(super) struct Controls {
    finder: AhoCorasick,
    tokens: Vec<(TokenId, AddedToken)>,
}

/// A control token in a text, with the white space that it takes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlMatch {
    pub(super) token: TokenId,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Controls {
    pub(super) fn new(tokens: Vec<(TokenId, AddedToken)>) -> Result<Self, TextError> {
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, token)| &token.content));
        let finder = finder.map_err(|error| TextError::Tokenizer {
            operation: "index its control tokens",
            reason: error.to_string(),
        })?;
        Ok(Self { finder, tokens })
    }

    /// The spellings of all control tokens.
    pub(super) fn spellings(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().map(|(_, token)| token.content.as_str())
    }

    /// The control token spelled `text`.
    pub(super) fn spelled(&self, text: &str) -> Option<TokenId> {
        self.tokens.iter().find(|(_, token)| token.content == text).map(|(id, _)| *id)
    }

    /// Control tokens of `text` from left to right, longest first, leaving out those that `is_forged` says
    /// come from a user.
    pub(super) fn find(&self, text: &str, is_forged: impl Fn(usize, usize) -> bool) -> Vec<ControlMatch> {
        let mut found: Vec<ControlMatch> = Vec::new();
        let mut from = 0;
        while let Some(hit) = self.finder.find(aho_corasick::Input::new(text).range(from..)) {
            let (token, flags) = &self.tokens[hit.pattern().as_usize()];
            let torn = flags.single_word && !stands_alone(text, hit.start(), hit.end());
            if torn || is_forged(hit.start(), hit.end()) {
                from = next_char(text, hit.start());
                continue;
            }
            let (mut start, mut end) = (hit.start(), hit.end());
            if flags.lstrip {
                let last_end = found.last().map_or(0, |last| last.end);
                start = text[last_end..start].trim_end().len() + last_end;
            }
            if flags.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            found.push(ControlMatch { token: *token, start, end });
            from = end;
        }
        found
    }
}

fn next_char(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

fn stands_alone(text: &str, start: usize, end: usize) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..start].ends_with(is_word) && !text[end..].starts_with(is_word)
}
