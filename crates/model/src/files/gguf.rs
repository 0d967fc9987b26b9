//! GGUF models in the common view: names and types translated.
//!
//! Rows of the query and key projections stay as they are. For the llama architecture GGUF stores them permuted
//! so that a pair of a head is two neighbours; the configuration says so (`RopeStyle::Interleaved`) and the
//! kernel turns neighbours, which costs nothing, where permuting back would copy the weights.

use std::{collections::BTreeMap, path::Path};

use longreach_gguf::{GgmlType, Gguf, Metadata, TensorInfo};
use longreach_kernels::StoredType;

use super::{ConfigSource, ModelFiles, OpenError, StoredTensor};

/// Names outside the layers.
const GLOBAL: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names inside a layer.
const IN_LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Opens the GGUF model that the file at `path` belongs to.
pub(super) fn open(path: &Path) -> Result<ModelFiles, OpenError> {
    let (metadata, infos, files) = Gguf::open(path)?.into_parts();
    let mut tensors = BTreeMap::new();
    for info in infos {
        let tensor = stored(&info, files[info.shard].path())?;
        tensors.insert(canonical_name(&info.name).unwrap_or(info.name), tensor);
    }
    Ok(ModelFiles { path: path.to_path_buf(), source: ConfigSource::Gguf(metadata), tensors, files })
}

/// The architecture that a GGUF file names.
pub(crate) fn architecture(metadata: &Metadata) -> Result<&str, longreach_gguf::GgufError> {
    let key = "general.architecture";
    metadata.str(key)?.ok_or_else(|| metadata.missing(key))
}

fn stored(info: &TensorInfo, path: &Path) -> Result<StoredTensor, OpenError> {
    let ty = stored_type(info.ty).ok_or_else(|| OpenError::TensorType {
        path: path.to_path_buf(),
        tensor: info.name.clone(),
        found: info.ty.name(),
    })?;
    Ok(StoredTensor { ty, shape: info.shape.clone(), file: info.shard, start: info.start, len: info.len })
}

/// The kernels' format of ggml's name and block.
fn stored_type(ty: GgmlType) -> Option<StoredType> {
    StoredType::ALL.into_iter().find(|stored| {
        let block = (stored.block_len() as u64, stored.block_bytes() as u64);
        stored.name() == ty.name() && block == (ty.block_len(), ty.block_bytes())
    })
}

/// `blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`; none for names without a counterpart.
fn canonical_name(name: &str) -> Option<String> {
    let (stem, kind) = name.rsplit_once('.')?;
    let find = |table: &[(&str, &'static str)], stem: &str| {
        table.iter().find(|(gguf, _)| *gguf == stem).map(|(_, canonical)| *canonical)
    };
    match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, stem)) => {
            let layer: usize = layer.parse().ok()?;
            find(&IN_LAYER, stem).map(|canonical| format!("model.layers.{layer}.{canonical}.{kind}"))
        }
        None => find(&GLOBAL, stem).map(|canonical| format!("{canonical}.{kind}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated_where_there_is_a_counterpart() {
        for (gguf, canonical) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("output.weight", Some("lm_head.weight")),
            ("output_norm.weight", Some("model.norm.weight")),
            ("blk.12.attn_q.bias", Some("model.layers.12.self_attn.q_proj.bias")),
            ("blk.0.ffn_norm.weight", Some("model.layers.0.post_attention_layernorm.weight")),
            ("rope_freqs.weight", None),
            ("blk.x.attn_q.weight", None),
            ("blk.0.ffn_gate_exps.weight", None),
        ] {
            assert_eq!(canonical_name(gguf).as_deref(), canonical, "{gguf}");
        }
    }

    #[test]
    fn every_format_of_the_kernels_has_a_ggml_type_of_the_same_layout() {
        for stored in StoredType::ALL {
            assert_eq!(GgmlType::from_name(stored.name()).and_then(stored_type), Some(stored));
        }
        assert_eq!(GgmlType::from_name("IQ2_XS").and_then(stored_type), None);
    }
}
