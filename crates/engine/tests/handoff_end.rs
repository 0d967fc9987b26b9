//! How a hand-off ends on a rank: by its stream, in whatever order the messages of it came.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{collections::BTreeMap, ops::Range};

use bytes::Bytes;
use futures::stream;
use longreach_engine::{
    KvInlet,
    cells::{CellSource, KvCells},
    inlet::InletIdentity,
    receive::{HandoffEnd, Receiver},
};
use longreach_kv::CoverageDigest;
use longreach_model::backend::KvShape;
use longreach_proto::{
    WIRE_VERSION, WorkerError,
    group::{ExpectKv, ExpectedBlocks},
    worker::{KvAck, KvChunk, KvCommit, KvHandler, KvLayout, KvMessage, KvOpen},
};
use longreach_types::{BlockId, DcpLayout, Epoch, HandoffId, KvDtype, N_SHARDS};

const N_LAYERS: usize = 2;
const N_BLOCKS: usize = 3;
const EPOCH: Epoch = Epoch(3);
const HANDOFF: HandoffId = HandoffId(7);
const CELL_BYTES: usize = 8;

/// Cells that remember what was written, by layer and block.
struct Memory {
    shape: KvShape,
    heads: Range<usize>,
    written: BTreeMap<(usize, BlockId), Vec<u8>>,
}

impl CellSource for Memory {
    fn export(&self, layer: usize, block: BlockId, _: Range<usize>, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.written[&(layer, block)]);
    }
}

impl KvCells for Memory {
    fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn heads(&self) -> &Range<usize> {
        &self.heads
    }

    fn import(&mut self, layer: usize, block: BlockId, _: Range<usize>, bytes: &[u8]) {
        self.written.insert((layer, block), bytes.to_vec());
    }
}

fn layout() -> KvLayout {
    KvLayout {
        model_fingerprint: [1; 16],
        n_layers: N_LAYERS,
        n_kv_heads: 1,
        head_dim: 1,
        kv_dtype: KvDtype::F32,
        block_size: 1,
        n_shards: N_SHARDS,
        wire_version: WIRE_VERSION,
    }
}

fn cell(layer: usize, block: usize) -> [u8; CELL_BYTES] {
    [(layer * 16 + block) as u8; CELL_BYTES]
}

fn open() -> KvMessage {
    KvMessage::Open(KvOpen {
        handoff: HANDOFF,
        epoch: EPOCH,
        rank: 0,
        layout: layout(),
        prompt_len: N_BLOCKS,
    })
}

/// One chunk a cell.
fn chunks() -> Vec<KvMessage> {
    let cells = (0..N_LAYERS).flat_map(|layer| (0..N_BLOCKS).map(move |block| (layer, block)));
    let chunk = |(layer, block)| {
        let bytes = cell(layer, block);
        KvMessage::Chunk(KvChunk {
            layers: layer..layer + 1,
            blocks: block..block + 1,
            payload: Bytes::copy_from_slice(&bytes),
            crc32c: vec![crc32c::crc32c(&bytes)],
        })
    };
    cells.map(chunk).collect()
}

fn commit() -> KvMessage {
    let mut digest = CoverageDigest::default();
    for layer in 0..N_LAYERS {
        (0..N_BLOCKS).for_each(|block| digest.add(layer, block, crc32c::crc32c(&cell(layer, block))));
    }
    KvMessage::Commit(KvCommit {
        n_cells: N_LAYERS * N_BLOCKS,
        digest: digest.0,
        prompt_hash: [5; 16],
        first_token: None,
    })
}

/// Pushes `messages` through a door to a rank that expects them. There is no clock: what does not end by itself would
/// hang.
async fn push(messages: Vec<KvMessage>) -> (Result<KvAck, WorkerError>, Vec<HandoffEnd>, Receiver, Memory) {
    let layout_dcp = DcpLayout::new(1, 1).unwrap();
    let shape = KvShape {
        n_layers: N_LAYERS,
        n_kv_heads: 1,
        head_dim: 1,
        dtype: KvDtype::F32,
        n_blocks: 2 * N_BLOCKS,
        layout: layout_dcp,
        dcp_rank: 0,
    };
    let mut memory = Memory { shape, heads: 0..1, written: BTreeMap::new() };
    let identity = InletIdentity { rank: 0, epoch: EPOCH, layout: layout(), cell_bytes: CELL_BYTES };
    let (inlet, mut deliveries) = KvInlet::new(identity);
    let mut receiver = Receiver::new(EPOCH);
    let missing = (0..N_BLOCKS as u32).map(|block| BlockId(2 * block)).collect();
    let blocks = vec![ExpectedBlocks { cached: Vec::new(), missing }];
    receiver
        .expect(&ExpectKv { handoff: HANDOFF, prompt_len: N_BLOCKS, prompt_hash: [5; 16], blocks }, &memory);
    let pushing = async move {
        let messages: Vec<_> = messages.into_iter().map(Ok).collect();
        let verdict = inlet.push(stream::iter(messages)).await;
        drop(inlet);
        verdict
    };
    let receiving = async {
        let mut ends = Vec::new();
        while let Some(delivery) = deliveries.recv().await {
            ends.extend(receiver.deliver(delivery, &mut memory));
        }
        ends
    };
    let (verdict, ends) = tokio::join!(pushing, receiving);
    (verdict, ends, receiver, memory)
}

#[tokio::test(flavor = "current_thread")]
async fn a_commit_that_overtakes_its_chunks_is_kept_until_they_are_there() {
    for n_before in 0..=N_LAYERS * N_BLOCKS {
        let mut messages = chunks();
        messages.reverse();
        messages.insert(n_before, commit());
        messages.insert(0, open());
        let (verdict, ends, receiver, memory) = push(messages).await;
        assert_eq!(verdict.unwrap().n_cells, N_LAYERS * N_BLOCKS, "commit after {n_before} chunks");
        assert!(matches!(&ends[..], [HandoffEnd { handoff: HANDOFF, result: Ok(None) }]), "{ends:?}");
        assert_eq!((receiver.len(), memory.written.len()), (0, N_LAYERS * N_BLOCKS));
        for ((layer, block), bytes) in &memory.written {
            assert_eq!(bytes[..], cell(*layer, block.0 as usize / 2));
        }
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_stream_that_ends_with_cells_missing_ends_its_hand_off_at_once() {
    for lost in 0..N_LAYERS * N_BLOCKS {
        for has_commit in [true, false] {
            let mut messages = chunks();
            messages.remove(lost);
            if has_commit {
                messages.insert(lost, commit());
            }
            messages.insert(0, open());
            let (verdict, ends, receiver, _) = push(messages).await;
            let reason = if has_commit { "1 cells missing" } else { "before its commit" };
            let Err(WorkerError::Aborted(told)) = verdict else { panic!("not refused: {verdict:?}") };
            assert!(told.contains(reason), "{told}");
            assert!(matches!(&ends[..], [HandoffEnd { handoff: HANDOFF, result: Err(_) }]), "{ends:?}");
            assert!(receiver.is_empty());
        }
    }
}
