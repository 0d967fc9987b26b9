//! The tokenizer that a GGUF file carries, as plain data.
//!
//! Only what the file says, with the arrays checked against each other. How text becomes tokens is the text
//! crate's business.

use crate::{
    error::{GgufError, Problem},
    metadata::Metadata,
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

/// The tokenizer keys of a file. Token ids are indices into `tokens`, and known to be inside.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE), `llama` (SentencePiece), …
    pub model: String,
    /// `tokenizer.ggml.pre`: which pre-tokenizer a `gpt2` model uses.
    pub pre: Option<String>,
    /// The vocabulary; not always UTF-8.
    pub tokens: Vec<Vec<u8>>,
    /// What each token is; as long as `tokens`. All normal when the file does not say.
    pub types: Vec<TokenType>,
    /// Score of each token, when given as long as `tokens`.
    pub scores: Option<Vec<f32>>,
    /// BPE merges, best first: two pieces with a space between.
    pub merges: Vec<Vec<u8>>,
    /// Beginning of a text.
    pub bos: Option<u32>,
    /// End of a text.
    pub eos: Option<u32>,
    /// End of a turn.
    pub eot: Option<u32>,
    /// End of a message that a tool will answer.
    pub eom: Option<u32>,
    /// Stands for what the vocabulary lacks.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether a text begins with `bos`, when the file says.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`, when the file says.
    pub add_eos: Option<bool>,
    /// Whether a space is put before the text (SentencePiece), when the file says.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// No statement.
    Undefined,
    /// Text.
    Normal,
    /// The unknown token.
    Unknown,
    /// Controls the model, stands for no text.
    Control,
    /// Added to the vocabulary by its user.
    UserDefined,
    /// A hole in the vocabulary.
    Unused,
    /// A single byte.
    Byte,
}

impl TokenType {
    fn from_number(number: i64) -> Option<Self> {
        Some(match number {
            0 => Self::Undefined,
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

impl GgufTokenizer {
    /// Reads the tokenizer of a file; `None` when it has no vocabulary.
    pub fn read(metadata: &Metadata) -> Result<Option<Self>, GgufError> {
        let Some(tokens) = metadata.strings(TOKENS)? else { return Ok(None) };
        let n_tokens = tokens.len();
        let id = |name: &str| token_id(metadata, name, n_tokens);
        let text = |key: &str| Ok::<_, GgufError>(metadata.str(key)?.map(str::to_owned));
        let model_key = "tokenizer.ggml.model";
        Ok(Some(Self {
            pre: text("tokenizer.ggml.pre")?,
            types: types(metadata, n_tokens)?,
            scores: scores(metadata, n_tokens)?,
            merges: to_owned(metadata.strings("tokenizer.ggml.merges")?.unwrap_or_default()),
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?,
            pad: id("padding")?,
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
            chat_template: text("tokenizer.chat_template")?,
            tokens: to_owned(tokens),
            model: text(model_key)?.ok_or_else(|| metadata.missing(model_key))?,
        }))
    }
}

fn to_owned(strings: Vec<&[u8]>) -> Vec<Vec<u8>> {
    strings.into_iter().map(<[u8]>::to_vec).collect()
}

fn types(metadata: &Metadata, n_tokens: usize) -> Result<Vec<TokenType>, GgufError> {
    let Some(numbers) = metadata.ints(TYPES)? else { return Ok(vec![TokenType::Normal; n_tokens]) };
    check_len(metadata, TYPES, numbers.len(), n_tokens)?;
    let convert = |number| {
        TokenType::from_number(number)
            .ok_or_else(|| metadata.error(TYPES, Problem::range(number, "token types 0 to 6")))
    };
    numbers.into_iter().map(convert).collect()
}

fn scores(metadata: &Metadata, n_tokens: usize) -> Result<Option<Vec<f32>>, GgufError> {
    let Some(scores) = metadata.floats(SCORES)? else { return Ok(None) };
    check_len(metadata, SCORES, scores.len(), n_tokens)?;
    Ok(Some(scores.into_iter().map(|score| score as f32).collect()))
}

fn check_len(metadata: &Metadata, key: &str, len: usize, want: usize) -> Result<(), GgufError> {
    if len == want { Ok(()) } else { Err(metadata.error(key, Problem::Length { len, want })) }
}

fn token_id(metadata: &Metadata, name: &str, n_tokens: usize) -> Result<Option<u32>, GgufError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(id) = metadata.uint(&key)? else { return Ok(None) };
    match u32::try_from(id) {
        Ok(id) if (id as usize) < n_tokens => Ok(Some(id)),
        _ => Err(metadata.error(&key, Problem::range(id, format!("below the {n_tokens} tokens")))),
    }
}
