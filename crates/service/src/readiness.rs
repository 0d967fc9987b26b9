//! Whether a process may get new work, and what it is waiting for if not.
//!
//! Whoever has a reason against it holds a [`Hold`]; the process is ready when it has started and nobody holds one.
//! A flag that each part sets would be wrong as soon as there are two parts.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::watch;

/// Whether a process may get new work. Draining is the end: nothing comes after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet, or not now.
    Starting {
        /// What it waits for; empty until the process says that it has started.
        waiting_for: Vec<String>,
    },
    /// Yes.
    Ready,
    /// No more.
    Draining,
}

impl Readiness {
    /// Whether new work may come.
    pub fn is_ready(&self) -> bool {
        *self == Self::Ready
    }
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting { waiting_for } if waiting_for.is_empty() => f.write_str("starting"),
            Self::Starting { waiting_for } => write!(f, "waiting for {}", waiting_for.join(", ")),
            Self::Ready => f.write_str("ready"),
            Self::Draining => f.write_str("draining"),
        }
    }
}

#[derive(Debug)]
struct State {
    has_started: bool,
    is_draining: bool,
    holds: BTreeMap<u64, String>,
    shown: watch::Sender<Readiness>,
}

impl State {
    fn show(&self) {
        let now = if self.is_draining {
            Readiness::Draining
        } else if self.has_started && self.holds.is_empty() {
            Readiness::Ready
        } else {
            Readiness::Starting { waiting_for: self.holds.values().cloned().collect() }
        };
        self.shown.send_if_modified(|shown| std::mem::replace(shown, now.clone()) != now);
    }
}

/// The readiness of a process, shared by its parts.
#[derive(Clone, Debug)]
pub struct ReadinessCell {
    state: Arc<std::sync::Mutex<State>>,
    next_hold: Arc<AtomicU64>,
}

impl Default for ReadinessCell {
    fn default() -> Self {
        let shown = watch::Sender::new(Readiness::Starting { waiting_for: Vec::new() });
        let state = State { has_started: false, is_draining: false, holds: BTreeMap::new(), shown };
        Self { state: Arc::new(std::sync::Mutex::new(state)), next_hold: Arc::default() }
    }
}

impl ReadinessCell {
    /// The readiness, now and as it changes.
    pub fn subscribe(&self) -> watch::Receiver<Readiness> {
        self.with(|state| state.shown.subscribe())
    }

    /// Says that everything is started. Ready from here on, unless somebody holds a [`Hold`].
    pub fn started(&self) {
        self.with(|state| state.has_started = true);
    }

    /// Says that no new work may come any more.
    pub fn draining(&self) {
        self.with(|state| state.is_draining = true);
    }

    /// Keeps the process from being ready, for the reason `what`, until the hold is dropped.
    pub fn hold(&self, what: &str) -> Hold {
        let number = self.next_hold.fetch_add(1, Ordering::Relaxed);
        self.with(|state| drop(state.holds.insert(number, what.to_owned())));
        Hold { cell: self.clone(), number }
    }

    fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let result = change(&mut state);
        state.show();
        result
    }
}

/// Keeps a process from being ready until it is dropped.
#[derive(Debug)]
#[must_use = "dropping a hold lets the process become ready"]
pub struct Hold {
    cell: ReadinessCell,
    number: u64,
}

impl Hold {
    /// Says something else than before.
    pub fn now(&self, what: &str) {
        self.cell.with(|state| drop(state.holds.insert(self.number, what.to_owned())));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.cell.with(|state| drop(state.holds.remove(&self.number)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_started_and_held_by_nobody_and_draining_is_final() {
        let cell = ReadinessCell::default();
        let seen = cell.subscribe();
        let says = || seen.borrow().to_string();
        assert_eq!(says(), "starting");
        let (weights, peers) = (cell.hold("weights"), cell.hold("peers"));
        cell.started();
        assert_eq!(says(), "waiting for weights, peers");
        drop(weights);
        peers.now("2 of 4 peers");
        assert_eq!(says(), "waiting for 2 of 4 peers");
        drop(peers);
        assert!(seen.borrow().is_ready());
        let again = cell.hold("a new epoch");
        assert_eq!(says(), "waiting for a new epoch");
        cell.draining();
        drop(again);
        cell.started();
        assert_eq!(says(), "draining");
    }

    #[test]
    fn watchers_wake_for_changes_only() {
        let cell = ReadinessCell::default();
        cell.started();
        let mut seen = cell.subscribe();
        seen.mark_unchanged();
        cell.started();
        assert!(!seen.has_changed().unwrap());
        let hold = cell.hold("x");
        assert!(seen.has_changed().unwrap());
        seen.mark_unchanged();
        hold.now("x");
        assert!(!seen.has_changed().unwrap());
    }
}
