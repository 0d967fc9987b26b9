//! What the lives of a group need of the ranks that a process hosts.
//!
//! When a life begins, what ends it and what is said of it is one state machine, whatever the ranks are. It knows
//! neither threads nor sockets: the process brings ranks that meet over TCP or in memory, and a simulation brings ranks
//! that meet on a simulated network.

use std::{future::Future, io, time::Duration};

use longreach_cluster::EpochRecord;
use longreach_engine::EngineHandle;
use longreach_types::{Epoch, GroupSecret};
use tokio_util::sync::CancellationToken;

/// The ranks of one process, loaded, between lives of their group or in one.
pub trait Ranks: Send + Sync {
    /// A life that this process leads.
    type Led: Led;
    /// A life that this process follows.
    type Followed: Followed;
    /// Why a life did not come about.
    type Error: std::error::Error + Send + 'static;

    /// Whether rank 0 is among them.
    fn has_leader(&self) -> bool;

    /// What only the members of the next life are to know.
    fn secret(&self) -> io::Result<GroupSecret>;

    /// Opens the doors of the life of `record` and meets its other ranks. The engine runs when this resolves: every rank
    /// has joined and the self-check has passed. Once `moot` is cancelled it gives up as soon as it can.
    fn lead(
        &self,
        record: &EpochRecord,
        moot: &CancellationToken,
    ) -> impl Future<Output = Result<Self::Led, Self::Error>> + Send;

    /// The same, under another process's lead.
    fn follow(
        &self,
        record: &EpochRecord,
        moot: &CancellationToken,
    ) -> impl Future<Output = Result<Self::Followed, Self::Error>> + Send;

    /// From now on no KV is taken, until the next life.
    fn close_doors(&self);

    /// Whether the group whose leader is at `endpoint` takes work now. What the store says of it may be as old as a lease.
    fn serves(&self, endpoint: &str) -> impl Future<Output = bool> + Send;
}

/// A life with its leader in this process.
pub trait Led: Send {
    /// The way into its engine.
    fn engine(&self) -> &EngineHandle;

    /// Cancelled when another rank has left the life, whatever this process's ranks are doing.
    fn deserted(&self) -> CancellationToken;

    /// Ends the life for all ranks and resolves when nothing of it runs in this process any more.
    fn stop(self) -> impl Future<Output = ()> + Send;
}

/// A life with its leader in another process.
pub trait Followed: Send {
    /// Cancelled when the leader has left the life or ended it, whatever this process's rank is doing.
    fn deserted(&self) -> CancellationToken;

    /// Something that tells the leader, when called, that this process drains.
    fn leaver(&self) -> Box<dyn FnOnce() + Send>;

    /// Resolves when nothing of the life runs in this process any more; with the reason, if the leader did not end it.
    fn ended(self) -> impl Future<Output = Result<(), String>> + Send;
}

/// A rank of this process does not come back from a life that is over for the others. Nothing can take its thread away,
/// and no next life may begin beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a rank of this process did not end within {after:?} of epoch {epoch}'s end; only a new process can join the group"
)]
pub struct Stuck {
    /// The life that is over.
    pub epoch: Epoch,
    /// How long the rank was waited for.
    pub after: Duration,
}
