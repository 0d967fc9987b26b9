//! The way of a hand-off from a prefill worker to one rank: the lane that sends, the network that repeats, reorders and
//! spoils chunks, and the door that checks what can be checked before the rank sees it.
//!
//! The product's transport keeps order, because it runs on TCP. The protocol promises more: chunks in any order, any
//! number of times, and a commit that overtakes them, so that another transport can be put underneath. That is what is
//! held against it here.

use std::ops::Range;

use bytes::Bytes;
use longreach_kv::{CoverageDigest, local_share};
use longreach_proto::{
    WorkerError,
    worker::{KvAck, KvChunk, KvCommit, KvMessage, KvOpen, OutputToken, RankTarget, Reservation},
};
use longreach_types::{BlockId, DcpLayout, Epoch, HandoffId};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    engine::{Input, LaneReport},
    model::N_LAYERS,
    net::{Broken, Net, NodeId},
    rank::{Delivery, Rank, cell_bytes},
    rng::Rng,
    services::{Door, Services},
};

/// Messages that may wait in a lane.
const LANE_LEN: usize = 4;

/// How badly chunks fare on their way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mangling {
    pub(crate) repeat_permille: u32,
    pub(crate) reorder_permille: u32,
    pub(crate) spoil_permille: u32,
}

/// What lanes need of the process around them.
#[derive(Clone)]
pub(crate) struct LaneContext {
    pub(crate) net: Net,
    pub(crate) node: NodeId,
    pub(crate) services: Services,
    pub(crate) reports: mpsc::Sender<Input>,
    pub(crate) mangling: Mangling,
    /// Most cells in one chunk.
    pub(crate) chunk_len: usize,
    pub(crate) seed: u64,
}

/// The way to one rank.
pub(crate) struct Lane {
    pub(crate) target: RankTarget,
    layout: DcpLayout,
    share: Range<usize>,
    next: Vec<usize>,
    n_cells: usize,
    digest: CoverageDigest,
    messages: Option<mpsc::Sender<KvMessage>>,
    commit: Option<([u8; 16], Option<OutputToken>)>,
    pub(crate) verified: bool,
    /// Ends the stream, which aborts the hand-off on the rank unless it was verified.
    _stop: DropGuard,
}

impl Lane {
    pub(crate) fn open(
        target: RankTarget,
        reservation: &Reservation,
        layout: DcpLayout,
        prompt_len: usize,
        context: &LaneContext,
    ) -> Self {
        let share = local_share(layout, reservation.blocks.clone(), target.dcp_rank);
        let (sender, receiver) = mpsc::channel(LANE_LEN);
        let open = KvOpen {
            handoff: reservation.handoff,
            epoch: reservation.epoch,
            rank: target.rank,
            layout: reservation.layout.clone(),
            prompt_len,
        };
        let stop = CancellationToken::new();
        let (stopped, context, endpoint) = (stop.clone(), context.clone(), target.endpoint.clone());
        let (node, net) = (context.node, context.net.clone());
        net.spawn_on(node, async move {
            let (handoff, rank) = (open.handoff, open.rank);
            let pushed = stopped.run_until_cancelled(push(&context, endpoint, open, receiver)).await;
            let Some(result) = pushed else { return };
            let report = Input::Report(LaneReport { handoff, rank, result: result.map(drop) });
            let _engine_gone = context.reports.send(report).await;
        });
        Self {
            target,
            layout,
            share,
            next: vec![0; N_LAYERS],
            n_cells: 0,
            digest: CoverageDigest::default(),
            messages: Some(sender),
            commit: None,
            verified: false,
            _stop: stop.drop_guard(),
        }
    }

    pub(crate) fn commit(&mut self, prompt_hash: [u8; 16], first_token: &OutputToken) {
        let first_token = (self.target.rank == 0).then(|| first_token.clone());
        self.commit = Some((prompt_hash, first_token));
    }

    /// Sends cells of the first `n_ready` logical blocks that fit, then the commit. Whether anything was sent.
    pub(crate) fn pump(&mut self, n_ready: usize, source: &CellSource<'_>) -> bool {
        let n_cells_before = self.n_cells;
        let n_final = self.layout.local_n_blocks(n_ready, self.target.dcp_rank).min(self.share.end);
        let n_final = n_final.saturating_sub(self.share.start);
        for layer in 0..N_LAYERS {
            while self.next[layer] < n_final {
                if self.send_run(layer, n_final, source).is_none() {
                    return self.n_cells > n_cells_before;
                }
            }
        }
        self.finish();
        self.n_cells > n_cells_before
    }

    fn send_run(&mut self, layer: usize, n_final: usize, source: &CellSource<'_>) -> Option<()> {
        let permit = self.messages.as_ref()?.try_reserve().ok()?;
        let start = self.next[layer];
        let end = n_final.min(start + source.chunk_len);
        let (mut payload, mut crc32c) = (Vec::new(), Vec::new());
        for cell in start..end {
            let block = self.layout.logical_block(self.share.start + cell, self.target.dcp_rank);
            let n_valid = self.layout.block_positions(block, source.prompt_len).len();
            let bytes = source.rank.export(layer, source.blocks[block], n_valid);
            let crc = crc32c::crc32c(&bytes);
            self.digest.add(layer, cell, crc);
            crc32c.push(crc);
            payload.extend(bytes);
        }
        let payload = Bytes::from(payload);
        permit.send(KvMessage::Chunk(KvChunk {
            layers: layer..layer + 1,
            blocks: start..end,
            payload,
            crc32c,
        }));
        self.n_cells += end - start;
        self.next[layer] = end;
        Some(())
    }

    fn finish(&mut self) {
        if self.next.iter().any(|&next| next < self.share.len()) {
            return;
        }
        let (Some((prompt_hash, first_token)), Some(messages)) = (self.commit.clone(), &self.messages) else {
            return;
        };
        let Ok(permit) = messages.try_reserve() else { return };
        let (n_cells, digest) = (self.n_cells, self.digest.0);
        permit.send(KvMessage::Commit(KvCommit { n_cells, digest, prompt_hash, first_token }));
        self.messages = None;
    }
}

/// One sequence's cells on the sending side.
pub(crate) struct CellSource<'a> {
    pub(crate) rank: &'a Rank,
    pub(crate) blocks: &'a [BlockId],
    pub(crate) prompt_len: usize,
    pub(crate) chunk_len: usize,
}

/// Sends one hand-off to the rank at `endpoint`; resolves when the rank has verified all of it or refused.
async fn push(
    context: &LaneContext,
    endpoint: String,
    open: KvOpen,
    messages: mpsc::Receiver<KvMessage>,
) -> Result<KvAck, WorkerError> {
    let lost = |_: Broken| WorkerError::Aborted("the connection to a rank was lost".to_owned());
    let gone = || WorkerError::Aborted("no such rank".to_owned());
    let node = context.services.rank_node(&endpoint).ok_or_else(gone)?;
    let conn = context.net.connect(context.node, node).await.map_err(lost)?;
    let door = context.services.door(&endpoint).ok_or_else(gone)?;
    let (sender, receiver) = mpsc::channel(LANE_LEN);
    let seed = context.seed ^ open.handoff.0 as u64 ^ ((open.rank as u64) << 48);
    let mangler =
        Mangler { context: context.clone(), rng: Rng::new(seed, 21), held: None, sink: sender, open };
    context.net.spawn(mangler.run(messages));
    let wake = context.reports.clone();
    let stream = conn.carry(receiver, move || {
        let _engine_busy_or_gone = wake.try_send(Input::Nudge);
    });
    let (verdict_in, verdict) = oneshot::channel();
    context.net.spawn_on(node, serve_push(door, stream, verdict_in));
    // Biased, so that a verdict that is there counts.
    tokio::select! {
        biased;
        verdict = verdict => {
            conn.transit().await.map_err(lost)?;
            verdict.unwrap_or(Err(stopped()))
        }
        broken = conn.broken() => Err(lost(broken)),
    }
}

/// Repeats, swaps and spoils chunks.
struct Mangler {
    context: LaneContext,
    rng: Rng,
    held: Option<KvMessage>,
    sink: mpsc::Sender<KvMessage>,
    open: KvOpen,
}

impl Mangler {
    async fn run(mut self, mut source: mpsc::Receiver<KvMessage>) {
        if self.sink.send(KvMessage::Open(self.open.clone())).await.is_err() {
            return;
        }
        while let Some(message) = source.recv().await {
            let _engine_busy_or_gone = self.context.reports.try_send(Input::Nudge);
            if self.pass(message).await.is_none() {
                return;
            }
        }
        if let Some(held) = self.held.take() {
            let _rank_gone = self.sink.send(held).await;
        }
    }

    async fn pass(&mut self, message: KvMessage) -> Option<()> {
        let Mangling { repeat_permille, reorder_permille, spoil_permille } = self.context.mangling;
        let services = self.context.services.clone();
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

/// The door of a rank: runs for as long as the rank's process lives.
async fn serve_push(
    door: Door,
    mut stream: mpsc::Receiver<Result<KvMessage, Broken>>,
    verdict: oneshot::Sender<Result<KvAck, WorkerError>>,
) {
    let result = admit(&door, &mut stream).await;
    let _sender_gone = verdict.send(result);
}

async fn admit(
    door: &Door,
    stream: &mut mpsc::Receiver<Result<KvMessage, Broken>>,
) -> Result<KvAck, WorkerError> {
    let Some(Ok(KvMessage::Open(open))) = stream.recv().await else {
        return Err(WorkerError::Aborted("the stream ended before it was opened".to_owned()));
    };
    if open.epoch != door.epoch {
        door.journal.count("stale epoch refused");
        return Err(WorkerError::Aborted(format!("epoch {} is stale", open.epoch)));
    }
    let (handoff, epoch) = (open.handoff, open.epoch);
    let (outcome, mut verdict) = oneshot::channel();
    door.deliver(Delivery::Open { open, outcome }).await?;
    // Biased: a verdict ends the call even while chunks keep coming.
    let passed = tokio::select! {
        biased;
        verdict = &mut verdict => return verdict.unwrap_or(Err(stopped())),
        passed = pass_on(door, (handoff, epoch), stream) => passed,
    };
    if let Err(error) = passed {
        door.deliver(Delivery::Broken(handoff)).await?;
        return Err(error);
    }
    verdict.await.unwrap_or(Err(stopped()))
}

async fn pass_on(
    door: &Door,
    (handoff, epoch): (HandoffId, Epoch),
    stream: &mut mpsc::Receiver<Result<KvMessage, Broken>>,
) -> Result<(), WorkerError> {
    let mut committed = false;
    while let Some(message) = stream.recv().await {
        match message {
            Ok(KvMessage::Open(_)) => return Err(WorkerError::Invalid("a second open".to_owned())),
            Ok(KvMessage::Chunk(chunk)) => {
                verify(&chunk, cell_bytes(door.layout))?;
                door.deliver(Delivery::Chunk { handoff, epoch, chunk }).await?;
            }
            Ok(KvMessage::Commit(commit)) => {
                committed = true;
                door.deliver(Delivery::Commit { handoff, epoch, commit }).await?;
            }
            Err(Broken) => return Err(WorkerError::Aborted("the stream was cut".to_owned())),
        }
    }
    if committed {
        Ok(())
    } else {
        Err(WorkerError::Aborted("the stream ended before its commit".to_owned()))
    }
}

fn verify(chunk: &KvChunk, cell_bytes: usize) -> Result<(), WorkerError> {
    let cells = chunk.payload.chunks_exact(cell_bytes);
    if cells.zip(&chunk.crc32c).all(|(cell, &crc)| crc32c::crc32c(cell) == crc) {
        return Ok(());
    }
    Err(WorkerError::DataLoss("a checksum is wrong".to_owned()))
}

fn stopped() -> WorkerError {
    WorkerError::Unavailable("the rank has stopped")
}
