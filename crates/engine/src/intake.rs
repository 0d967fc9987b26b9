//! Everything that reaches an engine thread, in one place. The thread drains it once per step and waits here when there
//! is nothing to compute; it is never called back.

use std::{sync::Arc, time::Duration};

use longreach_collective::control::ControlError;
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc},
};

use crate::{handle::Command, inlet::Delivery, send::LaneReport};

/// How long an idle engine sleeps before it looks at its deadlines.
const IDLE_TICK: Duration = Duration::from_millis(50);

/// One thing to take in.
pub(crate) enum Input {
    Command(Command),
    Delivery(Delivery),
    Report(LaneReport),
    Follower(usize, Result<Vec<u8>, ControlError>),
    /// All handles are gone.
    Abandoned,
}

/// The engine's ears.
pub(crate) struct Intake {
    pub(crate) runtime: Handle,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) deliveries: mpsc::Receiver<Delivery>,
    pub(crate) reports: mpsc::Receiver<LaneReport>,
    pub(crate) followers: mpsc::Receiver<(usize, Result<Vec<u8>, ControlError>)>,
    pub(crate) wake: Arc<Notify>,
}

impl Intake {
    /// What has arrived, without waiting.
    pub(crate) fn try_next(&mut self) -> Option<Input> {
        if let Ok((rank, message)) = self.followers.try_recv() {
            return Some(Input::Follower(rank, message));
        }
        if let Ok(report) = self.reports.try_recv() {
            return Some(Input::Report(report));
        }
        // Before deliveries: these may keep coming for as long as they are taken.
        match self.commands.try_recv() {
            Ok(command) => return Some(Input::Command(command)),
            Err(mpsc::error::TryRecvError::Disconnected) => return Some(Input::Abandoned),
            Err(mpsc::error::TryRecvError::Empty) => {}
        }
        self.deliveries.try_recv().ok().map(Input::Delivery)
    }

    /// The next thing, or `None` when the idle tick or a ring of `wake` came first. All arms are cancel-safe.
    pub(crate) fn wait(&mut self) -> Option<Input> {
        let Self { runtime, commands, deliveries, reports, followers, wake } = self;
        runtime.block_on(async {
            tokio::select! {
                Some((rank, message)) = followers.recv() => Some(Input::Follower(rank, message)),
                Some(report) = reports.recv() => Some(Input::Report(report)),
                Some(delivery) = deliveries.recv() => Some(Input::Delivery(delivery)),
                command = commands.recv() => Some(command.map_or(Input::Abandoned, Input::Command)),
                () = wake.notified() => None,
                () = tokio::time::sleep(IDLE_TICK) => None,
            }
        })
    }
}
