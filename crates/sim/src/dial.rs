//! Workers as a simulated router reaches them: the calls that in the product are gRPC.

use std::sync::Arc;

use futures::{FutureExt, StreamExt, future::BoxFuture};
use longreach_engine::{EngineEvent, EngineInfo, SeqStream, Submission, Work};
use longreach_proto::{
    WorkerError,
    worker::{ClientStream, DecodeEvent, GenerateRequest, GroupInfo, PrefillEvent, PrefillInfo, RunRequest},
};
use longreach_router::{DecodeCalls, Dial, DialError, PrefillCalls};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tonic::{Request, Status};

use crate::{
    model::VOCAB_SIZE,
    net::{Broken, Conn, Net, NodeId},
    scenario::Shape,
    services::Services,
};

/// Events on their way to a router beyond which the worker's side waits.
const WINDOW: usize = 8;

/// Dials workers from one router's node.
#[derive(Clone)]
pub(crate) struct SimDial {
    pub(crate) net: Net,
    pub(crate) services: Services,
    pub(crate) from: NodeId,
    pub(crate) shape: Arc<Shape>,
}

/// One worker, as one router reaches it.
#[derive(Clone)]
struct SimCalls {
    dial: SimDial,
    endpoint: String,
}

impl Dial for SimDial {
    fn decode(&self, endpoint: &str) -> Result<Arc<dyn DecodeCalls>, DialError> {
        Ok(Arc::new(SimCalls { dial: self.clone(), endpoint: endpoint.to_owned() }))
    }

    fn prefill(&self, endpoint: &str) -> Result<Arc<dyn PrefillCalls>, DialError> {
        Ok(Arc::new(SimCalls { dial: self.clone(), endpoint: endpoint.to_owned() }))
    }
}

impl SimCalls {
    /// One question, answered by what the worker shows of itself.
    async fn ask(self) -> Result<EngineInfo, Status> {
        let conn = self.connect().await?;
        let info = self.dial.services.engine_info(&self.endpoint);
        conn.transit().await.map_err(lost)?;
        info.ok_or_else(|| WorkerError::Unavailable("no epoch is formed").into())
    }

    async fn connect(&self) -> Result<Conn, Status> {
        let node = self.dial.services.engine_node(&self.endpoint).ok_or_else(|| lost(Broken))?;
        self.dial.net.connect(self.dial.from, node).await.map_err(lost)
    }

    /// Starts a sequence there; resolves when the worker has accepted or refused it. Its events come back as a stream
    /// that, when dropped, ends it.
    fn start<E: Send + 'static>(
        self,
        submission: Submission,
        read: fn(EngineEvent) -> Option<E>,
    ) -> BoxFuture<'static, Result<ClientStream<E>, Status>> {
        let (sink, events) = mpsc::channel(WINDOW);
        let (accepted, verdict) = oneshot::channel();
        let net = self.dial.net.clone();
        net.spawn(async move {
            match self.submit(submission, &sink).await {
                Ok((conn, submitted)) => {
                    let _router_gone = accepted.send(Ok(()));
                    let (source, carried) = mpsc::channel(1);
                    let carried = conn.carry(carried, || {});
                    futures::join!(self.worker_side(submitted, source), router_side(carried, &sink, read));
                }
                Err(status) => {
                    let _router_gone = accepted.send(Err(status));
                }
            }
        });
        async move {
            verdict.await.unwrap_or_else(|_| Err(lost(Broken)))?;
            let next = |mut events: mpsc::Receiver<_>| async move { Some((events.recv().await?, events)) };
            Ok(futures::stream::unfold(events, next).boxed())
        }
        .boxed()
    }

    async fn submit<E>(
        &self,
        submission: Submission,
        sink: &mpsc::Sender<E>,
    ) -> Result<(Conn, SeqStream), Status> {
        let conn = self.connect().await?;
        if self.dial.services.engine_node(&self.endpoint).is_some_and(|n| self.dial.services.is_draining(n)) {
            return Err(WorkerError::Unavailable("draining").into());
        }
        let engine = self.dial.services.engine(&self.endpoint);
        let engine = engine.ok_or(WorkerError::Unavailable("no epoch is formed"))?;
        // That the router has gone is news that travels as well.
        let gone = async {
            sink.closed().await;
            let _news_or_silence = conn.transit().await;
        };
        // Biased, so that a seed repeats its run. Dropping a submission that is not accepted yet ends it.
        let submitted = tokio::select! {
            biased;
            () = gone => return Err(lost(Broken)),
            broken = conn.broken() => return Err(lost(broken)),
            submitted = engine.submit(submission) => submitted,
        };
        // The verdict has its way to go.
        let arrived = conn.transit().await.map_err(lost);
        let submitted = submitted?;
        arrived?;
        Ok((conn, submitted))
    }
}

/// How it is counted that a hand-off was given up because nothing came.
pub(crate) const STOOD_STILL: &str = "hand-off stood still";

impl SimCalls {
    /// Puts events on their way, and ends the sequence when nobody takes them any more.
    async fn worker_side(
        &self,
        mut events: SeqStream,
        source: mpsc::Sender<Result<EngineEvent, WorkerError>>,
    ) {
        let started = Instant::now();
        loop {
            let event = tokio::select! {
                biased;
                () = source.closed() => return,
                event = events.next() => event,
            };
            let Some(event) = event else { return };
            self.count(&event, started);
            if source.send(event).await.is_err() {
                return;
            }
        }
    }

    /// Writes down what an event says of the way that its sequence, begun at `started`, took.
    fn count(&self, event: &Result<EngineEvent, WorkerError>, started: Instant) {
        let journal = &self.dial.services.journal;
        match event {
            Ok(EngineEvent::Reserved(reservation)) => {
                journal.count(if reservation.prefilled_here {
                    "prompt computed by its decode group"
                } else {
                    "hand-off reserved"
                });
                journal.count_n("prompt tokens found in a cache", reservation.cached_len as u64);
            }
            Ok(EngineEvent::FirstToken(first)) => {
                journal.count("prompt at a prefill worker");
                journal.count_n("prompt tokens found in a cache", first.cached_len as u64);
                if started.elapsed() > self.dial.shape.handoff_timeout {
                    journal.count("prompt took longer than its hand-off may stand still");
                }
            }
            Ok(EngineEvent::HandoffDone { .. }) => journal.count("hand-off done"),
            Err(WorkerError::Aborted(reason)) if reason.contains("stood still") => {
                journal.note(format_args!("{}: {reason}", self.endpoint));
                journal.count(STOOD_STILL);
            }
            Ok(EngineEvent::Token(_) | EngineEvent::Finish(_)) | Err(_) => {}
        }
    }
}

/// Takes events off the network; dropping its end of it tells the worker.
async fn router_side<E>(
    mut carried: mpsc::Receiver<Result<Result<EngineEvent, WorkerError>, Broken>>,
    sink: &mpsc::Sender<Result<E, Status>>,
    read: fn(EngineEvent) -> Option<E>,
) {
    loop {
        let event = tokio::select! {
            biased;
            () = sink.closed() => return,
            event = carried.recv() => event,
        };
        let event = match event {
            None => return,
            Some(Ok(Ok(event))) => read(event).ok_or_else(|| Status::internal("an event of another role")),
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(broken)) => Err(lost(broken)),
        };
        if sink.send(event).await.is_err() {
            return;
        }
    }
}

impl DecodeCalls for SimCalls {
    fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<DecodeEvent>, Status>> {
        let GenerateRequest { request_id, prompt, sampling, priority, .. } = request.into_inner();
        let submission = Submission { request_id, prompt, sampling, priority, work: Work::Decode };
        self.clone().start(submission, |event| match event {
            EngineEvent::Reserved(reservation) => Some(DecodeEvent::Reserved(reservation)),
            EngineEvent::Token(token) => Some(DecodeEvent::Token(token)),
            EngineEvent::Finish(reason) => Some(DecodeEvent::Finish(reason)),
            EngineEvent::FirstToken(_) | EngineEvent::HandoffDone { .. } => None,
        })
    }

    fn group(&self) -> BoxFuture<'static, Result<GroupInfo, Status>> {
        let (calls, shape) = (self.clone(), Arc::clone(&self.dial.shape));
        let group_id = self.endpoint.clone();
        async move {
            let info = calls.ask().await?;
            Ok(GroupInfo {
                group_id,
                epoch: info.epoch,
                layout: shape.kv_layout(),
                n_ranks: shape.n_ranks,
                dcp_size: shape.n_ranks,
                max_seq_len: shape.max_seq_len,
                vocab_size: VOCAB_SIZE,
                pools: info.pools(),
                n_waiting: info.stats.n_waiting,
                n_running: info.stats.n_running,
            })
        }
        .boxed()
    }
}

impl PrefillCalls for SimCalls {
    fn run(
        &self,
        request: Request<RunRequest>,
    ) -> BoxFuture<'static, Result<ClientStream<PrefillEvent>, Status>> {
        let RunRequest { request_id, prompt, sampling, priority, reservation, .. } = request.into_inner();
        let work = Work::Prefill(reservation);
        let submission = Submission { request_id, prompt, sampling, priority, work };
        self.clone().start(submission, |event| match event {
            EngineEvent::FirstToken(first) => Some(PrefillEvent::FirstToken(first)),
            EngineEvent::HandoffDone { sent_bytes } => Some(PrefillEvent::HandoffDone { sent_bytes }),
            EngineEvent::Reserved(_) | EngineEvent::Token(_) | EngineEvent::Finish(_) => None,
        })
    }

    fn worker(&self) -> BoxFuture<'static, Result<PrefillInfo, Status>> {
        let (calls, shape) = (self.clone(), Arc::clone(&self.dial.shape));
        let worker_id = self.endpoint.clone();
        async move {
            let info = calls.ask().await?;
            Ok(PrefillInfo {
                worker_id,
                layout: shape.kv_layout(),
                max_seq_len: shape.max_seq_len,
                vocab_size: VOCAB_SIZE,
                pool: info.pools().into_iter().next().unwrap_or_default(),
                n_waiting: info.stats.n_waiting,
                n_running: info.stats.n_running,
                queued_tokens: info.stats.pending_tokens as u64,
            })
        }
        .boxed()
    }
}

fn lost(_: Broken) -> Status {
    Status::unavailable("connection lost")
}
