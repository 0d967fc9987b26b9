//! A prefill engine and a decode group whose pulls can be watched and broken.
//!
//! Everything is the product's, the transport between threads included. What is added stands between that transport
//! and the prefill engine: it counts the messages of pulls, and does to one of them what a network or a peer may do.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use bytes::BytesMut;
use futures::{
    StreamExt,
    future::{self, BoxFuture},
    stream::BoxStream,
};
use longreach_engine::{
    DecodeGroup, EngineConfig, EngineHandle, EnginePair, Generated, KvInlet, KvTransport, LocalTransport,
    Model, start_prefill,
};
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvAck, KvMessage, PullMessage, PullRequest},
};
use longreach_types::{Epoch, Prompt, RequestId, SamplingParams, TokenId};
use tokio::{runtime::Handle, sync::Notify};

use crate::{
    cluster::{PATIENCE, eventually},
    tiny::Error,
};

/// What happens to one message of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error comes instead of it.
    Error,
    /// The stream ends before it.
    Cut,
    /// It comes twice, which is harmless.
    Repeat,
    /// A byte of it is another one.
    Corrupt,
    /// A byte of it is another one and its checksum agrees, as if the sender had read something else at first.
    Lie,
    /// It is left out, and what follows it is not.
    Lose,
    /// Neither it nor anything after it ever comes.
    Stall,
}

/// Faults of payloads and streams, each of which must make a pull fail.
pub const FATAL: [Fault; 5] = [Fault::Error, Fault::Cut, Fault::Corrupt, Fault::Lie, Fault::Lose];

/// The transport between the two engines.
#[derive(Clone, Default)]
pub struct Tap {
    inner: LocalTransport,
    state: Arc<TapState>,
}

#[derive(Default)]
struct TapState {
    n_messages: AtomicUsize,
    fault: Mutex<Option<(usize, Fault)>>,
    struck: Notify,
}

/// The two engines.
pub struct Pulling {
    /// The engines, which generate.
    pub pair: EnginePair,
    /// What is between them.
    pub tap: Tap,
    /// The doors of the decode group's ranks.
    pub inlets: Vec<KvInlet>,
}

impl Tap {
    /// From now on messages of pulls count from 0, and `fault` happens to the one at `index`.
    pub fn arm(&self, fault: Option<(usize, Fault)>) {
        *self.state.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        self.state.n_messages.store(0, Ordering::SeqCst);
    }

    /// Messages of pulls that came since.
    pub fn n_messages(&self) -> usize {
        self.state.n_messages.load(Ordering::SeqCst)
    }

    /// Resolves when the fault has happened.
    pub async fn struck(&self) {
        self.state.struck.notified().await;
    }

    fn take_fault(&self) -> Option<Fault> {
        let index = self.state.n_messages.fetch_add(1, Ordering::SeqCst);
        let mut fault = self.state.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, fault) = fault.take_if(|(at, _)| *at == index)?;
        self.state.struck.notify_one();
        Some(fault)
    }
}

impl KvTransport for Tap {
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>> {
        self.inner.push(endpoint, messages)
    }

    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage> {
        let tap = self.clone();
        let messages = self.inner.pull(endpoint, request).flat_map(move |message| {
            let fault = tap.take_fault();
            futures::stream::iter(spoil(message, fault)).chain(match fault {
                Some(Fault::Stall) => futures::stream::pending().boxed(),
                _ => futures::stream::empty().boxed(),
            })
        });
        // An empty place in the stream is its end.
        messages.take_while(|message| future::ready(message.is_some())).filter_map(future::ready).boxed()
    }
}

/// What comes instead of `message`; `None` ends the stream.
fn spoil(
    message: Result<PullMessage, WorkerError>,
    fault: Option<Fault>,
) -> Vec<Option<Result<PullMessage, WorkerError>>> {
    match (fault, message) {
        (Some(Fault::Error), _) => vec![Some(Err(WorkerError::Aborted("the test says so".to_owned())))],
        (Some(Fault::Cut), _) => vec![None],
        (Some(Fault::Stall | Fault::Lose), _) => Vec::new(),
        (Some(Fault::Repeat), Ok(message)) => vec![Some(Ok(message.clone())), Some(Ok(message))],
        (Some(fault @ (Fault::Corrupt | Fault::Lie)), Ok(mut message)) => {
            match &mut message {
                PullMessage::Chunk(chunk) => {
                    let mut payload = BytesMut::from(&chunk.payload[..]);
                    let cell_bytes = payload.len() / chunk.crc32c.len();
                    payload[cell_bytes / 2] ^= 1;
                    if fault == Fault::Lie {
                        chunk.crc32c[0] = crc32c::crc32c(&payload[..cell_bytes]);
                    }
                    chunk.payload = payload.freeze();
                }
                PullMessage::Done(done) => done.digest ^= 1,
            }
            vec![Some(Ok(message))]
        }
        (_, message) => vec![Some(message)],
    }
}

impl Pulling {
    /// Starts both engines. Whatever can be pulled is, and every prompt is handed off.
    pub fn start(model: &Model, mut config: EngineConfig) -> Result<Self, Error> {
        config.sched.local_prefill_max = 0;
        config.sched.reuse.pull_latency = std::time::Duration::ZERO;
        let tap = Tap::default();
        let (decode, inlets) = Self::group(model, &config, Epoch(1), &tap)?;
        let transport = Arc::new(tap.clone());
        let prefill = start_prefill(model, &config, transport, &Handle::current(), &|_, _| {})?;
        Ok(Self { pair: EnginePair { prefill, decode }, tap, inlets })
    }

    /// A decode group that is reached through `tap`, in place of the one before.
    pub fn group(
        model: &Model,
        config: &EngineConfig,
        epoch: Epoch,
        tap: &Tap,
    ) -> Result<(longreach_engine::RunningEngine, Vec<KvInlet>), Error> {
        let life = DecodeGroup::load(model, config, &|_, _| {})?.enlist(epoch);
        let inlets = life.inlets();
        let name = |rank: usize| format!("rank-{rank}");
        for (rank, inlet) in inlets.iter().enumerate() {
            tap.inner.insert(name(rank), inlet.clone());
        }
        let endpoints = (0..inlets.len()).map(name).collect();
        Ok((life.start(endpoints, &Handle::current())?, inlets))
    }

    /// Both engines.
    pub fn engines(&self) -> [&EngineHandle; 2] {
        [&self.pair.prefill.handle, &self.pair.decode.handle]
    }

    /// One output.
    pub async fn generate(
        &self,
        tokens: &[u32],
        sampling: &SamplingParams,
    ) -> Result<Generated, WorkerError> {
        let id = RequestId(format!("{} tokens", tokens.len()));
        self.pair.generate(id, prompt(tokens), sampling.clone(), |_| {}).await
    }

    /// Waits until neither engine has anything to do and no stream is left between them, and checks that no block is
    /// lost. A stream that outlived its pull would meet the fault that is meant for the next one.
    pub async fn assert_whole(&self) {
        let is_quiet = async || self.pair.prefill.n_lane_tasks() == 0;
        assert!(eventually(is_quiet).await, "streams are left: {}", self.pair.prefill.n_lane_tasks());
        for engine in self.engines() {
            let idle = tokio::time::timeout(PATIENCE, engine.wait_for(|info| info.is_idle())).await;
            assert!(matches!(idle, Ok(true)), "an engine does not come to rest: {:?}", engine.info());
            for pool in engine.info().pools() {
                assert_eq!(pool.free + pool.cached, pool.total, "{pool:?}");
            }
        }
    }

    /// The prefill engine forgets every prefix.
    pub async fn flush_prefill(&self) -> Result<(), WorkerError> {
        self.pair.prefill.handle.flush_cache().await
    }
}

/// A prompt of token ids.
pub fn prompt(tokens: &[u32]) -> Prompt {
    Prompt { tokens: tokens.iter().copied().map(TokenId).collect(), ..Prompt::default() }
}
