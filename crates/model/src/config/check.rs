//! The configuration against the tensors.
//!
//! Every tensor that the forward pass reads must be there in the right shape, and none may be there that it does
//! not read: a forgotten bias or an extra norm would make a wrong model that runs.

use crate::files::ModelFiles;

use super::{ConfigError, ModelConfig};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A tensor that must be there.
struct Expected {
    name: String,
    shape: Vec<usize>,
    why: String,
}

/// Compares `config` with the tensors of `files`.
pub(super) fn check(config: &ModelConfig, files: &ModelFiles) -> Result<(), ConfigError> {
    let mut n_found = 0;
    for expected in globals(config) {
        expected.check(files)?;
        n_found += 1;
    }
    for layer in 0..config.n_layers {
        for expected in in_layer(config, layer) {
            expected.check(files)?;
            n_found += 1;
        }
    }
    check_head(config, files)?;
    // All expected tensors are there, so a difference in number means others are too.
    if n_found == files.n_tensors() { Ok(()) } else { refuse_unexpected(config, files) }
}

impl Expected {
    fn check(&self, files: &ModelFiles) -> Result<(), ConfigError> {
        let path = || files.path().to_path_buf();
        let (name, why) = (self.name.clone(), self.why.clone());
        match files.tensor(&self.name) {
            None => Err(ConfigError::MissingTensor { path: path(), name, why: format!("needed for {why}") }),
            Some(tensor) if tensor.shape != self.shape => Err(ConfigError::Shape {
                path: path(),
                name,
                found: tensor.shape.to_vec(),
                want: self.shape.clone(),
                why,
            }),
            Some(_) => Ok(()),
        }
    }
}

fn globals(config: &ModelConfig) -> Vec<Expected> {
    let rows = format!("vocabulary {} and hidden size {}", config.vocab_size, config.hidden);
    let matrix = |name: &str| Expected {
        name: name.to_owned(),
        shape: vec![config.vocab_size, config.hidden],
        why: rows.clone(),
    };
    let mut expected = vec![matrix(EMBEDDING)];
    expected.push(Expected {
        name: "model.norm.weight".to_owned(),
        shape: vec![config.hidden],
        why: format!("hidden size {}", config.hidden),
    });
    if !config.tied_head {
        let why = format!("{rows}, with a head that is not tied to the embedding");
        expected.push(Expected { why, ..matrix(HEAD) });
    }
    expected
}

fn in_layer(config: &ModelConfig, layer: usize) -> Vec<Expected> {
    let (hidden, ffn) = (config.hidden, config.ffn);
    let (q_width, kv_width) = (config.q_width(), config.kv_width());
    let q = format!("{} query heads of head_dim {}", config.n_q_heads, config.head_dim);
    let kv = format!("{} key-value heads of head_dim {}", config.n_kv_heads, config.head_dim);
    let h = format!("hidden size {hidden}");
    let f = format!("feed-forward size {ffn}");
    let of = |part: &str, shape: &[usize], why: String| Expected {
        name: format!("model.layers.{layer}.{part}"),
        shape: shape.to_vec(),
        why,
    };
    let mut expected = vec![
        of("input_layernorm.weight", &[hidden], h.clone()),
        of("self_attn.q_proj.weight", &[q_width, hidden], format!("{q} and {h}")),
        of("self_attn.k_proj.weight", &[kv_width, hidden], format!("{kv} and {h}")),
        of("self_attn.v_proj.weight", &[kv_width, hidden], format!("{kv} and {h}")),
        of("self_attn.o_proj.weight", &[hidden, q_width], format!("{h} and {q}")),
        of("post_attention_layernorm.weight", &[hidden], h.clone()),
        of("mlp.gate_proj.weight", &[ffn, hidden], format!("{f} and {h}")),
        of("mlp.up_proj.weight", &[ffn, hidden], format!("{f} and {h}")),
        of("mlp.down_proj.weight", &[hidden, ffn], format!("{h} and {f}")),
    ];
    if config.qkv_bias {
        expected.push(of("self_attn.q_proj.bias", &[q_width], q));
        expected.push(of("self_attn.k_proj.bias", &[kv_width], kv.clone()));
        expected.push(of("self_attn.v_proj.bias", &[kv_width], kv));
    }
    if config.o_bias {
        expected.push(of("self_attn.o_proj.bias", &[hidden], h));
    }
    expected
}

/// A model that says its head is tied may store the embedding twice, but not two different ones.
fn check_head(config: &ModelConfig, files: &ModelFiles) -> Result<(), ConfigError> {
    let (true, Some(head), Some(embedding)) = (config.tied_head, files.tensor(HEAD), files.tensor(EMBEDDING))
    else {
        return Ok(());
    };
    let same = head.ty == embedding.ty && head.shape == embedding.shape && head.bytes == embedding.bytes;
    if same { Ok(()) } else { Err(ConfigError::HeadNotTied { path: files.path().to_path_buf() }) }
}

fn refuse_unexpected(config: &ModelConfig, files: &ModelFiles) -> Result<(), ConfigError> {
    let known: std::collections::HashSet<String> = globals(config)
        .into_iter()
        .chain((0..config.n_layers).flat_map(|layer| in_layer(config, layer)))
        .map(|expected| expected.name)
        .collect();
    // Buffers that can be computed, a tied head, and the factors that the RoPE configuration holds.
    let harmless = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq") || name == HEAD || name == super::rope::FREQ_FACTORS
    };
    match files.tensors().find(|tensor| !known.contains(tensor.name) && !harmless(tensor.name)) {
        Some(tensor) => Err(ConfigError::UnexpectedTensor {
            path: files.path().to_path_buf(),
            name: tensor.name.to_owned(),
            architecture: config.architecture,
            n_layers: config.n_layers,
        }),
        None => Ok(()),
    }
}
