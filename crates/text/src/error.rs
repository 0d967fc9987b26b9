//! What can go wrong between text and token ids.

use std::path::PathBuf;

use longreach_gguf::GgufError;
use longreach_types::TokenId;

/// An error of this crate. Those that [`TextError::is_request`] names are the client's to mend; all others
/// say that the model's files are not usable.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A file of the model is not what its name says.
    #[error("{path} is not usable: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A GGUF file is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model carries a tokenizer of a kind that this crate does not know.
    #[error("the {what} {given:?} is not supported; supported are {supported}")]
    Unsupported {
        /// Which part of the tokenizer.
        what: &'static str,
        /// What the file says.
        given: String,
        /// What would have been understood.
        supported: String,
    },
    /// The tokenizer library panicked or refused. A tokenizer file can make it do so on some texts only.
    #[error("the tokenizer failed to {operation}: {reason}")]
    Tokenizer {
        /// What it was asked for.
        operation: &'static str,
        /// Its message.
        reason: String,
    },
    /// The chat template does not compile.
    #[error("the chat template from {origin} is not usable: {reason}")]
    Template {
        /// Where it was found.
        origin: String,
        /// What is wrong with it, with the line.
        reason: String,
    },
    /// The model has no chat template, so it cannot be asked in messages.
    #[error("the model has no chat template; send a text prompt, or give the server a template")]
    NoTemplate,
    /// The template refuses these messages, in its own words.
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The messages cannot be rendered.
    #[error("the chat template cannot render the messages: {0}")]
    Render(String),
    /// A message or option is not valid.
    #[error("{field} is not valid: {reason}")]
    Request {
        /// The field, as clients know it.
        field: String,
        /// What is wrong with it and what would be right.
        reason: String,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {token} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// The id.
        token: TokenId,
        /// The first id that does not exist.
        vocab_size: usize,
    },
}

impl TextError {
    /// Whether the request is at fault, rather than the model's files.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Self::NoTemplate
                | Self::Refused(_)
                | Self::Render(_)
                | Self::Request { .. }
                | Self::UnknownToken { .. }
        )
    }

    pub(crate) fn request(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Request { field: field.into(), reason: reason.into() }
    }
}
