//! Rotary position embedding: how fast each pair of a head turns with the position.
//!
//! A pair `i` of a head turns by `pos · f_i` with `f_i = theta^(−2i/rot_dim)`, changed by the model's scaling so
//! that it works on more positions than it was trained on. The formulas are those of Hugging Face transformers
//! (`modeling_rope_utils.py`, version 5.19: `_compute_linear_scaling_rope_parameters`,
//! `_compute_llama3_parameters`, `_compute_yarn_parameters`), which models are trained and published with.
//! Computed in f64: f32 angles are off by a visible part of a turn at positions beyond 100,000.
//!
//! The choice of frequencies never depends on the length of a request, because keys already cached were turned
//! with them. Scalings that do depend on it (`dynamic`, `longrope`) are refused.

use std::{
    f64::consts::{PI, TAU},
    path::Path,
};

use longreach_kernels::{RopeStyle, StoredType};
use serde::Serialize;

use super::ConfigError;
use crate::files::ModelFiles;

/// Base of the frequencies where a file gives none, as the first Llama files do not.
pub(super) const DEFAULT_THETA: f64 = 10_000.0;
/// Bounds far from what any model has, which keep angles finite.
const MAX_FACTOR: f64 = 1e6;
const MAX_ATTENTION_FACTOR: f64 = 100.0;
/// Name of the tensor of frequency factors in GGUF files (Llama 3.1 and later).
pub(super) const FREQ_FACTORS: &str = "rope_freqs.weight";

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Which two values of a head form a pair.
    #[serde(serialize_with = "style_name")]
    pub style: RopeStyle,
    /// How many values of a head turn, from its start.
    pub rot_dim: usize,
    /// How the model was stretched to more positions.
    pub scaling: RopeScaling,
    /// A divisor for each pair's frequency, from a GGUF tensor.
    pub freq_factors: Option<Vec<f32>>,
}

/// How a model was stretched to more positions than it was first trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: slow pairs divided by `factor`, fast ones kept, between them a ramp over wavelengths.
    Llama3 {
        /// The divisor of slow pairs.
        factor: f64,
        /// Pairs that turn less than this often in `original_max` positions are slow.
        low_freq_factor: f64,
        /// Pairs that turn more than this often are fast.
        high_freq_factor: f64,
        /// Positions of the first training.
        original_max: usize,
    },
    /// YaRN (arXiv 2309.00071): a ramp over pairs, and longer keys and queries.
    Yarn {
        /// The divisor of slow pairs.
        factor: f64,
        /// Positions of the first training.
        original_max: usize,
        /// Pairs that turn at least this often in `original_max` positions are kept.
        beta_fast: f64,
        /// Pairs that turn at most this often are divided.
        beta_slow: f64,
        /// Factor of cosines and sines; computed from `factor` when absent.
        attention_factor: Option<f64>,
        /// Weight of ln `factor` above the line, with `mscale_all_dim` below it.
        mscale: Option<f64>,
        /// See `mscale`.
        mscale_all_dim: Option<f64>,
        /// Whether the ends of the ramp are rounded outwards to whole pairs.
        truncate: bool,
    },
}

impl RopeScaling {
    /// The divisor of slow pairs.
    const fn factor(&self) -> f64 {
        match *self {
            Self::None => 1.0,
            Self::Linear { factor } | Self::Llama3 { factor, .. } | Self::Yarn { factor, .. } => factor,
        }
    }
}

/// Angular frequency of each pair, and the factor of cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub struct Frequencies {
    /// Radians a position, `rot_dim / 2` of them.
    pub per_position: Vec<f64>,
    /// Multiplies every cosine and sine; 1 without YaRN.
    pub attention_factor: f64,
}

/// Cosines and sines of `n_pos` positions, each `[n_pos][rot_dim / 2]`, with the attention factor in them.
pub fn tables(config: &RopeConfig, n_pos: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = frequencies(config);
    let n_pairs = frequencies.per_position.len();
    let (mut cos, mut sin) = (Vec::with_capacity(n_pos * n_pairs), Vec::with_capacity(n_pos * n_pairs));
    for pos in 0..n_pos {
        for frequency in &frequencies.per_position {
            // libm, not the platform's functions: the tables must be the same bits on every machine of a group.
            let (s, c) = libm::sincos(pos as f64 * frequency);
            cos.push((c * frequencies.attention_factor) as f32);
            sin.push((s * frequencies.attention_factor) as f32);
        }
    }
    (cos, sin)
}

/// The frequencies of `config`.
pub fn frequencies(config: &RopeConfig) -> Frequencies {
    let n_pairs = config.rot_dim / 2;
    let plain: Vec<f64> =
        (0..n_pairs).map(|i| libm::pow(config.theta, -((2 * i) as f64) / config.rot_dim as f64)).collect();
    let scaled = plain.iter().enumerate().map(|(i, &f)| match config.scaling {
        RopeScaling::None => f,
        RopeScaling::Linear { factor } => f / factor,
        RopeScaling::Llama3 { .. } => llama3(&config.scaling, f),
        RopeScaling::Yarn { factor, .. } => {
            let kept = 1.0 - yarn_ramp(config, i);
            f / factor * (1.0 - kept) + f * kept
        }
    });
    let per_position = match &config.freq_factors {
        None => scaled.collect(),
        Some(factors) => scaled.zip(factors).map(|(f, &factor)| f / f64::from(factor)).collect(),
    };
    Frequencies { per_position, attention_factor: attention_factor(&config.scaling) }
}

fn llama3(scaling: &RopeScaling, f: f64) -> f64 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max } = *scaling else {
        return f;
    };
    let turns = original_max as f64 * f / TAU;
    if turns > high_freq_factor {
        return f;
    }
    if turns < low_freq_factor {
        return f / factor;
    }
    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    (1.0 - smooth) * f / factor + smooth * f
}

/// 0 for pairs that YaRN keeps, 1 for pairs that it divides.
fn yarn_ramp(config: &RopeConfig, pair: usize) -> f64 {
    let RopeScaling::Yarn { original_max, beta_fast, beta_slow, truncate, .. } = config.scaling else {
        return 0.0;
    };
    let dim = config.rot_dim as f64;
    // The pair that turns `turns` times in `original_max` positions.
    let pair_of = |turns: f64| {
        dim * libm::log(original_max as f64 / (turns * 2.0 * PI)) / (2.0 * libm::log(config.theta))
    };
    let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min(dim - 1.0);
    if low == high {
        high += 0.001; // as the reference does, so that the ramp is a step and not 0/0
    }
    ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0)
}

fn attention_factor(scaling: &RopeScaling) -> f64 {
    let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = *scaling else {
        return 1.0;
    };
    let length = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * libm::log(factor) + 1.0 };
    // Zero counts as absent, as in the reference.
    let given = |value: Option<f64>| value.filter(|&value| value != 0.0);
    match (attention_factor, given(mscale), given(mscale_all_dim)) {
        (Some(value), _, _) => value,
        (None, Some(above), Some(below)) => length(above) / length(below),
        (None, _, _) => length(1.0),
    }
}

/// Reads the tensor of frequency factors, where there is one.
pub(super) fn freq_factors(files: &ModelFiles) -> Result<Option<Vec<f32>>, ConfigError> {
    let Some(tensor) = files.tensor(FREQ_FACTORS) else { return Ok(None) };
    let (path, name) = (files.path().to_path_buf(), FREQ_FACTORS.to_owned());
    if tensor.ty != StoredType::F32 {
        return Err(ConfigError::value(&path, format!("type of tensor {name}"), tensor.ty.name(), "F32"));
    }
    let (chunks, _) = tensor.bytes.as_chunks::<4>();
    let factors: Vec<f32> = chunks.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    match factors.iter().position(|&factor| !(factor.is_finite() && factor > 0.0)) {
        Some(index) => Err(ConfigError::FreqFactor { path, name, index, value: factors[index] }),
        None => Ok(Some(factors)),
    }
}

impl RopeConfig {
    /// Refuses values that cannot be, or that would give angles that are no numbers.
    pub(super) fn validate(&self, path: &Path, head_dim: usize) -> Result<(), ConfigError> {
        let fail = |key: &str, value: String, want: &str| Err(ConfigError::value(path, key, value, want));
        let rot_dim = self.rot_dim;
        if rot_dim == 0 || rot_dim > head_dim || !rot_dim.is_multiple_of(2) {
            let want = format!("an even number from 2 to head_dim = {head_dim}");
            return fail("rotary dimensions", rot_dim.to_string(), &want);
        }
        if !(self.theta > 1.0 && self.theta.is_finite()) {
            return fail("RoPE base (rope_theta)", self.theta.to_string(), "a number above 1");
        }
        let factor = self.scaling.factor();
        if !(1.0..=MAX_FACTOR).contains(&factor) {
            return fail("RoPE scaling factor", factor.to_string(), "a number from 1 to a million");
        }
        let attention_factor = attention_factor(&self.scaling);
        if !(attention_factor > 0.0 && attention_factor <= MAX_ATTENTION_FACTOR) {
            let want = "a number above 0 and at most 100";
            return fail("attention factor of RoPE scaling", attention_factor.to_string(), want);
        }
        Ok(())
    }

    /// Adds factors that [`freq_factors`] read; there must be one for each pair.
    pub(super) fn with_freq_factors(
        mut self,
        factors: Option<Vec<f32>>,
        files: &ModelFiles,
    ) -> Result<Self, ConfigError> {
        let n_pairs = self.rot_dim / 2;
        if let Some(factors) = factors.as_ref().filter(|factors| factors.len() != n_pairs) {
            return Err(ConfigError::Shape {
                path: files.path().to_path_buf(),
                name: FREQ_FACTORS.to_owned(),
                found: vec![factors.len()],
                want: vec![n_pairs],
                why: format!("{} rotary dimensions", self.rot_dim),
            });
        }
        self.freq_factors = factors;
        Ok(self)
    }
}

fn style_name<S: serde::Serializer>(style: &RopeStyle, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match style {
        RopeStyle::Interleaved => "interleaved",
        RopeStyle::Half => "half",
    })
}
