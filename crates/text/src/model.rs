//! Everything between text and token ids for one model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use longreach_gguf::{Gguf, GgufTokenizer};
use longreach_types::TokenId;
use serde_json::{Map, Value};

use crate::tokenizer::TokenizerConfig;
use crate::{ChatMessage, ChatOptions, ChatTemplate, Detokenizer, TextError, Tokenizer};

/// The file in a model directory that holds nothing but the template.
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// A model's tokenizer and chat template. Cheap to clone and to share between threads.
#[derive(Clone, Debug)]
pub struct TextModel {
    tokenizer: Tokenizer,
    template: Option<Arc<ChatTemplate>>,
}

/// What the operator sets in place of the model's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// A file with a chat template.
    pub chat_template: Option<PathBuf>,
}

impl TextModel {
    /// Loads from a model directory or from a GGUF file, any file of a split set.
    pub fn load(path: &Path) -> Result<Self, TextError> {
        Self::load_with(path, &LoadOptions::default())
    }

    /// Loads with settings of the operator's.
    ///
    /// The chat template is the operator's, or else that of chat_template.jinja, tokenizer_config.json or the
    /// GGUF key, in this order.
    pub fn load_with(path: &Path, options: &LoadOptions) -> Result<Self, TextError> {
        let explicit = options.chat_template.as_deref().map(read_template).transpose()?;
        let (tokenizer, own) = if path.is_dir() { load_dir(path)? } else { load_gguf(path)? };
        Self::new(tokenizer, explicit.or(own))
    }

    /// Puts a tokenizer and a template together. `template` is its source and where it was found.
    pub fn new(tokenizer: Tokenizer, template: Option<(Value, String)>) -> Result<Self, TextError> {
        let compile = |(source, origin): (Value, String)| {
            ChatTemplate::new(&source, &origin, globals(&tokenizer)?).map(Arc::new)
        };
        let template = template.map(compile).transpose()?;
        Ok(Self { tokenizer, template })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// The ids of a text prompt, with the tokenizer's beginning-of-text token. Control tokens in the text
    /// stay text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let ids = self.tokenizer.encode(text, crate::Specials::Literal)?;
        Ok([self.tokenizer.special().prefix.as_slice(), &ids].concat())
    }

    /// The ids of a conversation. Control tokens come from the template only.
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<Vec<TokenId>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let rendered = template.render_for(&self.tokenizer, messages, options)?;
        let ids = self.tokenizer.encode_rendered(&rendered)?;
        Ok(self.tokenizer.with_prefix(ids))
    }

    /// A stream of text that continues `prompt`.
    pub fn detokenizer(&self, prompt: &[TokenId], skip_special: bool) -> Detokenizer {
        Detokenizer::new(&self.tokenizer, prompt, skip_special)
    }
}

type Loaded = (Tokenizer, Option<(Value, String)>);

fn load_dir(dir: &Path) -> Result<Loaded, TextError> {
    let config = TokenizerConfig::load(dir)?;
    let tokenizer = Tokenizer::from_dir_with(dir, &config)?;
    let file = dir.join(TEMPLATE_FILE);
    if file.exists() {
        return Ok((tokenizer, Some(read_template(&file)?)));
    }
    let origin = dir.join("tokenizer_config.json").display().to_string();
    let template = config.chat_template.filter(|template| !template.is_null());
    Ok((tokenizer, template.map(|template| (template, origin))))
}

fn load_gguf(path: &Path) -> Result<Loaded, TextError> {
    let gguf = Gguf::open(path)?;
    let Some(tokenizer) = GgufTokenizer::read(gguf.metadata())? else {
        let reason = "it has no tokenizer (no tokenizer.ggml.tokens)".to_owned();
        return Err(TextError::Invalid { path: path.to_owned(), reason });
    };
    let origin = format!("{} (tokenizer.chat_template)", path.display());
    let template = tokenizer.chat_template.clone().map(|template| (Value::String(template), origin));
    let tokenizer = Tokenizer::from_gguf(&tokenizer);
    let tokenizer =
        tokenizer.map_err(|error| TextError::Invalid { path: path.to_owned(), reason: error.to_string() })?;
    Ok((tokenizer, template))
}

fn read_template(path: &Path) -> Result<(Value, String), TextError> {
    let source =
        std::fs::read_to_string(path).map_err(|source| TextError::Io { path: path.to_owned(), source })?;
    Ok((Value::String(source), path.display().to_string()))
}

/// The special tokens under the names that templates use. A model without a beginning-of-text token gives an
/// empty string, so that a template that prints it prints nothing.
fn globals(tokenizer: &Tokenizer) -> Result<Map<String, Value>, TextError> {
    let special = tokenizer.special();
    let mut globals = Map::new();
    let always = [("bos_token", special.bos), ("eos_token", special.eos)];
    let when_known = [("unk_token", special.unk), ("pad_token", special.pad)];
    for (name, token) in always.into_iter().chain(when_known.into_iter().filter(|(_, token)| token.is_some()))
    {
        let text = token.map(|token| tokenizer.token_text(token)).transpose()?.unwrap_or_default();
        globals.insert(name.to_owned(), Value::String(text));
    }
    Ok(globals)
}

#[cfg(test)]
mod tests;
