//! From a generation to an answer: whole, or as server-sent events.
//!
//! A stream that fails ends with an error object and without `[DONE]`, which is how clients tell it from one that
//! is complete. All content travels inside JSON, so that no text of a model can end an event or begin another.

use std::{collections::VecDeque, convert::Infallible, marker::PhantomData, time::Duration};

use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use futures::{Stream, stream};
use longreach_text::Tokenizer;
use longreach_types::Usage;
use serde::Serialize;

use super::{
    error_body,
    shape::Shape,
    types::{Completion, UsageField},
};
use crate::{
    error::ServiceError,
    gateway::Gateway,
    ops::unix_now,
    output::{Generation, OutputEvent, WholeChoice},
    stall::StallWatch,
};

/// What the request asked of its answer.
pub(super) struct Options {
    /// Log-probabilities are shown.
    pub(super) has_logprobs: bool,
    /// The text of each prompt, if it is put before its outputs.
    pub(super) echo: Vec<String>,
    /// Outputs of each prompt.
    pub(super) n: usize,
}

/// One answer in the making.
pub(super) struct Answer<S> {
    id: String,
    created: u64,
    model: String,
    n_choices: usize,
    tokenizer: Tokenizer,
    options: Options,
    shape: PhantomData<S>,
}

/// A stream of events, in the making.
struct EventSource<S> {
    answer: Answer<S>,
    generation: Generation,
    include_usage: bool,
    /// Events that are due before the generation is asked again.
    due: VecDeque<Event>,
    has_ended: bool,
}

impl<S: Shape> Answer<S> {
    /// The answer to the request of `generation`.
    pub(super) fn new(gateway: &Gateway, generation: &Generation, options: Options) -> Self {
        Self {
            id: format!("{}{}", S::ID_PREFIX, generation.call.request_id),
            created: unix_now(),
            model: gateway.model_name.clone(),
            n_choices: generation.n_choices(),
            tokenizer: gateway.text.tokenizer().clone(),
            options,
            shape: PhantomData,
        }
    }

    /// The whole answer.
    pub(super) fn whole(&self, choices: Vec<WholeChoice>, usage: Usage) -> Completion<'_, S::Choice> {
        let choices = choices.into_iter().enumerate();
        let choices =
            choices.map(|(index, choice)| S::whole(index, choice, self.echo(index), self.logprobs()));
        self.completion(S::OBJECT, choices.collect(), UsageField::Known(usage))
    }

    /// The answer as it grows.
    pub(super) fn stream(
        self,
        generation: Generation,
        include_usage: bool,
        (stalls, heartbeat): (&StallWatch, Duration),
    ) -> Response {
        let due = VecDeque::new();
        let stalled = json_event(&error_body(&ServiceError::Stalled { patience: stalls.patience() }));
        let source = EventSource { answer: self, generation, include_usage, due, has_ended: false };
        let keep_alive = KeepAlive::new().interval(heartbeat).text("keep-alive");
        let events = stalls.watch(source.into_stream(), Ok(stalled.unwrap_or_default()));
        Sse::new(events).keep_alive(keep_alive).into_response()
    }

    fn completion<C>(&self, object: &'static str, choices: Vec<C>, usage: UsageField) -> Completion<'_, C> {
        Completion { id: &self.id, object, created: self.created, model: &self.model, choices, usage }
    }

    fn echo(&self, index: usize) -> &str {
        self.options.echo.get(index / self.options.n.max(1)).map_or("", String::as_str)
    }

    fn logprobs(&self) -> Option<&Tokenizer> {
        self.options.has_logprobs.then_some(&self.tokenizer)
    }
}

impl<S: Shape> EventSource<S> {
    fn into_stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        stream::unfold(self, |mut source| async move { source.next().await.map(|event| (Ok(event), source)) })
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Some(event);
            }
            if self.has_ended {
                return None;
            }
            match self.generation.next().await {
                Some(Ok(event)) => self.show(event),
                Some(Err(error)) => self.fail(&error),
                None => self.has_ended = true,
            }
        }
    }

    fn show(&mut self, event: OutputEvent) {
        match event {
            OutputEvent::Started => {
                for index in 0..self.answer.n_choices {
                    if let Some(chunk) = S::opening(index, self.answer.echo(index)) {
                        self.push_chunk(chunk);
                    }
                }
            }
            OutputEvent::Delta { index, delta } => {
                self.push_chunk(S::piece(index, delta, self.answer.logprobs()));
            }
            OutputEvent::Finish { index, ending, usage } => {
                self.push_chunk(S::finish(index, &ending));
                if let Some(usage) = usage {
                    self.finish(usage.tokens);
                }
            }
        }
    }

    fn push_chunk(&mut self, chunk: S::Chunk) {
        let usage = if self.include_usage { UsageField::Null } else { UsageField::Absent };
        let event = json_event(&self.answer.completion(S::CHUNK_OBJECT, vec![chunk], usage));
        self.push(event);
    }

    fn finish(&mut self, usage: Usage) {
        if self.include_usage {
            let chunk =
                self.answer.completion::<S::Chunk>(S::CHUNK_OBJECT, Vec::new(), UsageField::Known(usage));
            let event = json_event(&chunk);
            self.push(event);
        }
        self.due.push_back(Event::default().data("[DONE]"));
        self.has_ended = true;
    }

    fn push(&mut self, event: Result<Event, ServiceError>) {
        match event {
            Ok(event) => self.due.push_back(event),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &ServiceError) {
        self.due.extend(json_event(&error_body(error)));
        self.has_ended = true;
    }
}

fn json_event(value: &impl Serialize) -> Result<Event, ServiceError> {
    Event::default()
        .json_data(value)
        .map_err(|error| ServiceError::Internal { problem: format!("an event has no JSON form: {error}") })
}
