//! The OpenAI face: HTTP/1.1 and HTTP/2, JSON, server-sent events.
//!
//! It only converts. A request becomes a [`Draft`](crate::request::Draft) in [`body`], the generation it starts is
//! shown in the shapes of [`types`] by [`answer`], and errors come from the one table of
//! [`error`](crate::error).

mod answer;
mod body;
mod shape;
mod types;

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{
        DefaultBodyLimit, Path, State,
        rejection::{BytesRejection, PathRejection},
    },
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};

use self::{
    answer::Answer,
    body::Body,
    shape::{ChatShape, Shape, TextShape},
    types::{ErrorBody, ErrorObject, ModelList, ModelObject},
};
use crate::{
    call::CallContext,
    error::{ServiceError, cut},
    gateway::Gateway,
    ops::Operations,
    request::{Draft, PromptDraft},
};

/// Names a request, in both directions.
const REQUEST_ID: &str = "x-request-id";

/// How answers are held open.
#[derive(Clone, Copy, Debug)]
pub struct StreamConfig {
    /// How long a stream's headers wait for a worker to accept the request. Longer lets more failures be answered by
    /// a status that everything on the way can retry; shorter shows the client sooner that it was heard.
    pub max_header_wait: Duration,
    /// Pause after which a quiet stream says that it lives. Shorter passes stricter proxies; longer sends less.
    pub heartbeat_interval: Duration,
    /// How long a client may read nothing while there is something to read; then its request ends. Shorter frees KV
    /// sooner; longer bears worse lines.
    pub stall_timeout: Duration,
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self {
            max_header_wait: Duration::from_secs(30),
            heartbeat_interval: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(300),
        }
    }
}

/// What the handlers share.
#[derive(Clone)]
pub(crate) struct HttpFace {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) operations: Arc<Operations>,
    pub(crate) streams: StreamConfig,
}

/// All routes.
pub(crate) fn routes(face: HttpFace) -> Router {
    let max_body_bytes = face.gateway.limits.max_body_bytes;
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*model}", get(get_model))
        .merge(face.operations.admin().routes())
        .fallback(no_such_endpoint)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .with_state(face)
}

async fn chat_completions(
    State(face): State<HttpFace>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    face.respond::<ChatShape>("chat.completions", &headers, body, Body::into_chat).await
}

async fn completions(
    State(face): State<HttpFace>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    face.respond::<TextShape>("completions", &headers, body, Body::into_completion).await
}

async fn list_models(State(face): State<HttpFace>) -> Response {
    let data = vec![face.model()];
    Json(ModelList { object: "list", data }).into_response()
}

async fn get_model(State(face): State<HttpFace>, model: Result<Path<String>, PathRejection>) -> Response {
    // A name that is no text is no model's.
    let name = model.map_or_else(|rejection| rejection.body_text(), |Path(model)| model);
    match face.gateway.check_model(Some(&name)) {
        Ok(()) => Json(face.model()).into_response(),
        Err(error) => error_response(&error),
    }
}

async fn no_such_endpoint(method: Method, uri: Uri) -> Response {
    let message = format!("there is no {method} {}", cut(uri.path(), 200));
    not_here(StatusCode::NOT_FOUND, message, "unknown_url")
}

/// The header `Allow` is axum's.
async fn no_such_method(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not take {method}", cut(uri.path(), 200));
    not_here(StatusCode::METHOD_NOT_ALLOWED, message, "method_not_allowed")
}

/// The answer to what is no request of this API.
fn not_here(status: StatusCode, message: String, code: &str) -> Response {
    let error = ErrorObject { message, r#type: "invalid_request_error", param: None, code: code.to_owned() };
    (status, Json(ErrorBody { error })).into_response()
}

impl HttpFace {
    /// Answers a generation request in shape `S`.
    async fn respond<S: Shape>(
        &self,
        method: &'static str,
        headers: &HeaderMap,
        body: Result<Bytes, BytesRejection>,
        into_draft: fn(Body) -> Result<Draft, ServiceError>,
    ) -> Response {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let body = self.read_body(body);
        let client_id = header(REQUEST_ID).map(str::to_owned).or_else(|| body.as_ref().ok()?.request_id());
        let mut call = CallContext::new(client_id);
        call.trace_parent = header("traceparent").and_then(|trace| trace.parse().ok());
        let client_id = call.client_id.clone();
        let mut response = match body {
            Ok(body) => match self.generate::<S>(method, body, call, into_draft).await {
                Ok(response) => response,
                Err(error) => error_response(&error),
            },
            Err(error) => {
                self.gateway.metrics.begin(method).failed(&error, &call);
                error_response(&error)
            }
        };
        if let Ok(value) = HeaderValue::from_str(&client_id) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        response
    }

    fn read_body(&self, body: Result<Bytes, BytesRejection>) -> Result<Body, ServiceError> {
        match body {
            Ok(bytes) => Body::parse(&bytes),
            Err(rejection) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                Err(ServiceError::BodyTooLarge { limit: self.gateway.limits.max_body_bytes })
            }
            Err(rejection) => Err(ServiceError::invalid("body", rejection.body_text())),
        }
    }

    async fn generate<S: Shape>(
        &self,
        method: &'static str,
        body: Body,
        call: CallContext,
        into_draft: fn(Body) -> Result<Draft, ServiceError>,
    ) -> Result<Response, ServiceError> {
        let (is_stream, include_usage) = (body.stream.unwrap_or(false), body.include_usage());
        let is_echo = body.echo.unwrap_or(false);
        // Reported by the model's name even if the request has other faults: that one is the first to mend.
        let draft = self.gateway.check_model(body.model()).and_then(|()| into_draft(body));
        let draft = draft.inspect_err(|error| self.gateway.metrics.begin(method).failed(error, &call))?;
        let echoed = if is_echo { draft.prompts.clone() } else { Vec::new() };
        let has_logprobs = draft.options.top_logprobs.is_some();
        let n = draft.options.n.unwrap_or(1) as usize;
        let mut generation = self.gateway.generate(method, draft, call).await?;
        // Now that the request has its place.
        let echo = match self.echo(echoed).await {
            Ok(echo) => echo,
            Err(error) => return Err(generation.refuse(error)),
        };
        let answer = Answer::<S>::new(&self.gateway, &generation, answer::Options { has_logprobs, echo, n });
        if !is_stream {
            let (choices, usage) = generation.collect().await?;
            return Ok(Json(answer.whole(choices, usage.tokens)).into_response());
        }
        generation.opened(self.streams.max_header_wait).await?;
        let watch = (&*self.gateway.stalls, self.streams.heartbeat_interval);
        Ok(answer.stream(generation, include_usage, watch))
    }

    /// The text of each prompt, to be put before its outputs.
    async fn echo(&self, prompts: Vec<PromptDraft>) -> Result<Vec<String>, ServiceError> {
        let mut texts = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            texts.push(match prompt {
                PromptDraft::Text(text) => text,
                PromptDraft::Tokens(ids) => {
                    let ids = ids.into_iter().map(longreach_types::TokenId).collect();
                    self.gateway.decode(ids, "prompt", None).await?
                }
                PromptDraft::Chat(_) => String::new(),
            });
        }
        Ok(texts)
    }

    fn model(&self) -> ModelObject<'_> {
        ModelObject {
            id: &self.gateway.model_name,
            object: "model",
            created: self.operations.started_unix(),
            owned_by: "longreach",
            max_model_len: self.gateway.model_limits().ok().map(|limits| limits.max_context_len),
        }
    }
}

/// A body of `/v1/chat/completions`.
pub(crate) fn parse_chat(body: &[u8]) -> Result<Draft, ServiceError> {
    Body::parse(body).and_then(Body::into_chat)
}

/// A body of `/v1/completions`.
pub(crate) fn parse_completion(body: &[u8]) -> Result<Draft, ServiceError> {
    Body::parse(body).and_then(Body::into_completion)
}

/// The error object of `error`.
fn error_body(error: &ServiceError) -> ErrorBody {
    let class = error.class();
    ErrorBody {
        error: ErrorObject {
            message: error.message(),
            r#type: class.kind,
            param: error.field().map(str::to_owned),
            code: class.reason.to_lowercase(),
        },
    }
}

/// `error` as a whole answer.
pub(crate) fn error_response(error: &ServiceError) -> Response {
    let status = StatusCode::from_u16(error.class().http_status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(error_body(error))).into_response();
    if error.is_final() && status.is_server_error() {
        // The makers of the API retry every status from 500 on unless they are told not to.
        response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
    }
    if let Some(delay) = error.retry_after() {
        let seconds = delay.as_millis().div_ceil(1000).max(1) as u64;
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
