//! How KV travels between a prefill worker and a rank: one trait, so that shared memory or RDMA can enter without a
//! change to the protocol (descriptors, coverage, commit and epoch stay the same).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{
    StreamExt, TryStreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvAck, KvClient, KvHandler, KvMessage, PullMessage, PullRequest},
};
use longreach_tls::{Role, Security, handshake_error};
use tonic::{Code, Status, transport::Channel};

use crate::inlet::KvInlet;

/// How long a dead or unreachable rank may keep a hand-off from failing over.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// HTTP/2 flow-control windows: large enough that chunks of up to 1 MiB keep a fast link busy.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Sends hand-offs to ranks, and asks them for what they hold.
pub trait KvTransport: Send + Sync + 'static {
    /// Sends one hand-off to the rank at `endpoint`; resolves when the rank has verified all of it or refused.
    /// Dropping the future ends the stream, which aborts the hand-off on that rank.
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>>;

    /// Asks the rank at `endpoint` for a part of a hand-off's cached prefix. Chunks come as they are read; the last
    /// message is the pull's totals or an error. Dropping the stream ends the pull.
    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage>;
}

/// Connections that are kept. Ranks that were started again have other ports and leave theirs behind; beyond this many
/// all are let go. Those in use last as long as their streams, the others are made again.
const MAX_CHANNELS: usize = 1024;

/// KV over gRPC; always there. The default is without TLS.
#[derive(Clone, Debug, Default)]
pub struct GrpcTransport {
    security: Security,
    channels: Arc<Mutex<HashMap<String, Channel>>>,
}

impl GrpcTransport {
    /// With ranks that are protected as `security` says.
    pub fn new(security: Security) -> Self {
        Self { security, channels: Arc::default() }
    }

    /// One connection per rank, made on first use and re-made by the channel itself when it breaks.
    fn channel(&self, endpoint: &str) -> Result<Channel, WorkerError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(endpoint) {
            return Ok(channel.clone());
        }
        let channel = self.security.channel(endpoint, Role::Decode, |endpoint| {
            endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(Duration::from_secs(10))
                .keep_alive_timeout(Duration::from_secs(5))
                .initial_stream_window_size(STREAM_WINDOW_BYTES)
                .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        });
        let channel = channel.map_err(|error| WorkerError::Invalid(format!("rank endpoint: {error}")))?;
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(endpoint.to_owned(), channel.clone());
        Ok(channel)
    }
}

impl KvTransport for GrpcTransport {
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>> {
        let transport = self.clone();
        // The channel is made inside the task: the caller is an engine thread, which has no runtime of its own.
        Box::pin(async move {
            let channel = transport.channel(&endpoint)?;
            KvClient::new(channel).push(messages).await.map_err(|status| rank_error(&endpoint, &status))
        })
    }

    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage> {
        let transport = self.clone();
        let opened = async move {
            let channel = transport.channel(&endpoint)?;
            let messages = KvClient::new(channel).pull(request).await;
            let messages = messages.map_err(|status| rank_error(&endpoint, &status))?;
            Ok(messages.map_err(move |status| rank_error(&endpoint, &status)))
        };
        stream::once(opened).try_flatten().boxed()
    }
}

/// A rank's refusal, kept in the form that tells the router what to do.
fn rank_error(endpoint: &str, status: &Status) -> WorkerError {
    let message = match handshake_error(status) {
        Some(error) => format!("rank at {endpoint}: {error}"),
        None => format!("rank at {endpoint}: {}", status.message()),
    };
    match status.code() {
        Code::DataLoss => WorkerError::DataLoss(message),
        // Both values are in the rank's words.
        Code::FailedPrecondition => WorkerError::PeerMismatch(message),
        Code::InvalidArgument => WorkerError::Internal(message),
        _ => WorkerError::Aborted(message),
    }
}

/// KV handed to ranks of this process without a network; endpoints are names.
#[derive(Clone, Default)]
pub struct LocalTransport {
    inlets: Arc<Mutex<HashMap<String, KvInlet>>>,
}

impl LocalTransport {
    /// Makes the rank behind `inlet` reachable as `endpoint`.
    pub fn insert(&self, endpoint: String, inlet: KvInlet) {
        self.inlets.lock().unwrap_or_else(PoisonError::into_inner).insert(endpoint, inlet);
    }
}

impl KvTransport for LocalTransport {
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>> {
        let inlet = self.inlets.lock().unwrap_or_else(PoisonError::into_inner).get(&endpoint).cloned();
        Box::pin(async move {
            let inlet = inlet.ok_or(WorkerError::Unavailable("no rank of that name in this process"))?;
            inlet.push(messages.map(Ok)).await
        })
    }

    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage> {
        let inlet = self.inlets.lock().unwrap_or_else(PoisonError::into_inner).get(&endpoint).cloned();
        let opened = async move {
            let inlet = inlet.ok_or(WorkerError::Unavailable("no rank of that name in this process"))?;
            inlet.pull(request).await
        };
        stream::once(opened).try_flatten().boxed()
    }
}
