//! What a rank stores, as far as hand-offs and pulls see it: bytes by layer and block.
//!
//! Who moves KV need not know how it is held or computed. So the same code sends and receives the cells of a device's
//! cache and those of a simulated one. A copy of the cells behind a common type was not used: a step reads them where
//! they are, and what leaves during a step is read from under it, layer by layer.

use std::{ops::Range, sync::Arc};

use longreach_model::{Backend, ModelShard, backend::KvShape};
use longreach_types::BlockId;

/// Cells that can be read.
pub trait CellSource {
    /// Appends the bytes of one block of one layer: KV heads `heads`, counted from the first that is stored.
    fn export(&self, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>);
}

/// The cells of one rank.
pub trait KvCells: CellSource {
    /// How many there are, and of what.
    fn shape(&self) -> &KvShape;

    /// The KV heads of the model that are stored.
    fn heads(&self) -> &Range<usize>;

    /// Overwrites heads of one block of one layer with bytes that [`CellSource::export`] gave for as many heads.
    fn import(&mut self, layer: usize, block: BlockId, heads: Range<usize>, bytes: &[u8]);
}

/// A device's KV while a step runs, which holds it.
pub(crate) struct DeviceCells<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) kv: &'a B::Kv,
}

/// The KV of a shard.
pub(crate) struct ShardCells<B: Backend> {
    pub(crate) shard: Arc<ModelShard<B>>,
    pub(crate) kv: B::Kv,
}

impl<B: Backend> CellSource for DeviceCells<'_, B> {
    fn export(&self, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>) {
        self.backend.export_kv(self.kv, layer, block, heads, out);
    }
}

impl<B: Backend> CellSource for ShardCells<B> {
    fn export(&self, layer: usize, block: BlockId, heads: Range<usize>, out: &mut Vec<u8>) {
        self.shard.backend.export_kv(&self.kv, layer, block, heads, out);
    }
}

impl<B: Backend> KvCells for ShardCells<B> {
    fn shape(&self) -> &KvShape {
        &self.shard.kv_shape
    }

    fn heads(&self) -> &Range<usize> {
        &self.shard.heads.kv
    }

    fn import(&mut self, layer: usize, block: BlockId, heads: Range<usize>, bytes: &[u8]) {
        self.shard.backend.import_kv(&mut self.kv, layer, block, heads, bytes);
    }
}
