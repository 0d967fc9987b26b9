//! The parsers of this crate without their servers, for fuzzing.
//!
//! What a client sends is read and checked up to the point where a worker would be asked; what the coordinator holds
//! is followed up to the addresses. Every error is also put into the form in which a client would get it.

use longreach_cluster::{KeySpace, Membership, WatchEvent};
use longreach_proto::inference as pb;
use longreach_text::TextModel;
use longreach_types::TokenId;
pub use tonic::metadata::MetadataMap;
use tonic::{Status, transport::Endpoint};

use crate::{
    call::CallContext,
    discovery::Roster,
    error::ServiceError,
    gateway, grpc, http,
    request::{self, Draft, GenerateSpec, ModelLimits, RequestLimits, SamplingDefaults},
};

/// What the workers of the imagined cluster can hold.
const MAX_CONTEXT_LEN: usize = 4096;

/// Both faces of a router that serves one model.
pub struct Faces {
    text: TextModel,
    limits: RequestLimits,
}

impl Faces {
    /// Faces for `text`.
    pub fn new(text: TextModel) -> Self {
        Self { text, limits: RequestLimits::default() }
    }

    /// A body of `/v1/chat/completions`.
    pub fn chat_body(&self, body: &[u8]) -> bool {
        self.check(http::parse_chat(body), show_response)
    }

    /// A body of `/v1/completions`.
    pub fn completion_body(&self, body: &[u8]) -> bool {
        self.check(http::parse_completion(body), show_response)
    }

    /// A message of `GenerateStream`, which is that of `Generate` too.
    pub fn generate(&self, message: pb::GenerateStreamRequest) -> bool {
        self.check(grpc::parse(message), show_status)
    }

    /// A message of `ChatStream`, which is that of `Chat` too.
    pub fn chat(&self, message: pb::ChatStreamRequest) -> bool {
        self.check(grpc::parse(message), show_status)
    }

    /// A message of `Detokenize`.
    pub fn detokenize(&self, message: pb::DetokenizeRequest) -> bool {
        let tokens: Vec<TokenId> = message.token_ids.into_iter().map(TokenId).collect();
        self.text.tokenizer().decode(&tokens, true).is_ok()
    }

    /// The checks of a request, up to the outputs that would be started.
    fn check(&self, draft: Result<Draft, ServiceError>, show: fn(&ServiceError)) -> bool {
        let spec = draft.and_then(|draft| self.spec(draft));
        let spec = spec.inspect_err(show);
        let eos = self.text.tokenizer().special().stop.as_slice().into();
        spec.is_ok_and(|spec| !spec.choices(&eos).is_empty())
    }

    fn spec(&self, draft: Draft) -> Result<GenerateSpec, ServiceError> {
        request::n_choices(&draft, &self.limits)?;
        let prompts = draft.prompts.into_iter().map(|prompt| gateway::encode(&self.text, prompt));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let vocab_size = self.text.tokenizer().vocab_size();
        let model = ModelLimits { max_context_len: MAX_CONTEXT_LEN, vocab_size };
        GenerateSpec::check(prompts, draft.options.or(&SamplingDefaults::default()), model, &self.limits)
    }
}

/// Metadata of a call: its deadline, its trace, and the client's name for it.
pub fn call_metadata(client_id: String, metadata: &MetadataMap) -> bool {
    let call = CallContext::new(Some(client_id)).with_metadata(metadata);
    let request = call.worker_request(());
    request::check_client_id(&call.client_id).is_ok() && request.metadata().len() <= metadata.len()
}

/// A router's view of the workers that a coordinator names.
pub struct Discovery {
    membership: Membership,
    roster: Roster,
}

impl Discovery {
    /// Nobody yet.
    pub fn new(keys: KeySpace) -> Self {
        Self { membership: Membership::new(keys), roster: Roster::default() }
    }

    /// Takes what a watch brought. Gives the number of workers that are known then.
    pub fn apply(&mut self, event: WatchEvent) -> usize {
        for change in self.membership.apply(event) {
            self.roster.apply(change);
        }
        let endpoints = self.roster.endpoints();
        endpoints.inspect(|&endpoint| drop(Endpoint::from_shared(endpoint.clone()))).count()
    }
}

fn show_response(error: &ServiceError) {
    drop(http::error_response(error));
}

fn show_status(error: &ServiceError) {
    drop(Status::from(error.clone()));
}
