//! The collective interface of a rank.
//!
//! It is generic over the buffer type so that a device backend can take device memory where the CPU backends take
//! `[f32]`, and object safe so that a model is compiled once for all of them. It has no asynchronous form: a rank
//! does nothing else while it waits, and a future would only add a scheduler between two dependent kernels.

use std::{fmt, ops::Range, sync::Arc, thread, time::Duration};

use crate::error::CommError;

/// One rank's end of a group. All ranks call the same methods in the same order with fitting counts; where they do
/// not, they get [`CommError::Disagree`].
///
/// Every collective is a full rendezvous, broadcast included: nobody leaves one before every rank has entered it.
/// A communicator and those split from it belong to one thread; dropping one tells the peers that the rank is gone.
pub trait Communicator<T: ?Sized>: Send {
    /// This rank, `0 .. n_ranks`.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn n_ranks(&self) -> usize;

    /// Gathers equal parts: `recv` holds `n_ranks` parts of the length of `send`, in rank order.
    fn all_gather(&mut self, send: &T, recv: &mut T) -> Result<(), CommError>;

    /// Gathers parts of different lengths: `recv` holds `counts[r]` elements of each rank `r`, in rank order.
    fn all_gather_v(&mut self, send: &T, recv: &mut T, counts: &[usize]) -> Result<(), CommError>;

    /// Sends part `r` of `send` (`send_counts[r]` elements) to rank `r`, and receives `recv_counts[r]` elements of
    /// each rank `r`, in rank order.
    fn all_to_all(
        &mut self,
        send: &T,
        send_counts: &[usize],
        recv: &mut T,
        recv_counts: &[usize],
    ) -> Result<(), CommError>;

    /// Copies `data` of rank `root` to every rank.
    fn broadcast(&mut self, data: &mut T, root: usize) -> Result<(), CommError>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<(), CommError>;

    /// Gathers a few bytes of control data (digests, flags): `recv` holds `n_ranks` parts of the length of `send`.
    fn all_gather_bytes(&mut self, send: &[u8], recv: &mut [u8]) -> Result<(), CommError>;

    /// Cuts the group into `parts`, adjacent ranges that cover all ranks in order, and returns this rank's end of
    /// the part it belongs to. A collective of the whole group; all ranks pass the same parts. The parts share the
    /// fate of the group: an error in one ends them all.
    fn split(&mut self, parts: &[Range<usize>]) -> Result<Box<dyn Communicator<T>>, CommError>;

    /// A handle by which another thread ends the epoch and wakes this rank.
    fn abort_handle(&self) -> AbortHandle;
}

/// Bounds of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommConfig {
    /// The longest a collective may wait for its peers. Too short, and a slow step (a long prefill chunk on a busy
    /// peer) ends the epoch; too long, and a stopped peer stalls its streams for as long.
    pub timeout: Duration,
    /// How a waiting thread passes the time; unset lets the group choose by its size and the machine's cores.
    pub wait: Option<WaitPolicy>,
}

impl Default for CommConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(20), wait: None }
    }
}

/// How a thread waits for its peers before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// How long it spins. Longer saves wake-ups (tens of microseconds each) when peers come at slightly different
    /// times; it burns a core that another thread may need.
    pub spin: Duration,
    /// How often it then offers its core to others. Over TCP a rank offers its core all the while it spins, and
    /// this is not used.
    pub n_yields: u32,
}

impl WaitPolicy {
    /// The policy for `n_threads` waiting on this machine: spin where each can have a core of its own, give the
    /// core away at once where they cannot.
    pub fn for_threads(n_threads: usize) -> Self {
        let n_cores = thread::available_parallelism().map_or(1, usize::from);
        if n_threads <= n_cores {
            Self { spin: Duration::from_micros(50), n_yields: 8 }
        } else {
            Self { spin: Duration::ZERO, n_yields: 16 }
        }
    }
}

/// Ends the epoch of a group from any thread. Cheap to clone, harmless when the group is already gone.
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn() + Send + Sync>);

impl AbortHandle {
    pub(crate) fn new(abort: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(abort))
    }

    /// Every waiting and every later call on the group answers [`CommError::Aborted`], unless it had failed before.
    pub fn abort(&self) {
        (self.0)();
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}
