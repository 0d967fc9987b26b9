//! How the ranks of a decode group exchange data, and how its leader commands them.
//!
//! [`Communicator`] is what a model's forward pass sees: blocking collectives over `[f32]` with a bound on every
//! wait. [`local_group`] gives it to threads of one process, [`TcpGroup`] to processes; a device backend fills the
//! same trait over device buffers. [`control`] is the ordered message link between a leader and its followers.
//!
//! **There is no reduction here, on purpose.** An all-reduce adds in an order that depends on the number of ranks
//! and on the algorithm of the day, and the numeric contract promises the same bits for every rank count. A rank
//! therefore gathers its peers' parts, in rank order, and a kernel adds them in the canonical order.
//!
//! **Every wait is bounded.** A collective ends with data or with a [`CommError`] within [`CommConfig::timeout`]:
//! when a peer is lost, when ranks disagree on what they are doing, or when an [`AbortHandle`] is used. The first
//! error ends the epoch: the communicator and all that were split from it answer every later call with it.

mod comm;
pub mod control;
mod error;
mod local;
mod tcp;
mod transport;

pub use comm::{AbortHandle, CommConfig, Communicator, WaitPolicy};
pub use error::{Call, CommError, Op};
pub use local::{LocalCommunicator, local_group};
#[doc(hidden)]
pub use tcp::fuzzing;
pub use tcp::{ConnectCancel, ConnectError, ControlEnd, TcpCommunicator, TcpConfig, TcpGroup, random_secret};

#[cfg(test)]
mod tests;
