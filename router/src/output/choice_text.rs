//! The text of one output, and which token belongs to which piece of it.
//!
//! Text is held back while a character is incomplete or a stop string may be beginning. Tokens are reported with
//! their log-probabilities and spellings, so they are held back with their text: otherwise a stop string would reach
//! the client after all, token by token. A token goes out once text up to and into it has gone out. Positions are
//! counted in characters as tokens spell them; where a decoder rewrites text they are approximate, and tokens may
//! come with a later piece.

use std::{collections::VecDeque, sync::Arc};

use longreach_proto::worker::OutputToken;
use longreach_text::{StreamOptions, TextModel, TextStream, Tokenizer};
use longreach_types::TokenId;

use super::{Delta, DeltaToken};
use crate::{error::ServiceError, gateway::from_text_error, request::GenerateSpec};

/// The text of one output.
pub(super) struct ChoiceText {
    stream: TextStream,
    tokenizer: Tokenizer,
    stops: Vec<String>,
    /// Tokens that end the output and give no text.
    end_tokens: Arc<[TokenId]>,
    /// Whether tokens are reported at all.
    has_tokens: bool,
    held: VecDeque<HeldToken>,
    /// Characters of all tokens so far.
    n_chars: usize,
    /// Characters that went out.
    n_emitted_chars: usize,
}

struct HeldToken {
    token: DeltaToken,
    /// Characters that begin in it.
    n_chars: usize,
}

impl ChoiceText {
    /// Nothing yet, of an output of `prompt` and `spec`.
    pub(super) fn new(
        text: &TextModel,
        prompt: &[TokenId],
        spec: &GenerateSpec,
        end_tokens: Arc<[TokenId]>,
    ) -> Result<Self, ServiceError> {
        let options =
            StreamOptions { stop: spec.stop.clone(), include_stop: spec.include_stop, skip_special: true };
        let stream =
            TextStream::new(text, prompt, options).map_err(|error| from_text_error(error, "stop"))?;
        Ok(Self {
            stream,
            tokenizer: text.tokenizer().clone(),
            stops: spec.stop.clone(),
            end_tokens,
            has_tokens: spec.reports_tokens(),
            held: VecDeque::new(),
            n_chars: 0,
            n_emitted_chars: 0,
        })
    }

    /// Takes the next token. Gives what may be shown now, and the stop string that ended the output, if one did.
    pub(super) fn push(&mut self, token: OutputToken) -> Result<(Delta, Option<String>), ServiceError> {
        let is_end = self.end_tokens.contains(&token.token);
        let is_silent = is_end || self.tokenizer.is_control(token.token);
        self.hold(&token, is_silent);
        if is_end {
            return Ok((Delta::default(), None));
        }
        let step = self.stream.push(token.token).map_err(broken_token)?;
        let stop = step.matched.map(|idx| self.stops[idx].clone());
        Ok((self.delta(step.text), stop))
    }

    /// Takes the end of the tokens. Gives what was held back.
    pub(super) fn finish(&mut self) -> Result<(Delta, Option<String>), ServiceError> {
        let step = self.stream.finish().map_err(broken_token)?;
        let stop = step.matched.map(|idx| self.stops[idx].clone());
        let mut delta = self.delta(step.text);
        if stop.is_none() {
            delta.tokens.extend(self.held.drain(..).map(|held| held.token));
        }
        Ok((delta, stop))
    }

    fn hold(&mut self, token: &OutputToken, is_silent: bool) {
        if !self.has_tokens {
            return;
        }
        let bytes = if is_silent { &[] } else { self.tokenizer.token_bytes(token.token).unwrap_or_default() };
        // Every byte of UTF-8 that is not a continuation begins a character.
        let n_chars = bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count();
        let token =
            DeltaToken { token: token.token, logprobs: token.logprobs.clone(), text_offset: self.n_chars };
        self.n_chars += n_chars;
        self.held.push_back(HeldToken { token, n_chars });
    }

    fn delta(&mut self, text: String) -> Delta {
        self.n_emitted_chars += text.chars().count();
        let mut tokens = Vec::new();
        let n_emitted = self.n_emitted_chars;
        let is_out = |held: &mut HeldToken| {
            let start = held.token.text_offset;
            start < n_emitted || (held.n_chars == 0 && start == n_emitted)
        };
        while let Some(held) = self.held.pop_front_if(is_out) {
            tokens.push(held.token);
        }
        Delta { text, tokens }
    }
}

fn broken_token(error: longreach_text::TextError) -> ServiceError {
    ServiceError::Internal { problem: format!("a worker's token has no text: {error}") }
}

#[cfg(test)]
mod tests;
