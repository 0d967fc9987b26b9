//! One output, from tokens to text.

use futures::{Stream, stream};
use longreach_types::FinishReason;

use super::{Delta, Ending, choice_text::ChoiceText};
use crate::{
    dispatch::{Choice, ChoiceEvent},
    error::ServiceError,
};

/// What happens to one output, in text.
#[derive(Debug)]
pub(super) enum ChoiceOutput {
    /// A decode group has reserved blocks.
    Accepted { cached_len: usize },
    /// A token came. Its text may be held back still.
    Token { delta: Delta, cached_len: usize },
    /// What was held back at the end.
    Rest { delta: Delta },
    /// The output is complete.
    Finish { ending: Ending },
}

/// One output in the making, with its text.
pub(super) struct TextChoice {
    /// Gone as soon as the output is decided, and with it all that works for it.
    choice: Option<Choice>,
    text: ChoiceText,
    ending: Option<Ending>,
}

impl TextChoice {
    /// `choice` with its text.
    pub(super) fn new(choice: Choice, text: ChoiceText) -> Self {
        Self { choice: Some(choice), text, ending: None }
    }

    /// All events, to the finish or the first error.
    pub(super) fn into_stream(self) -> impl Stream<Item = Result<ChoiceOutput, ServiceError>> {
        stream::unfold(self, |mut this| async move {
            let output = this.next().await.transpose()?;
            if output.is_err() {
                this.choice = None;
            }
            Some((output, this))
        })
    }

    async fn next(&mut self) -> Result<Option<ChoiceOutput>, ServiceError> {
        if let Some(ending) = self.ending.take() {
            return Ok(Some(ChoiceOutput::Finish { ending }));
        }
        let Some(choice) = &mut self.choice else { return Ok(None) };
        let Some(event) = choice.next().await? else { return Ok(None) };
        Ok(Some(match event {
            ChoiceEvent::Accepted { cached_len } => ChoiceOutput::Accepted { cached_len },
            ChoiceEvent::Token { token, cached_len } => {
                let (delta, stop) = self.text.push(token)?;
                if let Some(stop) = stop {
                    self.end(Ending::StopString(stop));
                }
                ChoiceOutput::Token { delta, cached_len }
            }
            ChoiceEvent::Finish(reason) => {
                let (delta, stop) = self.text.finish()?;
                self.end(match (stop, reason) {
                    (Some(stop), _) => Ending::StopString(stop),
                    (None, FinishReason::Length) => Ending::Length,
                    (None, FinishReason::Eos(token)) => Ending::Eos(token),
                    (None, FinishReason::StopToken(token)) => Ending::StopToken(token),
                    (None, FinishReason::StopString) => return Err(no_text_below()),
                });
                ChoiceOutput::Rest { delta }
            }
        }))
    }

    fn end(&mut self, ending: Ending) {
        self.ending = Some(ending);
        self.choice = None;
    }
}

fn no_text_below() -> ServiceError {
    ServiceError::Internal { problem: "a worker, which sees no text, reported a stop string".to_owned() }
}
