//! Choosing the next token: keyed, not sequential.
//!
//! The noise of output index `i` and token `t` is a function of `(seed, i, t)` alone, and the token is the argmax of
//! `logit/T + gumbel(seed, i, t)` over the candidates, which samples from their softmax (Gumbel-max; Gumbel 1954,
//! Maddison et al. 2014). A generator that is advanced token by token would need its state carried through
//! preemption, migration and resumption; this needs none, and batch mates cannot disturb it.
//!
//! Order: penalties and bias, log-probabilities, temperature, top-k, top-p, min-p, noise.

use std::{cmp::Ordering, collections::HashMap};

use longreach_types::{Prompt, SamplingParams, TokenId, TokenLogprob, TokenLogprobs};

/// Temperatures below this are greedy: dividing by them would overflow, and no other token could win.
const GREEDY_BELOW: f32 = 1e-4;

/// Candidates sorted in one go while the nucleus of top-p is sought.
const NUCLEUS_STRIDE: usize = 256;

/// What sampling remembers of a sequence: a pure function of its token ids.
#[derive(Clone, Debug, Default)]
pub struct SamplerState {
    seen: HashMap<TokenId, u32>,
    output_len: usize,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Present when the request asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

/// Logits from which nothing can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is not a number: the forward pass is broken, and any token would be a wrong answer in silence.
    #[error("logit of token {0} is NaN")]
    Nan(TokenId),
    /// Every token is masked.
    #[error("no token is left to sample: every logit is negative infinity")]
    Empty,
}

impl SamplerState {
    /// The state before the next token of `prompt`, resumed output included.
    pub fn new(prompt: &Prompt) -> Self {
        let mut state = Self::default();
        let (given, resumed) = prompt.tokens.split_at(prompt.prompt_len());
        for &token in given {
            state.seen.entry(token).or_insert(0);
        }
        resumed.iter().for_each(|&token| state.push(token));
        state
    }

    /// Records an output token.
    pub fn push(&mut self, token: TokenId) {
        *self.seen.entry(token).or_insert(0) += 1;
        self.output_len += 1;
    }

    /// Output tokens so far; the index of the next one.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Chooses the next token from `logits` (one per vocabulary entry; changed in place by penalties).
    ///
    /// `end_tokens` are masked while fewer than `min_tokens` are out.
    pub fn sample(
        &self,
        logits: &mut [f32],
        params: &SamplingParams,
        end_tokens: &[TokenId],
    ) -> Result<Sampled, SampleError> {
        if let Some(nan) = logits.iter().position(|logit| logit.is_nan()) {
            return Err(SampleError::Nan(TokenId(nan as u32)));
        }
        self.adjust(logits, params, end_tokens);
        let best = argmax(logits).ok_or(SampleError::Empty)?;
        let token = if params.temperature < GREEDY_BELOW {
            best
        } else {
            let candidates = candidates(logits, params, logits[best.0 as usize]);
            self.gumbel_argmax(logits, params, best, candidates.as_deref())
        };
        let logprobs = params.top_logprobs.map(|n| logprobs(logits, token, n));
        Ok(Sampled { token, logprobs })
    }

    /// Applies penalties once per distinct id, bias, and the mask of `min_tokens`.
    fn adjust(&self, logits: &mut [f32], params: &SamplingParams, end_tokens: &[TokenId]) {
        if params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0
        {
            for (&token, &n_output) in &self.seen {
                let Some(logit) = logits.get_mut(token.0 as usize) else { continue };
                *logit = if *logit > 0.0 {
                    *logit / params.repetition_penalty
                } else {
                    *logit * params.repetition_penalty
                };
                if n_output > 0 {
                    *logit -= params.presence_penalty + params.frequency_penalty * n_output as f32;
                }
            }
        }
        for &(token, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(token.0 as usize) {
                *logit += bias;
            }
        }
        if self.output_len < params.min_tokens {
            for token in end_tokens.iter().chain(&params.stop_token_ids) {
                if let Some(logit) = logits.get_mut(token.0 as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// The candidate with the highest noisy score; the lower id on a tie. `None` for `candidates` means all.
    fn gumbel_argmax(
        &self,
        logits: &[f32],
        params: &SamplingParams,
        best: TokenId,
        candidates: Option<&[TokenId]>,
    ) -> TokenId {
        let scale = 1.0 / f64::from(params.temperature);
        let top = f64::from(logits[best.0 as usize]);
        let key = mix(mix(params.seed) ^ self.output_len as u64);
        // The most likely token goes first: its score lets almost every other be dismissed without a logarithm.
        let mut winner = (gumbel(draw(key, best)), best);
        let mut consider = |token: TokenId| {
            let shifted = (f64::from(logits[token.0 as usize]) - top) * scale;
            let bits = draw(key, token);
            if shifted + gumbel_bound(bits) < winner.0 {
                return;
            }
            let score = shifted + gumbel(bits);
            if score > winner.0 || (score == winner.0 && token < winner.1) {
                winner = (score, token);
            }
        };
        match candidates {
            Some(tokens) => tokens.iter().copied().for_each(&mut consider),
            None => (0..logits.len() as u32).map(TokenId).for_each(&mut consider),
        }
        winner.1
    }
}

/// The highest logit, the lowest id on ties; `None` if all are −∞.
fn argmax(logits: &[f32]) -> Option<TokenId> {
    let mut best = (f32::NEG_INFINITY, None);
    for (i, &logit) in logits.iter().enumerate() {
        if logit > best.0 {
            best = (logit, Some(TokenId(i as u32)));
        }
    }
    best.1
}

/// Most likely first; the lower id on ties.
fn by_likelihood(logits: &[f32]) -> impl Fn(&TokenId, &TokenId) -> Ordering + '_ {
    |a, b| logits[b.0 as usize].total_cmp(&logits[a.0 as usize]).then(a.cmp(b))
}

/// The `n` most likely of `tokens`, most likely first, without sorting the rest.
fn most_likely(logits: &[f32], mut tokens: Vec<TokenId>, n: usize) -> Vec<TokenId> {
    if n == 0 {
        return Vec::new();
    }
    if n < tokens.len() {
        tokens.select_nth_unstable_by(n - 1, by_likelihood(logits));
        tokens.truncate(n);
    }
    tokens.sort_unstable_by(by_likelihood(logits));
    tokens
}

/// The tokens that top-k, top-p and min-p leave, at least one; `None` if all three are off.
fn candidates(logits: &[f32], params: &SamplingParams, top: f32) -> Option<Vec<TokenId>> {
    let top_k = (params.top_k > 0).then_some(params.top_k as usize).filter(|&k| k < logits.len());
    if top_k.is_none() && params.top_p >= 1.0 && params.min_p <= 0.0 {
        return None;
    }
    let weight = |token: &TokenId| {
        let logit = f64::from(logits[token.0 as usize]);
        libm::exp((logit - f64::from(top)) / f64::from(params.temperature))
    };
    let mut tokens: Vec<TokenId> = (0..logits.len() as u32).map(TokenId).collect();
    if let Some(k) = top_k {
        tokens = most_likely(logits, tokens, k);
    }
    if params.top_p < 1.0 {
        tokens = nucleus(logits, tokens, f64::from(params.top_p), &weight);
    }
    if params.min_p > 0.0 {
        // The most likely token has weight 1, so one always stays.
        tokens.retain(|token| weight(token) >= f64::from(params.min_p));
    }
    Some(tokens)
}

/// The smallest prefix, by likelihood, whose share of the weight reaches `top_p`; at least one token.
fn nucleus(
    logits: &[f32],
    tokens: Vec<TokenId>,
    top_p: f64,
    weight: &dyn Fn(&TokenId) -> f64,
) -> Vec<TokenId> {
    let wanted = top_p * tokens.iter().map(weight).sum::<f64>();
    let mut n_sorted = NUCLEUS_STRIDE;
    loop {
        let sorted = most_likely(logits, tokens.clone(), n_sorted);
        let mut reached = 0.0;
        for (i, token) in sorted.iter().enumerate() {
            reached += weight(token);
            if reached >= wanted || i + 1 == tokens.len() {
                return sorted[..=i].to_vec();
            }
        }
        n_sorted *= 8;
    }
}

/// Log-probabilities over the whole vocabulary, summed in f64 in ascending order.
fn logprobs(logits: &[f32], sampled: TokenId, n_top: usize) -> TokenLogprobs {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| libm::exp(f64::from(logit) - f64::from(top))).sum();
    let lse = f64::from(top) + libm::log(sum);
    let entry =
        |token: TokenId| TokenLogprob { token, logprob: (f64::from(logits[token.0 as usize]) - lse) as f32 };
    let all = (0..logits.len() as u32).map(TokenId).collect();
    TokenLogprobs {
        sampled: entry(sampled),
        top: most_likely(logits, all, n_top).into_iter().map(entry).collect(),
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output bits all depend on all input bits.
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 53 random bits of `(key, token)`.
fn draw(key: u64, token: TokenId) -> u64 {
    mix(key ^ mix(u64::from(token.0))) >> 11
}

/// `u = (bits + ½) / 2^53`, in (0, 1); the standard Gumbel variate `−ln(−ln u)`.
fn gumbel(bits: u64) -> f64 {
    let u = (bits as f64 + 0.5) / (1_u64 << 53) as f64;
    -libm::log(-libm::log(u))
}

/// An upper bound of [`gumbel`] without logarithms: `−ln u ≥ 1 − u`, and `1 − u ≥ 2^−(n+1)` where n is the number of
/// leading zeros of its 53 bits.
fn gumbel_bound(bits: u64) -> f64 {
    let rest = (1_u64 << 53) - bits;
    let n_zeros = rest.leading_zeros().saturating_sub(10);
    f64::from(n_zeros + 2) * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests;
