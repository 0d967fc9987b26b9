//! Pulling the prefix of a prompt from the ranks that hold it, instead of computing it again, on a prefill worker.
//!
//! ```text
//! Pulling ──every cell there, totals equal──► pulled: the sequence computes the rest
//!    ├──── any rank refused, sent something wrong, or all took too long ────► failed: it computes everything
//!    └──── the request ended ────► forgotten
//! ```
//!
//! Each rank holds some positions of some KV heads, so a pull has a part for each DCP rank and each piece of the heads:
//! a stream, a task that reads it and holds its chunks against their checksums, and the coverage of what came. The
//! engine's own thread writes the cells, into blocks that only this sequence has, and nothing of a pull counts before
//! all of it is there. The thread forgets a pull before its blocks go to anyone else, so no late chunk can land.
//!
//! A pull is an attempt to save time. It is never the reason why a request fails.

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use futures::StreamExt;
use longreach_kv::{Commit, CoverageDigest, Incoming, Inserted, local_share};
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvChunk, KvLayout, PullDone, PullMessage, PullRequest, RankTarget, Reservation},
};
use longreach_types::{BlockId, DcpLayout, SeqId};
use tokio::{
    sync::{Notify, mpsc},
    task::AbortHandle,
    time::Instant,
};

use crate::{cells::KvCells, inlet, send::LaneSetup};

/// Messages of all pulls that may wait for the engine thread. It takes them between steps, so this is what can come
/// during one; chunks are of half a MiB or less, which bounds the memory.
const ARRIVALS_LEN: usize = 64;

/// All pulls of an engine.
pub(crate) struct PullSet {
    by_seq: BTreeMap<SeqId, Pull>,
    arrivals_in: mpsc::Sender<Arrival>,
    arrivals: mpsc::Receiver<Arrival>,
    n_bytes: u64,
}

/// What is to be pulled for one sequence.
pub(crate) struct PullAsk<'a> {
    pub(crate) seq: SeqId,
    pub(crate) reservation: &'a Reservation,
    pub(crate) ours: &'a KvLayout,
    pub(crate) prompt_hash: [u8; 16],
    /// Logical blocks that the ranks hold and this engine does not.
    pub(crate) wanted: Range<usize>,
    /// The sequence's blocks here, by logical block.
    pub(crate) blocks: &'a [BlockId],
    /// How long it may take.
    pub(crate) patience: Duration,
}

/// A pull that has ended.
pub(crate) type PullEnd = (SeqId, Result<(), WorkerError>);

/// One pull.
struct Pull {
    parts: Vec<Part>,
    deadline: Instant,
}

/// What one rank gives.
struct Part {
    incoming: Incoming,
    /// Where its cells go, by block of its share.
    blocks: Vec<BlockId>,
    heads: Range<usize>,
    task: AbortHandle,
}

/// A message of one part, verified as far as it can be without the others.
struct Arrival {
    seq: SeqId,
    part: usize,
    message: Result<PullMessage, WorkerError>,
}

impl Drop for Part {
    /// Ends the stream.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Default for PullSet {
    fn default() -> Self {
        let (arrivals_in, arrivals) = mpsc::channel(ARRIVALS_LEN);
        Self { by_seq: BTreeMap::new(), arrivals_in, arrivals, n_bytes: 0 }
    }
}

impl PullSet {
    /// Pulls that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.by_seq.len()
    }

    /// KV bytes that came, over all pulls.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Asks the ranks. An error means that there is nobody to ask.
    pub(crate) fn start(&mut self, ask: &PullAsk<'_>, setup: &LaneSetup) -> Result<(), WorkerError> {
        let ours = ask.ours;
        let layout = DcpLayout::new(ours.block_size, ask.reservation.dcp_size)
            .map_err(|error| WorkerError::Invalid(error.to_string()))?;
        let mut parts = Vec::new();
        for dcp_rank in 0..layout.dcp_size() {
            let share = local_share(layout, ask.wanted.clone(), dcp_rank);
            if share.is_empty() {
                continue;
            }
            let blocks = share.map(|local| ask.blocks[layout.logical_block(local, dcp_rank)]);
            let blocks: Vec<BlockId> = blocks.collect();
            for (target, heads) in cover_heads(&ask.reservation.ranks, dcp_rank, ours.n_kv_heads)? {
                let task = self.spawn(ask, (target, parts.len()), heads.clone(), setup);
                let (handoff, epoch) = (ask.reservation.handoff, ask.reservation.epoch);
                let incoming = Incoming::new(handoff, epoch, ours.n_layers, blocks.len());
                parts.push(Part { incoming, blocks: blocks.clone(), heads, task });
            }
        }
        let deadline = Instant::now() + ask.patience;
        self.by_seq.insert(ask.seq, Pull { parts, deadline });
        Ok(())
    }

    /// Reads one rank's stream in a task of its own.
    fn spawn(
        &self,
        ask: &PullAsk<'_>,
        (target, part): (&RankTarget, usize),
        heads: Range<usize>,
        setup: &LaneSetup,
    ) -> AbortHandle {
        let ours = ask.ours;
        let cell_bytes = heads.len() * 2 * ours.head_dim * ours.block_size * ours.kv_dtype.bytes();
        let request = PullRequest {
            handoff: ask.reservation.handoff,
            epoch: ask.reservation.epoch,
            rank: target.rank,
            layout: ours.clone(),
            prompt_hash: ask.prompt_hash,
            blocks: ask.wanted.clone(),
            heads,
        };
        let messages = setup.transport.pull(target.endpoint.clone(), request);
        let reader = Reader {
            seq: ask.seq,
            part,
            cell_bytes,
            arrivals: self.arrivals_in.clone(),
            wake: Arc::clone(&setup.wake),
        };
        setup.tasks.spawn_on(reader.run(messages), &setup.runtime).abort_handle()
    }

    /// Ends the pull of a sequence, if there is one.
    pub(crate) fn remove(&mut self, seq: SeqId) {
        self.by_seq.remove(&seq);
    }

    /// Takes in what has come and looks at the clock. Returns the pulls that have ended.
    pub(crate) fn turn(&mut self, cells: &mut impl KvCells, now: Instant) -> Vec<PullEnd> {
        let mut ended = Vec::new();
        // As many as fit into the queue: what comes meanwhile waits for the next turn.
        for _ in 0..ARRIVALS_LEN {
            let Ok(arrival) = self.arrivals.try_recv() else { break };
            let seq = arrival.seq;
            // A message of a pull that has ended is late, and of no use to anyone.
            let Some(pull) = self.by_seq.get_mut(&seq) else { continue };
            if let Ok(PullMessage::Chunk(chunk)) = &arrival.message {
                self.n_bytes += chunk.payload.len() as u64;
            }
            let result = match pull.take(arrival, cells) {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            self.by_seq.remove(&seq);
            ended.push((seq, result));
        }
        let overdue = self.by_seq.extract_if(.., |_, pull| pull.deadline <= now);
        ended.extend(overdue.map(|(seq, _)| {
            (seq, Err(WorkerError::Aborted("pulling took longer than computing would".to_owned())))
        }));
        ended
    }
}

impl Pull {
    /// Takes one message. `Ok(true)` when everything is there.
    fn take(&mut self, arrival: Arrival, cells: &mut impl KvCells) -> Result<bool, WorkerError> {
        let part = &mut self.parts[arrival.part];
        match arrival.message? {
            PullMessage::Chunk(chunk) => part.fill(&chunk, cells)?,
            PullMessage::Done(done) => part.finish(done)?,
        }
        Ok(self.parts.iter().all(|part| part.incoming.is_complete()))
    }
}

impl Part {
    fn fill(&mut self, chunk: &KvChunk, cells: &mut impl KvCells) -> Result<(), WorkerError> {
        let (layers, blocks) = (chunk.layers.clone(), chunk.blocks.clone());
        let epoch = self.incoming.epoch();
        let inserted = self.incoming.insert(epoch, layers.clone(), blocks.clone(), &chunk.crc32c);
        let inserted = inserted.map_err(|error| WorkerError::DataLoss(error.to_string()))?;
        if inserted == Inserted::Repeat {
            return Ok(());
        }
        let places = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block)));
        let cell_bytes = chunk.payload.len() / chunk.crc32c.len();
        for ((layer, block), bytes) in places.zip(chunk.payload.chunks_exact(cell_bytes)) {
            cells.import(layer, self.blocks[block], self.heads.clone(), bytes);
        }
        Ok(())
    }

    /// The rank's last message: it sends no more, so everything must be there.
    fn finish(&mut self, done: PullDone) -> Result<(), WorkerError> {
        let totals = Commit { n_cells: done.n_cells, digest: CoverageDigest(done.digest) };
        let epoch = self.incoming.epoch();
        self.incoming.commit(epoch, totals).map_err(|error| WorkerError::DataLoss(error.to_string()))?;
        if self.incoming.is_complete() {
            return Ok(());
        }
        let n_missing = self.incoming.coverage().n_missing();
        Err(WorkerError::DataLoss(format!(
            "the rank says that it is done, and {n_missing} cells are missing"
        )))
    }
}

/// Reads one rank's stream.
struct Reader {
    seq: SeqId,
    part: usize,
    cell_bytes: usize,
    arrivals: mpsc::Sender<Arrival>,
    wake: Arc<Notify>,
}

impl Reader {
    /// Passes everything on until the last message, which there always is.
    async fn run(self, mut messages: EventStream<PullMessage>) {
        loop {
            let message = match messages.next().await {
                Some(Ok(PullMessage::Chunk(chunk))) => {
                    inlet::verify(&chunk, self.cell_bytes).map(|()| PullMessage::Chunk(chunk))
                }
                Some(message) => message,
                None => Err(WorkerError::Aborted("the stream ended before everything was there".to_owned())),
            };
            let is_last = !matches!(message, Ok(PullMessage::Chunk(_)));
            let arrival = Arrival { seq: self.seq, part: self.part, message };
            let is_stopped = self.arrivals.send(arrival).await.is_err();
            self.wake.notify_one();
            if is_last || is_stopped {
                return;
            }
        }
    }
}

/// Which rank of a DCP rank gives which KV heads: each head once, though several ranks may store it.
fn cover_heads(
    ranks: &[RankTarget],
    dcp_rank: usize,
    n_kv_heads: usize,
) -> Result<Vec<(&RankTarget, Range<usize>)>, WorkerError> {
    let mut targets: Vec<_> = ranks.iter().filter(|target| target.dcp_rank == dcp_rank).collect();
    targets.sort_by_key(|target| target.kv_heads.start);
    let (mut parts, mut next) = (Vec::new(), 0);
    for target in targets {
        if target.kv_heads.contains(&next) {
            parts.push((target, next..target.kv_heads.end));
            next = target.kv_heads.end;
        }
    }
    if next != n_kv_heads {
        let message = format!("the ranks named for DCP rank {dcp_rank} do not hold {n_kv_heads} KV heads");
        return Err(WorkerError::Invalid(message));
    }
    Ok(parts)
}
