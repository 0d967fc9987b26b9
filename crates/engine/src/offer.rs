//! What a rank gives back of a hand-off it is to receive: the KV of the prompt's cached prefix, to the prefill worker
//! that has to compute the rest.
//!
//! ```text
//! idle ──request──► open ──every cell sent──► idle
//!                    └── another request, the caller gone, or the hand-off ended ──► idle
//! ```
//!
//! The rank's own thread copies the cells, as it does those that come in: the prefix belongs to a sequence of the
//! hand-off, and so cannot change owner while the thread knows of the hand-off. Nothing is copied ahead of the
//! reader. Each chunk that it takes asks for one more by a delivery of its own, so that a turn of the thread makes at
//! most as many chunks as deliveries fit into its queue, however many pulls are open; steps go in between.

use std::ops::Range;

use bytes::Bytes;
use longreach_kv::{CoverageDigest, local_share};
use longreach_proto::{
    WorkerError,
    worker::{KvChunk, PullDone, PullMessage, PullRequest},
};
use longreach_types::BlockId;
use tokio::sync::mpsc;

use crate::cells::KvCells;

/// Chunks of one pull that are made before the reader takes the first: with [`CHUNK_BYTES`] the memory of a pull. A
/// rank that runs steps makes so many a step, so fewer would starve a pull beside long steps.
pub(crate) const WINDOW: usize = 8;

/// Payload of one chunk: copied in a small part of a step's time.
const CHUNK_BYTES: usize = 512 << 10;

/// Where the messages of a pull go.
pub(crate) type PullSender = mpsc::Sender<Result<PullMessage, WorkerError>>;

/// The cached prefix of one hand-off on one rank, and the pull that reads it.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    /// The sequence's table up to the end of its cached prefix.
    cached: Vec<BlockId>,
    open: Option<OpenPull>,
}

/// A pull that has not ended.
#[derive(Debug)]
struct OpenPull {
    messages: PullSender,
    /// The rank's share of the request, as indices into the table.
    share: Range<usize>,
    /// Heads, counted from the first that the rank stores.
    heads: Range<usize>,
    /// The next cell.
    layer: usize,
    block: usize,
    done: PullDone,
}

impl Offer {
    /// Offers the blocks `cached`, which hold the start of a prompt.
    pub(crate) fn new(cached: Vec<BlockId>) -> Self {
        Self { cached, open: None }
    }

    /// Starts a pull, in place of one that is open. A request for what is not offered is refused, and changes nothing.
    pub(crate) fn open(&mut self, request: &PullRequest, messages: PullSender, cells: &impl KvCells) {
        let (shape, stored) = (cells.shape(), cells.heads());
        let share = local_share(shape.layout, request.blocks.clone(), shape.dcp_rank);
        let heads = &request.heads;
        if share.end > self.cached.len() || heads.start < stored.start || heads.end > stored.end {
            let message = format!(
                "blocks {:?} of heads {heads:?} are wanted, the hand-off has {} here of heads {stored:?}",
                request.blocks,
                self.cached.len()
            );
            // The window is never full before the first message.
            let _caller_gone = messages.try_send(Err(WorkerError::Invalid(message)));
            return;
        }
        let heads = heads.start - stored.start..heads.end - stored.start;
        let done = PullDone { n_cells: 0, digest: CoverageDigest::default().0 };
        self.open = Some(OpenPull { messages, block: share.start, share, heads, layer: 0, done });
        (0..WINDOW).for_each(|_| self.send_next(cells));
    }

    /// Makes the next chunk of the open pull, or its end. Does nothing when none is open.
    pub(crate) fn send_next(&mut self, cells: &impl KvCells) {
        let Some(pull) = &mut self.open else { return };
        if pull.messages.is_closed() {
            self.open = None;
            return;
        }
        // The reader made room before it asked, unless it reads a pull that this one has replaced: then it has asked
        // once too often, and is ignored.
        if pull.messages.capacity() == 0 {
            return;
        }
        let chunk = pull.next_chunk(&self.cached, cells);
        let message = chunk.map_or(PullMessage::Done(pull.done), PullMessage::Chunk);
        let is_last = matches!(message, PullMessage::Done(_));
        let _caller_gone = pull.messages.try_send(Ok(message));
        if is_last {
            self.open = None;
        }
    }
}

impl OpenPull {
    fn next_chunk(&mut self, cached: &[BlockId], cells: &impl KvCells) -> Option<KvChunk> {
        let shape = cells.shape();
        if self.share.is_empty() || self.heads.is_empty() || self.layer == shape.n_layers {
            return None;
        }
        let cell_bytes = shape.cell_bytes(self.heads.len());
        let n_blocks = (CHUNK_BYTES / cell_bytes).max(1).min(self.share.end - self.block);
        let blocks = self.block..self.block + n_blocks;
        let first = self.share.start;
        let mut payload = Vec::with_capacity(n_blocks * cell_bytes);
        let mut crc32c = Vec::with_capacity(n_blocks);
        let mut digest = CoverageDigest(self.done.digest);
        for (i, block) in blocks.clone().enumerate() {
            cells.export(self.layer, cached[block], self.heads.clone(), &mut payload);
            let crc = crc32c::crc32c(&payload[i * cell_bytes..]);
            digest.add(self.layer, block - first, crc);
            crc32c.push(crc);
        }
        let chunk = KvChunk {
            layers: self.layer..self.layer + 1,
            blocks: blocks.start - first..blocks.end - first,
            payload: Bytes::from(payload),
            crc32c,
        };
        self.done = PullDone { n_cells: self.done.n_cells + n_blocks, digest: digest.0 };
        self.block = blocks.end;
        if self.block == self.share.end {
            (self.layer, self.block) = (self.layer + 1, first);
        }
        Some(chunk)
    }
}
