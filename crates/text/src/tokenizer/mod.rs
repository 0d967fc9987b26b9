//! Text to token ids and back.
//!
//! The merging itself is the `tokenizers` crate's, so that ids equal those of the reference whatever the file
//! asks for. What is ours: control tokens come from a chat template only, never from what a user wrote;
//! panics of the library end a request, not the process; prompts are never cut short by a truncation that a
//! file asks for; and the tokens' bytes are laid out for streaming.
//!
//! Encoding is synchronous and linear in the text, some 2 to 10 MB/s. A caller on an async thread moves long
//! prompts elsewhere.

mod controls;
mod gguf;
mod guard;
mod hf;
mod pieces;
mod vocabulary;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use longreach_types::TokenId;
use tokenizers::tokenizer::{AddedVocabulary, Model, OffsetType, PreTokenizer};
use tokenizers::{AddedToken, Encoding};

use crate::TextError;
use crate::chat::Rendered;
use controls::{ControlMatch, Controls};
use guard::guarded;
use vocabulary::{Entry, TokenKind, Vocabulary};

pub(crate) use hf::TokenizerConfig;
pub(crate) use pieces::{DecodeRule, Lead};

/// The largest vocabulary: beyond it a file's ids are taken for damage, not for a table to allocate.
const MAX_VOCAB_SIZE: usize = 1 << 24;
/// Text with what real prompts have, to find out at load what would fail later.
const PROBE: &str = "Hello, wörld 42!\n\n  <x>\t日本 👋🏽 it's";

/// Whether control tokens are looked for in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// The spelling of a control token is ordinary text. For everything that a user wrote.
    Literal,
    /// The spelling of a control token is that token. For text that the operator trusts.
    Parse,
}

/// A tokenizer. Cheap to clone and to share between threads.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    engine: tokenizers::Tokenizer,
    /// The added tokens without the control tokens, and with the boundary token.
    literal: AddedVocabulary,
    /// Put before a text that does not open the prompt, and taken off its ids again: some tokenizers treat
    /// the start of a text unlike the text after a control token.
    boundary: String,
    controls: Controls,
    vocabulary: Vocabulary,
    rule: DecodeRule,
    special: SpecialTokens,
}

/// The tokens that frame texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Tokens that the tokenizer puts before every text: usually the beginning-of-text token, or nothing.
    pub prefix: Vec<TokenId>,
    /// Beginning of a text, as templates call it.
    pub bos: Option<TokenId>,
    /// Tokens that end an output, ascending.
    pub stop: Vec<TokenId>,
    /// End of a text, as templates call it.
    pub eos: Option<TokenId>,
    /// Stands for what the vocabulary cannot spell.
    pub unk: Option<TokenId>,
    /// Padding, as templates call it.
    pub pad: Option<TokenId>,
}

/// What a loader has found, before it becomes a [`Tokenizer`].
struct Parts {
    engine: tokenizers::Tokenizer,
    rule: DecodeRule,
    special: SpecialTokens,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.vocab_size();
        f.debug_struct("Tokenizer")
            .field("vocab_size", &size)
            .field("special", self.special())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    fn from_parts(parts: Parts) -> Result<Self, TextError> {
        let Parts { mut engine, rule, special } = parts;
        guarded("drop its truncation", || engine.with_truncation(None).map(|_| ()))?;
        engine.with_padding(None);
        engine.set_encode_special_tokens(false);
        guarded("mark its control tokens", || mark_control_tokens(&mut engine, &special))?;
        let added = engine.get_added_tokens_decoder();
        let mut controls: Vec<(TokenId, AddedToken)> = added
            .into_iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| (TokenId(id), token))
            .collect();
        controls.sort_unstable_by_key(|(id, _)| *id);
        let vocabulary = vocabulary_of(&engine, &rule, &controls)?;
        let boundary = boundary_spelling();
        let literal = guarded("add a token", || literal_vocabulary(&engine, &boundary))?;
        let controls = Controls::new(controls)?;
        let inner = Inner { engine, literal, boundary, controls, vocabulary, rule, special };
        let tokenizer = Self { inner: Arc::new(inner) };
        tokenizer.probe()?;
        Ok(tokenizer)
    }

    /// The ids of a text, without any beginning-of-text token.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<TokenId>, TextError> {
        match specials {
            Specials::Literal => self.encode_literal(text),
            Specials::Parse => {
                let added = self.inner.engine.get_added_vocabulary();
                Ok(token_ids(&self.inner.run(added, text, OffsetType::None)?))
            }
        }
    }

    /// The ids of a rendered conversation. Control tokens that stand in the template become ids; the spelling
    /// of a control token in what a user wrote stays text.
    ///
    /// When there is no such spelling, the whole text goes through the library in one piece, as in the
    /// reference. Otherwise the text is cut at the template's control tokens and each stretch between two of
    /// them is encoded with control tokens off: neither way is a word ever cut at the border between
    /// template and content.
    pub(crate) fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<TokenId>, TextError> {
        let text = rendered.text();
        let controls = self.inner.controls.find(text, |start, end| rendered.is_forged(start, end));
        let added = self.inner.engine.get_added_vocabulary();
        let offsets = if rendered.has_marks() { OffsetType::Byte } else { OffsetType::None };
        let encoding = self.inner.run(added, text, offsets)?;
        let ids = token_ids(&encoding);
        let in_template = controls.iter().map(|control| control.token);
        let as_expected = ids.iter().copied().filter(|&token| self.is_structure(token)).eq(in_template);
        let forged = |(&token, &(start, end)): (&TokenId, &(usize, usize))| {
            let (start, end) = trimmed(text, start, end);
            self.is_structure(token) && rendered.is_forged(start, end)
        };
        if as_expected && !(rendered.has_marks() && ids.iter().zip(encoding.get_offsets()).any(forged)) {
            return Ok(ids);
        }
        self.encode_around(text, &controls)
    }

    fn encode_around(&self, text: &str, controls: &[ControlMatch]) -> Result<Vec<TokenId>, TextError> {
        let mut ids = Vec::new();
        let mut from = 0;
        for control in controls {
            ids.extend(self.encode_stretch(&text[from..control.start], from == 0)?);
            ids.push(control.token);
            from = control.end;
        }
        ids.extend(self.encode_stretch(&text[from..], from == 0)?);
        Ok(ids)
    }

    /// Encodes text between two control tokens.
    fn encode_stretch(&self, text: &str, opens_prompt: bool) -> Result<Vec<TokenId>, TextError> {
        if text.is_empty() || opens_prompt {
            return self.encode_literal(text);
        }
        let behind = format!("{}{text}", self.inner.boundary);
        let encoding = self.inner.run(&self.inner.literal, &behind, OffsetType::Byte)?;
        self.without_controls(&behind, &encoding, 1)
    }

    fn encode_literal(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let ids = token_ids(&self.inner.run(&self.inner.literal, text, OffsetType::None)?);
        if !ids.iter().any(|&token| self.is_structure(token)) {
            return Ok(ids);
        }
        let encoding = self.inner.run(&self.inner.literal, text, OffsetType::Byte)?;
        self.without_controls(text, &encoding, 0)
    }

    /// The ids of an encoding from `skip` on. A model may still build a control token out of ordinary text;
    /// that piece of text is then encoded in two halves.
    fn without_controls(
        &self,
        text: &str,
        encoding: &Encoding,
        skip: usize,
    ) -> Result<Vec<TokenId>, TextError> {
        let mut ids = Vec::with_capacity(encoding.len());
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()).skip(skip) {
            let token = TokenId(id);
            if !self.is_structure(token) {
                ids.push(token);
                continue;
            }
            let piece = text.get(start..end).unwrap_or_default();
            let middle = piece.char_indices().nth(piece.chars().count() / 2).map_or(0, |(at, _)| at);
            if middle == 0 {
                let reason = format!("{piece:?} exists in the vocabulary as a control token only");
                return Err(TextError::request("text", reason));
            }
            ids.extend(self.encode_stretch(&piece[..middle], false)?);
            ids.extend(self.encode_stretch(&piece[middle..], false)?);
        }
        Ok(ids)
    }

    /// Whether a token must not come from a user's text. The unknown token may: it is what the vocabulary
    /// has for a character that it lacks.
    fn is_structure(&self, token: TokenId) -> bool {
        self.is_control(token) && self.inner.special.unk != Some(token)
    }

    /// The control tokens of a rendered conversation, in order, those that are not a user's.
    pub(crate) fn controls_in(&self, rendered: &Rendered) -> Vec<TokenId> {
        let found = self.inner.controls.find(rendered.text(), |start, end| rendered.is_forged(start, end));
        found.into_iter().map(|control| control.token).collect()
    }

    /// The text of tokens that stand alone. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        for &token in tokens {
            self.token_bytes(token)?;
        }
        let DecodeRule::Bytes(_, lead) = self.inner.rule else {
            return self.decode_by_library(tokens, skip_special);
        };
        let mut bytes = Vec::new();
        let mut lead = LeadState::new(lead);
        for &token in tokens.iter().filter(|&&token| !(skip_special && self.is_control(token))) {
            lead.append(self.token_bytes(token)?, &mut bytes);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn decode_by_library(&self, tokens: &[TokenId], skip: bool) -> Result<String, TextError> {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        guarded("decode", || self.inner.engine.decode(&ids, skip))
    }

    pub(crate) fn rule(&self) -> &DecodeRule {
        &self.inner.rule
    }

    pub(crate) fn control_spellings(&self) -> impl Iterator<Item = &str> {
        self.inner.controls.spellings()
    }

    /// Number of token ids: the first id that does not exist.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocabulary.len()
    }

    /// The tokens that frame texts.
    pub fn special(&self) -> &SpecialTokens {
        &self.inner.special
    }

    /// Whether a token is structure and stands for no text.
    pub fn is_control(&self, token: TokenId) -> bool {
        self.inner.vocabulary.kind(token) == TokenKind::Control
    }

    /// The control token with this spelling.
    pub fn control_token(&self, spelling: &str) -> Option<TokenId> {
        self.inner.controls.spelled(spelling)
    }

    /// What a token adds to a text; the spelling of a control token. Not always whole characters.
    pub fn token_bytes(&self, token: TokenId) -> Result<&[u8], TextError> {
        let bytes = self.inner.vocabulary.bytes(token);
        bytes.ok_or(TextError::UnknownToken { token, vocab_size: self.vocab_size() })
    }

    /// The text of a token for a table of log-probabilities; a part of a character becomes U+FFFD.
    pub fn token_text(&self, token: TokenId) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(self.token_bytes(token)?).into_owned())
    }

    /// Puts the tokenizer's own prefix before the ids of a prompt, unless the prompt has it already: when
    /// the tokenizer or the template or both ask for a beginning-of-text token, there is exactly one.
    pub(crate) fn with_prefix(&self, ids: Vec<TokenId>) -> Vec<TokenId> {
        let prefix = &self.inner.special.prefix;
        if prefix.is_empty() || ids.starts_with(prefix) { ids } else { [prefix.as_slice(), &ids].concat() }
    }

    fn probe(&self) -> Result<(), TextError> {
        for specials in [Specials::Literal, Specials::Parse] {
            let ids = self.encode(PROBE, specials)?;
            self.decode(&ids, true)?;
            if ids.is_empty() {
                let reason = "its vocabulary has nothing for any text".to_owned();
                return Err(TextError::Tokenizer { operation: "encode", reason });
            }
        }
        self.encode_stretch(PROBE, false).map(|_| ())
    }
}

impl Inner {
    /// The pipeline of the library with the added tokens of our choice.
    fn run(&self, added: &AddedVocabulary, text: &str, offsets: OffsetType) -> Result<Encoding, TextError> {
        guarded("encode", || {
            let mut pieces = added.extract_and_normalize(self.engine.get_normalizer(), text);
            if let Some(pre_tokenizer) = self.engine.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            let model = self.engine.get_model();
            pieces.tokenize(|piece| model.tokenize(piece.get()))?;
            pieces.into_encoding(None, 0, offsets)
        })
    }
}

/// Takes the spaces off the start of a text that arrives token by token.
#[derive(Clone, Debug)]
pub(crate) struct LeadState {
    lead: Lead,
}

impl LeadState {
    pub(crate) fn new(lead: Lead) -> Self {
        Self { lead }
    }

    /// Appends the bytes of the next token.
    pub(crate) fn append(&mut self, token: &[u8], bytes: &mut Vec<u8>) {
        match self.lead {
            Lead::Keep => bytes.extend_from_slice(token),
            Lead::DropInFirstToken => {
                bytes.extend(token.iter().filter(|&&byte| byte != b' '));
                self.lead = Lead::Keep;
            }
            Lead::DropSpaces(n_left) => {
                let n_spaces = token.iter().take(n_left).take_while(|&&byte| byte == b' ').count();
                bytes.extend_from_slice(&token[n_spaces..]);
                let ended = n_spaces < token.len() || n_spaces == n_left;
                self.lead = if ended { Lead::Keep } else { Lead::DropSpaces(n_left - n_spaces) };
            }
        }
    }
}

fn token_ids(encoding: &Encoding) -> Vec<TokenId> {
    encoding.get_ids().iter().copied().map(TokenId).collect()
}

/// A control token may take white space along; what matters is where its own characters stand.
fn trimmed(text: &str, start: usize, end: usize) -> (usize, usize) {
    let Some(spelling) = text.get(start..end) else { return (start, end) };
    let start = end - spelling.trim_start().len();
    (start.min(end), start + spelling.trim().len())
}

/// Makes control tokens of those that frame texts, also when a file lists them as ordinary added tokens. A
/// stop token that is a piece of text, such as a line end, stays one.
fn mark_control_tokens(
    engine: &mut tokenizers::Tokenizer,
    special: &SpecialTokens,
) -> tokenizers::Result<()> {
    let added = engine.get_added_tokens_decoder();
    let framing = special.stop.iter().chain(&special.bos).chain(&special.eos).chain(&special.pad);
    let ordinary = framing.filter_map(|id| added.get(&id.0)).filter(|token| !token.special);
    let words = ordinary.filter(|token| token.content.trim().chars().nth(1).is_some());
    let tokens: Vec<AddedToken> = words.map(|token| token.clone().special(true)).collect();
    engine.add_special_tokens(tokens).map(|_| ())
}

fn vocabulary_of(
    engine: &tokenizers::Tokenizer,
    rule: &DecodeRule,
    controls: &[(TokenId, AddedToken)],
) -> Result<Vocabulary, TextError> {
    let max_id = engine.get_vocab(true).into_values().max();
    let vocab_size = max_id.map_or(0, |id| id as usize + 1);
    if !(1..=MAX_VOCAB_SIZE).contains(&vocab_size) {
        let reason = format!("the vocabulary has {vocab_size} ids; from 1 to {MAX_VOCAB_SIZE} are allowed");
        return Err(TextError::Tokenizer { operation: "list its vocabulary", reason });
    }
    let is_control = |id: u32| controls.binary_search_by_key(&id, |(token, _)| token.0).is_ok();
    Ok(Vocabulary::new((0..vocab_size as u32).map(|id| match engine.id_to_token(id) {
        None => Entry { bytes: Vec::new(), kind: TokenKind::Hole },
        Some(piece) => {
            let bytes = match rule {
                DecodeRule::Bytes(pieces, _) => pieces.bytes(&piece),
                DecodeRule::Window => piece.into_bytes(),
            };
            let kind = if is_control(id) { TokenKind::Control } else { TokenKind::Text };
            Entry { bytes, kind }
        }
    })))
}

fn literal_vocabulary(engine: &tokenizers::Tokenizer, boundary: &str) -> tokenizers::Result<AddedVocabulary> {
    let mut literal = engine.get_added_vocabulary().clone();
    literal.set_encode_special_tokens(true);
    let token = AddedToken::from(boundary, false).normalized(false);
    literal.add_tokens([token], engine.get_model(), engine.get_normalizer())?;
    Ok(literal)
}

/// A spelling that no text has: two noncharacters around a number that differs between processes and
/// tokenizers. If a text had it, the text would lose it; nothing else would happen.
fn boundary_spelling() -> String {
    use std::hash::{BuildHasher, RandomState};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let state = RandomState::new();
    let numbers = [(); 2].map(|()| state.hash_one(COUNT.fetch_add(1, Ordering::Relaxed)));
    format!("\u{fdd0}{:016x}{:016x}\u{fdd1}", numbers[0], numbers[1])
}

#[cfg(test)]
mod tests;
