//! The KV cache's memory: one arena of blocks, all layers.
//!
//! `layer → block → kv head → K [k_dim][B], then V [B][v_dim]`. Keys are stored with positions innermost, so
//! that a score sums over `k_dim` in order while the lanes are keys; values with dimensions innermost, so that
//! the weighted sum runs over keys in order while the lanes are dimensions. A block of one layer is one piece
//! of memory, which is what a hand-off sends.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use longreach_types::{BlockId, KvDtype};

use crate::aligned::AlignedBytes;

/// Shape of the KV one rank holds of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvGeometry {
    /// KV heads of this rank; may be 0.
    pub n_kv_heads: usize,
    /// Numbers of a key.
    pub k_dim: usize,
    /// Numbers of a value.
    pub v_dim: usize,
    /// B, positions a block.
    pub block_size: usize,
    /// Storage format.
    pub dtype: KvDtype,
}

impl KvGeometry {
    /// A geometry whose keys and values both have `head_dim` numbers.
    pub const fn uniform(n_kv_heads: usize, head_dim: usize, block_size: usize, dtype: KvDtype) -> Self {
        Self { n_kv_heads, k_dim: head_dim, v_dim: head_dim, block_size, dtype }
    }

    /// Bytes of one block of one layer.
    pub const fn block_layer_bytes(&self) -> usize {
        self.n_kv_heads * self.head_bytes()
    }

    /// Bytes of the keys of one head in one block.
    pub(crate) const fn k_bytes(&self) -> usize {
        self.k_dim * self.block_size * self.dtype.bytes()
    }

    /// Bytes of one head in one block.
    pub(crate) const fn head_bytes(&self) -> usize {
        (self.k_dim + self.v_dim) * self.block_size * self.dtype.bytes()
    }
}

/// Keys and values of all layers, in `n_blocks` blocks.
#[derive(Debug)]
pub struct KvArena {
    geometry: KvGeometry,
    n_layers: usize,
    n_blocks: usize,
    bytes: AlignedBytes,
}

impl KvArena {
    /// A zeroed arena. The system gives it memory as blocks are first written.
    pub fn new(geometry: KvGeometry, n_layers: usize, n_blocks: usize) -> Self {
        let bytes = AlignedBytes::zeroed(n_layers * n_blocks * geometry.block_layer_bytes());
        Self { geometry, n_layers, n_blocks, bytes }
    }

    /// The shape of one layer's KV.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Layers.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Blocks.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// All blocks of one layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> &[u8] {
        assert!(layer < self.n_layers, "layer {layer} of {}", self.n_layers);
        let layer_bytes = self.n_blocks * self.geometry.block_layer_bytes();
        &self.bytes[layer * layer_bytes..][..layer_bytes]
    }

    /// One block of one layer, as it is stored and sent.
    ///
    /// # Panics
    /// If there is no such layer or block.
    pub fn block(&self, layer: usize, block: BlockId) -> &[u8] {
        let (start, len) = self.block_at(layer, block);
        &self.bytes[start..start + len]
    }

    /// One block of one layer, to be received into.
    ///
    /// # Panics
    /// If there is no such layer or block.
    pub fn block_mut(&mut self, layer: usize, block: BlockId) -> &mut [u8] {
        let (start, len) = self.block_at(layer, block);
        &mut self.bytes[start..start + len]
    }

    /// Sets every byte. `0xff` makes every number a NaN in all formats, which tests use as poison.
    pub fn fill(&mut self, byte: u8) {
        self.bytes.fill(byte);
    }

    fn block_at(&self, layer: usize, block: BlockId) -> (usize, usize) {
        let block = block.0 as usize;
        assert!(layer < self.n_layers, "layer {layer} of {}", self.n_layers);
        assert!(block < self.n_blocks, "block {block} of {}", self.n_blocks);
        let len = self.geometry.block_layer_bytes();
        ((layer * self.n_blocks + block) * len, len)
    }
}

/// Where one token's KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    /// The layer.
    pub layer: usize,
    /// The block.
    pub block: BlockId,
    /// Position within the block.
    pub offset: usize,
}

/// Stores one token's keys `[n_kv_heads][k_dim]` and values `[n_kv_heads][v_dim]`, rounded to nearest, ties to
/// even.
///
/// # Panics
/// If the slot is not in the arena or the lengths do not fit it.
pub fn kv_store(arena: &mut KvArena, slot: KvSlot, k: &[f32], v: &[f32]) {
    let geometry = arena.geometry;
    assert!(slot.offset < geometry.block_size, "offset {} of {}", slot.offset, geometry.block_size);
    assert_eq!(k.len(), geometry.n_kv_heads * geometry.k_dim, "length of k");
    assert_eq!(v.len(), geometry.n_kv_heads * geometry.v_dim, "length of v");
    let block = arena.block_mut(slot.layer, slot.block);
    match geometry.dtype {
        KvDtype::F16 => {
            let encode = |from: &[f32], to: &mut [f16]| to.convert_from_f32_slice(from);
            store(block, &geometry, slot.offset, (k, v), encode);
        }
        KvDtype::Bf16 => {
            let encode = |from: &[f32], to: &mut [bf16]| to.convert_from_f32_slice(from);
            store(block, &geometry, slot.offset, (k, v), encode);
        }
        KvDtype::F32 => {
            store(block, &geometry, slot.offset, (k, v), |from, to: &mut [f32]| to.copy_from_slice(from));
        }
    }
}

fn store<N: bytemuck::Pod>(
    block: &mut [u8],
    geometry: &KvGeometry,
    offset: usize,
    (k, v): (&[f32], &[f32]),
    encode: impl Fn(&[f32], &mut [N]),
) {
    /// Numbers that are converted together.
    const CHUNK: usize = 64;
    let mut encoded = [N::zeroed(); CHUNK];
    for head in 0..geometry.n_kv_heads {
        let bytes = &mut block[head * geometry.head_bytes()..][..geometry.head_bytes()];
        let (keys, values) = bytes.split_at_mut(geometry.k_bytes());
        let keys: &mut [N] = bytemuck::cast_slice_mut(keys);
        let mut slots = keys[offset..].iter_mut().step_by(geometry.block_size);
        for k in k[head * geometry.k_dim..][..geometry.k_dim].chunks(CHUNK) {
            let encoded = &mut encoded[..k.len()];
            encode(k, encoded);
            slots.by_ref().zip(encoded).for_each(|(slot, x)| *slot = *x);
        }
        let values: &mut [N] = bytemuck::cast_slice_mut(values);
        let v = &v[head * geometry.v_dim..][..geometry.v_dim];
        encode(v, &mut values[offset * geometry.v_dim..][..geometry.v_dim]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_lands_in_its_slot_and_nowhere_else() {
        for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
            let geometry = KvGeometry { n_kv_heads: 2, k_dim: 3, v_dim: 2, block_size: 4, dtype };
            let mut arena = KvArena::new(geometry, 2, 3);
            arena.fill(0xff);
            let slot = KvSlot { layer: 1, block: BlockId(2), offset: 1 };
            kv_store(&mut arena, slot, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[7.0, 8.0, 9.0, 10.0]);
            let n = dtype.bytes();
            let block = arena.block(1, BlockId(2));
            let numbers: Vec<f32> = block
                .chunks(n)
                .map(|bytes| match dtype {
                    KvDtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
                    KvDtype::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
                    KvDtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
                })
                .collect();
            let mut expected = vec![f32::NAN; 40];
            for (head, (k, v)) in
                [([1.0, 2.0, 3.0], [7.0, 8.0]), ([4.0, 5.0, 6.0], [9.0, 10.0])].iter().enumerate()
            {
                for (d, &k) in k.iter().enumerate() {
                    expected[head * 20 + d * 4 + 1] = k;
                }
                for (d, &v) in v.iter().enumerate() {
                    expected[head * 20 + 12 + 2 + d] = v;
                }
            }
            for (x, y) in numbers.iter().zip(&expected) {
                assert!(x == y || x.is_nan() && y.is_nan(), "{dtype}: {numbers:?}");
            }
            let others = (0..2).flat_map(|layer| (0..3).map(move |block| (layer, BlockId(block))));
            for (layer, block) in others.filter(|&at| at != (1, BlockId(2))) {
                assert!(arena.block(layer, block).iter().all(|&b| b == 0xff));
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let geometry = KvGeometry::uniform(1, 1, 1, KvDtype::F16);
        let mut arena = KvArena::new(geometry, 1, 1);
        let slot = KvSlot { layer: 0, block: BlockId(0), offset: 0 };
        // Halfway between 2048 and 2050, and between 2050 and 2052.
        kv_store(&mut arena, slot, &[2049.0], &[2051.0]);
        let block = arena.block(0, BlockId(0));
        assert_eq!(f16::from_le_bytes([block[0], block[1]]).to_f32(), 2048.0);
        assert_eq!(f16::from_le_bytes([block[2], block[3]]).to_f32(), 2052.0);
    }

    #[test]
    fn a_rank_without_heads_has_an_empty_arena() {
        let arena = KvArena::new(KvGeometry::uniform(0, 64, 32, KvDtype::F16), 30, 100);
        assert_eq!(arena.block(29, BlockId(99)), &[] as &[u8]);
    }
}
