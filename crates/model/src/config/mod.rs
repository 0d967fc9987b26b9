//! What a model is: its shape, its positions, its special tokens.
//!
//! One [`ModelConfig`] comes out of a `config.json` or of GGUF keys, with every value checked, and then compared
//! with the tensors that are really there: files and configuration disagree often enough (an exported `head_dim`
//! that was left out, a head that is said to be tied and is not) that believing either alone loads rubbish.
//! What this engine cannot compute is refused here, by name, before any weight is touched.

mod check;
mod error;
mod fields;
mod gguf;
mod hf;
pub mod rope;

use std::{fmt, path::Path};

use longreach_types::TokenId;
use serde::Serialize;

pub use error::ConfigError;
pub use rope::{RopeConfig, RopeScaling};

use crate::files::{ConfigSource, ModelFiles};

/// More layers than any real model; bounds what a bad value can make us allocate.
const MAX_LAYERS: usize = 65_536;
/// More positions than any real model; bounds the rotation tables.
const MAX_POSITIONS: usize = 1 << 24;
/// Largest size that is believed at all: products of two stay far from the end of 64 bits.
const MAX_COUNT: u64 = 1 << 31;

/// Shape and constants of a decoder-only transformer of the Llama family.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family member.
    pub architecture: Architecture,
    /// Transformer blocks.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_q_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head; not always `hidden / n_q_heads`.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Rows of the embedding, and logits of a position.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_position: usize,
    /// Added to the mean square in norms.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// For each layer how many of the latest positions a query sees, its own included; `None` for all.
    pub sliding_window: Vec<Option<usize>>,
    /// Whether the output head is the embedding.
    pub tied_head: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Tokens that end a generation.
    #[serde(serialize_with = "token_numbers")]
    pub eos: Vec<TokenId>,
    /// The token that begins a text, if the model has one.
    #[serde(serialize_with = "token_numbers")]
    pub bos: Option<TokenId>,
}

/// The architectures that the forward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama and SmolLM2; Mistral too, in GGUF files.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections.
    Qwen2,
}

impl Architecture {
    /// All of them, for messages.
    pub const SUPPORTED: &'static str = "llama (Llama, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5)";

    fn from_name(name: &str) -> Option<Self> {
        [Self::Llama, Self::Mistral, Self::Qwen2].into_iter().find(|architecture| architecture.name() == name)
    }

    /// The name in files (`model_type`, `general.architecture`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ModelConfig {
    /// Reads the configuration that comes with `files` and compares it with their tensors.
    pub fn from_files(files: &ModelFiles) -> Result<Self, ConfigError> {
        // Before anything else, as these are wrong or right by themselves.
        let freq_factors = rope::freq_factors(files)?;
        let config = match files.config_source() {
            ConfigSource::Json { path, config, generation } => hf::read(path, config, generation.as_ref())?,
            ConfigSource::Gguf(metadata) => gguf::read(metadata, files)?,
        };
        // Shapes first: a head width that was derived wrongly is best explained by the tensor that contradicts it.
        check::check(&config, files)?;
        config.rope.validate(files.path(), config.head_dim)?;
        let rope = config.rope.clone().with_freq_factors(freq_factors, files)?;
        Ok(Self { rope, ..config })
    }

    /// Width of all query heads together.
    pub const fn q_width(&self) -> usize {
        self.n_q_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads, together.
    pub const fn kv_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Rules between fields that hold whatever the source was; `keys` are the names the source has for
    /// the query heads, the key-value heads, the layers and the positions.
    fn validate(&self, path: &Path, keys: [&str; 4]) -> Result<(), ConfigError> {
        let fail = |key: &str, value: usize, want: String| {
            Err(ConfigError::value(path, key, value.to_string(), want))
        };
        if !self.n_q_heads.is_multiple_of(self.n_kv_heads) {
            let want = format!("a divisor of {} = {}", keys[0], self.n_q_heads);
            return fail(keys[1], self.n_kv_heads, want);
        }
        if self.n_layers > MAX_LAYERS {
            return fail(keys[2], self.n_layers, format!("at most {MAX_LAYERS}"));
        }
        if self.max_position > MAX_POSITIONS {
            return fail(keys[3], self.max_position, format!("at most {MAX_POSITIONS}"));
        }
        for token in self.eos.iter().chain(&self.bos) {
            if token.0 as usize >= self.vocab_size {
                let want = format!("below the vocabulary size {}", self.vocab_size);
                return fail("special token id", token.0 as usize, want);
            }
        }
        Ok(())
    }
}

/// Token ids as bare numbers; the crate of `TokenId` has no serde.
fn token_numbers<'a, T, S>(tokens: &'a T, serializer: S) -> Result<S::Ok, S::Error>
where
    &'a T: IntoIterator<Item = &'a TokenId>,
    S: serde::Serializer,
{
    serializer.collect_seq(tokens.into_iter().map(|token| token.0))
}
