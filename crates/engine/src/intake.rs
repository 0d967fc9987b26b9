//! Everything that reaches an engine, in one place. Who drives the engine drains it once per turn and waits here when
//! there is nothing to compute; it is never called back.

use std::sync::Arc;

use tokio::sync::{Notify, mpsc};

use crate::{
    handle::Command,
    inlet::{Deliveries, Delivery, QUEUE_LEN},
    send::LaneReport,
};

/// What an engine takes in between two steps. KV that comes or is pulled while it does would otherwise hold up the
/// sequences that decode, for as long as its peer is quick enough.
pub const MAX_INPUTS: usize = 2 * QUEUE_LEN;

/// One thing that has reached an engine. `F` is what comes over the links to followers, which are the driver's affair.
pub enum Heard<F> {
    /// For the core.
    Input(Input),
    /// From the follower of this rank.
    Follower(usize, F),
}

/// One thing for the core to take in.
pub enum Input {
    /// From a handle.
    Command(Command),
    /// From the door of the engine's own rank.
    Delivery(Delivery),
    /// From a lane.
    Report(LaneReport),
    /// All handles are gone.
    Abandoned,
}

/// The engine's ears.
pub struct Intake<F> {
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) reports: mpsc::Receiver<LaneReport>,
    pub(crate) wake: Arc<Notify>,
    pub(crate) deliveries: Deliveries,
    pub(crate) followers: mpsc::Receiver<(usize, F)>,
}

impl<F> Intake<F> {
    /// What has arrived, without waiting.
    pub fn try_next(&mut self) -> Option<Heard<F>> {
        if let Ok((rank, message)) = self.followers.try_recv() {
            return Some(Heard::Follower(rank, message));
        }
        if let Ok(report) = self.reports.try_recv() {
            return Some(Heard::Input(Input::Report(report)));
        }
        // Before deliveries: these may keep coming for as long as they are taken.
        match self.commands.try_recv() {
            Ok(command) => return Some(Heard::Input(Input::Command(command))),
            Err(mpsc::error::TryRecvError::Disconnected) => return Some(Heard::Input(Input::Abandoned)),
            Err(mpsc::error::TryRecvError::Empty) => {}
        }
        self.deliveries.try_recv().map(|delivery| Heard::Input(Input::Delivery(delivery)))
    }

    /// The next thing, or `None` when `wake` rang first. Needs no runtime. All arms are cancel-safe, and tried in the
    /// order of [`Self::try_next`]: the same arrivals give the same history.
    pub async fn next(&mut self) -> Option<Heard<F>> {
        let Self { commands, reports, wake, deliveries, followers } = self;
        let input = tokio::select! {
            biased;
            Some((rank, message)) = followers.recv() => return Some(Heard::Follower(rank, message)),
            Some(report) = reports.recv() => Input::Report(report),
            command = commands.recv() => command.map_or(Input::Abandoned, Input::Command),
            Some(delivery) = deliveries.recv() => Input::Delivery(delivery),
            () = wake.notified() => return None,
        };
        Some(Heard::Input(input))
    }
}
