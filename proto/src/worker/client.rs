//! Client side of the internal services, in domain types.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures::{Stream, StreamExt, stream::BoxStream};
use tonic::{Request, Status, transport::Channel};

use super::types::{
    DecodeEvent, GenerateRequest, GroupInfo, KvAck, KvMessage, PrefillEvent, PrefillInfo, PullMessage,
    PullRequest, RunRequest,
};
use crate::generated::worker as pb;

/// Calls a decode leader. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DecodeClient(pb::decode_service_client::DecodeServiceClient<Channel>);

/// Calls a prefill worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PrefillClient(pb::prefill_service_client::PrefillServiceClient<Channel>);

/// Sends KV to a rank, and asks for it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct KvClient(pb::kv_service_client::KvServiceClient<Channel>);

/// Events of one call as they arrive; dropping it cancels the call.
pub type ClientStream<T> = BoxStream<'static, Result<T, Status>>;

impl DecodeClient {
    /// A client over `channel`.
    pub fn new(channel: Channel) -> Self {
        Self(pb::decode_service_client::DecodeServiceClient::new(channel))
    }

    /// Starts one sequence; metadata of `request` (deadline, trace) is passed on.
    pub async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<ClientStream<DecodeEvent>, Status> {
        let response = self.0.clone().generate(request.map(Into::into)).await?;
        Ok(response.into_inner().map(|event| event.and_then(TryInto::try_into)).boxed())
    }

    /// Describes the group.
    pub async fn group(&self) -> Result<GroupInfo, Status> {
        self.0.clone().get_group(pb::GetGroupRequest {}).await?.into_inner().try_into()
    }
}

impl PrefillClient {
    /// A client over `channel`.
    pub fn new(channel: Channel) -> Self {
        Self(pb::prefill_service_client::PrefillServiceClient::new(channel))
    }

    /// Starts one prompt; metadata of `request` (deadline, trace) is passed on.
    pub async fn run(&self, request: Request<RunRequest>) -> Result<ClientStream<PrefillEvent>, Status> {
        let response = self.0.clone().run(request.map(Into::into)).await?;
        Ok(response.into_inner().map(|event| event.and_then(TryInto::try_into)).boxed())
    }

    /// Describes the worker.
    pub async fn worker(&self) -> Result<PrefillInfo, Status> {
        self.0.clone().get_worker(pb::GetWorkerRequest {}).await?.into_inner().try_into()
    }
}

impl KvClient {
    /// A client over `channel`.
    pub fn new(channel: Channel) -> Self {
        Self(pb::kv_service_client::KvServiceClient::new(channel))
    }

    /// Sends one hand-off; resolves when the rank has verified all of it or refused.
    pub async fn push(&self, messages: BoxStream<'static, KvMessage>) -> Result<KvAck, Status> {
        let response = self.0.clone().push(Outgoing(messages)).await?;
        Ok(KvAck { n_cells: response.into_inner().cell_count as usize })
    }

    /// Asks for a part of a hand-off's cached prefix; dropping the stream ends the pull.
    pub async fn pull(&self, request: PullRequest) -> Result<ClientStream<PullMessage>, Status> {
        let response = self.0.clone().pull(pb::PullRequest::from(request)).await?;
        Ok(response.into_inner().map(|message| message.and_then(TryInto::try_into)).boxed())
    }
}

/// Messages in their wire form. A named type, because the compiler cannot prove that a future which holds a boxed
/// `dyn Stream` across an await is `Send` for every lifetime.
struct Outgoing(BoxStream<'static, KvMessage>);

impl Stream for Outgoing {
    type Item = pb::PushRequest;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(context).map(|message| message.map(Into::into))
    }
}
