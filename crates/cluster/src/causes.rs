//! An error with everything that caused it, on one line of the log.

use std::{error::Error, fmt};

/// Shows an error and its sources: a log line has no chain, and "not available" alone helps nobody.
pub(crate) struct Causes<'a>(pub(crate) &'a (dyn Error + 'static));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CoordinatorError, Outage};

    #[test]
    fn every_cause_is_named() {
        let error = CoordinatorError::Unavailable(Box::new(Outage));
        let shown = Causes(&error).to_string();
        assert_eq!(shown, "the coordinator is not available: the in-memory coordinator is switched off");
    }
}
