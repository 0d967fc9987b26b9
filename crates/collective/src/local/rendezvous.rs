//! Waiting for each other: spin, then yield, then sleep, and never longer than the bound.
//!
//! One counter is enough. Each rank adds 1 as it enters a collective, and nobody enters collective `s + 1` before
//! all have entered `s`; so the counter reaches `n · s` exactly when all have entered `s`. Only the rank that
//! brings it there looks for sleepers.

use std::{
    hint,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use crate::{
    comm::{CommConfig, WaitPolicy},
    error::CommError,
};

/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 64;

/// Where the ranks of one communicator meet.
#[derive(Debug)]
pub(super) struct Rendezvous {
    /// Numbers of the ranks in the whole group.
    ranks: Range<usize>,
    config: CommConfig,
    policy: WaitPolicy,
    arrived: OwnLine<AtomicU64>,
    /// 1 + the rank that left first; 0 while all are here.
    left: AtomicUsize,
    lot: Arc<Lot>,
    fate: Arc<Fate>,
}

/// The common end of a group and of all communicators split from it.
#[derive(Debug, Default)]
pub(super) struct Fate {
    failed: AtomicBool,
    cause: OnceLock<CommError>,
    lots: Mutex<Vec<Arc<Lot>>>,
}

/// Where threads sleep.
#[derive(Debug, Default)]
struct Lot {
    n_sleepers: AtomicUsize,
    mutex: Mutex<()>,
    bell: Condvar,
}

/// Keeps a counter that all threads hammer off its neighbours' cache lines (two of 64 bytes are fetched together).
#[derive(Debug, Default)]
#[repr(align(128))]
struct OwnLine<T>(T);

/// Why a wait ended without everybody there.
#[derive(Debug)]
pub(super) enum Stop {
    Failed(CommError),
    Left { rank: usize },
    TimedOut,
}

impl Stop {
    /// The error of the group. A wait that ended by this rank's own observation ends the epoch.
    pub(super) fn into_error(self, meet: &Rendezvous, timeout: impl FnOnce() -> CommError) -> CommError {
        match self {
            Self::Failed(cause) => cause,
            Self::Left { rank } => meet.fail(CommError::PeerLost { rank }),
            Self::TimedOut => meet.fail(timeout()),
        }
    }
}

impl Rendezvous {
    pub(super) fn new(ranks: Range<usize>, config: CommConfig, fate: Arc<Fate>) -> Self {
        let lot = Arc::<Lot>::default();
        fate.lots.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&lot));
        let policy = config.wait.unwrap_or_else(|| WaitPolicy::for_threads(ranks.len()));
        Self { ranks, config, policy, arrived: OwnLine::default(), left: AtomicUsize::new(0), lot, fate }
    }

    /// The number of `rank` in the whole group; also of the bound one past the last.
    pub(super) fn global(&self, rank: usize) -> usize {
        self.ranks.start + rank
    }

    pub(super) fn fate(&self) -> Arc<Fate> {
        Arc::clone(&self.fate)
    }

    pub(super) fn fail(&self, cause: CommError) -> CommError {
        self.fate.fail(cause)
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        self.fate.cause().map_or(Ok(()), Err)
    }

    /// Counts a rank into collective `seq`; what it wrote before is visible to whoever sees all counted.
    pub(super) fn enter(&self, seq: u64) {
        let before = self.arrived.0.fetch_add(1, Ordering::SeqCst);
        if before + 1 == self.target(seq) {
            self.lot.wake_if_any();
        }
    }

    pub(super) fn leave(&self, rank: usize) {
        let who = self.global(rank) + 1;
        if self.left.compare_exchange(0, who, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.lot.wake_if_any();
        }
    }

    /// Waits until all ranks have entered collective `seq`.
    pub(super) fn wait(&self, seq: u64) -> Result<(), Stop> {
        let target = self.target(seq);
        if (0..SPINS_PER_LOOK).any(|_| self.spin_once(target)) {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < self.policy.spin {
            if (0..SPINS_PER_LOOK).any(|_| self.spin_once(target)) {
                return Ok(());
            }
        }
        for _ in 0..self.policy.n_yields {
            if self.all_here(target) {
                return Ok(());
            }
            thread::yield_now();
        }
        self.sleep(target, start)
    }

    fn sleep(&self, target: u64, start: Instant) -> Result<(), Stop> {
        let _counted = self.lot.count_sleeper();
        let mut guard = self.lot.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // Read before the counter: a rank that took part and then left is not missed by anybody.
            let stop = self.stop();
            if self.all_here(target) {
                return Ok(());
            }
            if let Some(stop) = stop {
                return Err(stop);
            }
            let Some(left) = self.config.timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero())
            else {
                return Err(Stop::TimedOut);
            };
            guard = self.lot.bell.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn stop(&self) -> Option<Stop> {
        if let Some(cause) = self.fate.cause() {
            return Some(Stop::Failed(cause));
        }
        let left = self.left.load(Ordering::SeqCst);
        left.checked_sub(1).map(|rank| Stop::Left { rank })
    }

    fn spin_once(&self, target: u64) -> bool {
        hint::spin_loop();
        self.all_here(target)
    }

    fn all_here(&self, target: u64) -> bool {
        self.arrived.0.load(Ordering::SeqCst) >= target
    }

    fn target(&self, seq: u64) -> u64 {
        seq * self.ranks.len() as u64
    }
}

impl Fate {
    /// Records the end of the epoch and wakes everybody; returns the first cause.
    pub(super) fn fail(&self, cause: CommError) -> CommError {
        let first = self.cause.get_or_init(|| cause).clone();
        self.failed.store(true, Ordering::SeqCst);
        for lot in self.lots.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            lot.wake_if_any();
        }
        first
    }

    fn cause(&self) -> Option<CommError> {
        if self.failed.load(Ordering::SeqCst) { self.cause.get().cloned() } else { None }
    }
}

impl Lot {
    /// Rings for those who sleep. A thread counts itself a sleeper before its last look at the condition, and both
    /// are sequentially consistent: either it sees the change that was made before this call, or it is seen here.
    fn wake_if_any(&self) {
        if self.n_sleepers.load(Ordering::SeqCst) > 0 {
            // Taken so that a thread between its last look and its sleep is asleep when the bell rings.
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.bell.notify_all();
        }
    }

    fn count_sleeper(&self) -> CountedSleeper<'_> {
        self.n_sleepers.fetch_add(1, Ordering::SeqCst);
        CountedSleeper(self)
    }
}

struct CountedSleeper<'a>(&'a Lot);

impl Drop for CountedSleeper<'_> {
    fn drop(&mut self) {
        self.0.n_sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
