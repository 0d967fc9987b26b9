//! One rank's memory and arithmetic: what stands for a device. Its cells have the shape of the product's, so that the
//! product's code sends, receives, gives back and pulls them.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use longreach_engine::{
    cells::{CellSource, KvCells},
    rank::StepOrder,
};
use longreach_model::backend::KvShape;
use longreach_types::{BlockId, DcpLayout, Epoch, KvDtype, SeqStep, StepPlan};

use crate::{
    journal::Journal,
    model::{self, N_LAYERS},
};

/// A step with what the simulated forward pass needs besides: the prefixes of each sequence, from which cells are made
/// and against which they are checked.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) plan: StepPlan,
    pub(crate) prefixes: Vec<Vec<u64>>,
}

pub(crate) struct Rank {
    name: String,
    shape: KvShape,
    heads: Range<usize>,
    order: StepOrder,
    /// By layer, then slot. The low half of a word is what a key would be, the high half a value.
    arena: Vec<Vec<u64>>,
    journal: Journal,
}

/// What of a rank others may see: how many hand-offs it waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankFace(Arc<AtomicUsize>);

impl RankFace {
    pub(crate) fn n_receiving(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn show(&self, n_receiving: usize) {
        self.0.store(n_receiving, Ordering::Relaxed);
    }
}

/// One head of one dimension: a position of a layer is a key and a value of four bytes each.
pub(crate) fn kv_shape(layout: DcpLayout, dcp_rank: usize, n_blocks: usize) -> KvShape {
    let (n_layers, n_kv_heads, head_dim, dtype) = (N_LAYERS, 1, 1, KvDtype::F32);
    KvShape { n_layers, n_kv_heads, head_dim, dtype, n_blocks, layout, dcp_rank }
}

impl Rank {
    /// A rank whose arena holds what it may not rely on.
    pub(crate) fn new(name: String, shape: KvShape, epoch: Epoch, journal: Journal) -> Self {
        let arena = vec![vec![0xdead; shape.n_blocks * shape.layout.block_size()]; N_LAYERS];
        Self { name, shape, heads: 0..1, order: StepOrder::new(epoch), arena, journal }
    }

    /// Bytes of one cell: all positions of a block in one layer.
    pub(crate) fn cell_bytes(&self) -> usize {
        self.shape.cell_bytes(self.shape.n_kv_heads)
    }

    /// Runs one step. Gives the sums over this rank's cells, one for each row that needs logits.
    pub(crate) fn step(&mut self, step: &Step) -> Vec<u64> {
        if let Err(wrong) = self.order.check(&step.plan) {
            self.journal.violation(format!("{}: {wrong}", self.name));
        }
        let mut sums = Vec::new();
        for (seq, prefixes) in step.plan.seqs.iter().zip(&step.prefixes) {
            self.forward(seq, prefixes, &mut sums);
        }
        sums
    }

    fn forward(&mut self, seq: &SeqStep, prefixes: &[u64], sums: &mut Vec<u64>) {
        let KvShape { layout, dcp_rank, .. } = self.shape;
        let first_logits = seq.seq_len() - seq.n_logits;
        let mut sum = 0_u64;
        for (pos, &prefix) in prefixes.iter().enumerate().take(seq.seq_len()) {
            if layout.owner(pos) == dcp_rank {
                let slot = self.slot(&seq.tables[dcp_rank], pos);
                for layer in 0..N_LAYERS {
                    let expected = model::cell(prefix, layer, pos);
                    if pos >= seq.context_len {
                        self.arena[layer][slot] = expected;
                    } else if self.arena[layer][slot] != expected {
                        self.journal.violation(format!(
                            "{}: sequence {} reads foreign KV at layer {layer}, position {pos}",
                            self.name, seq.seq
                        ));
                    }
                    sum = sum.wrapping_add(model::weight(self.arena[layer][slot], layer, pos));
                }
            }
            if pos >= first_logits {
                sums.push(sum);
            }
        }
    }

    fn slot(&self, table: &[BlockId], pos: usize) -> usize {
        let layout = self.shape.layout;
        let block = table[layout.local_block(layout.block(pos))];
        block.0 as usize * layout.block_size() + pos % layout.block_size()
    }

    fn slots(&self, block: BlockId) -> Range<usize> {
        let block_size = self.shape.layout.block_size();
        let start = block.0 as usize * block_size;
        start..start + block_size
    }
}

impl CellSource for Rank {
    fn export(&self, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>) {
        if heads.is_empty() {
            return;
        }
        let words = &self.arena[layer][self.slots(block)];
        out.extend(words.iter().flat_map(|word| (*word as u32).to_le_bytes()));
        out.extend(words.iter().flat_map(|word| ((word >> 32) as u32).to_le_bytes()));
    }
}

impl KvCells for Rank {
    fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn heads(&self) -> &Range<usize> {
        &self.heads
    }

    fn import(&mut self, layer: usize, block: BlockId, heads: Range<usize>, bytes: &[u8]) {
        if heads.is_empty() {
            return;
        }
        let slots = self.slots(block);
        let (halves, _) = bytes.as_chunks::<4>();
        let (keys, values) = halves.split_at(slots.len());
        for (word, (key, value)) in self.arena[layer][slots].iter_mut().zip(keys.iter().zip(values)) {
            let [key, value] = [key, value].map(|half| u64::from(u32::from_le_bytes(*half)));
            *word = value << 32 | key;
        }
    }
}
