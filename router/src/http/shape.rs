//! What differs between the answers of the two endpoints.

use longreach_text::Tokenizer;
use serde::Serialize;

use super::types::{
    AssistantMessage, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, TextChoice, TextLogprobs,
    finish_reason,
};
use crate::output::{Delta, Ending, WholeChoice};

/// How outputs are shown by one endpoint.
pub(super) trait Shape: Send + 'static {
    /// A whole output.
    type Choice: Serialize;
    /// A piece of an output.
    type Chunk: Serialize;
    /// What ids begin with.
    const ID_PREFIX: &'static str;
    /// `object` of a whole answer.
    const OBJECT: &'static str;
    /// `object` of a chunk.
    const CHUNK_OBJECT: &'static str;

    /// A whole output, behind the text `echo`.
    fn whole(index: usize, choice: WholeChoice, echo: &str, logprobs: Option<&Tokenizer>) -> Self::Choice;
    /// What comes before the first piece of an output, if anything.
    fn opening(index: usize, echo: &str) -> Option<Self::Chunk>;
    /// A piece of an output.
    fn piece(index: usize, delta: Delta, logprobs: Option<&Tokenizer>) -> Self::Chunk;
    /// The end of an output.
    fn finish(index: usize, ending: &Ending) -> Self::Chunk;
}

/// `/v1/chat/completions`.
pub(super) enum ChatShape {}

/// `/v1/completions`.
pub(super) enum TextShape {}

impl Shape for ChatShape {
    type Choice = ChatChoice;
    type Chunk = ChatChunkChoice;
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";

    fn whole(index: usize, choice: WholeChoice, _echo: &str, logprobs: Option<&Tokenizer>) -> ChatChoice {
        let Delta { text, tokens } = choice.output;
        ChatChoice {
            index,
            message: AssistantMessage { role: "assistant", content: text, refusal: None },
            logprobs: logprobs.map(|tokenizer| ChatLogprobs::new(&tokens, tokenizer)),
            finish_reason: finish_reason(&choice.ending),
        }
    }

    fn opening(index: usize, _echo: &str) -> Option<ChatChunkChoice> {
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChatChunkChoice { index, delta, logprobs: None, finish_reason: None })
    }

    fn piece(index: usize, delta: Delta, logprobs: Option<&Tokenizer>) -> ChatChunkChoice {
        ChatChunkChoice {
            index,
            delta: ChatDelta { role: None, content: Some(delta.text) },
            logprobs: logprobs.map(|tokenizer| ChatLogprobs::new(&delta.tokens, tokenizer)),
            finish_reason: None,
        }
    }

    fn finish(index: usize, ending: &Ending) -> ChatChunkChoice {
        let finish_reason = Some(finish_reason(ending));
        ChatChunkChoice { index, delta: ChatDelta::default(), logprobs: None, finish_reason }
    }
}

impl Shape for TextShape {
    type Choice = TextChoice;
    type Chunk = TextChoice;
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";

    fn whole(index: usize, choice: WholeChoice, echo: &str, logprobs: Option<&Tokenizer>) -> TextChoice {
        let mut whole = Self::piece(index, choice.output, logprobs);
        whole.text.insert_str(0, echo);
        whole.finish_reason = Some(finish_reason(&choice.ending));
        whole
    }

    fn opening(index: usize, echo: &str) -> Option<TextChoice> {
        let text = echo.to_owned();
        (!text.is_empty()).then_some(TextChoice { index, text, logprobs: None, finish_reason: None })
    }

    fn piece(index: usize, delta: Delta, logprobs: Option<&Tokenizer>) -> TextChoice {
        let Delta { text, tokens } = delta;
        let logprobs = logprobs.map(|tokenizer| TextLogprobs::new(&tokens, tokenizer));
        TextChoice { index, text, logprobs, finish_reason: None }
    }

    fn finish(index: usize, ending: &Ending) -> TextChoice {
        let finish_reason = Some(finish_reason(ending));
        TextChoice { index, text: String::new(), logprobs: None, finish_reason }
    }
}
