//! What a self-check found.

use std::borrow::Cow;

/// A broken invariant: always a bug of ours, never of a caller's input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("broken invariant: {0}")]
pub struct AuditError(Cow<'static, str>);

impl AuditError {
    /// A broken invariant, in words.
    pub fn new(what: impl Into<Cow<'static, str>>) -> Self {
        Self(what.into())
    }

    /// An error saying `what` unless `holds`.
    pub fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self::new(what())) }
    }
}
