//! Configuration from `config.json` and `generation_config.json`.
//!
//! Absent keys mean what they mean to Hugging Face transformers (5.19) for the architecture at hand, or are an
//! error where its default is a guess. RoPE is understood in both spellings: `rope_theta` with `rope_scaling`, and
//! `rope_parameters` (transformers 5); each with `rope_type` or `type`.

use std::path::Path;

use longreach_kernels::RopeStyle;
use longreach_types::TokenId;
use serde_json::Value;

use super::{
    Architecture, ConfigError, ModelConfig, RopeConfig, RopeScaling, fields::Fields, rope::DEFAULT_THETA,
};

/// The window of Mistral files that do not mention one.
const MISTRAL_WINDOW: usize = 4096;
/// The first windowed layer of Qwen2 files that do not mention one.
const QWEN2_MAX_WINDOW_LAYERS: usize = 28;

/// Reads the configuration in `config`, which stands in the file at `path`.
pub(super) fn read(
    path: &Path,
    config: &Value,
    generation: Option<&Value>,
) -> Result<ModelConfig, ConfigError> {
    let fields = Fields::root(path, config)?;
    let architecture = architecture(&fields)?;
    refuse_unsupported(&fields)?;
    let count = |key: &str| fields.require(key, fields.count(key)?);
    let (n_layers, hidden, n_q_heads) =
        (count("num_hidden_layers")?, count("hidden_size")?, count("num_attention_heads")?);
    let head_dim = head_dim(&fields, hidden, n_q_heads)?;
    let max_position = count("max_position_embeddings")?;
    let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    let generation_path = path.with_file_name("generation_config.json");
    let generation = generation.map(|value| Fields::root(&generation_path, value)).transpose()?;
    let config = ModelConfig {
        architecture,
        n_layers,
        hidden,
        n_q_heads,
        n_kv_heads: n_kv_heads(&fields, architecture, n_q_heads)?,
        head_dim,
        ffn: count("intermediate_size")?,
        vocab_size: count("vocab_size")?,
        max_position,
        rms_eps: fields.require("rms_norm_eps", fields.positive("rms_norm_eps")?)? as f32,
        rope: rope(&fields, head_dim, max_position)?,
        sliding_window: Vec::new(),
        tied_head: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: attention_bias || architecture == Architecture::Qwen2,
        o_bias: attention_bias,
        eos: tokens("eos_token_id", generation.as_ref(), &fields)?,
        bos: tokens("bos_token_id", generation.as_ref(), &fields)?.first().copied(),
    };
    let keys = ["num_attention_heads", "num_key_value_heads", "num_hidden_layers", "max_position_embeddings"];
    config.validate(path, keys)?;
    // Only now is the number of layers known to be small enough to have a list of.
    let sliding_window = sliding_window(&fields, architecture, n_layers)?;
    Ok(ModelConfig { sliding_window, ..config })
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture, ConfigError> {
    let name = fields.require("model_type", fields.text("model_type")?)?;
    Architecture::from_name(name).ok_or_else(|| ConfigError::Architecture {
        path: fields.path().to_path_buf(),
        found: name.to_owned(),
    })
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ConfigError> {
    if fields.text("hidden_act")?.is_some_and(|act| act != "silu") {
        return Err(fields.unsupported("hidden_act", "the feed-forward part computes silu"));
    }
    if fields.flag("mlp_bias")? == Some(true) {
        return Err(fields.unsupported("mlp_bias", "the feed-forward part has no biases"));
    }
    if fields.get("quantization_config").is_some() {
        let why = "safetensors weights must be F32, F16 or BF16; for quantised weights use a GGUF file";
        return Err(fields.unsupported("quantization_config", why));
    }
    Ok(())
}

fn n_kv_heads(
    fields: &Fields<'_>,
    architecture: Architecture,
    n_q_heads: usize,
) -> Result<usize, ConfigError> {
    let key = "num_key_value_heads";
    match fields.count(key)? {
        Some(n) => Ok(n),
        None if architecture == Architecture::Llama => Ok(n_q_heads),
        None => Err(ConfigError::missing(fields.path(), key)),
    }
}

fn head_dim(fields: &Fields<'_>, hidden: usize, n_q_heads: usize) -> Result<usize, ConfigError> {
    match fields.count("head_dim")? {
        Some(head_dim) => Ok(head_dim),
        None if hidden.is_multiple_of(n_q_heads) => Ok(hidden / n_q_heads),
        None => {
            let want = format!("a divisor of hidden_size = {hidden}, as there is no head_dim");
            Err(fields.bad("num_attention_heads", want))
        }
    }
}

fn rope(fields: &Fields<'_>, head_dim: usize, max_position: usize) -> Result<RopeConfig, ConfigError> {
    let scaling = match (fields.object("rope_parameters")?, fields.object("rope_scaling")?) {
        (Some(_), Some(_)) => {
            return Err(fields.bad("rope_scaling", "to be absent, as rope_parameters is there"));
        }
        (new, old) => new.or(old),
    };
    let either = |key: &str| match scaling.map(|scaling| scaling.positive(key)).transpose()?.flatten() {
        Some(value) => Ok::<_, ConfigError>(Some(value)),
        None => fields.positive(key),
    };
    let rot_frac = either("partial_rotary_factor")?.unwrap_or(1.0);
    Ok(RopeConfig {
        theta: either("rope_theta")?.unwrap_or(DEFAULT_THETA),
        style: RopeStyle::Half,
        rot_dim: (head_dim as f64 * rot_frac) as usize,
        scaling: match &scaling {
            None => RopeScaling::None,
            Some(scaling) => rope_scaling(scaling, fields, max_position)?,
        },
        freq_factors: None,
    })
}

fn rope_scaling(
    scaling: &Fields<'_>,
    root: &Fields<'_>,
    max_position: usize,
) -> Result<RopeScaling, ConfigError> {
    for kind in ["full_attention", "sliding_attention"] {
        if scaling.has(kind) {
            return Err(scaling.unsupported(kind, "all layers must rotate alike"));
        }
    }
    let name = match (scaling.text("rope_type")?, scaling.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            return Err(scaling.bad("type", format!("the same as rope_type, {new:?}")));
        }
        (new, old) => new.or(old).unwrap_or("default"),
    };
    let need = |key: &str| scaling.require(key, scaling.positive(key)?);
    let original_max = || {
        let key = "original_max_position_embeddings";
        Ok::<_, ConfigError>(root.count(key)?.or(scaling.count(key)?).unwrap_or(max_position))
    };
    let result = match name {
        "default" | "none" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: need("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_max: original_max()?,
        },
        "yarn" => yarn(scaling, original_max()?, max_position)?,
        other => {
            let path = scaling.path().to_path_buf();
            return Err(ConfigError::RopeScaling { path, found: other.to_owned() });
        }
    };
    if let RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. } = result
        && low_freq_factor >= high_freq_factor
    {
        return Err(scaling.bad("low_freq_factor", format!("below high_freq_factor = {high_freq_factor}")));
    }
    Ok(result)
}

fn yarn(scaling: &Fields<'_>, original_max: usize, max_position: usize) -> Result<RopeScaling, ConfigError> {
    // Absent, null and 0 all mean the default of the paper, as in the reference.
    let or_default = |key: &str, default: f64| {
        Ok::<_, ConfigError>(scaling.number(key)?.filter(|&value| value != 0.0).unwrap_or(default))
    };
    let (beta_fast, beta_slow) = (or_default("beta_fast", 32.0)?, or_default("beta_slow", 1.0)?);
    if !(beta_slow > 0.0 && beta_fast > beta_slow) {
        return Err(scaling.bad("beta_fast", format!("above beta_slow = {beta_slow}, and both above 0")));
    }
    let ratio = max_position as f64 / original_max as f64;
    Ok(RopeScaling::Yarn {
        factor: scaling.positive("factor")?.unwrap_or(ratio),
        original_max,
        beta_fast,
        beta_slow,
        attention_factor: scaling.positive("attention_factor")?,
        mscale: scaling.number("mscale")?,
        mscale_all_dim: scaling.number("mscale_all_dim")?,
        truncate: scaling.flag("truncate")?.unwrap_or(true),
    })
}

/// The window of each layer.
fn sliding_window(
    fields: &Fields<'_>,
    architecture: Architecture,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = match architecture {
        Architecture::Llama => None,
        // Absent and null differ here: null switches the window off.
        Architecture::Mistral if fields.has("sliding_window") => fields.count("sliding_window")?,
        Architecture::Mistral => Some(MISTRAL_WINDOW),
        Architecture::Qwen2 if fields.flag("use_sliding_window")? == Some(true) => {
            fields.count("sliding_window")?
        }
        Architecture::Qwen2 => None,
    };
    if let Some(types) = fields.texts("layer_types")? {
        return from_layer_types(fields, &types, window, n_layers);
    }
    let first = match architecture {
        Architecture::Qwen2 => fields.index("max_window_layers")?.unwrap_or(QWEN2_MAX_WINDOW_LAYERS),
        _ => 0,
    };
    Ok((0..n_layers).map(|layer| window.filter(|_| layer >= first)).collect())
}

fn from_layer_types(
    fields: &Fields<'_>,
    types: &[&str],
    window: Option<usize>,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    if types.len() != n_layers {
        return Err(fields.bad("layer_types", format!("a list of num_hidden_layers = {n_layers} types")));
    }
    let convert = |ty: &&str| match *ty {
        "full_attention" => Ok(None),
        "sliding_attention" => Ok(window),
        _ => Err(fields.bad("layer_types", "full_attention or sliding_attention for each layer")),
    };
    types.iter().map(convert).collect()
}

/// The tokens under `key` in the generation configuration, then those in the model's, each once.
fn tokens(
    key: &str,
    generation: Option<&Fields<'_>>,
    fields: &Fields<'_>,
) -> Result<Vec<TokenId>, ConfigError> {
    let mut tokens = generation.map(|fields| fields.tokens(key)).transpose()?.unwrap_or_default();
    for token in fields.tokens(key)? {
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    Ok(tokens)
}
