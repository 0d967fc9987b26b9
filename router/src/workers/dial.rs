//! How workers are reached: the only place of the router that knows gRPC channels.
//!
//! Everything above it calls a worker through [`DecodeCalls`] and [`PrefillCalls`], so that a simulation can put a
//! network of its own underneath and run the very code that serves. A seam lower down (a connector of byte streams)
//! would simulate HTTP/2 too, at a hundred times the cost, and could neither lose nor delay a single message.

use std::sync::Arc;

use futures::future::BoxFuture;
use longreach_proto::worker::{
    ClientStream, DecodeClient, DecodeEvent, GenerateRequest, GroupInfo, PrefillClient, PrefillEvent,
    PrefillInfo, RunRequest,
};
use longreach_tls::{Role, Security};
use tonic::{Request, Status, transport::Channel};

use super::WorkerConfig;

/// Bytes of one stream that a worker may send before they are read. It bounds what a client that reads slowly leaves
/// with the router; a token takes some ten bytes, some hundreds with all its alternatives.
const STREAM_WINDOW: u32 = 64 << 10;

/// Bytes of all streams of a connection: more than its streams can leave unread together, because at its end every
/// stream of the worker stops, also those that are read. A window is leave to send, not memory.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Makes the means to call a worker from its address.
pub trait Dial: Send + Sync + 'static {
    /// A decode group, by its leader's address. Nothing is sent before the first call.
    fn decode(&self, endpoint: &str) -> Result<Arc<dyn DecodeCalls>, DialError>;

    /// A prefill worker.
    fn prefill(&self, endpoint: &str) -> Result<Arc<dyn PrefillCalls>, DialError>;
}

/// Calls a decode leader.
pub trait DecodeCalls: Send + Sync {
    /// Starts one sequence; dropping the stream ends it.
    fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<DecodeEvent>, Status>>;

    /// Describes the group.
    fn group(&self) -> BoxFuture<'static, Result<GroupInfo, Status>>;
}

/// Calls a prefill worker.
pub trait PrefillCalls: Send + Sync {
    /// Starts one prompt; dropping the stream ends it.
    fn run(
        &self,
        request: Request<RunRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<PrefillEvent>, Status>>;

    /// Describes the worker.
    fn worker(&self) -> BoxFuture<'static, Result<PrefillInfo, Status>>;
}

/// An address that cannot be dialled.
#[derive(Debug, thiserror::Error)]
#[error("{endpoint:?} is not an address of a worker: {source}")]
pub struct DialError {
    /// The address.
    pub endpoint: String,
    /// Why.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// One gRPC channel for each worker.
pub(crate) struct GrpcDial {
    pub(crate) config: WorkerConfig,
    pub(crate) security: Security,
}

impl GrpcDial {
    /// A worker is believed to be what its certificate says, not what the store says of it.
    fn connect(&self, endpoint: &str, role: Role) -> Result<Channel, DialError> {
        let channel = self.security.channel(endpoint, role, |endpoint| {
            endpoint
                .connect_timeout(self.config.connect_timeout)
                .tcp_nodelay(true)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .http2_keep_alive_interval(self.config.keep_alive_interval)
                .keep_alive_timeout(self.config.keep_alive_timeout)
                .keep_alive_while_idle(true)
        });
        channel.map_err(|error| DialError { endpoint: endpoint.to_owned(), source: error.into() })
    }
}

impl Dial for GrpcDial {
    fn decode(&self, endpoint: &str) -> Result<Arc<dyn DecodeCalls>, DialError> {
        Ok(Arc::new(DecodeClient::new(self.connect(endpoint, Role::Decode)?)))
    }

    fn prefill(&self, endpoint: &str) -> Result<Arc<dyn PrefillCalls>, DialError> {
        Ok(Arc::new(PrefillClient::new(self.connect(endpoint, Role::Prefill)?)))
    }
}

impl DecodeCalls for DecodeClient {
    fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<DecodeEvent>, Status>> {
        let client = self.clone();
        Box::pin(async move { Self::generate(&client, request).await })
    }

    fn group(&self) -> BoxFuture<'static, Result<GroupInfo, Status>> {
        let client = self.clone();
        Box::pin(async move { Self::group(&client).await })
    }
}

impl PrefillCalls for PrefillClient {
    fn run(
        &self,
        request: Request<RunRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<PrefillEvent>, Status>> {
        let client = self.clone();
        Box::pin(async move { Self::run(&client, request).await })
    }

    fn worker(&self) -> BoxFuture<'static, Result<PrefillInfo, Status>> {
        let client = self.clone();
        Box::pin(async move { Self::worker(&client).await })
    }
}
