//! The contract of [`super::attention`] as plain loops.

use std::ops::Range;

use half::{bf16, f16};
use longreach_types::KvDtype;

use super::{AttnInput, AttnSeq, record_len};
use crate::{
    expf::{exp2, pow2_exact},
    merge::{halving_pairs, merge_record},
};

pub(super) fn attention(input: &AttnInput<'_>, out: &mut [f32]) {
    let geometry = input.arena.geometry();
    let record = record_len(geometry.v_dim);
    for seq in input.seqs {
        for (i, row) in seq.rows.clone().enumerate() {
            for head in 0..input.n_q_heads {
                let q = &input.q[row * input.q_stride + head * geometry.k_dim..][..geometry.k_dim];
                let one = One { input, seq, q, kv_head: input.kv_index[head] as usize };
                let at = (row * input.n_q_heads + head) * record;
                out[at..at + record].copy_from_slice(&one.attend(seq.first_pos + i));
            }
        }
    }
}

/// One (row, head).
struct One<'a> {
    input: &'a AttnInput<'a>,
    seq: &'a AttnSeq<'a>,
    q: &'a [f32],
    kv_head: usize,
}

impl One<'_> {
    fn attend(&self, pos: usize) -> Vec<f32> {
        let v_dim = self.input.arena.geometry().v_dim;
        let n_shards = self.input.layout.n_local_shards();
        let mut identity = vec![0.0; v_dim + 2];
        identity[v_dim + 1] = f32::NEG_INFINITY;
        let mut shards = vec![identity; n_shards];
        let visible = self.input.visible(pos);
        for j in self.input.local_blocks(visible.clone()) {
            let start = self.input.block_start(j);
            let end = start + self.input.layout.block_size();
            let keys = visible.start.clamp(start, end) - start..visible.end.clamp(start, end) - start;
            if !keys.is_empty() {
                self.add_block(j, keys, &mut shards[j % n_shards]);
            }
        }
        for (to, from) in halving_pairs(n_shards) {
            let (head, tail) = shards.split_at_mut(from);
            merge_record(&mut head[to], &tail[0]);
        }
        shards.swap_remove(0)
    }

    /// Adds the visible keys of local block `j` to a shard's record.
    fn add_block(&self, j: usize, keys: Range<usize>, record: &mut [f32]) {
        let geometry = self.input.arena.geometry();
        let (k, v) = self.input.head_bytes(self.seq.blocks[j], self.kv_head);
        let number = |bytes: &[u8], i: usize| number(geometry.dtype, bytes, i);
        let factor = self.input.scale * std::f32::consts::LOG2_E;
        let mut x = vec![f32::NEG_INFINITY; geometry.block_size];
        for key in keys.clone() {
            let dot = self
                .q
                .iter()
                .enumerate()
                .fold(0.0, |dot: f32, (d, q)| q.mul_add(number(k, d * geometry.block_size + key), dot));
            x[key] = dot * factor;
        }
        let (acc, stats) = record.split_at_mut(geometry.v_dim);
        let highest = x.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
        // Adding zero makes a negative zero positive.
        let highest = highest.ceil() + 0.0;
        let e = if stats[1] > highest { stats[1] } else { highest };
        if e == f32::NEG_INFINITY {
            return;
        }
        let rescale = pow2_exact(stats[1] - e);
        let p: Vec<f32> = x.iter().map(|x| exp2(x - e)).collect();
        *stats.first_mut().expect("a record ends in two numbers") = stats[0] * rescale + block_sum(&p);
        stats[1] = e;
        for (d, acc) in acc.iter_mut().enumerate() {
            *acc *= rescale;
            for key in keys.clone() {
                *acc = p[key].mul_add(number(v, key * geometry.v_dim + d), *acc);
            }
        }
    }
}

/// The sum of a block's weights, by halves.
fn block_sum(p: &[f32]) -> f32 {
    let n = p.len().next_power_of_two().max(16);
    let mut sums = vec![0.0; n];
    sums[..p.len()].copy_from_slice(p);
    halving_pairs(n).for_each(|(to, from)| sums[to] += sums[from]);
    sums[0]
}

fn number(dtype: KvDtype, bytes: &[u8], i: usize) -> f32 {
    match dtype {
        KvDtype::F16 => f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
        KvDtype::Bf16 => bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
        KvDtype::F32 => {
            let bytes = &bytes[4 * i..4 * i + 4];
            f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        }
    }
}
