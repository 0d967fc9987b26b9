//! The answers of the OpenAI endpoints, exactly as the official clients parse them.

use longreach_text::Tokenizer;
use longreach_types::{TokenId, Usage};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::output::{DeltaToken, Ending};

/// JSON has no infinity; this is what stands for a token that cannot be sampled, as in the original.
const LOGPROB_FLOOR: f32 = -9999.0;

/// A completion of either endpoint, or one chunk of it.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<C>,
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub(super) usage: UsageField,
}

/// Usage as an answer shows it: chunks of a stream that ends with the usage have it as null before.
#[derive(Clone, Copy, Debug)]
pub(super) enum UsageField {
    Absent,
    Null,
    Known(Usage),
}

/// One whole chat output.
#[derive(Debug, Serialize)]
pub(super) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: AssistantMessage,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: &'static str,
}

/// What the model said.
#[derive(Debug, Serialize)]
pub(super) struct AssistantMessage {
    pub(super) role: &'static str,
    pub(super) content: String,
    pub(super) refusal: Option<String>,
}

/// A piece of a chat output.
#[derive(Debug, Serialize)]
pub(super) struct ChatChunkChoice {
    pub(super) index: usize,
    pub(super) delta: ChatDelta,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// What is new in a piece.
#[derive(Debug, Default, Serialize)]
pub(super) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
}

/// One text output, or a piece of it.
#[derive(Debug, Serialize)]
pub(super) struct TextChoice {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: Option<TextLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// Log-probabilities of a chat output.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatTokenLogprob>,
}

#[derive(Debug, Serialize)]
struct ChatTokenLogprob {
    #[serde(flatten)]
    sampled: TokenEntry,
    top_logprobs: Vec<TokenEntry>,
}

#[derive(Debug, Serialize)]
struct TokenEntry {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Log-probabilities of a text output.
#[derive(Debug, Default, Serialize)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<TopLogprobs>,
    text_offset: Vec<usize>,
}

/// A map in the order of its entries: most likely first.
#[derive(Debug)]
struct TopLogprobs(Vec<(String, f32)>);

/// The error object.
#[derive(Debug, Serialize)]
pub(super) struct ErrorBody {
    pub(super) error: ErrorObject,
}

/// What is in it.
#[derive(Debug, Serialize)]
pub(super) struct ErrorObject {
    pub(super) message: String,
    pub(super) r#type: &'static str,
    pub(super) param: Option<String>,
    pub(super) code: String,
}

/// The models.
#[derive(Debug, Serialize)]
pub(super) struct ModelList<'a> {
    pub(super) object: &'static str,
    pub(super) data: Vec<ModelObject<'a>>,
}

/// One model.
#[derive(Debug, Serialize)]
pub(super) struct ModelObject<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) owned_by: &'static str,
    /// Tokens of prompt and output together; other servers of this API name it so too.
    pub(super) max_model_len: Option<usize>,
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl Serialize for UsageField {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Details {
            cached_tokens: usize,
        }
        #[derive(Serialize)]
        struct Object {
            prompt_tokens: usize,
            completion_tokens: usize,
            total_tokens: usize,
            prompt_tokens_details: Details,
        }
        let Self::Known(usage) = self else { return serializer.serialize_none() };
        Object {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: Details { cached_tokens: usage.cached_tokens },
        }
        .serialize(serializer)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

impl ChatLogprobs {
    /// Those of `tokens`.
    pub(super) fn new(tokens: &[DeltaToken], tokenizer: &Tokenizer) -> Self {
        let entry = |token, logprob| TokenEntry {
            token: spelling(tokenizer, token),
            logprob: floored(logprob),
            bytes: tokenizer.token_bytes(token).unwrap_or_default().to_vec(),
        };
        let of_token = |token: &DeltaToken| {
            let logprobs = token.logprobs.as_ref()?;
            Some(ChatTokenLogprob {
                sampled: entry(token.token, logprobs.sampled.logprob),
                top_logprobs: logprobs.top.iter().map(|top| entry(top.token, top.logprob)).collect(),
            })
        };
        Self { content: tokens.iter().filter_map(of_token).collect() }
    }
}

impl TextLogprobs {
    /// Those of `tokens`.
    pub(super) fn new(tokens: &[DeltaToken], tokenizer: &Tokenizer) -> Self {
        let mut all = Self::default();
        for token in tokens {
            let Some(logprobs) = &token.logprobs else { continue };
            let sampled = (spelling(tokenizer, token.token), floored(logprobs.sampled.logprob));
            let mut top: Vec<(String, f32)> = Vec::with_capacity(logprobs.top.len() + 1);
            let entries =
                logprobs.top.iter().map(|top| (spelling(tokenizer, top.token), floored(top.logprob)));
            for entry in entries.chain([sampled.clone()]) {
                // Keys of a JSON object are distinct; different tokens may spell alike, and the likelier stays.
                if top.iter().all(|(spelling, _)| *spelling != entry.0) {
                    top.push(entry);
                }
            }
            all.tokens.push(sampled.0);
            all.token_logprobs.push(sampled.1);
            all.top_logprobs.push(TopLogprobs(top));
            all.text_offset.push(token.text_offset);
        }
        all
    }
}

/// Why an output ended, in the API's two words.
pub(super) fn finish_reason(ending: &Ending) -> &'static str {
    match ending {
        Ending::Length => "length",
        Ending::Eos(_) | Ending::StopToken(_) | Ending::StopString(_) => "stop",
    }
}

/// What a token spells; its bytes, escaped, if they are not whole characters.
fn spelling(tokenizer: &Tokenizer, token: TokenId) -> String {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let escaped = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", escaped.collect::<String>())
        }
    }
}

fn floored(logprob: f32) -> f32 {
    // `max` also takes the floor for NaN, which a worker never sends.
    logprob.max(LOGPROB_FLOOR)
}
