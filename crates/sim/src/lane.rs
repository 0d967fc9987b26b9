//! How KV travels in the simulation: the product's lanes, pulls and doors, over a simulated network that repeats,
//! reorders and spoils chunks on the way.
//!
//! The product's transport keeps order, because it runs on TCP. The protocol promises more: chunks in any order, any
//! number of times, and a commit that overtakes them, so that another transport can be put underneath. That is what is
//! held against it here.

use futures::{FutureExt, StreamExt, future::BoxFuture, stream, stream::BoxStream};
use longreach_engine::{KvDoor, KvTransport};
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvAck, KvHandler, KvMessage, PullMessage, PullRequest},
};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::{
    net::{Broken, Conn, Net, NodeId},
    rng::Rng,
    services::Services,
};

/// Messages between the stages of a stream.
const STAGE_LEN: usize = 4;

/// How badly chunks fare on their way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mangling {
    pub(crate) repeat_permille: u32,
    pub(crate) reorder_permille: u32,
    pub(crate) spoil_permille: u32,
}

/// The way of KV from and to one process.
#[derive(Clone)]
pub(crate) struct SimTransport {
    pub(crate) net: Net,
    pub(crate) node: NodeId,
    pub(crate) services: Services,
    pub(crate) mangling: Mangling,
    pub(crate) seed: u64,
}

impl KvTransport for SimTransport {
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>> {
        let transport = self.clone();
        async move { transport.send(&endpoint, messages).await }.boxed()
    }

    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage> {
        let transport = self.clone();
        let opened = async move { transport.ask(&endpoint, request).await };
        let taken = |carried| async move {
            match carried {
                Ok(message) => message,
                Err(broken) => Err(lost(broken)),
            }
        };
        stream::once(opened)
            .flat_map(move |opened| match opened {
                Ok(carried) => received(carried).then(taken).boxed(),
                Err(error) => stream::iter([Err(error)]).boxed(),
            })
            .boxed()
    }
}

impl SimTransport {
    async fn connect(&self, endpoint: &str) -> Result<(Conn, NodeId, KvDoor), WorkerError> {
        let gone = || WorkerError::Aborted("no such rank".to_owned());
        let node = self.services.rank_node(endpoint).ok_or_else(gone)?;
        let conn = self.net.connect(self.node, node).await.map_err(lost)?;
        let door = self.services.door(endpoint).ok_or_else(gone)?;
        Ok((conn, node, door))
    }

    async fn send(
        self,
        endpoint: &str,
        messages: BoxStream<'static, KvMessage>,
    ) -> Result<KvAck, WorkerError> {
        let (conn, node, door) = self.connect(endpoint).await?;
        let (sink, mangled) = mpsc::channel(STAGE_LEN);
        self.net.spawn(Mangler::new(&self, sink).run(messages));
        let stream = received(conn.carry(mangled, || {}));
        let stream =
            stream.map(|message| message.map_err(|_| Status::unavailable("connection lost"))).boxed();
        let (verdict_in, verdict) = oneshot::channel();
        let their_end = conn.clone();
        self.net.spawn_on(node, async move {
            // As in the product, a call whose connection has ended is dropped.
            tokio::select! {
                biased;
                result = door.push(stream) => {
                    let _sender_gone = verdict_in.send(result);
                }
                _ = their_end.broken() => {}
            }
        });
        // Biased, so that a verdict that is there counts.
        tokio::select! {
            biased;
            verdict = verdict => {
                conn.transit().await.map_err(lost)?;
                verdict.unwrap_or(Err(WorkerError::Unavailable("the rank has stopped")))
            }
            broken = conn.broken() => Err(lost(broken)),
        }
    }

    async fn ask(self, endpoint: &str, request: PullRequest) -> Result<Carried, WorkerError> {
        let (conn, node, door) = self.connect(endpoint).await?;
        let (sink, messages) = mpsc::channel(1);
        self.net.spawn_on(node, async move {
            let mut pulled = match door.pull(request).await {
                Ok(pulled) => pulled,
                Err(error) => stream::iter([Err(error)]).boxed(),
            };
            while let Some(message) = pulled.next().await {
                if sink.send(message).await.is_err() {
                    return;
                }
            }
        });
        Ok(conn.carry(messages, || {}))
    }
}

/// A pull's messages as they come off the network.
type Carried = mpsc::Receiver<Result<Result<PullMessage, WorkerError>, Broken>>;

fn received<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> BoxStream<'static, T> {
    stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) }).boxed()
}

fn lost(_: Broken) -> WorkerError {
    WorkerError::Aborted("the connection to a rank was lost".to_owned())
}

/// Repeats, swaps and spoils chunks.
struct Mangler {
    mangling: Mangling,
    services: Services,
    seed: u64,
    rng: Rng,
    held: Option<KvMessage>,
    sink: mpsc::Sender<KvMessage>,
}

impl Mangler {
    fn new(transport: &SimTransport, sink: mpsc::Sender<KvMessage>) -> Self {
        let SimTransport { mangling, seed, .. } = *transport;
        let services = transport.services.clone();
        Self { mangling, services, seed, rng: Rng::new(seed, 21), held: None, sink }
    }

    async fn run(mut self, mut source: BoxStream<'static, KvMessage>) {
        while let Some(message) = source.next().await {
            let passed = match message {
                KvMessage::Open(open) => {
                    self.rng = Rng::new(self.seed ^ open.handoff.0 as u64 ^ ((open.rank as u64) << 48), 21);
                    self.sink.send(KvMessage::Open(open)).await.ok()
                }
                message => self.pass(message).await,
            };
            if passed.is_none() {
                return;
            }
        }
        if let Some(held) = self.held.take() {
            let _rank_gone = self.sink.send(held).await;
        }
    }

    async fn pass(&mut self, message: KvMessage) -> Option<()> {
        let Mangling { repeat_permille, reorder_permille, spoil_permille } = self.mangling;
        let services = self.services.clone();
        let mut message = message;
        if let KvMessage::Chunk(chunk) = &mut message
            && (services.take_spoil() || self.rng.chance(spoil_permille))
        {
            let mut bytes = chunk.payload.to_vec();
            let at = self.rng.below(bytes.len());
            bytes[at] ^= 1 << self.rng.below(8);
            chunk.payload = bytes.into();
            services.harm("chunk spoilt");
        }
        if self.held.is_none() && self.rng.chance(reorder_permille) {
            services.journal.count("message of a hand-off held back");
            self.held = Some(message);
            return Some(());
        }
        let repeated = self.rng.chance(repeat_permille).then(|| message.clone());
        for message in [Some(message), repeated.clone(), self.held.take()].into_iter().flatten() {
            self.sink.send(message).await.ok()?;
        }
        if repeated.is_some() {
            services.journal.count("message of a hand-off repeated");
        }
        Some(())
    }
}
