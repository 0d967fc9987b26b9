//! What a request asks of an engine, and what it gets back.

use std::fmt;

use crate::TokenId;

/// The most alternatives of `top_logprobs` a request may ask for.
pub const MAX_LOGPROBS: usize = 20;

/// A prompt as an engine sees it: token ids only. Text exists only in the router.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Prompt tokens, followed by the output tokens of an earlier leg when a stream is resumed.
    pub tokens: Vec<TokenId>,
    /// How many of the last `tokens` are output of an earlier leg. Sampling noise and penalties count from
    /// the true start of the output, so a resumed stream goes on as if it had never been cut.
    pub n_resumed: usize,
    /// Separates prefix caches: requests of different salts share no blocks.
    pub cache_salt: Vec<u8>,
}

impl Prompt {
    /// Length of the part the client gave.
    pub fn prompt_len(&self) -> usize {
        self.tokens.len() - self.n_resumed
    }
}

/// How the next token is chosen and when to stop. Every field is in its final, checked form.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the highest logit, the lowest id on ties.
    pub temperature: f32,
    /// Keep only the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this; 1 is off. At least one is kept.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 is off.
    pub min_p: f32,
    /// Divides (multiplies) positive (negative) logits of tokens seen in prompt or output, once an id; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token that occurs in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time it occurs in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Key of the sampling noise.
    pub seed: u64,
    /// The most output tokens, those of earlier legs included; at least 1.
    pub max_tokens: usize,
    /// End-of-sequence and stop ids are not sampled before this many output tokens.
    pub min_tokens: usize,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Log-probabilities of this many most likely tokens with each output token; `None` for none at all.
    pub top_logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            top_logprobs: None,
        }
    }
}

/// A sampling parameter out of its range: the field, its value and what is allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingError {
    /// Name of the field as clients know it.
    pub field: &'static str,
    /// The value that was given.
    pub value: String,
    /// The values that are allowed.
    pub allowed: String,
}

impl fmt::Display for SamplingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}; it must be {}", self.field, self.value, self.allowed)
    }
}

impl std::error::Error for SamplingError {}

impl SamplingParams {
    /// Checks every field against its range and every token id against the vocabulary. The router calls it
    /// at the edge, and each worker calls it again: ids index logits.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        fn within(field: &'static str, value: f32, low: f32, high: f32) -> Result<(), SamplingError> {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            let allowed = format!("from {low} to {high}");
            Err(SamplingError { field, value: value.to_string(), allowed })
        }
        within("temperature", self.temperature, 0.0, 100.0)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        within("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        for (_, bias) in &self.logit_bias {
            within("logit_bias", *bias, -100.0, 100.0)?;
        }
        let biased = self.logit_bias.iter().map(|(token, _)| ("logit_bias", token));
        let stops = self.stop_token_ids.iter().map(|token| ("stop_token_ids", token));
        for (field, token) in biased.chain(stops) {
            if token.0 as usize >= vocab_size {
                let allowed = format!("a token id below {vocab_size}");
                return Err(SamplingError { field, value: token.to_string(), allowed });
            }
        }
        if self.max_tokens == 0 {
            let allowed = "at least 1".to_owned();
            return Err(SamplingError { field: "max_tokens", value: "0".to_owned(), allowed });
        }
        match self.top_logprobs {
            Some(n) if n > MAX_LOGPROBS => Err(SamplingError {
                field: "top_logprobs",
                value: n.to_string(),
                allowed: format!("at most {MAX_LOGPROBS}"),
            }),
            _ => Ok(()),
        }
    }
}

/// Why an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// `max_tokens`, or the end of the model's context.
    Length,
    /// The model's end-of-sequence token.
    Eos(TokenId),
    /// One of the request's `stop_token_ids`.
    StopToken(TokenId),
    /// One of the request's stop strings. Only the router sees text, so only the router says this.
    StopString,
}

/// The log-probability of one token: natural log, over the whole vocabulary, after penalties and bias and
/// before temperature and truncation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// `ln p`; `f32::NEG_INFINITY` for an impossible token.
    pub logprob: f32,
}

/// Log-probabilities that come with one output token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// That of the sampled token.
    pub sampled: TokenLogprob,
    /// The most likely tokens, most likely first, as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// Token counts of one finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the output, the end token not counted as text but counted here.
    pub completion_tokens: usize,
    /// Prompt tokens served from a prefix cache.
    pub cached_tokens: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_field_refuses_nan_and_names_itself() {
        type Spoil = fn(&mut SamplingParams);
        let bad: [(&str, Spoil); 7] = [
            ("temperature", |p| p.temperature = f32::NAN),
            ("top_p", |p| p.top_p = f32::NAN),
            ("min_p", |p| p.min_p = f32::INFINITY),
            ("repetition_penalty", |p| p.repetition_penalty = 0.0),
            ("presence_penalty", |p| p.presence_penalty = f32::NAN),
            ("frequency_penalty", |p| p.frequency_penalty = f32::NEG_INFINITY),
            ("logit_bias", |p| p.logit_bias = vec![(TokenId(0), f32::NAN)]),
        ];
        for (field, spoil) in bad {
            let mut params = SamplingParams::default();
            spoil(&mut params);
            assert_eq!(params.validate(10).unwrap_err().field, field);
        }
    }

    #[test]
    fn token_ids_are_held_against_the_vocabulary() {
        let params = SamplingParams { stop_token_ids: vec![TokenId(10)], ..Default::default() };
        assert_eq!(params.validate(11), Ok(()));
        let error = params.validate(10).unwrap_err();
        assert_eq!(error.to_string(), "stop_token_ids is 10; it must be a token id below 10");
    }
}
