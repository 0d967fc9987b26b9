//! The life of a process, and its end.
//!
//! ```text
//! Starting ──started, no holds──▶ Ready ──stop──▶ Draining: not ready ▶ notice ▶ refuse new ▶ finish in flight
//!                                                 ▶ (grace over, or forced) ▶ cancel ▶ exit
//! ```
//! The order is in [`Lifecycle::drain`] and nowhere else. Every task is spawned on the lifecycle and awaited at the
//! end; a task that the process cannot do without ends the process when it ends, because a process whose heart has
//! stopped must not look healthy.

use std::{fmt, future, time::Duration};

use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{self, Instant},
};
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};
use tracing::{error, info, warn};

use crate::{
    readiness::{Hold, Readiness, ReadinessCell},
    signals::{Signal, Signals},
};

/// How long each stage of draining may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainConfig {
    /// How long the process goes on taking work after it has said that it is not ready, so that those who send work
    /// see it first. Shorter ends sooner; longer refuses less.
    pub notice: Duration,
    /// How long work in flight may take to finish. Longer loses less of it; a supervisor may not wait as long.
    pub grace: Duration,
    /// How long cancelled tasks may take to clean up. They should need milliseconds.
    pub cancel_timeout: Duration,
}

impl Default for DrainConfig {
    fn default() -> Self {
        Self {
            notice: Duration::from_secs(1),
            grace: Duration::from_secs(25),
            cancel_timeout: Duration::from_secs(2),
        }
    }
}

/// Why a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal.
    Signal(Signal),
    /// The program itself is done, or was asked by other means.
    Requested,
    /// A task that the process cannot do without returned or panicked.
    TaskEnded {
        /// Which.
        name: &'static str,
    },
}

impl StopReason {
    /// Whether somebody wanted it.
    pub fn is_asked(self) -> bool {
        !matches!(self, Self::TaskEnded { .. })
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => signal.fmt(f),
            Self::Requested => f.write_str("request"),
            Self::TaskEnded { name } => write!(f, "end of task {name}"),
        }
    }
}

/// How draining ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainEnd {
    /// Everything in flight was finished.
    Finished,
    /// The grace was over first; what was left was cancelled.
    GraceOver,
    /// Somebody could not wait; what was left was cancelled.
    Forced,
    /// Tasks did not end when they were cancelled.
    Stuck,
}

/// What draining did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Why the process ends.
    pub reason: StopReason,
    /// How.
    pub end: DrainEnd,
    /// Pieces of work that were cut off.
    pub n_cut_off: usize,
    /// Tasks that were left behind.
    pub n_stuck: usize,
    /// How long it took.
    pub took: Duration,
}

/// New work is refused because the process is draining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process is draining and takes no new work")]
pub struct Draining;

/// A piece of work that draining waits for. Dropping it says that the work is done.
#[derive(Debug)]
#[must_use = "work is in flight for as long as this lives"]
pub struct InFlight {
    _counted: TaskTrackerToken,
}

/// The life of a process. Cheap to clone; all clones are the same life.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    readiness: ReadinessCell,
    stop: watch::Sender<Option<StopReason>>,
    draining: CancellationToken,
    cancelled: CancellationToken,
    in_flight: TaskTracker,
    tasks: TaskTracker,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new()
    }
}

impl Lifecycle {
    /// A process that is starting.
    pub fn new() -> Self {
        Self {
            readiness: ReadinessCell::default(),
            stop: watch::Sender::new(None),
            draining: CancellationToken::new(),
            cancelled: CancellationToken::new(),
            in_flight: TaskTracker::new(),
            tasks: TaskTracker::new(),
        }
    }

    /// Says that everything is started. Ready from here on, unless somebody holds a [`Hold`].
    pub fn started(&self) {
        self.readiness.started();
    }

    /// Keeps the process from being ready, for the reason `what`, until the hold is dropped.
    pub fn hold(&self, what: &str) -> Hold {
        self.readiness.hold(what)
    }

    /// The readiness, now and as it changes.
    pub fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }

    /// Counts a new piece of work as in flight, or refuses it.
    pub fn admit(&self) -> Result<InFlight, Draining> {
        // Counted first: work that is not refused here is waited for.
        let work = InFlight { _counted: self.in_flight.token() };
        if self.draining.is_cancelled() { Err(Draining) } else { Ok(work) }
    }

    /// Pieces of work in flight.
    pub fn n_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Cancelled when new work is refused: servers stop accepting.
    pub fn draining(&self) -> CancellationToken {
        self.draining.child_token()
    }

    /// Cancelled when everything must end: the root of every request's and every task's token.
    pub fn token(&self) -> CancellationToken {
        self.cancelled.child_token()
    }

    /// Runs a task. It must end when [`Lifecycle::token`] is cancelled, and is awaited at the end.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tasks.spawn(task)
    }

    /// Runs a task without which the process is of no use: when it returns or panics before it is cancelled, the
    /// process stops.
    pub fn spawn_essential<F>(&self, name: &'static str, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let heart = Heart { name, lifecycle: self.clone() };
        self.tasks.spawn(async move {
            // Dropped with the future, however it ends.
            let _heart = heart;
            task.await
        })
    }

    /// Asks the process to end; the first reason counts.
    pub fn stop(&self, reason: StopReason) {
        self.stop.send_if_modified(|stop| stop.is_none() && stop.replace(reason).is_none());
    }

    /// Waits until the process is asked to end.
    pub async fn stopped(&self) -> StopReason {
        let mut stop = self.stop.subscribe();
        match stop.wait_for(Option::is_some).await.map(|reason| *reason) {
            Ok(Some(reason)) => reason,
            // The sender lives in `self`, and the condition was waited for.
            _ => future::pending().await,
        }
    }

    /// Waits for a signal or a call of [`Lifecycle::stop`], then drains; a second signal forces the end.
    pub async fn run(&self, mut signals: Signals, config: DrainConfig) -> DrainReport {
        // Both arms are cancel-safe. Without bias: which of two reasons is named does not matter.
        let reason = tokio::select! {
            signal = signals.next() => StopReason::Signal(signal),
            reason = self.stopped() => reason,
        };
        self.stop(reason);
        self.drain(config, async {
            let signal = signals.next().await;
            warn!(%signal, "second signal, not waiting any longer");
        })
        .await
    }

    /// Ends the process in order: not ready, notice, refuse new work, finish what is in flight within the grace, cancel
    /// the rest, wait for all tasks. `force` skips what is left of notice and grace.
    pub async fn drain(&self, config: DrainConfig, force: impl Future<Output = ()>) -> DrainReport {
        let start = Instant::now();
        self.stop(StopReason::Requested);
        let reason = self.stopped().await;
        info!(%reason, in_flight = self.n_in_flight(), "draining");
        self.readiness.draining();
        // The first arm leaves nothing half done when it is dropped: refusing and cancelling are repeated below.
        let mut end = tokio::select! {
            end = self.finish(config) => end,
            () = force => DrainEnd::Forced,
        };
        let n_cut_off = self.n_in_flight();
        self.draining.cancel();
        self.cancelled.cancel();
        self.tasks.close();
        let all_ended = time::timeout(config.cancel_timeout, self.tasks.wait()).await.is_ok();
        let n_stuck = self.tasks.len();
        if !all_ended && n_stuck > 0 {
            end = DrainEnd::Stuck;
        }
        let report = DrainReport { reason, end, n_cut_off, n_stuck, took: start.elapsed() };
        report.log();
        report
    }

    async fn finish(&self, config: DrainConfig) -> DrainEnd {
        time::sleep(config.notice).await;
        self.draining.cancel();
        self.in_flight.close();
        match time::timeout(config.grace, self.in_flight.wait()).await {
            Ok(()) => DrainEnd::Finished,
            Err(_) => DrainEnd::GraceOver,
        }
    }
}

impl DrainReport {
    fn log(&self) {
        let Self { reason, end, n_cut_off, n_stuck, took } = self;
        match end {
            DrainEnd::Finished => info!(%reason, ?took, "drained, everything in flight was finished"),
            DrainEnd::GraceOver => {
                warn!(%reason, ?took, n_cut_off, "drained, the grace was over before the work")
            }
            DrainEnd::Forced => warn!(%reason, ?took, n_cut_off, "drained by force"),
            DrainEnd::Stuck => error!(%reason, ?took, n_cut_off, n_stuck, "tasks do not end when cancelled"),
        }
    }
}

/// Stops the process when it is dropped too early.
struct Heart {
    name: &'static str,
    lifecycle: Lifecycle,
}

impl Drop for Heart {
    fn drop(&mut self) {
        if !self.lifecycle.cancelled.is_cancelled() {
            self.lifecycle.stop(StopReason::TaskEnded { name: self.name });
        }
    }
}

#[cfg(test)]
mod tests;
