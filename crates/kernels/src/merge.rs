//! Merging partial attention, and the trees of sums that cross ranks.
//!
//! A **record** is the partial result of one (row, head) over some keys: `acc[v_dim], l, max_exp2`. With
//! `x = score · log2(e)` the scores in base 2, `max_exp2 = e` is `ceil(max x)` (−∞ for no keys),
//! `l = Σ 2^(x − e)` and `acc = Σ 2^(x − e) · v`. In natural terms `m = e · ln 2` and `lse = e · ln 2 + ln l`.
//! The reference point is an integer so that changing it multiplies by a power of two, which is exact: a
//! maximum kept as a real number would round `l` and `acc` at every rescale, differently for each order of
//! merging. So the two communication forms below give the same bits (as long as nothing underflows, which
//! takes scores that differ by more than about 100 in base 2).
//!
//! The **identity** is `(0, 0, −∞)`. A side whose `e` is −∞ has weight exactly 0 and its `acc` is not read.
//!
//! `n` parts merge by halves (`i` with `i + n/2`, then `+ n/4`, …) when `n` is a power of two, in sequence
//! otherwise. Additions are rounded, so the tree is part of the contract; only the rescaling is free.

use crate::{
    exec::Exec,
    expf::{exp2, pow2_exact},
};

/// Shape of a merge of attention records.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a> {
    /// Parts: the ranks of a head group.
    pub n_parts: usize,
    /// Numbers of a value.
    pub v_dim: usize,
    /// For each head a logit that takes part in the softmax and has no value (attention sink). Record `i` is
    /// of head `i mod sinks.len()`. Empty for models without.
    pub sinks: &'a [f32],
}

/// The scale that brings a side with reference `e` to the common reference `max`.
fn weight(e: f32, max: f32) -> f32 {
    if e == f32::NEG_INFINITY { 0.0 } else { pow2_exact(e - max) }
}

/// `x · weight`, where a weight of 0 wins over anything, NaN included.
#[inline(always)]
fn scaled(x: f32, weight: f32) -> f32 {
    if weight == 0.0 { 0.0 } else { x * weight }
}

fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Merges record `b` into record `a`.
#[inline(always)]
pub(crate) fn merge_record(a: &mut [f32], b: &[f32]) {
    let last = a.len() - 1;
    let e = max(a[last], b[last]);
    let (weight_a, weight_b) = (weight(a[last], e), weight(b[last], e));
    let pairs = a[..last].iter_mut().zip(b);
    // The usual case first, without a choice in the loop.
    if weight_a != 0.0 && weight_b != 0.0 {
        pairs.for_each(|(a, b)| *a = *a * weight_a + *b * weight_b);
    } else {
        pairs.for_each(|(a, b)| *a = scaled(*a, weight_a) + scaled(*b, weight_b));
    }
    a[last] = e;
}

/// The pairs `(to, from)` of the stride-halving tree over `n` parts, in an order in which they can be joined;
/// the result is in part 0.
#[inline(always)]
pub(crate) fn halving_pairs(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..n).map(move |i| {
        if n.is_power_of_two() {
            // Every part but the first is joined once, from the last on: its stride is its highest bit.
            let from = n - i;
            (from ^ (1 << from.ilog2()), from)
        } else {
            (0, i)
        }
    })
}

/// Merges `parts`, `[n_parts][n_records][v_dim + 2]`, into `out`, `[n_records][v_dim]`: the softmax-weighted
/// mean of the values, 0 for a record without keys.
///
/// # Panics
/// If the lengths do not fit the shape.
pub fn merge_partials(exec: &Exec, merge: &Merge<'_>, parts: &[f32], out: &mut [f32]) {
    let record = merge.v_dim + 2;
    let part_len = out.len() / merge.v_dim * record;
    assert!(out.len().is_multiple_of(merge.v_dim), "out is not whole rows of {}", merge.v_dim);
    assert_eq!(parts.len(), merge.n_parts * part_len, "parts are not {} of {part_len}", merge.n_parts);
    exec.parallel_rows(out, merge.v_dim, grain(record * merge.n_parts), |first, out| {
        let mut local = vec![0.0; merge.n_parts * record];
        for (i, out) in out.chunks_exact_mut(merge.v_dim).enumerate() {
            for (part, local) in local.chunks_exact_mut(record).enumerate() {
                local.copy_from_slice(&parts[part * part_len + (first + i) * record..][..record]);
            }
            for (to, from) in halving_pairs(merge.n_parts) {
                let (head, tail) = local.split_at_mut(from * record);
                merge_record(&mut head[to * record..][..record], &tail[..record]);
            }
            let (acc, stats) = local[..record].split_at(merge.v_dim);
            out.copy_from_slice(acc);
            finish(out, stats[0], stats[1], merge.sink(first + i));
        }
    });
}

impl Merge<'_> {
    fn sink(&self, record: usize) -> Option<f32> {
        (!self.sinks.is_empty()).then(|| self.sinks[record % self.sinks.len()])
    }
}

/// Divides by the sum of weights, to which a sink adds its own.
fn finish(acc: &mut [f32], mut l: f32, e: f32, sink: Option<f32>) {
    if let Some(logit) = sink {
        let x = logit * std::f32::consts::LOG2_E;
        let sink_e = x.ceil() + 0.0;
        let max = max(e, sink_e);
        let own = weight(e, max);
        l = scaled(l, own) + scaled(exp2(x - sink_e), weight(sink_e, max));
        acc.iter_mut().for_each(|x| *x = scaled(*x, own));
    }
    let inverse = if l == 0.0 { 0.0 } else { 1.0 / l };
    acc.iter_mut().for_each(|x| *x = scaled(*x, inverse));
}

/// Form `ag_rs`, first step: `(l, max_exp2)` of each record, to be gathered from all parts.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn partial_stats(records: &[f32], v_dim: usize, out: &mut [f32]) {
    assert_eq!(records.len() * 2, out.len() * (v_dim + 2), "out is not two numbers a record");
    for (record, out) in records.chunks_exact(v_dim + 2).zip(out.chunks_exact_mut(2)) {
        out.copy_from_slice(&record[v_dim..]);
    }
}

/// Form `ag_rs`, second step: this part's `acc` at the reference point common to all parts, `[n][v_dim]`.
/// `all_stats` is `[n_parts][n][2]`, what [`partial_stats`] gave each part, and `own_part` is this one.
///
/// # Panics
/// If the lengths do not fit the shape.
pub fn correct_partials(
    merge: &Merge<'_>,
    own_part: usize,
    records: &[f32],
    all_stats: &[f32],
    out: &mut [f32],
) {
    let n = records.len() / (merge.v_dim + 2);
    assert_eq!(records.len(), n * (merge.v_dim + 2), "records are not whole");
    assert_eq!(out.len(), n * merge.v_dim, "out is not {n} rows of {}", merge.v_dim);
    assert_eq!(all_stats.len(), merge.n_parts * n * 2, "all_stats are not {} of {n} pairs", merge.n_parts);
    assert!(own_part < merge.n_parts, "part {own_part} of {}", merge.n_parts);
    for i in 0..n {
        let record = &records[i * (merge.v_dim + 2)..];
        let own = weight(record[merge.v_dim + 1], max_exp2_of_all(merge, all_stats, n, i));
        for (out, x) in out[i * merge.v_dim..][..merge.v_dim].iter_mut().zip(record) {
            *out = scaled(*x, own);
        }
    }
}

fn max_exp2_of_all(merge: &Merge<'_>, all_stats: &[f32], n: usize, i: usize) -> f32 {
    (0..merge.n_parts).map(|part| all_stats[(part * n + i) * 2 + 1]).fold(f32::NEG_INFINITY, max)
}

/// Form `ag_rs`, third step: the sum of the corrected parts, `[n_parts][out.len()]`, in the tree of
/// [`merge_partials`].
///
/// # Panics
/// If `parts` is not `n_parts` times as long as `out`.
pub fn tree_sum(parts: &[f32], n_parts: usize, out: &mut [f32]) {
    sum_by(parts, n_parts, out, |n, join| halving_pairs(n).for_each(|(to, from)| join(to, from)));
}

/// Form `ag_rs`, last step: divides the summed `acc` of records `first_record..` by their total weight, in
/// place. `all_stats` covers all `n` records, of which `acc` holds a contiguous share.
///
/// # Panics
/// If the lengths do not fit the shape.
pub fn finish_corrected(merge: &Merge<'_>, first_record: usize, all_stats: &[f32], acc: &mut [f32]) {
    let n = all_stats.len() / (2 * merge.n_parts);
    assert_eq!(all_stats.len(), 2 * merge.n_parts * n, "all_stats are not {} parts", merge.n_parts);
    assert!(acc.len().is_multiple_of(merge.v_dim), "acc is not whole rows of {}", merge.v_dim);
    let mut weights = vec![0.0; merge.n_parts];
    for (i, acc) in acc.chunks_exact_mut(merge.v_dim).enumerate() {
        let record = first_record + i;
        let max_exp2 = max_exp2_of_all(merge, all_stats, n, record);
        for (part, l) in weights.iter_mut().enumerate() {
            let stats = &all_stats[(part * n + record) * 2..];
            *l = scaled(stats[0], weight(stats[1], max_exp2));
        }
        halving_pairs(merge.n_parts).for_each(|(to, from)| weights[to] += weights[from]);
        finish(acc, weights[0], max_exp2, merge.sink(record));
    }
}

/// The cross-rank half of a row-parallel sum: adds `parts`, `[n_parts][out.len()]`, by adjacent pairs
/// `(0 + 1) + (2 + 3)` … when their number is a power of two, in sequence otherwise.
///
/// # Panics
/// If `parts` is not `n_parts` times as long as `out`.
pub fn tree_add(parts: &[f32], n_parts: usize, out: &mut [f32]) {
    sum_by(parts, n_parts, out, |n, join| {
        if n.is_power_of_two() {
            let mut stride = 1;
            while stride < n {
                (0..n).step_by(2 * stride).for_each(|i| join(i, i + stride));
                stride *= 2;
            }
        } else {
            (1..n).for_each(|i| join(0, i));
        }
    });
}

/// Adds parts element by element, joining them as `order` says.
fn sum_by(
    parts: &[f32],
    n_parts: usize,
    out: &mut [f32],
    order: impl Fn(usize, &mut dyn FnMut(usize, usize)),
) {
    const CHUNK: usize = 256;
    assert_eq!(parts.len(), n_parts * out.len(), "parts are not {n_parts} of {}", out.len());
    let n = out.len();
    let mut local = vec![[0.0; CHUNK]; n_parts];
    for (c, out) in out.chunks_mut(CHUNK).enumerate() {
        for (part, local) in local.iter_mut().enumerate() {
            local[..out.len()].copy_from_slice(&parts[part * n + c * CHUNK..][..out.len()]);
        }
        order(n_parts, &mut |to, from| {
            let (head, tail) = local.split_at_mut(from);
            head[to].iter_mut().zip(&tail[0]).for_each(|(a, b)| *a += b);
        });
        out.copy_from_slice(&local[0][..out.len()]);
    }
}

/// Records a task should have at least, so that handing it to a thread pays.
fn grain(numbers: usize) -> usize {
    (1 << 13) / numbers + 1
}

#[cfg(test)]
mod tests;
