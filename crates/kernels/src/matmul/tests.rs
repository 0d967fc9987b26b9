//! Matmul: one result on every implementation, and the right one.
#![allow(clippy::single_range_in_vec_init, reason = "one segment is a list of one range")]

use std::ops::Range;

use longreach_types::{WeightForm, canonical_bounds};
use proptest::prelude::*;

use super::*;
use crate::{
    isa::Isa,
    merge::tree_add,
    pack::MatrixView,
    testing::{Rng, expand_f64, random_stored},
};

fn run(isa: Isa, n_threads: usize, w: &PackedMatrix, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let n_tokens = x.len() / w.k();
    let mut y = vec![f32::NAN; n_tokens * w.n_out()];
    matmul(&Exec::new(isa, n_threads).unwrap(), w, x, bias, &mut y);
    y
}

fn assert_same_bits(have: &[f32], want: &[f32], what: &str) {
    for (i, (a, b)) in have.iter().zip(want).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what}: value {i} is {a:e}, expected {b:e}");
    }
}

fn pack(view: MatrixView<'_>, segments: &[Range<usize>]) -> PackedMatrix {
    let exec = Exec::new(Isa::Portable, 1).unwrap();
    PackedMatrix::pack(&exec, &[(view, 0..view.n_rows)], segments, WeightForm::AsStored).unwrap()
}

/// Segments of adjacent columns, some of them empty, at multiples of `align`.
fn segments(k: usize, align: usize, n: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let mut bounds: Vec<usize> = (0..n - 1).map(|_| rng.below(k / align + 1) * align).chain([0, k]).collect();
    bounds.sort_unstable();
    bounds.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_isa_and_thread_count_gives_the_reference_bits(
        ty in prop::sample::select(StoredType::ALL.to_vec()),
        n_out in 1_usize..70,
        n_tokens in 1_usize..30,
        k_blocks in 1_usize..4,
        odd in 0_usize..32,
        n_segments in 1_usize..=8,
        seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let k = match ty.block_len() { 1 => k_blocks * 17 + odd, len => k_blocks * len };
        let bytes = random_stored(ty, n_out * k, &mut rng);
        let align = if ty.is_quantised() { 32 } else { 1 };
        let segments = segments(k, align, n_segments, &mut rng);
        let w = pack(MatrixView { ty, n_rows: n_out, k, bytes: &bytes }, &segments);
        let x = rng.units(n_tokens * k);
        let bias = rng.units(n_out);
        let expected = run(Isa::Reference, 1, &w, &x, Some(&bias));
        for isa in Isa::available() {
            for n_threads in [1, 3] {
                let y = run(isa, n_threads, &w, &x, Some(&bias));
                assert_same_bits(&y, &expected, &format!("{ty} {isa} {n_threads} threads"));
            }
        }
    }
}

/// The dot product in f64, with activations quantised as the contract says when the weights are.
fn exact(ty: StoredType, w: &[f64], x: &[f32]) -> (f64, f64) {
    let x: Vec<f64> = if ty.is_quantised() {
        let blocks = x.as_chunks::<32>().0.iter().map(crate::quant::quantise_block);
        blocks.flat_map(|(d, q)| q.map(|q| f64::from(d) * f64::from(q))).collect()
    } else {
        x.iter().map(|&x| f64::from(x)).collect()
    };
    let terms = || w.iter().zip(&x).map(|(w, x)| w * x);
    (terms().sum(), terms().map(f64::abs).sum())
}

#[test]
fn matmul_is_accurate_for_every_format() {
    let mut rng = Rng(7);
    let (n_out, k, n_tokens) = (37, 512, 5);
    for ty in StoredType::ALL {
        let bytes = random_stored(ty, n_out * k, &mut rng);
        let x = rng.units(n_tokens * k);
        let w = pack(MatrixView { ty, n_rows: n_out, k, bytes: &bytes }, &[0..k]);
        let y = run(Isa::best(), 2, &w, &x, None);
        let weights = expand_f64(ty, &bytes);
        for (t, x) in x.chunks(k).enumerate() {
            for o in 0..n_out {
                let (sum, size) = exact(ty, &weights[o * k..][..k], x);
                let have = f64::from(y[t * n_out + o]);
                assert!((have - sum).abs() < 2e-6 * size + 1e-6, "{ty} [{t}][{o}]: {have} is not {sum}");
            }
        }
    }
}

#[test]
fn quantising_activations_costs_less_than_a_percent() {
    let mut rng = Rng(8);
    let (ty, n_out, k) = (StoredType::Q8_0, 64, 1536);
    let bytes = random_stored(ty, n_out * k, &mut rng);
    let x = rng.units(k);
    let y = run(Isa::best(), 1, &pack(MatrixView { ty, n_rows: n_out, k, bytes: &bytes }, &[0..k]), &x, None);
    let weights = expand_f64(ty, &bytes);
    let exact = |o: usize| (0..k).map(|i| weights[o * k + i] * f64::from(x[i])).sum::<f64>();
    let error: f64 = (0..n_out).map(|o| (f64::from(y[o]) - exact(o)).powi(2)).sum();
    let size: f64 = (0..n_out).map(|o| exact(o).powi(2)).sum();
    assert!((error / size).sqrt() < 0.01, "relative error {}", (error / size).sqrt());
}

#[test]
fn ranks_with_their_segments_and_the_cross_rank_tree_equal_one_rank() {
    let mut rng = Rng(9);
    for (ty, k, align) in [(StoredType::Q4_1, 576, 64), (StoredType::Q6K, 1536, 32), (StoredType::F32, 40, 8)]
    {
        let (n_out, n_tokens) = (33, 3);
        let bytes = random_stored(ty, n_out * k, &mut rng);
        let view = MatrixView { ty, n_rows: n_out, k, bytes: &bytes };
        let x = rng.units(n_tokens * k);
        let bounds = canonical_bounds(k, align);
        let all: Vec<Range<usize>> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let whole = run(Isa::best(), 1, &pack(view, &all), &x, None);
        for n_ranks in [1, 2, 4, 8] {
            let mut parts = Vec::new();
            for own in all.chunks(8 / n_ranks) {
                let columns = own[0].start..own[own.len() - 1].end;
                let local: Vec<f32> = x.chunks(k).flat_map(|row| row[columns.clone()].to_vec()).collect();
                let mut y = vec![0.0; n_tokens * n_out];
                matmul(&Exec::new(Isa::best(), 1).unwrap(), &pack(view, own), &local, None, &mut y);
                parts.extend(y);
            }
            let mut sum = vec![0.0; n_tokens * n_out];
            tree_add(&parts, n_ranks, &mut sum);
            assert_same_bits(&sum, &whole, &format!("{ty} over {n_ranks} ranks"));
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut rng = Rng(10);
    // Small batches are cut by outputs, and large ones (the limit grows with the threads) by tokens too.
    for (ty, n_tokens) in [(StoredType::Q4_1, 29), (StoredType::Q8_0, 211), (StoredType::F16, 200)] {
        let (n_out, k) = (48, 256);
        let bytes = random_stored(ty, n_out * k, &mut rng);
        let w = pack(MatrixView { ty, n_rows: n_out, k, bytes: &bytes }, &[0..k]);
        let x = rng.units(n_tokens * k);
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Reference) {
            let batch = run(isa, 2, &w, &x, None);
            for t in 0..n_tokens {
                let alone = run(isa, 1, &w, &x[t * k..][..k], None);
                assert_same_bits(&alone, &batch[t * n_out..][..n_out], &format!("{ty} row {t} {isa}"));
            }
        }
    }
}

#[test]
fn fused_sources_of_different_formats_are_stacked_in_order() {
    let mut rng = Rng(11);
    let k = 256;
    let rows = [(StoredType::Q4_1, 20), (StoredType::Q4_1, 17), (StoredType::Q6K, 9), (StoredType::F16, 5)];
    let stored: Vec<_> = rows.iter().map(|&(ty, n)| random_stored(ty, n * k, &mut rng)).collect();
    let views: Vec<_> = rows
        .iter()
        .zip(&stored)
        .map(|(&(ty, n_rows), bytes)| (MatrixView { ty, n_rows, k, bytes }, 2..n_rows))
        .collect();
    let exec = Exec::new(Isa::best(), 2).unwrap();
    let x = rng.units(3 * k);
    for form in [WeightForm::AsStored, WeightForm::F32] {
        let fused = PackedMatrix::pack(&exec, &views, &[0..k], form).unwrap();
        assert_eq!((fused.n_out(), fused.k()), (43, k));
        let y = run(Isa::best(), 2, &fused, &x, None);
        let mut first = 0;
        for source in &views {
            let alone = PackedMatrix::pack(&exec, std::slice::from_ref(source), &[0..k], form).unwrap();
            let own = run(Isa::Reference, 1, &alone, &x, None);
            for (t, own) in own.chunks(alone.n_out()).enumerate() {
                assert_same_bits(&y[t * 43 + first..][..alone.n_out()], own, "fused");
            }
            first += alone.n_out();
        }
    }
}

#[test]
fn a_broken_activation_shows_on_every_isa() {
    let mut rng = Rng(12);
    let bytes = random_stored(StoredType::Q4_0, 16 * 64, &mut rng);
    let w = pack(MatrixView { ty: StoredType::Q4_0, n_rows: 16, k: 64, bytes: &bytes }, &[0..64]);
    for broken in [f32::NAN, f32::INFINITY] {
        let mut x = rng.units(64);
        x[40] = broken;
        for isa in Isa::available() {
            assert!(run(isa, 1, &w, &x, None).iter().all(|y| y.is_nan()), "{isa}");
        }
    }
}

#[test]
fn a_rank_without_columns_adds_nothing_but_the_bias() {
    let bytes = random_stored(StoredType::Q8_0, 5 * 64, &mut Rng(13));
    let w = pack(MatrixView { ty: StoredType::Q8_0, n_rows: 5, k: 64, bytes: &bytes }, &[32..32, 32..32]);
    for isa in Isa::available() {
        let mut y = [f32::NAN; 10];
        let bias = [1.0, 2.0, 3.0, 4.0, 5.0];
        matmul(&Exec::new(isa, 1).unwrap(), &w, &[], Some(&bias), &mut y);
        assert_eq!(y, [1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    }
}
