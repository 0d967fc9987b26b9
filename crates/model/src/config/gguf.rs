//! Configuration from GGUF metadata.
//!
//! Keys are prefixed by the architecture that the file names. Mistral models call themselves `llama` there.

use longreach_gguf::{Metadata, Problem, Value};
use longreach_kernels::RopeStyle;
use longreach_types::TokenId;

use super::{
    Architecture, ConfigError, MAX_COUNT, ModelConfig, RopeConfig, RopeScaling, rope::DEFAULT_THETA,
};
use crate::files::{ModelFiles, gguf_architecture};

const TOKENS: &str = "tokenizer.ggml.tokens";

/// The keys of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
}

/// Reads the configuration of `files`, whose metadata is `metadata`.
pub(super) fn read(metadata: &Metadata, files: &ModelFiles) -> Result<ModelConfig, ConfigError> {
    let keys = Keys { metadata, architecture: architecture(metadata)? };
    let n_layers = keys.need("block_count")?;
    let (hidden, n_q_heads) = (keys.need("embedding_length")?, keys.need("attention.head_count")?);
    keys.refuse_unsupported()?;
    let head_dim = keys.head_dim(hidden, n_q_heads)?;
    let max_position = keys.need("context_length")?;
    let has = |name: &str| files.tensor(name).is_some();
    let config = ModelConfig {
        architecture: keys.architecture,
        n_layers,
        hidden,
        n_q_heads,
        n_kv_heads: keys.count("attention.head_count_kv")?.unwrap_or(n_q_heads),
        head_dim,
        ffn: keys.need("feed_forward_length")?,
        vocab_size: keys.vocab_size(files)?,
        max_position,
        rms_eps: keys.need_positive("attention.layer_norm_rms_epsilon")? as f32,
        rope: keys.rope(head_dim, max_position)?,
        sliding_window: Vec::new(),
        tied_head: !has("lm_head.weight"),
        qkv_bias: keys.architecture == Architecture::Qwen2 || has("model.layers.0.self_attn.q_proj.bias"),
        o_bias: has("model.layers.0.self_attn.o_proj.bias"),
        eos: keys.tokens(&["eos", "eot", "eom"])?,
        bos: keys.tokens(&["bos"])?.first().copied(),
    };
    let names = ["attention.head_count", "attention.head_count_kv", "block_count", "context_length"];
    config.validate(metadata.path(), names.map(|name| keys.name(name)).each_ref().map(String::as_str))?;
    let window = keys.count("attention.sliding_window")?;
    Ok(ModelConfig { sliding_window: vec![window; n_layers], ..config })
}

fn architecture(metadata: &Metadata) -> Result<Architecture, ConfigError> {
    match gguf_architecture(metadata)? {
        "llama" => Ok(Architecture::Llama),
        "qwen2" => Ok(Architecture::Qwen2),
        other => {
            Err(ConfigError::Architecture { path: metadata.path().to_path_buf(), found: other.to_owned() })
        }
    }
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn error(&self, key: &str, value: impl ToString, want: &str) -> ConfigError {
        ConfigError::value(self.metadata.path(), self.name(key), value.to_string(), want)
    }

    /// A size, when the key is there and not 0, which converters write for "none".
    fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.metadata.uint(&self.name(key))? {
            None | Some(0) => Ok(None),
            Some(value) if value <= MAX_COUNT => Ok(Some(value as usize)),
            Some(value) => Err(self.error(key, value, "at most 2^31")),
        }
    }

    fn need(&self, key: &str) -> Result<usize, ConfigError> {
        match self.count(key)? {
            Some(value) => Ok(value),
            None if self.metadata.get(&self.name(key)).is_some() => Err(self.error(key, 0, "at least 1")),
            None => Err(self.metadata.missing(&self.name(key)).into()),
        }
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.metadata.float(&self.name(key))? {
            Some(value) if !(value.is_finite() && value > 0.0) => {
                Err(self.error(key, value, "a finite number above 0"))
            }
            value => Ok(value),
        }
    }

    fn need_positive(&self, key: &str) -> Result<f64, ConfigError> {
        self.positive(key)?.ok_or_else(|| self.metadata.missing(&self.name(key)).into())
    }

    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        match self.count("expert_count")? {
            Some(n) => Err(ConfigError::Unsupported {
                path: self.metadata.path().to_path_buf(),
                key: self.name("expert_count"),
                value: n.to_string(),
                why: "mixtures of experts are not computed",
            }),
            None => Ok(()),
        }
    }

    fn head_dim(&self, hidden: usize, n_q_heads: usize) -> Result<usize, ConfigError> {
        let Some(head_dim) = self.count("attention.key_length")? else {
            if !hidden.is_multiple_of(n_q_heads) {
                let want = format!("a divisor of embedding_length = {hidden}, as there is no key_length");
                return Err(self.error("attention.head_count", n_q_heads, &want));
            }
            return Ok(hidden / n_q_heads);
        };
        match self.count("attention.value_length")? {
            Some(value_dim) if value_dim != head_dim => {
                let want = format!("{head_dim} as attention.key_length");
                Err(self.error("attention.value_length", value_dim, &want))
            }
            _ => Ok(head_dim),
        }
    }

    /// Rows of the embedding. The key and the tokenizer must not say more.
    fn vocab_size(&self, files: &ModelFiles) -> Result<usize, ConfigError> {
        let name = "model.embed_tokens.weight";
        let Some(&rows) = files.tensor(name).and_then(|tensor| tensor.shape.first()) else {
            let path = self.metadata.path().to_path_buf();
            let why = "every model has an embedding (token_embd.weight)".to_owned();
            return Err(ConfigError::MissingTensor { path, name: name.to_owned(), why });
        };
        if let Some(n) = self.count("vocab_size")?.filter(|&n| n != rows) {
            return Err(self.error("vocab_size", n, &format!("{rows}, the rows of token_embd.weight")));
        }
        match self.metadata.get(TOKENS) {
            Some(Value::Array(tokens)) if tokens.len() > rows => {
                let problem = Problem::Length { len: rows, want: tokens.len() };
                Err(self.metadata.error("token_embd.weight", problem).into())
            }
            _ => Ok(rows),
        }
    }

    fn rope(&self, head_dim: usize, max_position: usize) -> Result<RopeConfig, ConfigError> {
        Ok(RopeConfig {
            theta: self.positive("rope.freq_base")?.unwrap_or(DEFAULT_THETA),
            style: match self.architecture {
                // Converters permute the rows of llama's query and key projections for neighbouring pairs.
                Architecture::Llama | Architecture::Mistral => RopeStyle::Interleaved,
                Architecture::Qwen2 => RopeStyle::Half,
            },
            rot_dim: self.count("rope.dimension_count")?.unwrap_or(head_dim),
            scaling: self.rope_scaling(max_position)?,
            freq_factors: None,
        })
    }

    fn rope_scaling(&self, max_position: usize) -> Result<RopeScaling, ConfigError> {
        let key = "rope.scaling.type";
        let need_factor = || self.need_positive("rope.scaling.factor");
        match self.metadata.str(&self.name(key))? {
            // Files from before the key had a factor alone, which meant linear.
            None => Ok(match self.positive("rope.scale_linear")?.filter(|&factor| factor != 1.0) {
                Some(factor) => RopeScaling::Linear { factor },
                None => RopeScaling::None,
            }),
            Some("none") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need_factor()? }),
            Some("yarn") => self.yarn(need_factor()?, max_position),
            Some(other) => Err(ConfigError::RopeScaling {
                path: self.metadata.path().to_path_buf(),
                found: other.to_owned(),
            }),
        }
    }

    fn yarn(&self, factor: f64, max_position: usize) -> Result<RopeScaling, ConfigError> {
        let beta = |name: &str, default: f64| {
            Ok::<_, ConfigError>(self.positive(&format!("rope.scaling.{name}"))?.unwrap_or(default))
        };
        // In GGUF the factor multiplies the one that follows from the scaling; in `config.json` it replaces it.
        let attention_factor = self
            .positive("rope.scaling.attn_factor")?
            .map(|extra| extra * (0.1 * libm::log(factor.max(1.0)) + 1.0));
        Ok(RopeScaling::Yarn {
            factor,
            original_max: self.count("rope.scaling.original_context_length")?.unwrap_or(max_position),
            beta_fast: beta("yarn_beta_fast", 32.0)?,
            beta_slow: beta("yarn_beta_slow", 1.0)?,
            attention_factor,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        })
    }

    /// The special tokens of the given names, each once.
    fn tokens(&self, names: &[&str]) -> Result<Vec<TokenId>, ConfigError> {
        let mut tokens = Vec::new();
        for name in names {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let Some(id) = self.metadata.uint(&key)? else { continue };
            let id = u32::try_from(id)
                .map_err(|_| ConfigError::value(self.metadata.path(), &key, id.to_string(), "a token id"))?;
            if !tokens.contains(&TokenId(id)) {
                tokens.push(TokenId(id));
            }
        }
        Ok(tokens)
    }
}
