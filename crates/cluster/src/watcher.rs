//! Follows a prefix through everything that happens to watches.
//!
//! A broken or compacted watch is replaced by a snapshot and a watch from the revision after it, with growing pauses
//! while the store is away. It never gives up and never fails: who wants to stop drops the future.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};
use tracing::{debug, info};

use crate::{
    backoff::Backoff,
    causes::Causes,
    coordinator::{Batch, Coordinator, CoordinatorError, Revision, Snapshot, Watch},
    keys::Prefix,
};

/// How old a watch must be for its end to count as a first failure.
const LIVED: Duration = Duration::from_secs(10);

/// What a watcher brings. The first is a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// Everything, at the beginning and after an interruption.
    Snapshot(Snapshot),
    /// What changed.
    Changes(Batch),
    /// What is known may be out of date from now until the next snapshot. Serve on, but change no topology.
    Interrupted,
}

/// Follows one prefix.
pub struct Watcher {
    coordinator: Arc<dyn Coordinator>,
    prefix: Prefix,
    backoff: Backoff,
    state: State,
}

enum State {
    /// A snapshot is needed, after a pause if the last attempt failed.
    Stale {
        failed: bool,
    },
    /// A watch is needed, for changes from here on.
    Fresh {
        from: Revision,
    },
    Watching {
        watch: Box<dyn Watch>,
        since: Instant,
    },
}

impl Watcher {
    /// Follows `prefix`.
    pub fn new(coordinator: Arc<dyn Coordinator>, prefix: Prefix, backoff: Backoff) -> Self {
        Self { coordinator, prefix, backoff, state: State::Stale { failed: false } }
    }

    /// Waits for the next event. Dropping the future loses nothing: an event is given out in the same poll in which
    /// it is taken from the watch.
    pub async fn next(&mut self) -> WatchEvent {
        loop {
            match &mut self.state {
                State::Stale { failed } => {
                    if *failed {
                        time::sleep(self.backoff.pause()).await;
                        *failed = false;
                    }
                    match self.coordinator.snapshot(&self.prefix).await {
                        Ok(snapshot) => {
                            self.state = State::Fresh { from: Revision(snapshot.revision.0 + 1) };
                            return WatchEvent::Snapshot(snapshot);
                        }
                        Err(error) => self.retry(&error),
                    }
                }
                State::Fresh { from } => match self.coordinator.watch(&self.prefix, *from).await {
                    Ok(watch) => self.state = State::Watching { watch, since: Instant::now() },
                    Err(error) => {
                        self.retry(&error);
                        return WatchEvent::Interrupted;
                    }
                },
                State::Watching { watch, since } => match watch.next().await {
                    Ok(batch) => return WatchEvent::Changes(batch),
                    Err(error) => {
                        info!(prefix = %self.prefix, error = %Causes(&error), "watch ended, taking a new snapshot");
                        // A watch that lived was a success; one that breaks at once must not become a busy loop.
                        if since.elapsed() >= LIVED {
                            self.backoff.reset();
                        }
                        self.state = State::Stale { failed: true };
                        return WatchEvent::Interrupted;
                    }
                },
            }
        }
    }

    fn retry(&mut self, error: &CoordinatorError) {
        debug!(prefix = %self.prefix, error = %Causes(error), "coordinator does not answer, trying again");
        self.state = State::Stale { failed: true };
    }
}
