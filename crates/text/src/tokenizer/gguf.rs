//! Building a tokenizer from the vocabulary inside a GGUF file.
//!
//! The file names its pre-tokenizer instead of spelling it out, and for SentencePiece it gives scores instead
//! of merges. Both become what the same model's tokenizer.json has, so that ids are equal to those.

use std::collections::HashMap;

use longreach_gguf::{GgufTokenizer, TokenType};
use longreach_types::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::pieces::{PieceRule, byte_of_escape};
use super::{DecodeRule, Lead, Parts, SpecialTokens, Tokenizer, guarded};
use crate::TextError;

/// Words of GPT-2: a contraction, or letters, or digits, or other characters, each with a space before; spaces.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const SINGLE_DIGITS: &str = r"\p{N}";
const THREE_DIGITS: &str = r"\p{N}{1,3}";
/// Words of cl100k, as Llama 3 spells it: numbers by up to three digits, punctuation with line ends.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with combining marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of o200k: a capital begins a new word.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same without contractions and with single digits.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3_CJK: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const DEEPSEEK_V3_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// One kind of byte-level BPE.
struct ByteLevelKind {
    /// What `tokenizer.ggml.pre` calls it.
    names: &'static [&'static str],
    /// How text is cut into words: at each match of each pattern in turn.
    cuts: &'static [&'static str],
    /// Whether text is brought into Unicode's composed form first.
    nfc: bool,
    /// Whether a word that is a token is that token, whatever the merges say. These are also the models
    /// whose texts begin with a beginning-of-text token when the file does not say.
    whole_words: bool,
}

const BYTE_LEVEL: [ByteLevelKind; 10] = [
    kind(&["default", "gpt-2", "gpt2", "mpt", "olmo", "jais"], &[GPT2]),
    kind(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        &[SINGLE_DIGITS, GPT2],
    ),
    kind(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    kind(&["deepseek-coder"], &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", SINGLE_DIGITS]),
    kind(&["deepseek-v3"], &[THREE_DIGITS, DEEPSEEK_V3_CJK, DEEPSEEK_V3_WORDS]),
    kind(&["gpt-4o", "llama4"], &[O200K]),
    ByteLevelKind { nfc: true, ..kind(&["qwen2", "deepseek-r1-qwen"], &[QWEN2]) },
    kind(&["qwen35"], &[QWEN35]),
    ByteLevelKind { whole_words: true, ..kind(&["llama-bpe", "llama3", "llama-v3"], &[LLAMA3]) },
    ByteLevelKind { whole_words: true, ..kind(&["tekken"], &[TEKKEN]) },
];

const fn kind(names: &'static [&'static str], cuts: &'static [&'static str]) -> ByteLevelKind {
    ByteLevelKind { names, cuts, nfc: false, whole_words: false }
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file carries.
    pub fn from_gguf(gguf: &GgufTokenizer) -> Result<Self, TextError> {
        let parts = match gguf.model.as_str() {
            "gpt2" => byte_level(gguf)?,
            "llama" => sentence_piece(gguf)?,
            _ => {
                return Err(TextError::Unsupported {
                    what: "tokenizer model",
                    given: gguf.model.clone(),
                    supported: "gpt2, llama".to_owned(),
                });
            }
        };
        Self::from_parts(parts)
    }
}

fn byte_level(gguf: &GgufTokenizer) -> Result<Parts, TextError> {
    let name = gguf.pre.as_deref().unwrap_or("default");
    let Some(kind) = BYTE_LEVEL.iter().find(|kind| kind.names.contains(&name)) else {
        let names: Vec<&str> = BYTE_LEVEL.iter().flat_map(|kind| kind.names).copied().collect();
        return Err(TextError::Unsupported {
            what: "pre-tokenizer",
            given: name.to_owned(),
            supported: names.join(", "),
        });
    };
    let pieces = spellings(gguf)?;
    let merges = gguf.merges.iter().map(|merge| split_merge(merge)).collect::<Result<Vec<_>, _>>()?;
    let mut engine = guarded("load", || {
        let bpe = BPE::builder().vocab_and_merges(vocab_of(&pieces), merges).ignore_merges(kind.whole_words);
        let mut engine = tokenizers::Tokenizer::new(bpe.build()?);
        engine.with_normalizer(kind.nfc.then_some(NFC))?;
        engine.with_pre_tokenizer(Some(kind.pre_tokenizer()?));
        engine.with_decoder(Some(ByteLevel::default()));
        Ok(engine)
    })?;
    add_tokens(gguf, &pieces, &mut engine)?;
    let rule = DecodeRule::Bytes(PieceRule::ByteLevel, Lead::Keep);
    Ok(Parts { engine, rule, special: special_tokens(gguf, kind.whole_words) })
}

impl ByteLevelKind {
    fn pre_tokenizer(&self) -> tokenizers::Result<Sequence> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for &cut in self.cuts {
            let pattern = SplitPattern::Regex(cut.to_owned());
            steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        steps.push(ByteLevel::new(false, true, false).into());
        Ok(Sequence::new(steps))
    }
}

fn sentence_piece(gguf: &GgufTokenizer) -> Result<Parts, TextError> {
    let Some(scores) = &gguf.scores else {
        let reason = "tokenizer.ggml.scores is missing; a llama tokenizer needs it".to_owned();
        return Err(TextError::Tokenizer { operation: "load", reason });
    };
    let pieces = spellings(gguf)?;
    let merges = merges_of_scores(gguf, &pieces, scores);
    let has_bytes =
        (0..=0xff_u8).all(|byte| gguf.tokens.iter().any(|t| *t == format!("<0x{byte:02X}>").as_bytes()));
    let add_space = gguf.add_space_prefix.unwrap_or(true);
    let mut engine = guarded("load", || {
        let mut bpe = BPE::builder()
            .vocab_and_merges(vocab_of(&pieces), merges)
            .fuse_unk(true)
            .byte_fallback(has_bytes);
        if let Some(unk) = gguf.unk {
            bpe = bpe.unk_token(pieces[unk as usize].clone());
        }
        let mut engine = tokenizers::Tokenizer::new(bpe.build()?);
        let mut steps: Vec<NormalizerWrapper> = vec![Replace::new(" ", "▁")?.into()];
        if add_space {
            steps.insert(0, Prepend::new("▁".to_owned()).into());
        }
        engine.with_normalizer(Some(Normalizers::new(steps)))?;
        Ok(engine)
    })?;
    add_tokens(gguf, &pieces, &mut engine)?;
    let lead = if add_space { Lead::DropSpaces(1) } else { Lead::Keep };
    Ok(Parts { engine, rule: DecodeRule::sentence_piece(lead), special: special_tokens(gguf, true) })
}

/// The spelling of each token. A spelling that occurs again, and bytes that are not UTF-8, cannot be looked
/// up by text; they get a spelling that no text has, and keep their id.
fn spellings(gguf: &GgufTokenizer) -> Result<Vec<String>, TextError> {
    let mut seen = std::collections::HashSet::new();
    let mut pieces = Vec::with_capacity(gguf.tokens.len());
    for (id, bytes) in gguf.tokens.iter().enumerate() {
        let piece = match std::str::from_utf8(bytes) {
            Ok(piece) if !piece.is_empty() && seen.insert(piece) => piece.to_owned(),
            _ => format!("\u{fdd0}{id}\u{fdd1}"),
        };
        pieces.push(piece);
    }
    Ok(pieces)
}

fn vocab_of(pieces: &[String]) -> Vocab {
    pieces.iter().cloned().zip(0..).collect()
}

fn split_merge(merge: &[u8]) -> Result<(String, String), TextError> {
    let pair = std::str::from_utf8(merge).ok().and_then(|text| text.split_once(' '));
    let pair = pair.filter(|(left, right)| !left.is_empty() && !right.is_empty());
    let (left, right) = pair.ok_or_else(|| TextError::Tokenizer {
        operation: "load",
        reason: format!(
            "the merge {:?} is not two pieces with a space between",
            String::from_utf8_lossy(merge)
        ),
    })?;
    Ok((left.to_owned(), right.to_owned()))
}

/// SentencePiece joins the pair whose joint piece has the highest score. As a list of merges that is: every
/// way to cut each piece in two pieces, best score first; equal scores, longer left part first.
fn merges_of_scores(gguf: &GgufTokenizer, pieces: &[String], scores: &[f32]) -> Vec<(String, String)> {
    let takes_part =
        |ty: TokenType| matches!(ty, TokenType::Normal | TokenType::UserDefined | TokenType::Undefined);
    let parts: HashMap<&str, f32> = pieces
        .iter()
        .zip(scores)
        .zip(&gguf.types)
        .filter(|((piece, _), ty)| takes_part(**ty) && byte_of_escape(piece).is_none())
        .map(|((piece, &score), _)| (piece.as_str(), score))
        .collect();
    let mut merges = Vec::new();
    for piece in pieces {
        let Some(&score) = parts.get(piece.as_str()) else { continue };
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if parts.contains_key(left) && parts.contains_key(right) {
                merges.push((score, left, right));
            }
        }
    }
    let chars = |text: &str| text.chars().count();
    merges.sort_by(|a, b| {
        let lengths = (chars(b.1), chars(b.2)).cmp(&(chars(a.1), chars(a.2)));
        b.0.total_cmp(&a.0).then(lengths)
    });
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

/// Control tokens are found in templates, tokens that a user added are found in any text.
fn add_tokens(
    gguf: &GgufTokenizer,
    pieces: &[String],
    engine: &mut tokenizers::Tokenizer,
) -> Result<(), TextError> {
    let added = pieces.iter().zip(&gguf.types).filter_map(|(piece, ty)| {
        let special = matches!(ty, TokenType::Control | TokenType::Unknown);
        let added = special || *ty == TokenType::UserDefined;
        added.then(|| AddedToken::from(piece.clone(), special).normalized(false))
    });
    let added: Vec<AddedToken> = added.collect();
    guarded("load", || engine.add_tokens(added).map(|_| ()))
}

fn special_tokens(gguf: &GgufTokenizer, adds_bos: bool) -> SpecialTokens {
    let bos = gguf.bos.map(TokenId);
    let mut stop: Vec<TokenId> = [gguf.eos, gguf.eot, gguf.eom].into_iter().flatten().map(TokenId).collect();
    stop.sort_unstable();
    stop.dedup();
    let prefix = bos.filter(|_| gguf.add_bos.unwrap_or(adds_bos)).into_iter().collect();
    let id = |id: Option<u32>| id.map(TokenId);
    SpecialTokens { prefix, bos, stop, eos: id(gguf.eos), unk: id(gguf.unk), pad: id(gguf.pad) }
}
