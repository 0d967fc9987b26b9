//! A rank's door for KV: runs in the service's tasks, checks what can be checked there, and hands verified chunks to
//! the rank's own thread, which alone touches the arena. What is pulled goes out by the same door: the thread is asked
//! for as many chunks as the caller has taken.
//!
//! Writing into the arena from here would need shared mutable access to memory that a step is reading. Copying in the
//! rank's thread between steps costs one bounded queue and makes the order plain: once the thread has processed a
//! drop, no late byte can land.

use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use longreach_proto::{
    WorkerError,
    worker::{
        EventStream, KvAck, KvChunk, KvCommit, KvHandler, KvLayout, KvMessage, KvOpen, PullMessage,
        PullRequest,
    },
};
use longreach_types::{Epoch, HandoffId};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::offer;

/// Chunks that may wait for the rank's thread, over all hand-offs; with chunks of at most 1 MiB this bounds memory.
pub(crate) const QUEUE_LEN: usize = 32;

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
    /// The sender is at work on the prompt.
    Alive(HandoffId),
    /// The stream has ended: what has not come never will.
    Ended(HandoffId),
    /// Someone wants the cached prefix of a hand-off.
    Pull {
        /// Which part.
        request: PullRequest,
        /// Where it goes. It has room for as many messages as may be made at once.
        messages: mpsc::Sender<Result<PullMessage, WorkerError>>,
    },
    /// The reader of a pull has taken a chunk.
    PullMore(HandoffId),
}

impl Delivery {
    /// Which hand-off it is about.
    pub fn handoff(&self) -> HandoffId {
        match self {
            Self::Open { open, .. } => open.handoff,
            Self::Pull { request, .. } => request.handoff,
            Self::Chunk(handoff, _)
            | Self::Commit(handoff, _)
            | Self::Alive(handoff)
            | Self::Ended(handoff)
            | Self::PullMore(handoff) => *handoff,
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
    cut_off: mpsc::UnboundedSender<HandoffId>,
}

/// The queue behind a door.
#[derive(Debug)]
pub struct Deliveries {
    queue: mpsc::Receiver<Delivery>,
    /// Streams whose tasks were dropped, at most once each. A destructor cannot wait for room in the queue, and what
    /// it has to say must not get lost.
    cut_off: mpsc::UnboundedReceiver<HandoffId>,
}

impl Deliveries {
    /// What has come, without waiting.
    pub fn try_recv(&mut self) -> Option<Delivery> {
        let cut_off = self.cut_off.try_recv().ok().map(Delivery::Ended);
        cut_off.or_else(|| self.queue.try_recv().ok())
    }

    /// The next delivery; `None` when the door is gone. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Delivery> {
        tokio::select! {
            biased;
            Some(handoff) = self.cut_off.recv() => Some(Delivery::Ended(handoff)),
            delivery = self.queue.recv() => delivery,
        }
    }
}

impl KvInlet {
    /// A door and the queue behind it.
    pub fn new(identity: InletIdentity) -> (Self, Deliveries) {
        let (deliveries, queue) = mpsc::channel(QUEUE_LEN);
        let (cut_off_in, cut_off) = mpsc::unbounded_channel();
        let inlet = Self { identity: Arc::new(identity), deliveries, cut_off: cut_off_in };
        (inlet, Deliveries { queue, cut_off })
    }

    /// Refuses a caller that means another rank or another life, or holds KV differently.
    fn check_caller(&self, rank: usize, epoch: Epoch, layout: &KvLayout) -> Result<(), WorkerError> {
        let ours = &self.identity;
        if rank != ours.rank {
            return Err(WorkerError::Invalid(format!("a call for rank {rank} came to rank {}", ours.rank)));
        }
        if epoch != ours.epoch {
            let message = format!("epoch {epoch} is stale, the group is at {}", ours.epoch);
            return Err(WorkerError::Aborted(message));
        }
        WorkerError::layout_mismatch(&ours.layout, layout).map_or(Ok(()), Err)
    }

    async fn deliver(&self, delivery: Delivery) -> Result<(), WorkerError> {
        self.deliveries.send(delivery).await.map_err(|_| WorkerError::Unavailable("the rank has stopped"))
    }

    /// Passes everything on until the stream ends: on a transport that does not keep order the commit may overtake
    /// chunks. A checksum is verified here, off the rank's thread.
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
                KvMessage::Commit(commit) => self.deliver(Delivery::Commit(handoff, commit)).await?,
                KvMessage::Alive => self.deliver(Delivery::Alive(handoff)).await?,
            }
        }
        self.deliver(Delivery::Ended(handoff)).await
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
        self.check_caller(open.rank, open.epoch, &open.layout)?;
        let handoff = open.handoff;
        let (sender, mut outcome) = oneshot::channel();
        let mut guard = EndGuard { inlet: self.clone(), handoff: Some(handoff) };
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

    async fn pull(&self, request: PullRequest) -> Result<EventStream<PullMessage>, WorkerError> {
        self.check_caller(request.rank, request.epoch, &request.layout)?;
        let handoff = request.handoff;
        let (messages, queue) = mpsc::channel(offer::WINDOW);
        self.deliver(Delivery::Pull { request, messages }).await?;
        let inlet = self.clone();
        let taken = stream::unfold((queue, inlet), move |(mut queue, inlet)| async move {
            let message = queue.recv().await?;
            if matches!(message, Ok(PullMessage::Chunk(_))) {
                // A rank that has stopped makes no more chunks, which ends the queue.
                let _stopped = inlet.deliver(Delivery::PullMore(handoff)).await;
            }
            Some((message, (queue, inlet)))
        });
        Ok(taken.boxed())
    }
}

/// Tells the rank that a stream ended without a verdict, however its task ended.
struct EndGuard {
    inlet: KvInlet,
    handoff: Option<HandoffId>,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        if let Some(handoff) = self.handoff.take() {
            let _rank_gone = self.inlet.cut_off.send(handoff);
        }
    }
}

/// Holds a chunk's size and checksums against each other.
pub(crate) fn verify(chunk: &KvChunk, cell_bytes: usize) -> Result<(), WorkerError> {
    // What a peer says of its chunk may overflow any product.
    let n_cells = chunk.layers.len().saturating_mul(chunk.blocks.len());
    let n_bytes = n_cells.saturating_mul(cell_bytes);
    if n_cells == 0 || chunk.crc32c.len() != n_cells || chunk.payload.len() != n_bytes {
        return Err(WorkerError::DataLoss(format!(
            "a chunk of {} layers and {} blocks has {} bytes and {} checksums; it needs {n_bytes} and {n_cells}",
            chunk.layers.len(),
            chunk.blocks.len(),
            chunk.payload.len(),
            chunk.crc32c.len(),
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_chunk_that_claims_anything_is_only_refused() {
        let chunk = |layers: usize, blocks: usize, payload: &'static [u8], crc32c: Vec<u32>| KvChunk {
            layers: 0..layers,
            blocks: 7..7 + blocks,
            payload: Bytes::from_static(payload),
            crc32c,
        };
        let right = crc32c::crc32c(b"abcd");
        assert!(verify(&chunk(1, 1, b"abcd", vec![right]), 4).is_ok());
        let max = u32::MAX as usize;
        for bad in [
            chunk(1, 1, b"abcd", vec![right ^ 1]),
            chunk(1, 1, b"abc", vec![right]),
            chunk(1, 2, b"abcd", vec![right]),
            chunk(0, 0, b"", vec![]),
            chunk(max, max, b"abcd", vec![right]),
            chunk(max, 1 << 32, b"", vec![]),
        ] {
            assert!(matches!(verify(&bad, 4), Err(WorkerError::DataLoss(_))), "{bad:?}");
        }
    }
}
