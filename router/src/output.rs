//! The outputs of one request, merged into one stream of events that every face can show.
//!
//! Pulled like the [`Choice`]s below it: dropping a [`Generation`] cancels all that works for it. A face that
//! wants whole outputs instead of events collects them with [`Generation::collect`], so that streamed and whole
//! answers cannot differ.

mod choice_text;
mod text_choice;
mod usage;

use std::{sync::Arc, time::Duration};

use futures::{
    StreamExt,
    stream::{BoxStream, SelectAll},
};
use longreach_text::TextModel;
use longreach_types::{TokenId, TokenLogprobs, Usage};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) use self::usage::Timings;
use self::{
    choice_text::ChoiceText,
    text_choice::{ChoiceOutput, TextChoice},
    usage::Account,
};
use crate::{
    call::CallContext,
    dispatch::{Choice, Dispatcher},
    error::ServiceError,
    gateway::Admitted,
    metrics::RequestMeter,
    request::GenerateSpec,
};

/// A further piece of one output.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Whole characters.
    pub(crate) text: String,
    /// The tokens that the piece, or what was held back before it, was made of.
    pub(crate) tokens: Vec<DeltaToken>,
}

/// One token of an output, in the order in which text became known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeltaToken {
    pub(crate) token: TokenId,
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// Characters of the output before the token's own.
    pub(crate) text_offset: usize,
}

/// Why an output ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// `max_tokens`, or the end of the context.
    Length,
    /// The model ended it.
    Eos(TokenId),
    /// One of `stop_token_ids`.
    StopToken(TokenId),
    /// One of the stop strings.
    StopString(String),
}

/// What happens to the outputs of a request.
#[derive(Clone, Debug)]
pub(crate) enum OutputEvent {
    /// A worker has accepted the first of them. Comes first, once.
    Started,
    /// An output has grown.
    Delta { index: usize, delta: Delta },
    /// An output is complete. The last one of the request comes with the usage.
    Finish { index: usize, ending: Ending, usage: Option<UsageReport> },
}

/// What a request cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsageReport {
    pub(crate) tokens: Usage,
    pub(crate) timings: Timings,
}

/// One whole output.
#[derive(Clone, Debug)]
pub(crate) struct WholeChoice {
    pub(crate) output: Delta,
    pub(crate) ending: Ending,
}

/// What a [`Generation`] is made from.
pub(crate) struct GenerationParts {
    pub(crate) call: Arc<CallContext>,
    pub(crate) spec: GenerateSpec,
    pub(crate) text: TextModel,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) meter: RequestMeter,
    /// The request's places among those that are admitted.
    pub(crate) admitted: Admitted,
    /// Cancelled when the router ends and takes its requests along.
    pub(crate) ending: CancellationToken,
}

/// The outputs of one request in the making.
pub(crate) struct Generation {
    /// How the request is called, and when it must be over.
    pub(crate) call: Arc<CallContext>,
    /// The request's seed.
    pub(crate) seed: u64,
    choices: SelectAll<BoxStream<'static, (usize, Result<ChoiceOutput, ServiceError>)>>,
    account: Account,
    meter: RequestMeter,
    is_started: bool,
    /// An event that was taken out early, to see whether the request is accepted.
    peeked: Option<OutputEvent>,
    ending: CancellationToken,
    _admitted: Admitted,
}

impl Generation {
    /// Prepares every output of `parts.spec`; nothing happens until it is pulled.
    pub(crate) fn new(parts: GenerationParts) -> Result<Self, ServiceError> {
        let GenerationParts { call, spec, text, dispatcher, meter, admitted, ending } = parts;
        let eos: Arc<[TokenId]> = Arc::from(text.tokenizer().special().stop.as_slice());
        let end_tokens: Arc<[TokenId]> = Arc::from(spec.end_tokens(&eos));
        let mut choices = SelectAll::new();
        for (index, choice) in spec.choices(&eos).into_iter().enumerate() {
            let text = ChoiceText::new(&text, &choice.prompt, &spec, Arc::clone(&end_tokens))?;
            let choice = Choice::new(Arc::clone(&dispatcher), Arc::clone(&call), choice);
            let outputs = TextChoice::new(choice, text).into_stream();
            choices.push(outputs.map(move |output| (index, output)).boxed());
        }
        let account = Account::new(&spec);
        Ok(Self {
            call,
            seed: spec.seed(),
            choices,
            account,
            meter,
            is_started: false,
            peeked: None,
            ending,
            _admitted: admitted,
        })
    }

    /// Tokens of the prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.account.prompt_tokens()
    }

    /// How many outputs there are.
    pub(crate) fn n_choices(&self) -> usize {
        self.account.n_choices()
    }

    /// Waits until a worker has accepted the first output, or refused it, but no longer than `patience`. For the
    /// others there is no wait, or one that is queued would hold up those that run.
    pub(crate) async fn opened(&mut self, patience: Duration) -> Result<(), ServiceError> {
        if let Ok(Some(first)) = tokio::time::timeout(patience, self.next()).await {
            self.peeked = Some(first?);
        }
        Ok(())
    }

    /// Ends the request, which has its places, in `error`. Gives the error back.
    pub(crate) fn refuse(mut self, error: ServiceError) -> ServiceError {
        self.meter.failed(&error, &self.call);
        error
    }

    /// The next event; `None` after the last finish or an error. Loses nothing when it is dropped unfinished.
    pub(crate) async fn next(&mut self) -> Option<Result<OutputEvent, ServiceError>> {
        if let Some(event) = self.peeked.take() {
            return Some(Ok(event));
        }
        loop {
            match self.next_output().await? {
                Ok((index, output)) => {
                    if let Some(event) = self.take(index, output) {
                        return Some(Ok(event));
                    }
                }
                Err(error) => {
                    // One output's failure is the request's: the others are cancelled with it.
                    self.choices.clear();
                    self.meter.failed(&error, &self.call);
                    return Some(Err(error));
                }
            }
        }
    }

    async fn next_output(&mut self) -> Option<Result<(usize, ChoiceOutput), ServiceError>> {
        let deadline = self.call.deadline;
        // Only the first arm takes anything, and what it takes it gives in the same poll. Biased, so that an event
        // that is there is not lost to a deadline that passes with it.
        tokio::select! {
            biased;
            output = self.choices.next() => output.map(|(index, output)| output.map(|output| (index, output))),
            () = expire(deadline) => Some(Err(ServiceError::Deadline { stage: self.account.stage() })),
            () = self.ending.cancelled() => Some(Err(ServiceError::Unavailable {
                problem: "the router ended".to_owned(),
                retry_after: Duration::from_secs(1),
            })),
        }
    }

    /// Books what happened to an output, and says what of it is to be shown.
    fn take(&mut self, index: usize, output: ChoiceOutput) -> Option<OutputEvent> {
        let now = Instant::now();
        match output {
            ChoiceOutput::Accepted { cached_len } => {
                self.account.accepted(index, cached_len, now);
                if std::mem::replace(&mut self.is_started, true) {
                    return None;
                }
                self.meter.accepted();
                Some(OutputEvent::Started)
            }
            ChoiceOutput::Token { delta, cached_len } => {
                self.account.token(index, cached_len, now);
                self.show(index, delta, now)
            }
            ChoiceOutput::Rest { delta } => self.show(index, delta, now),
            ChoiceOutput::Finish { ending } => {
                let usage = self.account.finished(index).then(|| self.account.report());
                if let Some(usage) = &usage {
                    self.meter.finished(usage);
                }
                Some(OutputEvent::Finish { index, ending, usage })
            }
        }
    }

    fn show(&mut self, index: usize, delta: Delta, now: Instant) -> Option<OutputEvent> {
        if delta.text.is_empty() && delta.tokens.is_empty() {
            return None;
        }
        self.meter.shown(index, now);
        Some(OutputEvent::Delta { index, delta })
    }

    /// All outputs, whole, by index; and what they cost.
    pub(crate) async fn collect(mut self) -> Result<(Vec<WholeChoice>, UsageReport), ServiceError> {
        let mut outputs: Vec<Delta> = Vec::new();
        let mut endings: Vec<Option<Ending>> = Vec::new();
        outputs.resize_with(self.account.n_choices(), Delta::default);
        endings.resize_with(self.account.n_choices(), || None);
        while let Some(event) = self.next().await {
            match event? {
                OutputEvent::Started => {}
                OutputEvent::Delta { index, delta } => {
                    outputs[index].text.push_str(&delta.text);
                    outputs[index].tokens.extend(delta.tokens);
                }
                OutputEvent::Finish { index, ending, usage } => {
                    endings[index] = Some(ending);
                    if let Some(usage) = usage {
                        let whole = |(output, ending): (Delta, Option<Ending>)| {
                            ending.map(|ending| WholeChoice { output, ending })
                        };
                        let choices = outputs.into_iter().zip(endings).map(whole);
                        return choices
                            .collect::<Option<Vec<_>>>()
                            .map(|all| (all, usage))
                            .ok_or_else(unfinished);
                    }
                }
            }
        }
        Err(unfinished())
    }
}

async fn expire(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn unfinished() -> ServiceError {
    ServiceError::Internal { problem: "an output ended without a finish".to_owned() }
}
