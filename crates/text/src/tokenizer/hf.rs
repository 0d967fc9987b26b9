//! Loading a tokenizer from the files that Hugging Face repositories hold.

use std::io::ErrorKind;
use std::path::Path;

use longreach_types::TokenId;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::{DecodeRule, Parts, SpecialTokens, Tokenizer, guarded};
use crate::TextError;

/// Tokenizer classes whose `add_bos_token` rules over what tokenizer.json says, as their code rebuilds it.
const REBUILT_CLASSES: [&str; 4] =
    ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"];

/// The parts of tokenizer.json that we read ourselves.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    decoder: Option<Value>,
    #[serde(default)]
    model: UnknownToken,
}

/// How a model names its token for what it lacks: by spelling or, in Unigram models, by id.
#[derive(Default, Deserialize)]
#[serde(default)]
struct UnknownToken {
    unk_token: Option<String>,
    unk_id: Option<u32>,
}

/// tokenizer_config.json, and special_tokens_map.json, which repeats some of its keys.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct TokenizerConfig {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    unk_token: Option<TokenName>,
    pad_token: Option<TokenName>,
    additional_special_tokens: Option<Vec<TokenName>>,
    add_bos_token: Option<bool>,
    tokenizer_class: Option<String>,
    /// A template, or a list of named ones.
    pub(crate) chat_template: Option<Value>,
}

/// A token by its spelling, alone or in an object with flags.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TokenName {
    Plain(String),
    Object { content: String },
}

/// The token ids in generation_config.json and config.json.
#[derive(Debug, Default, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl Tokenizer {
    /// Loads the tokenizer of a model directory.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let config = TokenizerConfig::load(dir)?;
        Self::from_dir_with(dir, &config)
    }

    pub(crate) fn from_dir_with(dir: &Path, config: &TokenizerConfig) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let json = std::fs::read(&path).map_err(|source| TextError::Io { path: path.clone(), source })?;
        let special = SpecialTokens { stop: stop_tokens(dir)?, ..SpecialTokens::default() };
        let tokenizer = read_parts(&json, config, special).and_then(Self::from_parts);
        tokenizer.map_err(|error| TextError::Invalid { path, reason: error.to_string() })
    }
}

fn read_parts(json: &[u8], config: &TokenizerConfig, special: SpecialTokens) -> Result<Parts, TextError> {
    let file: TokenizerFile = guarded("load", || Ok(serde_json::from_slice(json)?))?;
    let mut engine = guarded("load", || tokenizers::Tokenizer::from_bytes(json))?;
    guarded("drop its truncation", || engine.with_truncation(None).map(|_| ()))?;
    engine.with_padding(None);
    guarded("mark its control tokens", || add_named_tokens(config, &mut engine))?;
    let special = special_tokens(special, &file.model, config, &engine)?;
    Ok(Parts { engine, rule: DecodeRule::from_json(file.decoder.as_ref()), special })
}

impl TokenizerConfig {
    /// Reads tokenizer_config.json, completed from special_tokens_map.json; either may be absent.
    pub(crate) fn load(dir: &Path) -> Result<Self, TextError> {
        let config: Self = read_json(&dir.join("tokenizer_config.json"))?;
        let map: Self = read_json(&dir.join("special_tokens_map.json"))?;
        Ok(Self {
            bos_token: config.bos_token.or(map.bos_token),
            eos_token: config.eos_token.or(map.eos_token),
            unk_token: config.unk_token.or(map.unk_token),
            pad_token: config.pad_token.or(map.pad_token),
            additional_special_tokens: config.additional_special_tokens.or(map.additional_special_tokens),
            ..config
        })
    }

    fn rebuilds_prefix(&self) -> bool {
        let class = self.tokenizer_class.as_deref().unwrap_or_default();
        REBUILT_CLASSES.contains(&class.strip_suffix("Fast").unwrap_or(class))
    }
}

impl TokenName {
    fn spelling(&self) -> &str {
        match self {
            Self::Plain(content) | Self::Object { content } => content,
        }
    }
}

impl OneOrMany {
    fn into_tokens(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![TokenId(id)],
            Self::Many(ids) => ids.into_iter().map(TokenId).collect(),
        }
    }
}

/// The reference makes control tokens of all that these files name, whatever tokenizer.json says of them.
fn add_named_tokens(config: &TokenizerConfig, engine: &mut tokenizers::Tokenizer) -> tokenizers::Result<()> {
    let named = [&config.bos_token, &config.eos_token, &config.pad_token].into_iter().flatten();
    let names = named.chain(config.additional_special_tokens.iter().flatten()).map(TokenName::spelling);
    let known: Vec<&str> = names.filter(|name| engine.token_to_id(name).is_some()).collect();
    let added = engine.get_added_tokens_decoder();
    let missing =
        known.into_iter().filter(|name| !added.values().any(|token| token.special && token.content == *name));
    let words = missing.filter(|name| name.trim().chars().nth(1).is_some());
    let flags = |name: &str| added.values().find(|token| token.content == name).cloned();
    let tokens = words.map(|name| flags(name).unwrap_or_else(|| AddedToken::from(name, true)).special(true));
    let tokens: Vec<AddedToken> = tokens.collect();
    engine.add_special_tokens(tokens).map(|_| ())
}

/// The end tokens that generation_config.json lists and those that config.json does, as workers read them too.
fn stop_tokens(dir: &Path) -> Result<Vec<TokenId>, TextError> {
    let mut tokens = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let generation: GenerationConfig = read_json(&dir.join(name))?;
        tokens.extend(generation.eos_token_id.into_iter().flat_map(|ids| ids.into_tokens()));
    }
    Ok(tokens)
}

/// Completes `special` with what the tokenizer's own files say.
fn special_tokens(
    special: SpecialTokens,
    model: &UnknownToken,
    config: &TokenizerConfig,
    engine: &tokenizers::Tokenizer,
) -> Result<SpecialTokens, TextError> {
    let id = |name: &Option<TokenName>| engine.token_to_id(name.as_ref()?.spelling()).map(TokenId);
    let (bos, eos) = (id(&config.bos_token), id(&config.eos_token));
    let mut stop: Vec<TokenId> = special.stop.into_iter().chain(eos).collect();
    stop.sort_unstable();
    stop.dedup();
    let mut prefix = guarded("encode", || prefix_of(engine))?;
    if let (Some(add), Some(bos)) = (config.add_bos_token.filter(|_| config.rebuilds_prefix()), bos) {
        prefix = if add { vec![bos] } else { Vec::new() };
    }
    let spelled = |spelling: &String| engine.token_to_id(spelling);
    let unk = model.unk_token.as_ref().and_then(spelled).or(model.unk_id).map(TokenId);
    let unk = unk.or_else(|| id(&config.unk_token));
    Ok(SpecialTokens { prefix, bos, stop, eos, unk, pad: id(&config.pad_token) })
}

/// What the post-processor puts before a text. What it puts behind is left out: it would end the text that
/// the model is asked to continue.
fn prefix_of(engine: &tokenizers::Tokenizer) -> tokenizers::Result<Vec<TokenId>> {
    let framed = engine.encode("a", true)?;
    let bare = engine.encode("a", false)?;
    let (framed, bare) = (framed.get_ids(), bare.get_ids());
    let at = framed.windows(bare.len().max(1)).position(|window| window == bare).unwrap_or(0);
    Ok(framed[..at].iter().copied().map(TokenId).collect())
}

/// Reads a JSON file; an absent file reads as the default.
pub(crate) fn read_json<T: Default + for<'de> Deserialize<'de>>(path: &Path) -> Result<T, TextError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(T::default()),
        Err(source) => return Err(TextError::Io { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| TextError::Invalid { path: path.to_owned(), reason: error.to_string() })
}
