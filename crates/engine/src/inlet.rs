//! A rank's door for KV: runs in the service's tasks, checks what can be checked there, and hands verified chunks to
//! the rank's own thread, which alone touches the arena.
//!
//! Writing into the arena from here would need shared mutable access to memory that a step is reading. Copying in the
//! rank's thread between steps costs one bounded queue and makes the order plain: once the thread has processed a
//! drop, no late byte can land.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use longreach_proto::{
    WorkerError,
    worker::{KvAck, KvChunk, KvCommit, KvHandler, KvLayout, KvMessage, KvOpen},
};
use longreach_types::{Epoch, HandoffId};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

/// Chunks that may wait for the rank's thread, over all hand-offs; with chunks of at most 1 MiB this bounds memory.
const QUEUE_LEN: usize = 32;

/// What the rank's thread gets.
#[derive(Debug)]
pub enum Delivery {
    /// A stream was opened; the outcome of the whole hand-off goes to `outcome`.
    Open {
        /// What was said.
        open: KvOpen,
        /// Resolves the sender's call.
        outcome: oneshot::Sender<Result<KvAck, WorkerError>>,
    },
    /// A chunk whose checksums hold.
    Chunk(HandoffId, KvChunk),
    /// The sender is done.
    Commit(HandoffId, KvCommit),
    /// The stream ended before its commit.
    Broken(HandoffId),
}

impl Delivery {
    /// Which hand-off it is about.
    pub fn handoff(&self) -> HandoffId {
        match self {
            Self::Open { open, .. } => open.handoff,
            Self::Chunk(handoff, _) | Self::Commit(handoff, _) | Self::Broken(handoff) => *handoff,
        }
    }
}

/// What a rank is, as far as a sender must agree.
#[derive(Clone, Debug)]
pub struct InletIdentity {
    /// Rank in the group.
    pub rank: usize,
    /// The group's life.
    pub epoch: Epoch,
    /// How it holds KV.
    pub layout: KvLayout,
    /// Bytes of one cell (layer × block) on this rank.
    pub cell_bytes: usize,
}

/// The door. Cheap to clone.
#[derive(Clone, Debug)]
pub struct KvInlet {
    identity: Arc<InletIdentity>,
    deliveries: mpsc::Sender<Delivery>,
}

impl KvInlet {
    /// A door and the queue behind it.
    pub fn new(identity: InletIdentity) -> (Self, mpsc::Receiver<Delivery>) {
        let (deliveries, queue) = mpsc::channel(QUEUE_LEN);
        (Self { identity: Arc::new(identity), deliveries }, queue)
    }

    /// Refuses a sender that belongs to another rank, another life, or holds KV differently.
    fn check_open(&self, open: &KvOpen) -> Result<(), WorkerError> {
        let ours = &self.identity;
        if open.rank != ours.rank {
            let message = format!("KV for rank {} came to rank {}", open.rank, ours.rank);
            return Err(WorkerError::Invalid(message));
        }
        if open.epoch != ours.epoch {
            let message = format!("epoch {} is stale, the group is at {}", open.epoch, ours.epoch);
            return Err(WorkerError::Aborted(message));
        }
        WorkerError::layout_mismatch(&ours.layout, &open.layout).map_or(Ok(()), Err)
    }

    async fn deliver(&self, delivery: Delivery) -> Result<(), WorkerError> {
        self.deliveries.send(delivery).await.map_err(|_| WorkerError::Unavailable("the rank has stopped"))
    }

    /// Passes chunks on until the commit. A checksum is verified here, off the rank's thread.
    async fn pass_on(
        &self,
        handoff: HandoffId,
        messages: &mut (impl Stream<Item = Result<KvMessage, Status>> + Unpin),
    ) -> Result<(), WorkerError> {
        while let Some(message) = messages.next().await {
            let message = message.map_err(|status| WorkerError::Aborted(status.message().to_owned()))?;
            match message {
                KvMessage::Open(_) => {
                    return Err(WorkerError::Invalid("a second open on one stream".to_owned()));
                }
                KvMessage::Chunk(chunk) => {
                    verify(&chunk, self.identity.cell_bytes)?;
                    self.deliver(Delivery::Chunk(handoff, chunk)).await?;
                }
                KvMessage::Commit(commit) => return self.deliver(Delivery::Commit(handoff, commit)).await,
            }
        }
        Err(WorkerError::Aborted("the stream ended before its commit".to_owned()))
    }
}

impl KvHandler for KvInlet {
    async fn push(
        &self,
        mut messages: impl Stream<Item = Result<KvMessage, Status>> + Send + Unpin + 'static,
    ) -> Result<KvAck, WorkerError> {
        let open = match messages.next().await {
            Some(Ok(KvMessage::Open(open))) => open,
            Some(Err(status)) => return Err(WorkerError::Aborted(status.message().to_owned())),
            Some(Ok(_)) | None => {
                return Err(WorkerError::Invalid("the first message must open a hand-off".to_owned()));
            }
        };
        self.check_open(&open)?;
        let handoff = open.handoff;
        let (sender, mut outcome) = oneshot::channel();
        let mut guard = BrokenGuard { inlet: self.clone(), handoff: Some(handoff) };
        self.deliver(Delivery::Open { open, outcome: sender }).await?;
        // Biased: a verdict ends the call even while chunks keep coming.
        tokio::select! {
            biased;
            verdict = &mut outcome => {
                guard.handoff = None;
                return verdict.unwrap_or(Err(WorkerError::Unavailable("the rank has stopped")));
            }
            passed = self.pass_on(handoff, &mut messages) => passed?,
        }
        let verdict = outcome.await.unwrap_or(Err(WorkerError::Unavailable("the rank has stopped")));
        guard.handoff = None;
        verdict
    }
}

/// Tells the rank that a stream ended without a verdict, however its task ended.
struct BrokenGuard {
    inlet: KvInlet,
    handoff: Option<HandoffId>,
}

impl Drop for BrokenGuard {
    fn drop(&mut self) {
        let Some(handoff) = self.handoff.take() else { return };
        // A full queue must not lose the news, and a destructor must not wait: leave it to a thread that may.
        match self.inlet.deliveries.try_send(Delivery::Broken(handoff)) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(delivery)) => {
                let deliveries = self.inlet.deliveries.clone();
                std::thread::spawn(move || {
                    // The rank's thread drains the queue or drops it; either ends this wait.
                    let _gone = deliveries.blocking_send(delivery);
                });
            }
        }
    }
}

/// Holds a chunk's size and checksums against each other.
fn verify(chunk: &KvChunk, cell_bytes: usize) -> Result<(), WorkerError> {
    let n_cells = chunk.layers.len() * chunk.blocks.len();
    if n_cells == 0 || chunk.crc32c.len() != n_cells || chunk.payload.len() != n_cells * cell_bytes {
        return Err(WorkerError::DataLoss(format!(
            "a chunk of {} layers and {} blocks has {} bytes and {} checksums; it needs {} and {n_cells}",
            chunk.layers.len(),
            chunk.blocks.len(),
            chunk.payload.len(),
            chunk.crc32c.len(),
            n_cells * cell_bytes,
        )));
    }
    if cell_bytes == 0 {
        return Ok(());
    }
    for (i, (cell, &expected)) in chunk.payload.chunks_exact(cell_bytes).zip(&chunk.crc32c).enumerate() {
        let got = crc32c::crc32c(cell);
        if got != expected {
            let (layer, block) = (chunk.layers.start + i / chunk.blocks.len(), i % chunk.blocks.len());
            return Err(WorkerError::DataLoss(format!(
                "checksum of layer {layer}, block {} is {got:08x}, the sender says {expected:08x}",
                chunk.blocks.start + block
            )));
        }
    }
    Ok(())
}
