//! Server side of the internal services: handlers speak domain types, adapters here speak protobuf.

use std::{future::Future, pin::Pin, sync::Arc};

use futures::{Stream, StreamExt, stream::BoxStream};
use tonic::{Request, Response, Status, Streaming};

use super::types::{
    DecodeEvent, GenerateRequest, GroupInfo, KvAck, KvMessage, PrefillEvent, PrefillInfo, PullMessage,
    PullRequest, RunRequest,
};
use crate::{WorkerError, generated::worker as pb};

/// What gRPC peers accept unless told otherwise. It bounds the memory that a sender can make a receiver hold.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// The largest cell (one layer of one block) that a message of a hand-off or of a pull can carry: a message has at least
/// one, whole, and needs a little room beside it.
pub const MAX_CELL_BYTES: usize = MAX_MESSAGE_BYTES - 1024;

/// Long prompts travel as token ids: 5 bytes each at most.
const MAX_PROMPT_MESSAGE_BYTES: usize = 32 << 20;

/// Events of one call, in order; dropping it cancels the work behind it.
pub type EventStream<T> = BoxStream<'static, Result<T, WorkerError>>;

/// Rank 0 of a decode group.
pub trait DecodeHandler: Send + Sync + 'static {
    /// Starts one sequence; see `DecodeService.Generate`.
    fn generate(
        &self,
        request: GenerateRequest,
    ) -> impl Future<Output = Result<EventStream<DecodeEvent>, WorkerError>> + Send;
    /// Describes the group.
    fn group(&self) -> impl Future<Output = Result<GroupInfo, WorkerError>> + Send;
}

/// A prefill worker.
pub trait PrefillHandler: Send + Sync + 'static {
    /// Starts one prompt; see `PrefillService.Run`.
    fn run(
        &self,
        request: RunRequest,
    ) -> impl Future<Output = Result<EventStream<PrefillEvent>, WorkerError>> + Send;
    /// Describes the worker.
    fn worker(&self) -> impl Future<Output = Result<PrefillInfo, WorkerError>> + Send;
}

/// Any rank of a decode group.
pub trait KvHandler: Send + Sync + 'static {
    /// Receives one hand-off; see `KvService.Push`.
    fn push(
        &self,
        messages: impl Stream<Item = Result<KvMessage, Status>> + Send + Unpin + 'static,
    ) -> impl Future<Output = Result<KvAck, WorkerError>> + Send;
    /// Gives a part of a hand-off's cached prefix; see `KvService.Pull`.
    fn pull(
        &self,
        request: PullRequest,
    ) -> impl Future<Output = Result<EventStream<PullMessage>, WorkerError>> + Send;
}

/// The tonic service of a decode leader.
pub fn decode_server<H: DecodeHandler>(
    handler: Arc<H>,
) -> pb::decode_service_server::DecodeServiceServer<Adapter<H>> {
    pb::decode_service_server::DecodeServiceServer::new(Adapter(handler))
        .max_decoding_message_size(MAX_PROMPT_MESSAGE_BYTES)
}

/// The tonic service of a prefill worker.
pub fn prefill_server<H: PrefillHandler>(
    handler: Arc<H>,
) -> pb::prefill_service_server::PrefillServiceServer<Adapter<H>> {
    pb::prefill_service_server::PrefillServiceServer::new(Adapter(handler))
        .max_decoding_message_size(MAX_PROMPT_MESSAGE_BYTES)
}

/// The tonic service of a rank, for KV in both directions.
pub fn kv_server<H: KvHandler>(handler: Arc<H>) -> pb::kv_service_server::KvServiceServer<Adapter<H>> {
    pb::kv_service_server::KvServiceServer::new(Adapter(handler)).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

/// Stands between generated service traits and our handlers.
#[derive(Debug)]
pub struct Adapter<H>(Arc<H>);

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn to_wire<T: 'static, W: From<T> + 'static>(events: EventStream<T>) -> ResponseStream<W> {
    Box::pin(events.map(|event| event.map(W::from).map_err(Status::from)))
}

#[tonic::async_trait]
impl<H: DecodeHandler> pb::decode_service_server::DecodeService for Adapter<H> {
    type GenerateStream = ResponseStream<pb::GenerateResponse>;

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let events = self.0.generate(request.into_inner().try_into()?).await?;
        Ok(Response::new(to_wire(events)))
    }

    async fn get_group(
        &self,
        _request: Request<pb::GetGroupRequest>,
    ) -> Result<Response<pb::GetGroupResponse>, Status> {
        Ok(Response::new(self.0.group().await?.into()))
    }
}

#[tonic::async_trait]
impl<H: PrefillHandler> pb::prefill_service_server::PrefillService for Adapter<H> {
    type RunStream = ResponseStream<pb::RunResponse>;

    async fn run(&self, request: Request<pb::RunRequest>) -> Result<Response<Self::RunStream>, Status> {
        let events = self.0.run(request.into_inner().try_into()?).await?;
        Ok(Response::new(to_wire(events)))
    }

    async fn get_worker(
        &self,
        _request: Request<pb::GetWorkerRequest>,
    ) -> Result<Response<pb::GetWorkerResponse>, Status> {
        Ok(Response::new(self.0.worker().await?.into()))
    }
}

#[tonic::async_trait]
impl<H: KvHandler> pb::kv_service_server::KvService for Adapter<H> {
    type PullStream = ResponseStream<pb::PullResponse>;

    async fn push(
        &self,
        request: Request<Streaming<pb::PushRequest>>,
    ) -> Result<Response<pb::PushResponse>, Status> {
        let messages = request.into_inner().map(|message| message.and_then(KvMessage::try_from));
        let ack = self.0.push(messages).await?;
        Ok(Response::new(pb::PushResponse { cell_count: ack.n_cells as u32 }))
    }

    async fn pull(&self, request: Request<pb::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let messages = self.0.pull(request.into_inner().try_into()?).await?;
        Ok(Response::new(to_wire(messages)))
    }
}
