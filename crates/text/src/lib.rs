//! Everything between text and token ids. Used by the router and the command line only: workers see ids.
//!
//! [`TextModel`] is the way in: it loads a model directory or a GGUF file, turns prompts and conversations
//! into ids, and makes a [`TextStream`] for each output. Three rules hold throughout:
//!
//! - Text of a user never becomes a control token. Only a chat template makes control tokens.
//! - Emitted text is whole characters, and its concatenation is the decode of all tokens.
//! - Nothing that a file or a client says makes this crate panic.
//!
//! It is synchronous and does no I/O but at load.

mod chat;
mod detokenizer;
mod error;
mod model;
mod stop;
mod stream;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use chat::{ChatMessage, ChatOptions, ChatTemplate, Content, ContentPart, Role};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use model::{LoadOptions, TextModel};
pub use stop::{MAX_STOP_BYTES, MAX_STOPS, StopMatcher, StopStep};
pub use stream::{StreamOptions, TextStream};
pub use tokenizer::{SpecialTokens, Specials, Tokenizer};
