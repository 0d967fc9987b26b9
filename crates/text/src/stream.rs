//! The text of one output: tokens in, text and a stop out.
//!
//! This ties the detokenizer to the stop matcher, so that both ends go through the same path. A stop string
//! that is the spelling of a control token is never seen in the text, so it is matched by id.

use longreach_types::TokenId;

use crate::{Detokenizer, StopMatcher, StopStep, TextError, TextModel};

/// How an output becomes text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Stop strings; none means that nothing stops the text.
    pub stop: Vec<String>,
    /// Emit the stop string that matched.
    pub include_stop: bool,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self { stop: Vec::new(), include_stop: false, skip_special: true }
    }
}

/// The state of one output.
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    /// Control tokens that are stop strings, with the index of the stop.
    control_stops: Vec<(TokenId, usize)>,
    options: StreamOptions,
    done: bool,
}

impl TextStream {
    /// A stream that continues `prompt`.
    pub fn new(model: &TextModel, prompt: &[TokenId], options: StreamOptions) -> Result<Self, TextError> {
        let matcher = StopMatcher::new(&options.stop, options.include_stop)?;
        let stops = options.stop.iter().enumerate();
        let control_stops =
            stops.filter_map(|(idx, stop)| Some((model.tokenizer().control_token(stop)?, idx)));
        Ok(Self {
            detokenizer: model.detokenizer(prompt, options.skip_special),
            matcher,
            control_stops: control_stops.collect(),
            options,
            done: false,
        })
    }

    /// Tokens that end this output because a stop string spells them: for the sampler, so that it stops by
    /// itself.
    pub fn stop_tokens(&self) -> impl Iterator<Item = TokenId> {
        self.control_stops.iter().map(|(token, _)| *token)
    }

    /// Takes the next token. After a match, nothing more comes out.
    pub fn push(&mut self, token: TokenId) -> Result<StopStep, TextError> {
        if self.done {
            return Ok(StopStep::default());
        }
        if let Some(&(_, stop_idx)) = self.control_stops.iter().find(|(stop, _)| *stop == token) {
            let mut step = self.finish()?;
            if step.matched.is_none() {
                step.matched = Some(stop_idx);
                if self.options.include_stop {
                    step.text.push_str(&self.options.stop[stop_idx]);
                }
            }
            return Ok(step);
        }
        let text = self.detokenizer.push(token)?;
        let step = self.matcher.push(&text);
        self.done = step.matched.is_some();
        Ok(step)
    }

    /// Ends the output: releases what was held back. The released text may still hold a stop.
    pub fn finish(&mut self) -> Result<StopStep, TextError> {
        if self.done {
            return Ok(StopStep::default());
        }
        self.done = true;
        let rest = self.detokenizer.finish()?;
        let mut step = self.matcher.push(&rest);
        if step.matched.is_none() {
            let end = self.matcher.finish();
            step.text.push_str(&end.text);
            step.matched = end.matched;
        }
        Ok(step)
    }
}

#[cfg(test)]
mod tests;
