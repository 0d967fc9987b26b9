//! Between the public messages and the router's own types.

use std::time::Duration;

use longreach_proto::inference as pb;
use longreach_text::{ChatMessage, Tokenizer};
use longreach_types::TokenLogprob;

use crate::{
    error::ServiceError,
    gateway::{Gateway, from_text_error},
    output::{Delta, DeltaToken, Ending, Generation, OutputEvent, UsageReport, WholeChoice},
    request::{ChatDraft, Draft, Options, PromptDraft},
};

/// The parts that every generating request has.
pub(crate) struct IncomingParts {
    pub(super) model: String,
    pub(super) request_id: String,
    pub(super) prompt: Option<pb::Prompt>,
    pub(super) options: pb::GenerateOptions,
}

/// A generating request.
pub(crate) trait Incoming: Send + 'static {
    /// Its parts.
    fn into_parts(self) -> IncomingParts;
}

impl Incoming for pb::GenerateRequest {
    fn into_parts(self) -> IncomingParts {
        let Self { model, request_id, prompt, options } = self;
        IncomingParts { model, request_id, prompt, options: options.unwrap_or_default() }
    }
}

impl Incoming for pb::GenerateStreamRequest {
    fn into_parts(self) -> IncomingParts {
        let Self { model, request_id, prompt, options } = self;
        IncomingParts { model, request_id, prompt, options: options.unwrap_or_default() }
    }
}

impl Incoming for pb::ChatRequest {
    fn into_parts(self) -> IncomingParts {
        let Self { model, request_id, chat, options } = self;
        IncomingParts { model, request_id, prompt: chat_prompt(chat), options: options.unwrap_or_default() }
    }
}

impl Incoming for pb::ChatStreamRequest {
    fn into_parts(self) -> IncomingParts {
        let Self { model, request_id, chat, options } = self;
        IncomingParts { model, request_id, prompt: chat_prompt(chat), options: options.unwrap_or_default() }
    }
}

fn chat_prompt(chat: Option<pb::ChatPrompt>) -> Option<pb::Prompt> {
    chat.map(|chat| pb::Prompt { prompt: Some(pb::prompt::Prompt::Chat(chat)) })
}

impl IncomingParts {
    /// As the router's own request.
    pub(super) fn into_draft(self) -> Result<Draft, ServiceError> {
        Ok(Draft {
            model: Some(self.model),
            prompts: vec![prompt(self.prompt)?],
            options: options(self.options),
        })
    }
}

/// A prompt in one of its three forms.
pub(super) fn prompt(prompt: Option<pb::Prompt>) -> Result<PromptDraft, ServiceError> {
    match prompt.and_then(|prompt| prompt.prompt) {
        Some(pb::prompt::Prompt::Text(text)) => Ok(PromptDraft::Text(text)),
        Some(pb::prompt::Prompt::TokenIds(tokens)) => Ok(PromptDraft::Tokens(tokens.ids)),
        Some(pb::prompt::Prompt::Chat(chat)) => {
            if chat.messages.is_empty() {
                return Err(ServiceError::invalid("messages", "is empty; at least 1 message is needed"));
            }
            let messages = chat.messages.into_iter().enumerate().map(chat_message);
            Ok(PromptDraft::Chat(ChatDraft {
                messages: messages.collect::<Result<_, _>>()?,
                add_generation_prompt: chat.add_generation_prompt.unwrap_or(true),
                variables: serde_json::Map::new(),
            }))
        }
        None => Err(ServiceError::invalid("prompt", "is missing; set text, token_ids or chat")),
    }
}

fn chat_message((idx, message): (usize, pb::ChatMessage)) -> Result<ChatMessage, ServiceError> {
    let role = message.role.parse().map_err(|error| match from_text_error(error, "role") {
        ServiceError::Invalid { problem, .. } => {
            ServiceError::invalid(format!("messages[{idx}].role"), problem)
        }
        other => other,
    })?;
    Ok(ChatMessage::text(role, message.content))
}

fn options(options: pb::GenerateOptions) -> Options {
    Options {
        temperature: options.temperature,
        top_k: options.top_k.map(i64::from),
        top_p: options.top_p,
        min_p: options.min_p,
        repetition_penalty: options.repetition_penalty,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        logit_bias: options.logit_bias.into_iter().collect(),
        seed: options.seed,
        n: options.n,
        max_tokens: options.max_tokens,
        min_tokens: options.min_tokens,
        stop: options.stop,
        stop_token_ids: options.stop_token_ids,
        ignore_eos: options.ignore_eos.unwrap_or(false),
        include_stop: options.include_stop.unwrap_or(false),
        top_logprobs: options.top_logprobs,
        return_token_ids: options.return_token_ids.unwrap_or(false),
        session_id: options.session_id,
        cache_salt: options.cache_salt,
        priority: options.priority.unwrap_or(0),
    }
}

/// How the outputs of one request are shown.
pub(super) struct Shown {
    pub(super) model: String,
    tokenizer: Tokenizer,
    has_token_ids: bool,
    has_timings: bool,
}

/// One message of a stream, whatever the method.
pub(super) struct StreamEvent {
    kind: EventKind,
    usage: Option<pb::Usage>,
}

enum EventKind {
    Started(pb::Started),
    Delta(pb::Delta),
    Finish(pb::ChoiceFinish),
    Heartbeat(pb::Heartbeat),
}

impl Shown {
    /// As `options` ask for it.
    pub(super) fn new(gateway: &Gateway, options: &pb::GenerateOptions) -> Self {
        Self {
            model: gateway.model_name.clone(),
            tokenizer: gateway.text.tokenizer().clone(),
            has_token_ids: options.return_token_ids.unwrap_or(false),
            has_timings: options.return_timings.unwrap_or(false),
        }
    }

    /// Whole outputs.
    pub(super) fn choices(&self, choices: Vec<WholeChoice>) -> Vec<pb::Choice> {
        let choice = |(index, choice): (usize, WholeChoice)| {
            let Delta { text, tokens } = choice.output;
            pb::Choice {
                index: count(index),
                text,
                token_ids: self.token_ids(&tokens),
                logprobs: self.logprobs(&tokens),
                finish: Some(finish(choice.ending)),
            }
        };
        choices.into_iter().enumerate().map(choice).collect()
    }

    /// What a request cost.
    pub(super) fn usage(&self, report: UsageReport) -> pb::Usage {
        let UsageReport { tokens, timings } = report;
        pb::Usage {
            prompt_tokens: count(tokens.prompt_tokens),
            completion_tokens: count(tokens.completion_tokens),
            cached_tokens: count(tokens.cached_tokens),
            timings: self.has_timings.then(|| pb::Timings {
                queue: duration(timings.queue),
                prefill: duration(timings.prefill),
                decode: duration(timings.decode),
            }),
        }
    }

    /// One event of `generation`.
    pub(super) fn event(&self, event: OutputEvent, generation: &Generation) -> StreamEvent {
        let mut usage = None;
        let kind = match event {
            OutputEvent::Started => EventKind::Started(pb::Started {
                request_id: generation.call.client_id.clone(),
                model: self.model.clone(),
                seed: generation.seed,
                prompt_tokens: count(generation.prompt_tokens()),
            }),
            OutputEvent::Delta { index, delta } => EventKind::Delta(pb::Delta {
                index: count(index),
                token_ids: self.token_ids(&delta.tokens),
                logprobs: self.logprobs(&delta.tokens),
                text: delta.text,
            }),
            OutputEvent::Finish { index, ending, usage: report } => {
                usage = report.map(|report| self.usage(report));
                EventKind::Finish(pb::ChoiceFinish { index: count(index), finish: Some(finish(ending)) })
            }
        };
        StreamEvent { kind, usage }
    }

    fn token_ids(&self, tokens: &[DeltaToken]) -> Vec<u32> {
        if self.has_token_ids { tokens.iter().map(|token| token.token.0).collect() } else { Vec::new() }
    }

    fn logprobs(&self, tokens: &[DeltaToken]) -> Vec<pb::TokenLogprobs> {
        let all = tokens.iter().filter_map(|token| token.logprobs.as_ref());
        all.map(|logprobs| pb::TokenLogprobs {
            sampled: Some(self.logprob(logprobs.sampled)),
            top: logprobs.top.iter().map(|top| self.logprob(*top)).collect(),
        })
        .collect()
    }

    fn logprob(&self, entry: TokenLogprob) -> pb::TokenLogprob {
        let spelling = self.tokenizer.token_bytes(entry.token).unwrap_or_default().to_vec();
        pb::TokenLogprob { token_id: entry.token.0, logprob: entry.logprob, spelling }
    }
}

impl StreamEvent {
    /// A sign of life.
    pub(super) fn heartbeat() -> Self {
        Self { kind: EventKind::Heartbeat(pb::Heartbeat {}), usage: None }
    }
}

impl From<StreamEvent> for pb::GenerateStreamResponse {
    fn from(StreamEvent { kind, usage }: StreamEvent) -> Self {
        use pb::generate_stream_response::Event;
        let event = Some(match kind {
            EventKind::Started(started) => Event::Started(started),
            EventKind::Delta(delta) => Event::Delta(delta),
            EventKind::Finish(finish) => Event::Finish(finish),
            EventKind::Heartbeat(heartbeat) => Event::Heartbeat(heartbeat),
        });
        Self { event, usage }
    }
}

impl From<StreamEvent> for pb::ChatStreamResponse {
    fn from(StreamEvent { kind, usage }: StreamEvent) -> Self {
        use pb::chat_stream_response::Event;
        let event = Some(match kind {
            EventKind::Started(started) => Event::Started(started),
            EventKind::Delta(delta) => Event::Delta(delta),
            EventKind::Finish(finish) => Event::Finish(finish),
            EventKind::Heartbeat(heartbeat) => Event::Heartbeat(heartbeat),
        });
        Self { event, usage }
    }
}

fn finish(ending: Ending) -> pb::Finish {
    use pb::{FinishReason, finish::Matched};
    let (reason, matched) = match ending {
        Ending::Length => (FinishReason::Length, None),
        Ending::Eos(token) => (FinishReason::Eos, Some(Matched::TokenId(token.0))),
        Ending::StopToken(token) => (FinishReason::StopToken, Some(Matched::TokenId(token.0))),
        Ending::StopString(stop) => (FinishReason::StopString, Some(Matched::Stop(stop))),
    };
    pb::Finish { reason: reason.into(), matched }
}

fn duration(span: Duration) -> Option<prost_types::Duration> {
    span.try_into().ok()
}

/// Counts cross the wire as 32-bit numbers; everything counted here is bounded far below.
pub(super) fn count(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
