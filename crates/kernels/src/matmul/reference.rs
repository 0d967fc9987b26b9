//! The contract of [`super::matmul`] as plain loops.

use crate::{
    pack::{PackedMatrix, Run},
    panel::{Format, with_format},
    quant::quantise_block,
    simd::LANES,
    stored::{GROUP, StoredType},
};

pub(super) fn matmul(w: &PackedMatrix, x: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    let blocks: Vec<(f32, [i8; GROUP])> = x.as_chunks::<GROUP>().0.iter().map(quantise_block).collect();
    for (t, y) in y.chunks_exact_mut(w.n_out()).enumerate() {
        let x = &x[t * w.k()..][..w.k()];
        for run in w.runs() {
            for i in 0..run.n_out {
                let partial = |columns: std::ops::Range<usize>| {
                    with_format!(
                        run.ty,
                        F => {
                            let first = t * w.k() / GROUP;
                            quantised::<F>(run, i, columns, &blocks[first..])
                        },
                        _float => float(run, i, columns, x)
                    )
                };
                let mut start = 0;
                let sums =
                    w.segment_ends().iter().map(|&end| partial(std::mem::replace(&mut start, end)..end));
                let sum = tree(sums.collect());
                let out = run.first_out + i;
                y[out] = bias.map_or(sum, |bias| sum + bias[out]);
            }
        }
    }
}

/// Adjacent pairs, level by level; in sequence when the number is not a power of two.
fn tree(mut sums: Vec<f32>) -> f32 {
    if !sums.len().is_power_of_two() {
        return sums[1..].iter().fold(sums[0], |sum, x| sum + x);
    }
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    sums[0]
}

fn float(run: &Run, out: usize, columns: std::ops::Range<usize>, x: &[f32]) -> f32 {
    let (panel, lane) = (out / LANES, out % LANES);
    columns.fold(0.0, |acc, column| {
        let w = match run.ty {
            StoredType::F16 => half::f16::from_bits(run.floats::<u16>(panel)[column][lane]).to_f32(),
            StoredType::BF16 => half::bf16::from_bits(run.floats::<u16>(panel)[column][lane]).to_f32(),
            _ => run.floats::<f32>(panel)[column][lane],
        };
        x[column].mul_add(w, acc)
    })
}

fn quantised<F: Format>(
    run: &Run,
    out: usize,
    columns: std::ops::Range<usize>,
    blocks: &[(f32, [i8; GROUP])],
) -> f32 {
    let records = run.quantised::<F>(out / LANES);
    let offset = i32::from(F::TYPE.offset());
    (columns.start / GROUP..columns.end / GROUP).fold(0.0, |mut acc, i| {
        let group = records[i].get(out % LANES);
        let (d, q) = &blocks[i];
        let parts = if F::SPLIT { 2 } else { 1 };
        let len = GROUP / parts;
        for part in 0..parts {
            let pairs = group.codes.iter().zip(q).skip(part * len).take(len);
            let dot: i32 = pairs.map(|(&code, &q)| (i32::from(code) - offset) * i32::from(q)).sum();
            acc = (group.scales[part] * d).mul_add(dot as f32, acc);
        }
        if F::TYPE.has_min() {
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            acc = group.min.mul_add(d * sum as f32, acc);
        }
        acc
    })
}
