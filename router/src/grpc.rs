//! The typed face: `longreach.inference.v1` over gRPC, with health and reflection.
//!
//! It only converts. A message becomes a [`Draft`](crate::request::Draft) in [`convert`], the generation it starts is
//! shown as messages by the same module, and errors become statuses with `google.rpc` details by the one table of
//! [`error`](crate::error).

mod convert;
mod models;

use std::{pin::Pin, sync::Arc};

use futures::{Stream, stream};
use longreach_proto::inference::{
    ChatRequest, ChatResponse, ChatStreamRequest, ChatStreamResponse, Choice, DetokenizeRequest,
    DetokenizeResponse, GenerateRequest, GenerateResponse, GenerateStreamRequest, GenerateStreamResponse,
    TokenizeRequest, TokenizeResponse, Usage,
    inference_service_server::{InferenceService, InferenceServiceServer},
    model_service_server::ModelServiceServer,
};
use longreach_types::TokenId;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use self::convert::{Incoming, Shown, StreamEvent};
pub(crate) use self::models::ModelFace;
use crate::{
    call::{self, CallContext},
    error::ServiceError,
    gateway::Gateway,
    http::StreamConfig,
    output::Generation,
    request::Draft,
};

/// The services' full names, for health checks.
pub(crate) const SERVICE_NAMES: [&str; 2] =
    ["longreach.inference.v1.InferenceService", "longreach.inference.v1.ModelService"];

/// A stream of responses.
type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves `InferenceService`.
pub(crate) struct GrpcFace {
    gateway: Arc<Gateway>,
    streams: StreamConfig,
}

/// What a whole answer says, whatever the method.
struct Whole {
    request_id: String,
    model: String,
    seed: u64,
    choices: Vec<Choice>,
    usage: Usage,
}

/// Both services, with their message limits set.
pub(crate) fn services(
    gateway: &Arc<Gateway>,
    streams: StreamConfig,
) -> (InferenceServiceServer<GrpcFace>, ModelServiceServer<ModelFace>) {
    let face = GrpcFace { gateway: Arc::clone(gateway), streams };
    let inference = InferenceServiceServer::new(face)
        .max_decoding_message_size(gateway.limits.max_body_bytes)
        .max_encoding_message_size(usize::MAX);
    (inference, ModelServiceServer::new(ModelFace::new(Arc::clone(gateway))))
}

#[tonic::async_trait]
impl InferenceService for GrpcFace {
    type GenerateStreamStream = ResponseStream<GenerateStreamResponse>;
    type ChatStreamStream = ResponseStream<ChatStreamResponse>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<GenerateResponse>, Status> {
        let Whole { request_id, model, seed, choices, usage } = self.whole("Generate", request).await?;
        Ok(Response::new(GenerateResponse { request_id, model, seed, choices, usage: Some(usage) }))
    }

    async fn generate_stream(
        &self,
        request: Request<GenerateStreamRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        self.stream("GenerateStream", request).await
    }

    async fn chat(&self, request: Request<ChatRequest>) -> Result<Response<ChatResponse>, Status> {
        let Whole { request_id, model, seed, choices, usage } = self.whole("Chat", request).await?;
        Ok(Response::new(ChatResponse { request_id, model, seed, choices, usage: Some(usage) }))
    }

    async fn chat_stream(
        &self,
        request: Request<ChatStreamRequest>,
    ) -> Result<Response<Self::ChatStreamStream>, Status> {
        self.stream("ChatStream", request).await
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let TokenizeRequest { model, prompt } = request.into_inner();
        let prompt = convert::prompt(prompt)?;
        let tokens = self.gateway.tokenize(Some(&model), prompt, deadline).await?;
        Ok(Response::new(TokenizeResponse { token_ids: tokens.into_iter().map(|token| token.0).collect() }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let deadline = call::deadline(request.metadata());
        let DetokenizeRequest { model, token_ids } = request.into_inner();
        let tokens: Vec<TokenId> = token_ids.into_iter().map(TokenId).collect();
        let text = self.gateway.detokenize(Some(&model), tokens, deadline).await?;
        Ok(Response::new(DetokenizeResponse { text }))
    }
}

impl GrpcFace {
    /// Starts the generation that a request asks for.
    async fn start<R: Incoming>(
        &self,
        method: &'static str,
        request: Request<R>,
    ) -> Result<(Generation, Shown), ServiceError> {
        let (metadata, _, message) = request.into_parts();
        let incoming = message.into_parts();
        let call = call_context(&incoming.request_id, &metadata);
        let shown = Shown::new(&self.gateway, &incoming.options);
        let draft = incoming.into_draft();
        let draft = draft.inspect_err(|error| self.gateway.metrics.begin(method).failed(error, &call))?;
        Ok((self.gateway.generate(method, draft, call).await?, shown))
    }

    /// Answers with everything at once.
    async fn whole<R: Incoming>(
        &self,
        method: &'static str,
        request: Request<R>,
    ) -> Result<Whole, ServiceError> {
        let (generation, shown) = self.start(method, request).await?;
        let (request_id, seed) = (generation.call.client_id.clone(), generation.seed);
        let (choices, usage) = generation.collect().await?;
        let (choices, usage) = (shown.choices(choices), shown.usage(usage));
        Ok(Whole { request_id, model: shown.model, seed, choices, usage })
    }

    /// Answers with a stream. Its headers wait for a worker to accept the request.
    async fn stream<R: Incoming, E: From<StreamEvent> + Send + 'static>(
        &self,
        method: &'static str,
        request: Request<R>,
    ) -> Result<Response<ResponseStream<E>>, Status> {
        let (mut generation, shown) = self.start(method, request).await?;
        generation.opened(self.streams.max_header_wait).await?;
        let heartbeat = self.streams.heartbeat_interval;
        let events = stream::unfold(Some((generation, shown)), move |state| async move {
            let (mut generation, shown) = state?;
            // Waiting for the next event loses nothing when it is cut off.
            match tokio::time::timeout(heartbeat, generation.next()).await {
                Err(_) => Some((Ok(E::from(StreamEvent::heartbeat())), Some((generation, shown)))),
                Ok(None) => None,
                Ok(Some(Ok(event))) => {
                    let event = shown.event(event, &generation);
                    Some((Ok(E::from(event)), Some((generation, shown))))
                }
                Ok(Some(Err(error))) => Some((Err(Status::from(error)), None)),
            }
        });
        let stalls = &self.gateway.stalls;
        let stalled = ServiceError::Stalled { patience: stalls.patience() };
        Ok(Response::new(Box::pin(stalls.watch(events, Err(stalled.into())))))
    }
}

/// What a generating message asks for.
pub(crate) fn parse(message: impl Incoming) -> Result<Draft, ServiceError> {
    message.into_parts().into_draft()
}

/// The call that came with `metadata`. A name in the message counts before one in the metadata.
fn call_context(request_id: &str, metadata: &MetadataMap) -> CallContext {
    let from_metadata = || metadata.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let client_id = Some(request_id.to_owned()).filter(|id| !id.is_empty()).or_else(from_metadata);
    CallContext::new(client_id).with_metadata(metadata)
}
