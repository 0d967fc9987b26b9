//! Client side of the internal services, in domain types.

use futures::{Stream, StreamExt, stream::BoxStream};
use tonic::{Request, Status, transport::Channel};

use super::types::{
    DecodeEvent, GenerateRequest, GroupInfo, KvAck, KvMessage, PrefillEvent, PrefillInfo, RunRequest,
};
use crate::generated::worker as pb;

/// Calls a decode leader. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DecodeClient(pb::decode_service_client::DecodeServiceClient<Channel>);

/// Calls a prefill worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PrefillClient(pb::prefill_service_client::PrefillServiceClient<Channel>);

/// Sends KV to a rank. Cheap to clone.
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
    pub async fn push(
        &self,
        messages: impl Stream<Item = KvMessage> + Send + 'static,
    ) -> Result<KvAck, Status> {
        let response = self.0.clone().push(messages.map(pb::PushRequest::from)).await?;
        Ok(KvAck { n_blocks: response.into_inner().block_count as usize })
    }
}
