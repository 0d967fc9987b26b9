//! Frequencies against values that transformers' own functions give in f64 (`modeling_rope_utils.py`, 5.19).

use longreach_kernels::RopeStyle;
use longreach_model::config::{RopeConfig, RopeScaling, rope};

fn config(theta: f64, rot_dim: usize, scaling: RopeScaling) -> RopeConfig {
    RopeConfig { theta, style: RopeStyle::Half, rot_dim, scaling, freq_factors: None }
}

fn yarn(factor: f64, original_max: usize) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        original_max,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    }
}

/// Compares the pairs in `want` (pair, frequency) and the attention factor.
fn check(config: &RopeConfig, want: &[(usize, f64)], attention_factor: f64) {
    let got = rope::frequencies(config);
    assert_eq!(got.per_position.len(), config.rot_dim / 2);
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-14 * b.abs();
    for &(pair, frequency) in want {
        assert!(
            close(got.per_position[pair], frequency),
            "pair {pair}: {} {frequency}",
            got.per_position[pair]
        );
    }
    assert!(close(got.attention_factor, attention_factor), "{} {attention_factor}", got.attention_factor);
}

#[test]
fn linear() {
    let want = [(0, 0.25), (1, 0.07905694150420949), (4, 0.0025), (7, 7.905694150420948e-05)];
    check(&config(1e4, 16, RopeScaling::Linear { factor: 4.0 }), &want, 1.0);
}

#[test]
fn llama3() {
    let scaling = |original_max| RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max,
    };
    let tiny = [(0, 1.0), (1, 0.0794030091792082), (2, 0.004700753866357992), (7, 1.2891731721515574e-06)];
    check(&config(5e5, 16, scaling(64)), &tiny, 1.0);
    // Llama 3.1: kept, ramp, divided.
    let llama31 = [
        (28, 0.0032114459947525913),
        (29, 0.002166570763503359),
        (32, 0.0005248461609929547),
        (34, 0.00017850781276799638),
        (36, 7.78465527393245e-05),
        (63, 3.068925988914511e-07),
    ];
    check(&config(5e5, 128, scaling(8192)), &llama31, 1.0);
}

#[test]
fn yarn_of_qwen() {
    let want = [
        (23, 0.006978305848598663),
        (24, 0.005375321490790102),
        (32, 0.0006029411764705882),
        (39, 6.490394320837029e-05),
        (40, 4.445698525097307e-05),
        (63, 3.102344401879299e-07),
    ];
    check(&config(1e6, 128, yarn(4.0, 32768)), &want, 1.138629436111989);
}

#[test]
fn yarn_with_every_option() {
    let with_mscale = RopeScaling::Yarn {
        factor: 40.0,
        original_max: 4096,
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor: None,
        mscale: Some(0.707),
        mscale_all_dim: Some(1.2),
        truncate: false,
    };
    let want = [
        (3, 0.03162277660168379),
        (4, 0.005790104962447107),
        (5, 0.0001239523692661043),
        (6, 2.5e-05),
        (7, 7.905694150420947e-06),
    ];
    check(&config(1e4, 16, with_mscale), &want, 0.8739404576185121);
    let RopeScaling::Yarn { factor, original_max, beta_fast, beta_slow, truncate, .. } = yarn(4.0, 64) else {
        unreachable!("yarn makes yarn")
    };
    let given = RopeScaling::Yarn {
        factor,
        original_max,
        beta_fast,
        beta_slow,
        attention_factor: Some(1.25),
        mscale: None,
        mscale_all_dim: None,
        truncate,
    };
    check(&config(1e4, 8, given), &[(0, 1.0), (1, 0.0625), (2, 0.0025), (3, 0.00025)], 1.25);
}

/// ATT-10: a factor divides its own pair and no other.
#[test]
fn frequency_factors_divide_pair_by_pair() {
    let plain = config(1e4, 4, RopeScaling::None);
    let divided = RopeConfig { freq_factors: Some(vec![1.0, 8.0]), ..plain.clone() };
    let (plain, divided) = (rope::frequencies(&plain), rope::frequencies(&divided));
    assert_eq!(divided.per_position, [plain.per_position[0], plain.per_position[1] / 8.0]);
}

/// Angles in f32 would be wrong in the third digit at the last of these positions.
#[test]
fn tables_hold_cosines_and_sines_of_exact_angles() {
    let config = config(1e4, 16, yarn(4.0, 64));
    let n_pos = 131_072;
    let (cos, sin) = rope::tables(&config, n_pos);
    assert_eq!((cos.len(), sin.len()), (n_pos * 8, n_pos * 8));
    let frequencies = rope::frequencies(&config);
    for pos in [0, 1, 63, 64, 4095, n_pos - 1] {
        for (pair, frequency) in frequencies.per_position.iter().enumerate() {
            let angle = pos as f64 * frequency;
            let want = [angle.cos(), angle.sin()].map(|value| value * frequencies.attention_factor);
            let got = [cos[pos * 8 + pair], sin[pos * 8 + pair]].map(f64::from);
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-7), "{pos} {pair}");
        }
    }
}
