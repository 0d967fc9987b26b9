//! Token ids to text, one stream at a time.
//!
//! Bytes of a character that is not whole yet are held; all else is emitted with the token that completes it.
//! The concatenated text equals a lossy decode of all bytes at once: invalid bytes become U+FFFD, and a
//! sequence that is only cut at the present end is not taken for invalid.
//!
//! Decoding the whole output again for each token, as is often done, costs quadratic time and is not even
//! right, as decoders rewrite their ends. So each token contributes its bytes. For the rare vocabulary where
//! that is not possible the library decodes a short window, see [`Window`].

use longreach_types::TokenId;

use crate::TextError;
use crate::tokenizer::{DecodeRule, Lead, LeadState, Tokenizer};

/// How many tokens a window may hold back before it is emitted as it is.
const MAX_WINDOW_HELD: usize = 32;
/// How many tokens of the prompt open a window.
const N_CONTEXT_TOKENS: usize = 8;

/// The state of one output stream.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Bytes { held: Vec<u8>, lead: LeadState },
    Window(Window),
}

/// For decoders that need context. Everything since the last emission is decoded behind the tokens of the
/// emission before, and what is new behind the common prefix of the two texts is emitted. A decoder that
/// rewrites text it gave before cannot be followed exactly; it never leads to an error.
#[derive(Clone, Debug, Default)]
struct Window {
    tokens: Vec<TokenId>,
    n_emitted: usize,
}

impl Detokenizer {
    /// A stream that continues `prompt`. With `skip_special`, control tokens give no text.
    pub fn new(tokenizer: &Tokenizer, prompt: &[TokenId], skip_special: bool) -> Self {
        let is_visible = |token: &&TokenId| !(skip_special && tokenizer.is_control(**token));
        let state = match tokenizer.rule() {
            DecodeRule::Bytes(_, lead) => {
                let opens_text = !prompt.iter().any(|token| is_visible(&token));
                let lead = LeadState::new(if opens_text { *lead } else { Lead::Keep });
                State::Bytes { held: cut_tail(tokenizer, prompt, is_visible), lead }
            }
            DecodeRule::Window => {
                let tokens = prompt[prompt.len().saturating_sub(N_CONTEXT_TOKENS)..].to_vec();
                State::Window(Window { n_emitted: tokens.len(), tokens })
            }
        };
        Self { tokenizer: tokenizer.clone(), skip_special, state }
    }

    /// Takes the next token; returns the text that it completes, often none. A token that the tokenizer does
    /// not know gives no text: models are padded beyond their vocabulary, and may sample from the padding.
    pub fn push(&mut self, token: TokenId) -> Result<String, TextError> {
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        if self.skip_special && self.tokenizer.is_control(token) {
            return Ok(String::new());
        }
        match &mut self.state {
            State::Bytes { held, lead } => {
                lead.append(bytes, held);
                Ok(take_whole(held))
            }
            State::Window(window) => window.push(token, &self.tokenizer, self.skip_special),
        }
    }

    /// Ends the stream: a character that was never completed comes out as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TextError> {
        match &mut self.state {
            State::Bytes { held, .. } => Ok(String::from_utf8_lossy(&std::mem::take(held)).into_owned()),
            State::Window(window) => window.emit(&self.tokenizer, self.skip_special),
        }
    }
}

impl Window {
    fn push(&mut self, token: TokenId, tokenizer: &Tokenizer, skip: bool) -> Result<String, TextError> {
        self.tokens.push(token);
        let text = tokenizer.decode_by_library(&self.tokens, skip)?;
        let n_held = self.tokens.len() - self.n_emitted;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && n_held <= MAX_WINDOW_HELD {
            return Ok(String::new());
        }
        self.emit(tokenizer, skip)
    }

    fn emit(&mut self, tokenizer: &Tokenizer, skip: bool) -> Result<String, TextError> {
        let before = tokenizer.decode_by_library(&self.tokens[..self.n_emitted], skip)?;
        let after = tokenizer.decode_by_library(&self.tokens, skip)?;
        let new = &after[common_prefix_len(&before, &after)..];
        if !new.is_empty() {
            self.tokens.drain(..self.n_emitted);
            self.n_emitted = self.tokens.len();
        }
        Ok(new.to_owned())
    }
}

/// Length of the longest common prefix, at a character boundary of both.
fn common_prefix_len(a: &str, b: &str) -> usize {
    let common = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    common.map(|(c, _)| c.len_utf8()).sum()
}

/// Takes the decided part of `bytes`: all but a sequence that is valid so far and cut at the end.
fn take_whole(bytes: &mut Vec<u8>) -> String {
    let mut decided = 0;
    loop {
        match std::str::from_utf8(&bytes[decided..]) {
            Ok(rest) => decided += rest.len(),
            Err(error) => {
                decided += error.valid_up_to();
                if let Some(n_invalid) = error.error_len() {
                    decided += n_invalid;
                    continue;
                }
            }
        }
        break;
    }
    let whole = String::from_utf8_lossy(&bytes[..decided]).into_owned();
    bytes.drain(..decided);
    whole
}

/// The bytes of a character that the prompt begins and does not end: a prompt of token ids may do that.
fn cut_tail(tokenizer: &Tokenizer, prompt: &[TokenId], is_visible: impl Fn(&&TokenId) -> bool) -> Vec<u8> {
    let mut tail: Vec<u8> = Vec::new();
    for token in prompt.iter().rev().filter(is_visible) {
        let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
        tail.splice(..0, bytes.iter().copied());
        if tail.len() >= 3 {
            break;
        }
    }
    take_whole(&mut tail);
    tail
}

#[cfg(test)]
mod tests;
