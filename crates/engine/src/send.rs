//! The sending side of a hand-off: which cells are final, which have been sent to which rank, and the commit.
//!
//! ```text
//! Sending ──all layers final, first token known──► Committing ──every rank verified──► done
//!    └──────────────── any lane refused, or the request ended ────────────────► aborted (dropped)
//! ```
//!
//! A cell (layer × block) leaves as soon as the pass that fills it is complete for its layer. A lane to each rank takes
//! cells at its own pace: what it has no room for stays in the source blocks, which are pinned, and is taken up when the
//! lane drains. Nothing here waits.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream};
use longreach_kv::{CoverageDigest, local_share};
use longreach_proto::{
    WorkerError,
    worker::{KvChunk, KvCommit, KvLayout, KvMessage, KvOpen, OutputToken, RankTarget, Reservation},
};
use longreach_types::{BlockId, DcpLayout, HandoffId, KvDtype};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc},
    task::AbortHandle,
    time::Instant,
};
use tokio_util::task::TaskTracker;

use crate::{cells::CellSource, transport::KvTransport};

/// Messages that may wait for one rank's stream: with chunks of at most [`MAX_CHUNK_BYTES`] this bounds memory.
const LANE_LEN: usize = 4;

/// How long a receiver hears nothing at most while the sender is at work. It may be set to less patience than the sender,
/// but hardly to less than a few seconds.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Payload of one message, unless set otherwise: far below what a peer accepts, large enough to keep a
/// link busy.
pub(crate) const MAX_CHUNK_BYTES: usize = 1 << 20;

/// A lane's end, as its task reports it.
#[derive(Debug)]
pub struct LaneReport {
    /// Which hand-off.
    pub(crate) handoff: HandoffId,
    /// To which rank.
    pub(crate) rank: usize,
    /// Whether the rank verified everything.
    pub(crate) result: Result<(), WorkerError>,
}

/// What lanes need of the process around them.
pub(crate) struct LaneSetup {
    /// How bytes travel.
    pub(crate) transport: Arc<dyn KvTransport>,
    /// Rings when a lane has room again.
    pub(crate) wake: Arc<Notify>,
    /// Where lanes report their end.
    pub(crate) reports: mpsc::Sender<LaneReport>,
    /// Where lane tasks run and are awaited at shutdown.
    pub(crate) tasks: TaskTracker,
    /// The runtime of those tasks.
    pub(crate) runtime: Handle,
    /// The most payload of one message, where a cell is not larger.
    pub(crate) max_chunk_bytes: usize,
}

/// One sequence's cells on the prefill side.
pub(crate) struct SeqCells<'a, S> {
    /// Where they are.
    pub(crate) source: &'a S,
    /// The sequence's blocks, by logical block.
    pub(crate) blocks: &'a [BlockId],
}

/// One hand-off on its way out.
pub(crate) struct Outbound {
    handoff: HandoffId,
    prompt_len: usize,
    /// How the receiving group splits positions.
    layout: DcpLayout,
    head_dim: usize,
    kv_dtype: KvDtype,
    /// For each layer, the logical blocks up to here are final.
    ready: Vec<usize>,
    lanes: Vec<Lane>,
    sent_bytes: u64,
    /// How long it may stand still.
    patience: Duration,
    /// After this the hand-off is given up, unless something is sent before.
    pub(crate) deadline: Instant,
    /// When the receiver is told next that the sender is at work.
    alive_at: Instant,
}

/// The way to one rank.
struct Lane {
    target: RankTarget,
    /// The rank's share, as indices into its table of the sequence.
    share: Range<usize>,
    /// For each layer, the next cell of the share to be sent.
    next: Vec<usize>,
    n_cells: usize,
    digest: CoverageDigest,
    max_chunk_bytes: usize,
    /// Closed after the commit.
    messages: Option<mpsc::Sender<KvMessage>>,
    commit: Option<CommitNote>,
    verified: bool,
    task: AbortHandle,
}

#[derive(Clone)]
struct CommitNote {
    prompt_hash: [u8; 16],
    first_token: Option<OutputToken>,
}

impl Drop for Lane {
    /// Ends the stream, which aborts the hand-off on the rank unless it was verified.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Outbound {
    /// Opens a lane to every rank of `reservation`.
    pub(crate) fn open(
        reservation: &Reservation,
        ours: &KvLayout,
        prompt_len: usize,
        patience: Duration,
        setup: &LaneSetup,
    ) -> Result<Self, WorkerError> {
        if let Some(error) = WorkerError::layout_mismatch(&reservation.layout, ours) {
            return Err(error);
        }
        let layout = DcpLayout::new(ours.block_size, reservation.dcp_size)
            .map_err(|error| WorkerError::Invalid(error.to_string()))?;
        if reservation.blocks.end != layout.n_blocks(prompt_len) {
            return Err(WorkerError::Invalid(format!(
                "the reservation ends at block {}, {prompt_len} prompt tokens end at block {}",
                reservation.blocks.end,
                layout.n_blocks(prompt_len)
            )));
        }
        let mut lanes = Vec::with_capacity(reservation.ranks.len());
        for target in &reservation.ranks {
            if target.kv_heads.end > ours.n_kv_heads || target.dcp_rank >= reservation.dcp_size {
                let message = format!("reservation names a rank that cannot be: {target:?}");
                return Err(WorkerError::Invalid(message));
            }
            let open = KvOpen {
                handoff: reservation.handoff,
                epoch: reservation.epoch,
                rank: target.rank,
                layout: ours.clone(),
                prompt_len,
            };
            lanes.push(Lane::open(target.clone(), reservation, layout, open, setup));
        }
        let now = Instant::now();
        Ok(Self {
            handoff: reservation.handoff,
            prompt_len,
            layout,
            head_dim: ours.head_dim,
            kv_dtype: ours.kv_dtype,
            ready: vec![reservation.blocks.start; ours.n_layers],
            lanes,
            sent_bytes: 0,
            patience,
            deadline: now + patience,
            alive_at: now + alive_interval(patience),
        })
    }

    /// Which hand-off this is.
    pub(crate) fn handoff(&self) -> HandoffId {
        self.handoff
    }

    /// KV bytes sent so far, all ranks.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Positions below `len` are final in `layer`. A block leaves when it is full, the last one with the prompt's end.
    pub(crate) fn advance(&mut self, layer: usize, len: usize) {
        let n_blocks = if len >= self.prompt_len {
            self.layout.n_blocks(self.prompt_len)
        } else {
            self.layout.block(len)
        };
        self.ready[layer] = self.ready[layer].max(n_blocks);
    }

    /// [`Self::advance`] for every layer: positions that were cached, or a chunk that is complete.
    pub(crate) fn advance_all(&mut self, len: usize) {
        (0..self.ready.len()).for_each(|layer| self.advance(layer, len));
    }

    /// Everything is final: each rank gets its commit after its last cell, rank 0 with the first token.
    pub(crate) fn commit(&mut self, prompt_hash: [u8; 16], first_token: OutputToken) {
        for lane in &mut self.lanes {
            let first_token = (lane.target.rank == 0).then(|| first_token.clone());
            lane.commit = Some(CommitNote { prompt_hash, first_token });
        }
    }

    /// Sends what is final and fits; the rest goes when a lane rings.
    pub(crate) fn pump<S: CellSource>(&mut self, from: &SeqCells<'_, S>) {
        let cells = Cells {
            layout: self.layout,
            head_dim: self.head_dim,
            kv_dtype: self.kv_dtype,
            prompt_len: self.prompt_len,
        };
        let (sent_before, mut waits_for_peer) = (self.sent_bytes, false);
        for lane in &mut self.lanes {
            self.sent_bytes += lane.pump(&self.ready, &cells, from);
            waits_for_peer |= lane.commit.is_some() || lane.n_unsent(&self.ready, &cells) > 0;
        }
        let now = Instant::now();
        if !waits_for_peer {
            self.say_alive(now);
        }
        // Where all that is final has gone, it is the prompt that takes its time.
        if self.sent_bytes > sent_before || !waits_for_peer {
            self.deadline = now + self.patience;
        }
    }

    /// Tells the rank that leads, which alone keeps the time, that the prompt is at work on.
    fn say_alive(&mut self, now: Instant) {
        if now < self.alive_at {
            return;
        }
        self.alive_at = now + alive_interval(self.patience);
        let leader = self.lanes.iter().find(|lane| lane.target.rank == 0);
        if let Some(messages) = leader.and_then(|lane| lane.messages.as_ref()) {
            // Where there is no room, something else is on its way.
            let _full = messages.try_send(KvMessage::Alive);
        }
    }

    /// Takes a lane's report. `Ok(true)` when every rank has verified its share.
    pub(crate) fn report(&mut self, report: LaneReport) -> Result<bool, WorkerError> {
        report.result?;
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.target.rank == report.rank) {
            lane.verified = true;
        }
        Ok(self.lanes.iter().all(|lane| lane.verified))
    }

    /// Whether every lane's task has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.lanes.iter().all(|lane| lane.task.is_finished())
    }
}

impl Lane {
    fn open(
        target: RankTarget,
        reservation: &Reservation,
        layout: DcpLayout,
        open: KvOpen,
        setup: &LaneSetup,
    ) -> Self {
        let stores = !target.kv_heads.is_empty();
        let share = local_share(layout, reservation.blocks.clone(), target.dcp_rank);
        let share = if stores { share } else { share.start..share.start };
        let (sender, receiver) = mpsc::channel(LANE_LEN);
        let wake = Arc::clone(&setup.wake);
        let queue = stream::unfold(receiver, move |mut receiver| {
            let wake = Arc::clone(&wake);
            async move {
                let message = receiver.recv().await?;
                wake.notify_one();
                Some((message, receiver))
            }
        });
        let (handoff, rank) = (open.handoff, target.rank);
        let messages = stream::once(async move { KvMessage::Open(open) }).chain(queue).boxed();
        let pushed = setup.transport.push(target.endpoint.clone(), messages);
        let reports = setup.reports.clone();
        let task = setup.tasks.spawn_on(
            async move {
                let result = pushed.await.map(|_ack| ());
                // The engine has stopped if nobody takes the report.
                let _stopped = reports.send(LaneReport { handoff, rank, result }).await;
            },
            &setup.runtime,
        );
        Self {
            next: vec![0; open_layers(reservation)],
            target,
            share,
            n_cells: 0,
            digest: CoverageDigest::default(),
            max_chunk_bytes: setup.max_chunk_bytes,
            messages: Some(sender),
            commit: None,
            verified: false,
            task: task.abort_handle(),
        }
    }

    /// How many blocks of its share are final in a layer that is so for the logical blocks below `ready`.
    fn n_final(&self, ready: usize, cells: &Cells) -> usize {
        let n_final = cells.layout.local_n_blocks(ready, self.target.dcp_rank).min(self.share.end);
        n_final.saturating_sub(self.share.start)
    }

    /// Cells that are final and had no room yet.
    fn n_unsent(&self, ready: &[usize], cells: &Cells) -> usize {
        self.next.iter().zip(ready).map(|(&next, &ready)| self.n_final(ready, cells) - next).sum()
    }

    fn pump<S: CellSource>(&mut self, ready: &[usize], cells: &Cells, from: &SeqCells<'_, S>) -> u64 {
        let mut n_bytes = 0;
        for (layer, &ready) in ready.iter().enumerate() {
            let n_final = self.n_final(ready, cells);
            while self.next[layer] < n_final {
                let Some(sent) = self.send_run(layer, n_final, cells, from) else { return n_bytes };
                n_bytes += sent;
            }
        }
        self.finish();
        n_bytes
    }

    /// Sends one chunk of `layer`; `None` when there is no room.
    fn send_run<S: CellSource>(
        &mut self,
        layer: usize,
        n_final: usize,
        cells: &Cells,
        from: &SeqCells<'_, S>,
    ) -> Option<u64> {
        let permit = self.messages.as_ref()?.try_reserve().ok()?;
        let cell_bytes = cells.bytes(self.target.kv_heads.len());
        let start = self.next[layer];
        let end = n_final.min(start + (self.max_chunk_bytes / cell_bytes).max(1));
        let mut payload = Vec::with_capacity((end - start) * cell_bytes);
        let mut crc32c = Vec::with_capacity(end - start);
        for cell in start..end {
            let block = cells.layout.logical_block(self.share.start + cell, self.target.dcp_rank);
            let heads = self.target.kv_heads.clone();
            from.source.export(layer, from.blocks[block], heads, &mut payload);
            let bytes = &mut payload[(cell - start) * cell_bytes..];
            cells.clear_tail(block, bytes);
            let crc = crc32c::crc32c(bytes);
            self.digest.add(layer, cell, crc);
            crc32c.push(crc);
        }
        let n_bytes = payload.len() as u64;
        let payload = Bytes::from(payload);
        permit.send(KvMessage::Chunk(KvChunk {
            layers: layer..layer + 1,
            blocks: start..end,
            payload,
            crc32c,
        }));
        self.n_cells += end - start;
        self.next[layer] = end;
        Some(n_bytes)
    }

    /// Sends the commit once every cell has been sent.
    fn finish(&mut self) {
        if self.next.iter().any(|&next| next < self.share.len()) {
            return;
        }
        let (Some(note), Some(messages)) = (self.commit.clone(), &self.messages) else { return };
        let Ok(permit) = messages.try_reserve() else { return };
        permit.send(KvMessage::Commit(KvCommit {
            n_cells: self.n_cells,
            digest: self.digest.0,
            prompt_hash: note.prompt_hash,
            first_token: note.first_token,
        }));
        self.messages = None;
    }
}

fn alive_interval(patience: Duration) -> Duration {
    ALIVE_INTERVAL.min(patience / 8)
}

fn open_layers(reservation: &Reservation) -> usize {
    reservation.layout.n_layers
}

/// Shape of the cells of one hand-off.
struct Cells {
    layout: DcpLayout,
    head_dim: usize,
    kv_dtype: KvDtype,
    prompt_len: usize,
}

impl Cells {
    fn bytes(&self, n_kv_heads: usize) -> usize {
        n_kv_heads * 2 * self.head_dim * self.layout.block_size() * self.kv_dtype.bytes()
    }

    /// Zeroes the slots of `block` past the prompt's end: they hold what the pool held before, which is another
    /// request's.
    fn clear_tail(&self, block: usize, cell: &mut [u8]) {
        let n_valid = self.layout.block_positions(block, self.prompt_len).len();
        let block_size = self.layout.block_size();
        if n_valid == block_size {
            return;
        }
        let width = self.kv_dtype.bytes();
        let head_bytes = self.head_dim * block_size * width;
        for (i, part) in cell.chunks_exact_mut(head_bytes).enumerate() {
            if i % 2 == 0 {
                // K: [head_dim][B]
                for row in part.chunks_exact_mut(block_size * width) {
                    row[n_valid * width..].fill(0);
                }
            } else {
                // V: [B][head_dim]
                part[n_valid * self.head_dim * width..].fill(0);
            }
        }
    }
}
