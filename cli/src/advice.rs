//! Which sampling the makers of a model advise, for requests that leave it open.

use longreach_model::files::{ConfigSource, ModelFiles};
use longreach_router::SamplingDefaults;
use serde_json::Value;

/// What the card of SmolLM2-135M-Instruct advises. The file that most people get is GGUF, which has no place for it,
/// and at temperature 1 so small a model loses its thread within a sentence.
const SMOLLM2: (&str, SamplingDefaults) = (
    "SmolLM2-135M-Instruct",
    SamplingDefaults {
        temperature: Some(0.2),
        top_k: None,
        top_p: Some(0.9),
        min_p: None,
        repetition_penalty: None,
    },
);

/// The advice of `generation_config.json`, or what is known of the model of that name.
pub(crate) fn sampling(name: &str, files: &ModelFiles) -> SamplingDefaults {
    match files.config_source() {
        ConfigSource::Json { generation: Some(generation), .. } => from_generation_config(generation),
        _ if name == SMOLLM2.0 => SMOLLM2.1,
        _ => SamplingDefaults::default(),
    }
}

/// Values that a request could not ask for are not advice, but mistakes; they are left out.
fn from_generation_config(generation: &Value) -> SamplingDefaults {
    let number = |key: &str, low: f64, high: f64| {
        let value = generation.get(key).and_then(Value::as_f64);
        value.filter(|value| (low..=high).contains(value)).map(|value| value as f32)
    };
    let top_k = generation.get("top_k").and_then(Value::as_u64);
    SamplingDefaults {
        temperature: number("temperature", 0.0, 100.0),
        top_k: top_k.and_then(|k| u32::try_from(k).ok()),
        top_p: number("top_p", 0.0, 1.0),
        min_p: number("min_p", 0.0, 1.0),
        repetition_penalty: number("repetition_penalty", 0.01, 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_taken_where_it_makes_sense() {
        let generation =
            serde_json::json!({"temperature": 0.7, "top_k": 20, "top_p": 1.5, "eos_token_id": 2});
        let want =
            SamplingDefaults { temperature: Some(0.7), top_k: Some(20), ..SamplingDefaults::default() };
        assert_eq!(from_generation_config(&generation), want);
    }
}
