//! Requests in few words, and what comes of them on the gRPC face.

use futures::StreamExt;
use longreach_proto::inference::{
    ChatMessage, ChatPrompt, Choice, Finish, FinishReason, GenerateOptions, GenerateRequest,
    GenerateResponse, GenerateStreamRequest, GenerateStreamResponse, Prompt, TokenIds, Usage,
    generate_stream_response::Event, prompt,
};
use serde_json::{Value, json};
use tonic::{Status, Streaming};

use super::{TestCluster, model::VOCAB_SIZE};

/// One request: greedy, token ids reported, unless it is told otherwise.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What to continue.
    pub prompt: prompt::Prompt,
    /// How.
    pub options: GenerateOptions,
}

/// One finished output, gathered from a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Bits of the tokens' log-probabilities, if asked for.
    pub logprobs: Vec<u32>,
    /// Why it ended.
    pub finish: Option<Finish>,
    /// What it cost; the request's, so it is with the last output to end.
    pub usage: Option<Usage>,
}

impl Ask {
    fn new(prompt: prompt::Prompt) -> Self {
        let options = GenerateOptions {
            temperature: Some(0.0),
            ignore_eos: Some(true),
            return_token_ids: Some(true),
            max_tokens: Some(16),
            ..GenerateOptions::default()
        };
        Self { prompt, options }
    }

    /// A prompt of token ids.
    pub fn tokens(ids: impl Into<Vec<u32>>) -> Self {
        Self::new(prompt::Prompt::TokenIds(TokenIds { ids: ids.into() }))
    }

    /// A text prompt.
    pub fn text(text: &str) -> Self {
        Self::new(prompt::Prompt::Text(text.to_owned()))
    }

    /// One question in a conversation.
    pub fn chat(question: &str) -> Self {
        let messages = vec![ChatMessage { role: "user".to_owned(), content: question.to_owned() }];
        Self::new(prompt::Prompt::Chat(ChatPrompt { messages, ..ChatPrompt::default() }))
    }

    /// The most tokens.
    pub fn max_tokens(mut self, max_tokens: u32) -> Self {
        self.options.max_tokens = Some(max_tokens);
        self
    }

    /// Samples at temperature 1 with this seed.
    pub fn sampled(mut self, seed: u64) -> Self {
        self.options.temperature = Some(1.0);
        self.options.seed = Some(seed);
        self
    }

    /// Reports log-probabilities of this many alternatives.
    pub fn logprobs(mut self, n_top: u32) -> Self {
        self.options.top_logprobs = Some(n_top);
        self
    }

    /// Lets only lower-case letters and pairs of them be sampled, so that every token is readable.
    pub fn letters(mut self) -> Self {
        let is_letter = |id: &u32| (97..123).contains(id) || (256..VOCAB_SIZE - 3).contains(id);
        self.options.logit_bias =
            (0..VOCAB_SIZE).filter(|id| !is_letter(id)).map(|id| (id, -100.0)).collect();
        self
    }

    /// As a unary request.
    pub fn request(&self) -> GenerateRequest {
        GenerateRequest {
            prompt: Some(Prompt { prompt: Some(self.prompt.clone()) }),
            options: Some(self.options.clone()),
            ..GenerateRequest::default()
        }
    }

    /// As a streaming request.
    pub fn stream_request(&self) -> GenerateStreamRequest {
        let GenerateRequest { prompt, options, .. } = self.request();
        GenerateStreamRequest { prompt, options, ..GenerateStreamRequest::default() }
    }

    /// As the body of a request to `/v1/completions`, or, for a conversation, to `/v1/chat/completions`.
    pub fn body(&self) -> Value {
        let options = &self.options;
        let mut body = json!({
            "temperature": options.temperature, "seed": options.seed, "max_tokens": options.max_tokens,
            "ignore_eos": options.ignore_eos, "n": options.n, "stop": options.stop,
            "logit_bias": options.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)))
                .collect::<serde_json::Map<_, _>>(),
        });
        match &self.prompt {
            prompt::Prompt::Text(text) => body["prompt"] = json!(text),
            prompt::Prompt::TokenIds(ids) => body["prompt"] = json!(ids.ids),
            prompt::Prompt::Chat(chat) => {
                let message =
                    |message: &ChatMessage| json!({"role": message.role, "content": message.content});
                body["messages"] = chat.messages.iter().map(message).collect();
            }
        }
        if let (Some(n_top), true) = (options.top_logprobs, body["messages"].is_null()) {
            body["logprobs"] = json!(n_top);
        } else if let Some(n_top) = options.top_logprobs {
            body["logprobs"] = json!(true);
            body["top_logprobs"] = json!(n_top);
        }
        body
    }

    /// The whole answer of the gRPC face.
    pub async fn generate(&self, cluster: &TestCluster) -> Result<GenerateResponse, Status> {
        Ok(cluster.inference().generate(self.request()).await?.into_inner())
    }

    /// The stream of the gRPC face.
    pub async fn open(&self, cluster: &TestCluster) -> Result<Streaming<GenerateStreamResponse>, Status> {
        Ok(cluster.inference().generate_stream(self.stream_request()).await?.into_inner())
    }

    /// The one output of the gRPC stream, read to its end.
    pub async fn output(&self, cluster: &TestCluster) -> Result<Output, Status> {
        Output::of(self.open(cluster).await?).await
    }

    /// The tokens of the one output, read from a stream.
    pub async fn output_tokens(&self, cluster: &TestCluster) -> Result<Vec<u32>, Status> {
        Ok(self.output(cluster).await?.tokens)
    }
}

impl Output {
    /// The output of a stream, read to its end.
    pub async fn of(mut events: Streaming<GenerateStreamResponse>) -> Result<Self, Status> {
        let mut output = Self::default();
        while let Some(event) = events.next().await {
            output.take(event?);
        }
        Ok(output)
    }

    /// Adds one event of a stream.
    pub fn take(&mut self, event: GenerateStreamResponse) {
        self.usage = event.usage.or(self.usage.take());
        match event.event {
            Some(Event::Delta(delta)) => {
                self.text += &delta.text;
                self.tokens.extend(delta.token_ids);
                self.logprobs.extend(logprob_bits(&delta.logprobs));
            }
            Some(Event::Finish(finish)) => {
                assert!(self.finish.is_none(), "an output ended twice");
                self.finish = finish.finish;
            }
            Some(Event::Started(_) | Event::Heartbeat(_)) | None => {}
        }
    }

    /// The cost.
    pub fn usage(&self) -> Usage {
        self.usage.unwrap_or_default()
    }
}

impl From<GenerateResponse> for Output {
    fn from(mut response: GenerateResponse) -> Self {
        assert_eq!(response.choices.len(), 1, "one output was asked for");
        let Choice { text, token_ids, logprobs, finish, .. } = response.choices.remove(0);
        let logprobs = logprob_bits(&logprobs);
        Self { text, tokens: token_ids, logprobs, finish, usage: response.usage }
    }
}

/// Bits of every log-probability, sampled token first: equal bits are equal logits.
fn logprob_bits(logprobs: &[longreach_proto::inference::TokenLogprobs]) -> Vec<u32> {
    let entries = logprobs.iter().flat_map(|entry| entry.sampled.iter().chain(&entry.top));
    entries.flat_map(|entry| [entry.token_id, entry.logprob.to_bits()]).collect()
}

/// Whether an output ended because it was as long as it may be.
pub fn is_length(finish: &Option<Finish>) -> bool {
    finish.as_ref().is_some_and(|finish| finish.reason() == FinishReason::Length)
}
