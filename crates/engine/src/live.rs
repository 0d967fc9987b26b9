//! What an engine keeps of a sequence besides its blocks: how to sample it, when it ends, and who listens.

use longreach_model::{SampleError, Sampled, SamplerState};
use longreach_proto::{WorkerError, worker::OutputToken};
use longreach_types::{FinishReason, Prompt, RequestId, SamplingParams, TokenId};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::handle::{EngineEvent, Submission};

/// A sequence in flight.
pub(crate) struct Live {
    pub(crate) request_id: RequestId,
    sampling: SamplingParams,
    sampler: SamplerState,
    prompt_len: usize,
    pub(crate) prompt_hash: [u8; 16],
    /// Prompt tokens found in this engine's prefix cache.
    pub(crate) cached_len: usize,
    events: mpsc::Sender<Result<EngineEvent, WorkerError>>,
}

/// Limits of the model that end an output.
pub(crate) struct OutputLimits<'a> {
    pub(crate) eos: &'a [TokenId],
    pub(crate) max_seq_len: usize,
}

impl Live {
    pub(crate) fn new(
        submission: &Submission,
        events: mpsc::Sender<Result<EngineEvent, WorkerError>>,
    ) -> Self {
        Self {
            request_id: submission.request_id.clone(),
            sampling: submission.sampling.clone(),
            sampler: SamplerState::new(&submission.prompt),
            prompt_len: submission.prompt.prompt_len(),
            prompt_hash: prompt_hash(&submission.prompt),
            cached_len: 0,
            events,
        }
    }

    /// Whether the listener has gone away.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Chooses the next token. It becomes part of the output with [`Self::push`].
    pub(crate) fn sample(
        &self,
        logits: &mut [f32],
        limits: &OutputLimits<'_>,
    ) -> Result<OutputToken, SampleError> {
        let end_tokens = if self.sampling.ignore_eos { &[] } else { limits.eos };
        let Sampled { token, logprobs } = self.sampler.sample(logits, &self.sampling, end_tokens)?;
        Ok(OutputToken { output_idx: self.sampler.output_len(), token, logprobs })
    }

    /// Adds a token to the output. Returns why the output ends with it, if it does.
    ///
    /// This is the one owner of the count: prefill workers ask it for the first token, leaders for all others.
    pub(crate) fn push(&mut self, token: TokenId, limits: &OutputLimits<'_>) -> Option<FinishReason> {
        self.sampler.push(token);
        let output_len = self.sampler.output_len();
        if !self.sampling.ignore_eos && limits.eos.contains(&token) {
            return Some(FinishReason::Eos(token));
        }
        if self.sampling.stop_token_ids.contains(&token) {
            return Some(FinishReason::StopToken(token));
        }
        let is_full =
            output_len >= self.sampling.max_tokens || self.prompt_len + output_len >= limits.max_seq_len;
        is_full.then_some(FinishReason::Length)
    }

    /// Whether the next token is the last one whatever it is.
    pub(crate) fn ends_with_next(&self, limits: &OutputLimits<'_>) -> bool {
        let output_len = self.sampler.output_len() + 1;
        output_len >= self.sampling.max_tokens || self.prompt_len + output_len >= limits.max_seq_len
    }

    /// Tells the listener. The channel holds as many events as a sequence can have, so it is never full; a listener
    /// that has gone is found by [`Self::is_cancelled`].
    pub(crate) fn send(&self, event: EngineEvent) {
        let _listener_gone = self.events.try_send(Ok(event));
    }

    /// Tells the listener that the sequence failed.
    pub(crate) fn fail(self, error: WorkerError) {
        let _listener_gone = self.events.try_send(Err(error));
    }
}

/// First half of the SHA-256 of the token ids as little-endian words: both sides of a hand-off compare it.
pub fn prompt_hash(prompt: &Prompt) -> [u8; 16] {
    let mut hash = Sha256::new();
    for token in &prompt.tokens {
        hash.update(token.0.to_le_bytes());
    }
    let mut half = [0; 16];
    half.copy_from_slice(&hash.finalize()[..16]);
    half
}

/// Checks what a caller sent before any block is reserved: ids index the embedding and the logits.
pub(crate) fn check(
    submission: &Submission,
    vocab_size: usize,
    max_seq_len: usize,
) -> Result<(), WorkerError> {
    let Submission { prompt, sampling, .. } = submission;
    sampling.validate(vocab_size).map_err(|error| WorkerError::Invalid(error.to_string()))?;
    let n_tokens = prompt.tokens.len();
    if n_tokens == 0 || prompt.n_resumed >= n_tokens {
        let message = format!("a prompt of {n_tokens} tokens of which {} are resumed", prompt.n_resumed);
        return Err(WorkerError::Invalid(message));
    }
    if let Some(token) = prompt.tokens.iter().find(|token| token.0 as usize >= vocab_size) {
        return Err(WorkerError::Invalid(format!("token {token} is outside the vocabulary of {vocab_size}")));
    }
    if n_tokens >= max_seq_len {
        return Err(WorkerError::TooLarge { need: n_tokens + 1, have: max_seq_len });
    }
    if sampling.max_tokens <= prompt.n_resumed {
        let (max, n) = (sampling.max_tokens, prompt.n_resumed);
        return Err(WorkerError::Invalid(format!("max_tokens is {max}, and {n} tokens are out already")));
    }
    Ok(())
}
