//! What happened in a run: a log that must be the same whenever its seed is run, counts of what was injected and of
//! what it led to, and the violations that were found.

use std::{
    collections::BTreeMap,
    fmt::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Shared by everything in one run.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    entries: Arc<Mutex<Entries>>,
    started: Instant,
    /// Set at the first violation: the run is over.
    pub(crate) failed: CancellationToken,
}

#[derive(Debug, Default)]
struct Entries {
    digest: u64,
    n_lines: u64,
    lines: Option<Vec<String>>,
    counts: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

/// A journal that is complete.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Digest of the whole event log: equal for every run of a seed.
    pub digest: u64,
    /// Lines of the event log.
    pub n_lines: u64,
    /// The event log, if it was asked for.
    pub log: Vec<String>,
    /// What was injected and what it led to.
    pub counts: BTreeMap<&'static str, u64>,
    /// What must not happen, and did.
    pub violations: Vec<String>,
}

impl Journal {
    pub(crate) fn new(keep_lines: bool) -> Self {
        let entries = Entries { lines: keep_lines.then(Vec::new), ..Entries::default() };
        Self {
            entries: Arc::new(Mutex::new(entries)),
            started: Instant::now(),
            failed: CancellationToken::new(),
        }
    }

    /// Writes one line of the log.
    pub(crate) fn note(&self, what: fmt::Arguments<'_>) {
        let millis = self.started.elapsed().as_millis();
        let mut entries = self.entries();
        let mut hash = Hashing(entries.digest ^ millis as u64);
        // Hashing cannot fail; a type's own formatting that does would be seen as another digest.
        let _infallible = hash.write_fmt(what);
        entries.digest = hash.0;
        entries.n_lines += 1;
        if let Some(lines) = &mut entries.lines {
            lines.push(format!("{millis:>7} ms  {what}"));
        }
    }

    /// Counts one event of a kind.
    pub(crate) fn count(&self, kind: &'static str) {
        self.count_n(kind, 1);
    }

    pub(crate) fn count_n(&self, kind: &'static str, n: u64) {
        *self.entries().counts.entry(kind).or_default() += n;
    }

    /// How often a kind of event was counted.
    pub(crate) fn n(&self, kind: &str) -> u64 {
        self.entries().counts.get(kind).copied().unwrap_or(0)
    }

    /// Something happened that must not.
    pub(crate) fn violation(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(format_args!("VIOLATION {what}"));
        self.entries().violations.push(what);
        self.failed.cancel();
    }

    pub(crate) fn report(&self) -> Report {
        let mut entries = self.entries();
        Report {
            digest: entries.digest,
            n_lines: entries.n_lines,
            log: entries.lines.take().unwrap_or_default(),
            counts: entries.counts.clone(),
            violations: entries.violations.clone(),
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// FNV-1a over what is written.
struct Hashing(u64);

impl Write for Hashing {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
