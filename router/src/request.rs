//! From what a client wrote to what the router does: every check, once, for every face.
//!
//! A face turns its wire format into a [`Draft`], in which everything may be absent and nothing is trusted.
//! [`Checker::check`] turns that into a [`GenerateSpec`], in which every field has its final form. Nothing is clamped
//! in silence: what is out of range is refused with the field's name, the value and what is allowed. The few
//! meanings that clients disagree about are settled here:
//!
//! - `temperature` below [`GREEDY_BELOW`] is 0. Dividing logits by less overflows, and the result is greedy anyway.
//! - `top_k` of 0 and of -1 are both "off"; more than the vocabulary has is all of it.
//! - `top_p` of 0 is allowed: at least one token is always kept, so it is greedy.
//! - `max_tokens` defaults to the room left in the context; prompt and `max_tokens` together may not exceed it.

use std::{collections::HashMap, sync::Arc};

use longreach_text::StopMatcher;
use longreach_types::{SamplingParams, TokenId};

use crate::{
    dispatch::ChoiceSpec,
    error::ServiceError,
    gateway::from_text_error,
    random::{self, choice_seed},
};

/// Temperatures below this are greedy.
pub(crate) const GREEDY_BELOW: f32 = 0.01;

/// The most tokens whose logits one request may bias.
const MAX_LOGIT_BIAS: usize = 1024;

/// The longest name a client may give a request or session, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// The longest cache salt, in bytes.
const MAX_SALT_BYTES: usize = 256;

/// What one request may ask of this router.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Outputs of one request, over all its prompts. More serves batch jobs; each is a sequence on a decode group.
    pub max_choices: usize,
    /// Bytes of one request's body or message. More admits longer prompts. A body is read before its request is admitted:
    /// what strangers can make the router hold is this times the connections that whatever stands before it lets through.
    pub max_body_bytes: usize,
    /// Outputs in the making. More keeps larger fleets busy; beyond it requests are refused at once.
    pub max_inflight: usize,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self { max_choices: 64, max_body_bytes: 16 << 20, max_inflight: 4096 }
    }
}

/// What a request that says nothing gets, instead of plain sampling at temperature 1: what the model's makers advise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Instead of 1.
    pub temperature: Option<f32>,
    /// Instead of off.
    pub top_k: Option<u32>,
    /// Instead of 1.
    pub top_p: Option<f32>,
    /// Instead of 0.
    pub min_p: Option<f32>,
    /// Instead of 1.
    pub repetition_penalty: Option<f32>,
}

/// A request as a client wrote it, in the words of no face.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draft {
    pub(crate) model: Option<String>,
    pub(crate) prompts: Vec<PromptDraft>,
    pub(crate) options: Options,
}

/// One prompt as a client wrote it.
#[derive(Clone, Debug)]
pub(crate) enum PromptDraft {
    Text(String),
    Tokens(Vec<u32>),
    Chat(ChatDraft),
}

/// A conversation as a client wrote it.
#[derive(Clone, Debug)]
pub(crate) struct ChatDraft {
    pub(crate) messages: Vec<longreach_text::ChatMessage>,
    pub(crate) add_generation_prompt: bool,
    /// Further variables of the template.
    pub(crate) variables: serde_json::Map<String, serde_json::Value>,
}

/// Everything about an output that is not its prompt; absent fields have defaults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) top_p: Option<f32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) seed: Option<u64>,
    pub(crate) n: Option<u32>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) include_stop: bool,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) return_token_ids: bool,
    pub(crate) session_id: Option<String>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) priority: i32,
}

impl Options {
    /// Fills what the client left open.
    pub(crate) fn or(mut self, defaults: &SamplingDefaults) -> Self {
        self.temperature = self.temperature.or(defaults.temperature);
        self.top_k = self.top_k.or(defaults.top_k.map(i64::from));
        self.top_p = self.top_p.or(defaults.top_p);
        self.min_p = self.min_p.or(defaults.min_p);
        self.repetition_penalty = self.repetition_penalty.or(defaults.repetition_penalty);
        self
    }
}

/// What the workers can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelLimits {
    /// Tokens of prompt and output together.
    pub(crate) max_context_len: usize,
    /// Token ids are below this.
    pub(crate) vocab_size: usize,
}

/// A checked request.
#[derive(Clone, Debug)]
pub(crate) struct GenerateSpec {
    /// The prompts; none is empty.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
    /// Outputs of each prompt.
    pub(crate) n: usize,
    /// How tokens are chosen. `seed` is the request's; `max_tokens` is 0 where each prompt has its own.
    sampling: SamplingParams,
    max_context_len: usize,
    vocab_size: usize,
    /// Strings that end an output.
    pub(crate) stop: Vec<String>,
    /// Whether a matched one stays in the text.
    pub(crate) include_stop: bool,
    return_token_ids: bool,
    session: Option<String>,
    cache_salt: Vec<u8>,
    priority: i32,
}

impl GenerateSpec {
    /// Checks `options` for `prompts`, which are tokens already.
    pub(crate) fn check(
        prompts: Vec<Vec<TokenId>>,
        options: Options,
        model: ModelLimits,
        limits: &RequestLimits,
    ) -> Result<Self, ServiceError> {
        for (idx, prompt) in prompts.iter().enumerate() {
            check_prompt(idx, prompt, model)?;
        }
        let n = check_n(options.n, prompts.len(), limits.max_choices)?;
        check_name("session_id", options.session_id.as_deref(), MAX_NAME_BYTES)?;
        check_name("cache_salt", options.cache_salt.as_deref(), MAX_SALT_BYTES)?;
        StopMatcher::new(&options.stop, options.include_stop)
            .map_err(|error| from_text_error(error, "stop"))?;
        let sampling = check_sampling(&options, model)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let max_tokens = sampling.max_tokens.max(1);
        if longest + max_tokens > model.max_context_len {
            let limit = model.max_context_len;
            return Err(ServiceError::ContextLength { limit, prompt_len: longest, max_tokens });
        }
        let room = model.max_context_len - longest;
        if sampling.min_tokens > room {
            let problem = format!("is {}; the context has room for {room}", sampling.min_tokens);
            return Err(ServiceError::invalid("min_tokens", problem));
        }
        Ok(Self {
            prompts: prompts.into_iter().map(Arc::from).collect(),
            n,
            sampling,
            max_context_len: model.max_context_len,
            vocab_size: model.vocab_size,
            stop: options.stop,
            include_stop: options.include_stop,
            return_token_ids: options.return_token_ids,
            session: options.session_id.filter(|id| !id.is_empty()),
            cache_salt: options.cache_salt.unwrap_or_default().into_bytes(),
            priority: options.priority,
        })
    }

    /// The request's seed.
    pub(crate) fn seed(&self) -> u64 {
        self.sampling.seed
    }

    /// Whether single tokens are reported beside the text.
    pub(crate) fn reports_tokens(&self) -> bool {
        self.return_token_ids || self.sampling.top_logprobs.is_some()
    }

    /// Tokens that end an output, where `eos` are the model's. A worker is told all of them: it knows those of the
    /// model's configuration, and must not go on after one that only the tokenizer's files name.
    pub(crate) fn end_tokens(&self, eos: &[TokenId]) -> Vec<TokenId> {
        let SamplingParams { stop_token_ids, ignore_eos, .. } = &self.sampling;
        let eos = if *ignore_eos { &[] } else { eos };
        // A tokenizer may have ids beyond those that the model can give.
        let is_new =
            |token: &&TokenId| (token.0 as usize) < self.vocab_size && !stop_token_ids.contains(token);
        stop_token_ids.iter().chain(eos.iter().filter(is_new)).copied().collect()
    }

    /// Tokens of all prompts, each counted once.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.len()).sum()
    }

    /// Every output to make: those of the first prompt first.
    pub(crate) fn choices(&self, eos: &Arc<[TokenId]>) -> Vec<ChoiceSpec> {
        let end_tokens = self.end_tokens(eos);
        let mut choices = Vec::with_capacity(self.prompts.len() * self.n);
        for prompt in &self.prompts {
            for _ in 0..self.n {
                let mut sampling = self.sampling.clone();
                sampling.seed = choice_seed(sampling.seed, choices.len());
                sampling.stop_token_ids.clone_from(&end_tokens);
                if sampling.max_tokens == 0 {
                    sampling.max_tokens = self.max_context_len - prompt.len();
                }
                choices.push(ChoiceSpec {
                    prompt: Arc::clone(prompt),
                    cache_salt: self.cache_salt.clone(),
                    sampling,
                    priority: self.priority,
                    session: self.session.clone(),
                    eos: Arc::clone(eos),
                });
            }
        }
        choices
    }
}

/// How many outputs `draft` asks for. Known before anything is done for it.
pub(crate) fn n_choices(draft: &Draft, limits: &RequestLimits) -> Result<usize, ServiceError> {
    let n_prompts = draft.prompts.len();
    Ok(check_n(draft.options.n, n_prompts, limits.max_choices)? * n_prompts)
}

/// Checks a name that a client made up.
fn check_name(field: &str, name: Option<&str>, max_bytes: usize) -> Result<(), ServiceError> {
    match name {
        Some(name) if name.len() > max_bytes => Err(ServiceError::invalid(
            field,
            format!("has {} bytes; at most {max_bytes} are allowed", name.len()),
        )),
        Some(name) if name.chars().any(char::is_control) => {
            Err(ServiceError::invalid(field, "contains control characters"))
        }
        _ => Ok(()),
    }
}

/// Checks a client's name for its request.
pub(crate) fn check_client_id(id: &str) -> Result<(), ServiceError> {
    check_name("request_id", Some(id), MAX_NAME_BYTES)
}

/// Checks token ids that a client gave, or that its text became.
fn check_prompt(idx: usize, prompt: &[TokenId], model: ModelLimits) -> Result<(), ServiceError> {
    if prompt.is_empty() {
        return Err(ServiceError::invalid("prompt", "is empty; at least 1 token is needed"));
    }
    match prompt.iter().position(|token| token.0 as usize >= model.vocab_size) {
        Some(pos) => Err(ServiceError::invalid(
            "prompt",
            format!(
                "token {pos} of prompt {idx} is {}; it must be a token id below {}",
                prompt[pos], model.vocab_size
            ),
        )),
        None => Ok(()),
    }
}

fn check_n(n: Option<u32>, n_prompts: usize, max_choices: usize) -> Result<usize, ServiceError> {
    let n = n.unwrap_or(1) as usize;
    if n == 0 {
        return Err(ServiceError::invalid("n", "is 0; it must be at least 1"));
    }
    match n.checked_mul(n_prompts) {
        Some(n_choices) if n_choices <= max_choices => Ok(n),
        _ => Err(ServiceError::invalid(
            "n",
            format!("is {n} for {n_prompts} prompts; at most {max_choices} outputs are allowed in all"),
        )),
    }
}

/// The sampling parameters in their final form, except that `max_tokens` is 0 if it was left open.
fn check_sampling(options: &Options, model: ModelLimits) -> Result<SamplingParams, ServiceError> {
    let defaults = SamplingParams::default();
    let temperature = options.temperature.unwrap_or(1.0);
    let params = SamplingParams {
        temperature: if (0.0..GREEDY_BELOW).contains(&temperature) { 0.0 } else { temperature },
        top_k: check_top_k(options.top_k, model.vocab_size)?,
        top_p: options.top_p.unwrap_or(defaults.top_p),
        min_p: options.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        presence_penalty: options.presence_penalty.unwrap_or(defaults.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        logit_bias: check_logit_bias(&options.logit_bias)?,
        seed: options.seed.unwrap_or_else(random::next_u64),
        max_tokens: options.max_tokens.unwrap_or(1) as usize,
        min_tokens: options.min_tokens.unwrap_or(0) as usize,
        stop_token_ids: options.stop_token_ids.iter().copied().map(TokenId).collect(),
        ignore_eos: options.ignore_eos,
        top_logprobs: options.top_logprobs.map(|n| n as usize),
    };
    params.validate(model.vocab_size)?;
    let max_tokens = options.max_tokens.map_or(0, |max| max as usize);
    if max_tokens > 0 && params.min_tokens > max_tokens {
        let problem = format!("is {}; it must be at most max_tokens, {max_tokens}", params.min_tokens);
        return Err(ServiceError::invalid("min_tokens", problem));
    }
    Ok(SamplingParams { max_tokens, ..params })
}

fn check_top_k(top_k: Option<i64>, vocab_size: usize) -> Result<u32, ServiceError> {
    match top_k {
        None | Some(0 | -1) => Ok(0),
        Some(k) if k > 0 => Ok(u32::try_from(k.min(vocab_size as i64)).unwrap_or(u32::MAX)),
        Some(k) => Err(ServiceError::invalid("top_k", format!("is {k}; it must be -1, 0 or more"))),
    }
}

/// One entry for each token; the last one counts, as in a map.
fn check_logit_bias(entries: &[(u32, f32)]) -> Result<Vec<(TokenId, f32)>, ServiceError> {
    if entries.len() > MAX_LOGIT_BIAS {
        let problem = format!("has {} entries; at most {MAX_LOGIT_BIAS} are allowed", entries.len());
        return Err(ServiceError::invalid("logit_bias", problem));
    }
    let unique: HashMap<u32, f32> = entries.iter().copied().collect();
    let mut bias: Vec<(TokenId, f32)> = unique.into_iter().map(|(id, bias)| (TokenId(id), bias)).collect();
    bias.sort_unstable_by_key(|(token, _)| *token);
    Ok(bias)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODEL: ModelLimits = ModelLimits { max_context_len: 256, vocab_size: 1000 };

    fn check(prompt_len: usize, options: Options) -> Result<GenerateSpec, ServiceError> {
        let prompt = vec![TokenId(1); prompt_len];
        GenerateSpec::check(vec![prompt], options, MODEL, &RequestLimits::default())
    }

    fn sampling(options: Options) -> SamplingParams {
        check(8, options).unwrap().choices(&Arc::from([]))[0].sampling.clone()
    }

    #[test]
    fn an_open_output_gets_the_room_that_is_left() {
        assert_eq!(sampling(Options::default()).max_tokens, 248);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        assert!(check(255, Options::default()).is_ok());
        let full = check(256, Options::default()).unwrap_err();
        assert!(full.to_string().contains("256 tokens; the prompt has 256"), "{full}");
        assert!(check(8, Options { max_tokens: Some(248), ..Default::default() }).is_ok());
        let long = check(8, Options { max_tokens: Some(249), ..Default::default() }).unwrap_err();
        assert_eq!(long.class().reason, "CONTEXT_LENGTH_EXCEEDED");
    }

    #[test]
    fn tiny_temperatures_are_greedy_and_negative_ones_refused() {
        for temperature in [0.0, -0.0, 1e-4, 1e-30, f32::MIN_POSITIVE] {
            assert_eq!(
                sampling(Options { temperature: Some(temperature), ..Default::default() }).temperature,
                0.0
            );
        }
        let cold = check(8, Options { temperature: Some(-1e-4), ..Default::default() }).unwrap_err();
        assert_eq!(cold.field(), Some("temperature"));
        assert_eq!(sampling(Options::default()).temperature, 1.0);
        let advised = SamplingDefaults { temperature: Some(0.2), top_k: Some(40), ..Default::default() };
        let filled = sampling(Options { top_k: Some(0), ..Default::default() }.or(&advised));
        assert_eq!(
            (filled.temperature, filled.top_k),
            (0.2, 0),
            "a client's own word counts, also where it is \"off\""
        );
    }

    #[test]
    fn top_k_is_off_at_zero_and_minus_one_and_never_beyond_the_vocabulary() {
        let top_k = |k| sampling(Options { top_k: Some(k), ..Default::default() }).top_k;
        assert_eq!([top_k(-1), top_k(0), top_k(40), top_k(i64::MAX)], [0, 0, 40, 1000]);
        for k in [-2, i64::MIN] {
            assert_eq!(
                check(8, Options { top_k: Some(k), ..Default::default() }).unwrap_err().field(),
                Some("top_k")
            );
        }
    }

    #[test]
    fn each_choice_has_its_own_seed_and_the_first_has_the_requests() {
        let options = Options { n: Some(3), seed: Some(7), ..Default::default() };
        let seeds: Vec<u64> =
            check(8, options).unwrap().choices(&Arc::from([])).iter().map(|c| c.sampling.seed).collect();
        assert_eq!(seeds[0], 7);
        assert!(seeds[0] != seeds[1] && seeds[1] != seeds[2] && seeds[0] != seeds[2]);
    }

    #[test]
    fn outputs_are_counted_over_all_prompts() {
        let check = |n_prompts, n| {
            let options = Options { n: Some(n), ..Default::default() };
            GenerateSpec::check(vec![vec![TokenId(0)]; n_prompts], options, MODEL, &RequestLimits::default())
        };
        assert_eq!(check(8, 8).unwrap().choices(&Arc::from([])).len(), 64);
        assert_eq!(check(13, 5).unwrap_err().field(), Some("n"));
        assert_eq!(check(1, 0).unwrap_err().field(), Some("n"));
        assert_eq!(check(2, u32::MAX).unwrap_err().field(), Some("n"));
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_is_valid_for_workers(
            floats in prop::collection::vec(prop::option::of(any::<f32>()), 6),
            top_k in prop::option::of(any::<i64>()),
            lens in (1_usize..300, prop::option::of(0_u32..300), prop::option::of(0_u32..300)),
            ids in prop::collection::vec(0_u32..1100, 0..3),
        ) {
            let (prompt_len, max_tokens, min_tokens) = lens;
            let options = Options {
                temperature: floats[0],
                top_p: floats[1],
                min_p: floats[2],
                repetition_penalty: floats[3],
                presence_penalty: floats[4],
                frequency_penalty: floats[5],
                top_k,
                max_tokens,
                min_tokens,
                stop_token_ids: ids,
                ..Default::default()
            };
            if let Ok(spec) = check(prompt_len, options) {
                for choice in spec.choices(&Arc::from([TokenId(3), TokenId(1000)])) {
                    prop_assert_eq!(choice.sampling.validate(MODEL.vocab_size), Ok(()));
                    prop_assert!(prompt_len + choice.sampling.max_tokens <= MODEL.max_context_len);
                }
            }
        }
    }
}
