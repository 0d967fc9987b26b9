//! What every face asks the router for: a generation, the tokens of a prompt, the text of tokens, the model.
//!
//! This is where a request is admitted. Admission comes before any work on the request, and is a counter, not a queue:
//! what does not fit is refused at once, with a hint when to come back. Waiting happens on the decode group, which
//! knows its blocks.

use std::sync::Arc;

use longreach_proto::worker::GroupInfo;
use longreach_service::{InFlight, Lifecycle};
use longreach_text::{ChatOptions, TextError, TextModel};
use longreach_types::TokenId;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::{
    call::CallContext,
    dispatch::Dispatcher,
    error::{ServiceError, Stage},
    metrics::{Metrics, RequestMeter},
    output::{Generation, GenerationParts},
    request::{
        self, ChatDraft, Draft, GenerateSpec, ModelLimits, PromptDraft, RequestLimits, SamplingDefaults,
    },
    stall::StallWatch,
};

/// Text up to this many bytes is tokenized where it is; more would keep other requests of the thread waiting.
const MAX_INLINE_BYTES: usize = 4096;
/// Tokens whose text is made where the request is handled.
const MAX_INLINE_TOKENS: usize = 1024;

/// The router behind its faces.
pub(crate) struct Gateway {
    pub(crate) model_name: String,
    pub(crate) text: TextModel,
    pub(crate) stalls: Arc<StallWatch>,
    pub(crate) limits: RequestLimits,
    pub(crate) sampling: SamplingDefaults,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) metrics: Metrics,
    pub(crate) admission: Arc<Semaphore>,
    pub(crate) lifecycle: Lifecycle,
}

/// A request's places among those that are admitted. Dropping it gives them back.
pub(crate) struct Admitted {
    _places: OwnedSemaphorePermit,
    /// What draining waits for.
    _in_flight: InFlight,
}

impl Gateway {
    /// Admits and checks a request that came by `method`, and prepares its outputs. Workers are first asked when
    /// the generation is pulled.
    pub(crate) async fn generate(
        &self,
        method: &'static str,
        draft: Draft,
        call: CallContext,
    ) -> Result<Generation, ServiceError> {
        let mut meter = self.metrics.begin(method);
        match within(call.deadline, self.prepare(draft, &call)).await {
            Ok((spec, admitted)) => self.start(spec, admitted, call, meter),
            Err(error) => {
                meter.failed(&error, &call);
                Err(error)
            }
        }
    }

    async fn prepare(
        &self,
        draft: Draft,
        call: &CallContext,
    ) -> Result<(GenerateSpec, Admitted), ServiceError> {
        self.check_model(draft.model.as_deref())?;
        request::check_client_id(&call.client_id)?;
        let n_choices = request::n_choices(&draft, &self.limits)?;
        let mut admitted = self.admit(n_choices)?;
        let limits = self.model_limits()?;
        let mut prompts = Vec::with_capacity(draft.prompts.len());
        for prompt in draft.prompts {
            let tokens;
            (tokens, admitted) = self.encode(prompt, admitted).await?;
            prompts.push(tokens);
        }
        let spec = GenerateSpec::check(prompts, draft.options.or(&self.sampling), limits, &self.limits)?;
        Ok((spec, admitted))
    }

    fn start(
        &self,
        spec: GenerateSpec,
        admitted: Admitted,
        call: CallContext,
        meter: RequestMeter,
    ) -> Result<Generation, ServiceError> {
        Generation::new(GenerationParts {
            call: Arc::new(call),
            spec,
            text: self.text.clone(),
            dispatcher: Arc::clone(&self.dispatcher),
            meter,
            admitted,
            ending: self.lifecycle.token(),
        })
    }

    fn admit(&self, n_choices: usize) -> Result<Admitted, ServiceError> {
        let in_flight = self.lifecycle.admit().map_err(|draining| self.unavailable(&draining.to_string()))?;
        let n_permits = u32::try_from(n_choices).unwrap_or(u32::MAX);
        let places = Arc::clone(&self.admission).try_acquire_many_owned(n_permits).map_err(|_| {
            let (n_inflight, max) = (self.n_inflight(), self.limits.max_inflight);
            let problem = format!(
                "the router has {n_inflight} of at most {max} outputs in the making, and {n_choices} more were asked for"
            );
            ServiceError::Overloaded { problem, retry_after: self.dispatcher.recovery.retry_after }
        })?;
        Ok(Admitted { _places: places, _in_flight: in_flight })
    }

    /// Outputs in the making.
    fn n_inflight(&self) -> usize {
        self.limits.max_inflight.saturating_sub(self.admission.available_permits())
    }

    /// The tokens of a prompt.
    pub(crate) async fn tokenize(
        &self,
        model: Option<&str>,
        prompt: PromptDraft,
        deadline: Option<Instant>,
    ) -> Result<Vec<TokenId>, ServiceError> {
        self.check_model(model)?;
        let encoding = self.encode(prompt, self.admit(1)?);
        let (tokens, _admitted) = within(deadline, encoding).await?;
        Ok(tokens)
    }

    /// The text of tokens, control tokens left out.
    pub(crate) async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<TokenId>,
        deadline: Option<Instant>,
    ) -> Result<String, ServiceError> {
        self.check_model(model)?;
        let decoding = self.decode(tokens, "token_ids", Some(self.admit(1)?));
        within(deadline, decoding).await
    }

    /// The text of the tokens in `field` of a request. That of many is made elsewhere, as in [`Self::encode`].
    pub(crate) async fn decode(
        &self,
        tokens: Vec<TokenId>,
        field: &'static str,
        admitted: Option<Admitted>,
    ) -> Result<String, ServiceError> {
        let (text, is_short) = (self.text.clone(), tokens.len() <= MAX_INLINE_TOKENS);
        let decode = move || {
            let _admitted = admitted;
            text.tokenizer().decode(&tokens, true).map_err(|error| from_text_error(error, field))
        };
        if is_short {
            return decode();
        }
        tokio::task::spawn_blocking(decode).await.unwrap_or_else(|_| Err(tokenizer_panicked()))
    }

    /// Whether `model` is the one that is served. None, or an empty name, is.
    pub(crate) fn check_model(&self, model: Option<&str>) -> Result<(), ServiceError> {
        match model {
            Some(model) if !model.is_empty() && model != self.model_name => {
                Err(ServiceError::UnknownModel { model: model.to_owned(), served: self.model_name.clone() })
            }
            _ => Ok(()),
        }
    }

    /// What the largest decode group holds.
    pub(crate) fn model_limits(&self) -> Result<ModelLimits, ServiceError> {
        let limits = self.dispatcher.decodes.limits();
        let limits = limits.map(|(max_context_len, vocab_size)| ModelLimits { max_context_len, vocab_size });
        limits.ok_or_else(|| self.unavailable("no decode group is ready"))
    }

    fn unavailable(&self, problem: &str) -> ServiceError {
        let retry_after = self.dispatcher.recovery.retry_after;
        ServiceError::Unavailable { problem: problem.to_owned(), retry_after }
    }

    /// The decode groups that are known.
    pub(crate) fn groups(&self) -> Vec<Arc<GroupInfo>> {
        let mut groups = self.dispatcher.decodes.infos();
        groups.sort_by(|a, b| a.group_id.cmp(&b.group_id));
        groups
    }

    /// The tokens of a prompt. A long one is made elsewhere, and its place stays taken until that is done, also if nobody
    /// waits for it any more.
    async fn encode(
        &self,
        prompt: PromptDraft,
        admitted: Admitted,
    ) -> Result<(Vec<TokenId>, Admitted), ServiceError> {
        if matches!(&prompt, PromptDraft::Text(text) if text.len() <= MAX_INLINE_BYTES) {
            return Ok((encode(&self.text, prompt)?, admitted));
        }
        let text = self.text.clone();
        tokio::task::spawn_blocking(move || Ok((encode(&text, prompt)?, admitted)))
            .await
            .unwrap_or_else(|_| Err(tokenizer_panicked()))
    }
}

/// What `work` on text comes to, if it does before `deadline`.
async fn within<T>(
    deadline: Option<Instant>,
    work: impl Future<Output = Result<T, ServiceError>>,
) -> Result<T, ServiceError> {
    match deadline {
        Some(deadline) => {
            timeout_at(deadline, work).await.unwrap_or(Err(ServiceError::Deadline { stage: Stage::Text }))
        }
        None => work.await,
    }
}

fn tokenizer_panicked() -> ServiceError {
    ServiceError::Internal { problem: "the tokenizer panicked".to_owned() }
}

/// The tokens of a prompt.
pub(crate) fn encode(text: &TextModel, prompt: PromptDraft) -> Result<Vec<TokenId>, ServiceError> {
    match prompt {
        PromptDraft::Tokens(ids) => Ok(ids.into_iter().map(TokenId).collect()),
        PromptDraft::Text(prompt) => {
            text.encode_prompt(&prompt).map_err(|error| from_text_error(error, "prompt"))
        }
        PromptDraft::Chat(ChatDraft { messages, add_generation_prompt, variables }) => {
            let options = ChatOptions { add_generation_prompt, variables, ..ChatOptions::default() };
            text.render_chat(&messages, &options).map_err(|error| from_text_error(error, "messages"))
        }
    }
}

/// What a failure of the text layer means for a client that wrote `field`.
pub(crate) fn from_text_error(error: TextError, field: &str) -> ServiceError {
    match error {
        TextError::Request { field, reason } => ServiceError::invalid(field, reason),
        TextError::NoTemplate => ServiceError::unsupported(field, error.to_string()),
        error if error.is_request() => ServiceError::invalid(field, error.to_string()),
        error => ServiceError::Internal { problem: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tokenizer_that_takes_too_long_is_not_waited_for() {
        let deadline = Instant::now() + Duration::from_secs(1);
        let outcome = within(Some(deadline), pending::<Result<(), _>>()).await;
        assert!(matches!(outcome, Err(ServiceError::Deadline { stage: Stage::Text })), "{outcome:?}");
        assert_eq!(Instant::now().duration_since(deadline).as_millis(), 0);
        for deadline in [Some(deadline + Duration::from_secs(1)), None] {
            assert_eq!(within(deadline, async { Ok(7) }).await.unwrap(), 7);
        }
    }
}
