//! The request body of the OpenAI endpoints.
//!
//! One type serves both endpoints, because they share all but three fields, and two copies of a field list drift
//! apart. Fields that other servers of this API have added keep the names they have there. What cannot be done here is
//! refused by name; what has no effect on the output (`user`, `metadata`, and whatever clients add) is ignored.

use std::collections::HashMap;

use longreach_text::ChatMessage;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};

use crate::{
    error::ServiceError,
    request::{ChatDraft, Draft, Options, PromptDraft},
};

/// Everything a client may write.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Body {
    model: Option<String>,
    messages: Option<Vec<ChatMessage>>,
    prompt: Option<PromptField>,
    pub(super) stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub(super) echo: Option<bool>,
    logprobs: Option<LogprobsField>,
    top_logprobs: Option<u32>,

    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<HashMap<String, f32>>,
    seed: Option<i128>,
    n: Option<u32>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    min_tokens: Option<u32>,
    stop: Option<StopField>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    add_generation_prompt: Option<bool>,
    /// Whatever the model's template knows.
    chat_template_kwargs: Option<Map<String, Value>>,

    request_id: Option<String>,
    session_id: Option<String>,
    prompt_cache_key: Option<String>,
    cache_salt: Option<String>,
    priority: Option<i32>,

    tools: Option<Vec<IgnoredAny>>,
    functions: Option<Vec<IgnoredAny>>,
    response_format: Option<ResponseFormat>,
    modalities: Option<Vec<String>>,
    audio: Option<IgnoredAny>,
    best_of: Option<u32>,
    suffix: Option<String>,
    prompt_logprobs: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    r#type: String,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, or token ids (whole numbers from 0 to 4294967295)"
)]
enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum StopField {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected true, false or a whole number")]
enum LogprobsField {
    Flag(bool),
    Count(u32),
}

impl Body {
    /// Reads a body; an error names the field.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ServiceError> {
        // A derived reader takes an array for a struct, too.
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Err(ServiceError::invalid("body", "is not a JSON object"));
        }
        let mut json = serde_json::Deserializer::from_slice(bytes);
        let body: Self = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            // A question mark stands for a place between fields.
            let path = error.path().to_string();
            let field = path.trim_end_matches(['.', '?']);
            let field = if field.is_empty() { "body" } else { field };
            ServiceError::invalid(field, error.inner().to_string())
        })?;
        json.end().map_err(|error| ServiceError::invalid("body", error.to_string()))?;
        Ok(body)
    }

    /// Whether a stream ends with a chunk that has the usage.
    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The client's name for the request.
    pub(super) fn request_id(&self) -> Option<String> {
        self.request_id.clone()
    }

    /// The model that is asked for.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// As a chat request.
    pub(super) fn into_chat(mut self) -> Result<Draft, ServiceError> {
        let messages = self.messages.take().unwrap_or_default();
        if messages.is_empty() {
            return Err(ServiceError::invalid("messages", "is empty; at least 1 message is needed"));
        }
        let top_logprobs = match (&self.logprobs, self.top_logprobs) {
            (Some(LogprobsField::Flag(true)), top) => Some(top.unwrap_or(0)),
            (Some(LogprobsField::Count(_)), _) => {
                return Err(ServiceError::invalid("logprobs", "is a number; it must be true or false"));
            }
            (_, Some(_)) => {
                return Err(ServiceError::invalid("top_logprobs", "needs logprobs to be true"));
            }
            _ => None,
        };
        let add_generation_prompt = self.add_generation_prompt.unwrap_or(true);
        let variables = self.chat_template_kwargs.take().unwrap_or_default();
        let prompts = vec![PromptDraft::Chat(ChatDraft { messages, add_generation_prompt, variables })];
        self.into_draft(prompts, top_logprobs)
    }

    /// As a completion request.
    pub(super) fn into_completion(mut self) -> Result<Draft, ServiceError> {
        let prompts: Vec<PromptDraft> = match self.prompt.take() {
            Some(PromptField::Text(text)) => vec![PromptDraft::Text(text)],
            Some(PromptField::Texts(texts)) => texts.into_iter().map(PromptDraft::Text).collect(),
            Some(PromptField::Tokens(tokens)) => vec![PromptDraft::Tokens(tokens)],
            Some(PromptField::TokenLists(lists)) => lists.into_iter().map(PromptDraft::Tokens).collect(),
            None => Vec::new(),
        };
        if prompts.is_empty() {
            return Err(ServiceError::invalid("prompt", "is empty; at least 1 token is needed"));
        }
        let top_logprobs = match self.logprobs {
            Some(LogprobsField::Count(n)) => Some(n),
            Some(LogprobsField::Flag(true)) => {
                return Err(ServiceError::invalid("logprobs", "is true; it must be a number"));
            }
            Some(LogprobsField::Flag(false)) | None => None,
        };
        if self.echo == Some(true) && top_logprobs.is_some() {
            let problem = "cannot be combined with logprobs: those of the prompt are not computed";
            return Err(ServiceError::unsupported("echo", problem));
        }
        self.into_draft(prompts, top_logprobs)
    }

    fn into_draft(self, prompts: Vec<PromptDraft>, top_logprobs: Option<u32>) -> Result<Draft, ServiceError> {
        self.check_supported()?;
        let options = Options {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: logit_bias(self.logit_bias.unwrap_or_default())?,
            seed: self.seed.map(seed).transpose()?,
            n: self.n,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            min_tokens: self.min_tokens,
            stop: match self.stop {
                Some(StopField::One(stop)) => vec![stop],
                Some(StopField::Many(stops)) => stops,
                None => Vec::new(),
            },
            stop_token_ids: self.stop_token_ids.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            top_logprobs,
            return_token_ids: false,
            session_id: self.session_id.or(self.prompt_cache_key),
            cache_salt: self.cache_salt,
            priority: self.priority.unwrap_or(0),
        };
        Ok(Draft { model: self.model, prompts, options })
    }

    /// Refuses what would change the output and cannot be done.
    fn check_supported(&self) -> Result<(), ServiceError> {
        let format = self.response_format.as_ref().map(|format| format.r#type.as_str());
        let speaks = |modalities: &Vec<String>| modalities.iter().any(|modality| modality != "text");
        let given = |list: &Option<Vec<IgnoredAny>>| list.as_ref().is_some_and(|list| !list.is_empty());
        let unsupported = [
            ("tools", given(&self.tools)),
            ("functions", given(&self.functions)),
            ("response_format", format.is_some_and(|format| format != "text")),
            ("modalities", self.modalities.as_ref().is_some_and(speaks)),
            ("audio", self.audio.is_some()),
            ("best_of", self.best_of.is_some_and(|best_of| best_of != self.n.unwrap_or(1))),
            ("suffix", self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
        ];
        match unsupported.into_iter().find(|(_, is_asked)| *is_asked) {
            Some((field, _)) => Err(ServiceError::unsupported(field, "is not supported by this server")),
            None => Ok(()),
        }
    }
}

fn logit_bias(entries: HashMap<String, f32>) -> Result<Vec<(u32, f32)>, ServiceError> {
    let parse = |(key, bias): (String, f32)| match key.parse() {
        Ok(token) => Ok((token, bias)),
        Err(_) => {
            Err(ServiceError::invalid("logit_bias", format!("has the key {key:?}; keys are token ids")))
        }
    };
    entries.into_iter().map(parse).collect()
}

/// Clients draw seeds from signed and from unsigned 64-bit numbers; both are 64 bits.
fn seed(seed: i128) -> Result<u64, ServiceError> {
    u64::try_from(seed).or_else(|_| i64::try_from(seed).map(i64::cast_unsigned)).map_err(|_| {
        ServiceError::invalid("seed", format!("is {seed}; it must be a whole number of at most 64 bits"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(body: &str) -> String {
        Body::parse(body.as_bytes()).and_then(Body::into_chat).unwrap_err().to_string()
    }

    #[test]
    fn mistakes_name_their_field() {
        let with = |field: &str| format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{field}}}"#);
        for (body, start) in [
            ("", "body: is not a JSON object"),
            ("[]", "body: is not a JSON object"),
            ("{", "body: EOF"),
            (r#"{"messages":[{"content":"x"}]}"#, "messages[0]: missing field `role`"),
            (r#"{"messages":[{"role":"user","content":7}]}"#, "messages[0].content: data did not match"),
            (r#"{"messages":[{"role":"user","content":"\ud83d"}]}"#, "messages[0].content: "),
            (&with(r#""temperature":"hot""#), "temperature: invalid type"),
            (&with(r#""temperature":1e999"#), "temperature: number out of range"),
            (&with(r#""temperature":NaN"#), "temperature: expected"),
            (&with(r#""n":-1"#), "n: invalid value"),
            (&with(r#""stop":7"#), "stop: expected a string or a list"),
            (&with(r#""logit_bias":{"AI":1}"#), "logit_bias: has the key \"AI\""),
            (&with(r#""seed":18446744073709551616"#), "seed: is 18446744073709551616"),
            (&with(r#""tools":[{}]"#), "tools: is not supported"),
            (&with(r#""response_format":{"type":"json_object"}"#), "response_format: is not supported"),
            (&with(r#""top_logprobs":3"#), "top_logprobs: needs logprobs"),
            (&(with(r#""n":1"#) + "x"), "body: trailing characters"),
        ] {
            let problem = problem(body);
            assert!(problem.starts_with(start), "{body}: {problem}");
        }
    }

    #[test]
    fn null_is_absent_and_unknown_fields_are_ignored() {
        let body = r#"{"messages":[{"role":"user","content":null}],"stop":null,"seed":null,"tools":null,
            "user":"u","metadata":{"a":[1]},"store":false}"#;
        let draft = Body::parse(body.as_bytes()).unwrap().into_chat().unwrap();
        assert!(draft.options.stop.is_empty() && draft.options.seed.is_none());
    }

    #[test]
    fn seeds_of_either_sign_are_64_bits() {
        assert_eq!(seed(-1).unwrap(), u64::MAX);
        assert_eq!(seed(u64::MAX.into()).unwrap(), u64::MAX);
        assert!(seed(i128::from(i64::MIN) - 1).is_err());
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let prompts = |prompt: &str| {
            let body = format!(r#"{{"prompt":{prompt}}}"#);
            Body::parse(body.as_bytes()).and_then(Body::into_completion).map(|draft| draft.prompts.len())
        };
        assert_eq!(prompts(r#""a""#).unwrap(), 1);
        assert_eq!(prompts(r#"["a","b"]"#).unwrap(), 2);
        assert_eq!(prompts("[1,2,3]").unwrap(), 1);
        assert_eq!(prompts("[[1],[2,3]]").unwrap(), 2);
        for bad in ["[]", "[-1]", "[5279552648203111001]", "{}", "null"] {
            assert_eq!(prompts(bad).unwrap_err().field(), Some("prompt"), "{bad}");
        }
    }
}
