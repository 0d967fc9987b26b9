//! A wall around the tokenizer library.
//!
//! A tokenizer file can make the library panic at load, at encode or at decode: it deserialises without
//! checking. A panic becomes an error here, so that it ends one request, or the load, and not the process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::TextError;

/// Runs a call into the library. `operation` completes "the tokenizer failed to …".
///
/// Unwind safety: the library's shared state is its cache of merged words, which it takes with `try_lock`
/// and fills with whole entries.
pub(super) fn guarded<T>(
    operation: &'static str,
    call: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, TextError> {
    let reason = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(payload) => format!("panic: {}", panic_message(payload.as_ref())),
    };
    Err(TextError::Tokenizer { operation, reason })
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
