//! Fork and join over a few threads, the caller being one of them.
//!
//! A decode step forks some two hundred times for tens of microseconds each. A general pool hands such work over
//! through queues and wakes the caller again at the end, which took a third of the step; here the caller works
//! itself, the others join in if they are awake, and a thread that comes late is not waited for. Threads look
//! for work for some tens of microseconds before they sleep. There are no queues,
//! no stealing and no nesting: a fork within a task, or while another caller forks, runs on its own thread.

use std::{
    any::Any,
    cell::UnsafeCell,
    hint, io,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Processor pauses between two looks: about a third of a microsecond. A pause leaves the core to its other
/// thread, which a call to the system would not.
const PAUSES: u32 = 16;
/// Looks before a worker sleeps, and before a caller gives way.
const LOOKS: u32 = 100;

/// In [`Shared::gate`]: threads may join the current job.
const OPEN: u64 = 1 << 31;
/// In [`Shared::gate`]: how many have joined and not yet left.
const INSIDE: u64 = OPEN - 1;

/// The threads, besides the caller's.
#[derive(Debug)]
pub(crate) struct ForkJoin {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller that forks.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Number of the current job, shifted by 32; [`OPEN`]; and the threads [`INSIDE`].
    gate: AtomicU64,
    /// Written only while the gate is closed and nobody is inside.
    job: UnsafeCell<Job>,
    /// For each thread, the first task of its share that nobody has taken.
    next: Vec<Share>,
    /// What a task on a worker panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    n_sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stops: AtomicBool,
}

// SAFETY: the job is written by the one caller whose turn it is, while nobody is inside, and read by threads
// inside; entering and leaving order the accesses. Its pointer is to a `Sync` closure.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A counter with a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Share(AtomicUsize);

type Work<'a> = dyn Fn(usize) + Sync + 'a;

#[derive(Clone, Copy, Debug)]
struct Job {
    /// Alive as long as the gate is open or someone is inside.
    work: *const Work<'static>,
    n_tasks: usize,
}

impl ForkJoin {
    /// Starts `n_workers` threads.
    pub(crate) fn new(n_workers: usize) -> io::Result<Self> {
        let nothing: *const Work<'static> = &|_| {};
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(Job { work: nothing, n_tasks: 0 }),
            next: (0..=n_workers).map(|_| Share(AtomicUsize::new(0))).collect(),
            panic: Mutex::new(None),
            n_sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stops: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for i in 1..=n_workers {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("kernel-{i}"));
            pool.workers.push(builder.spawn(move || shared.serve(i))?);
        }
        Ok(pool)
    }

    /// Threads that take part, the caller included.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(i)` for every `i < n_tasks`, in any order and on any of the threads. Panics if a call does,
    /// after all others have ended.
    pub(crate) fn run(&self, n_tasks: usize, work: &Work<'_>) {
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..n_tasks).for_each(work),
        };
        // SAFETY: only the lifetime changes; `Closing` ends all use of the job before `work` can die.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let job = Job { work, n_tasks };
        let closing = self.shared.open(job);
        self.shared.take_tasks(job, 0);
        drop(closing);
        if let Some(panic) = lock(&self.shared.panic).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for ForkJoin {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so it does not end with one.
            let _ = worker.join();
        }
    }
}

/// Closes the gate and waits until nobody is inside, even if the caller's own task panics.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while self.0.gate.load(Ordering::Acquire) & INSIDE != 0 {
            looks += 1;
            if looks > LOOKS {
                // A worker that the system has taken off its core.
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
    }
}

impl Shared {
    /// Lets threads join `job`.
    fn open(&self, job: Job) -> Closing<'_> {
        // SAFETY: it is the caller's turn, and the last turn ended with the gate closed and nobody inside.
        unsafe { *self.job.get() = job };
        for (thread, next) in self.next.iter().enumerate() {
            next.0.store(self.share(job, thread).start, Ordering::Relaxed);
        }
        let number = (self.gate.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // Sequentially consistent, as is a sleeper's check: either it sees the gate or it is seen here.
        self.gate.store(number << 32 | OPEN, Ordering::SeqCst);
        let closing = Closing(self);
        if self.n_sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
        closing
    }

    /// The tasks that are first of all this thread's: neighbours, which often touch the same lines.
    fn share(&self, job: Job, thread: usize) -> Range<usize> {
        let n_threads = self.next.len();
        thread * job.n_tasks / n_threads..(thread + 1) * job.n_tasks / n_threads
    }

    /// Runs the tasks of the thread's share, then what is left of the others'.
    fn take_tasks(&self, job: Job, thread: usize) {
        // SAFETY: the caller is inside, or the one that opened.
        let work = unsafe { &*job.work };
        let n_threads = self.next.len();
        for owner in (thread..n_threads).chain(0..thread) {
            let end = self.share(job, owner).end;
            loop {
                let i = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                work(i);
            }
        }
    }

    /// The life of a worker.
    fn serve(&self, thread: usize) {
        let mut last = 0;
        while let Some(job) = self.enter(&mut last) {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(job, thread))) {
                lock(&self.panic).get_or_insert(panic);
            }
            self.gate.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Joins the next job after number `last`; none when the pool stops.
    fn enter(&self, last: &mut u64) -> Option<Job> {
        let mut looks = 0;
        loop {
            let gate = self.gate.load(Ordering::Acquire);
            if is_new(gate, *last) {
                let joined = self.gate.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed);
                if joined.is_ok() {
                    *last = gate >> 32;
                    // SAFETY: this thread is inside.
                    return Some(unsafe { *self.job.get() });
                }
                continue;
            }
            if self.stops.load(Ordering::Relaxed) {
                return None;
            }
            pause();
            looks += 1;
            if looks > LOOKS {
                self.sleep_until_open(*last);
                looks = 0;
            }
        }
    }

    fn sleep_until_open(&self, last: u64) {
        let mut guard = lock(&self.sleep);
        self.n_sleepers.fetch_add(1, Ordering::SeqCst);
        while !is_new(self.gate.load(Ordering::SeqCst), last) && !self.stops.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.n_sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether the gate is open for a job after number `last`.
fn is_new(gate: u64, last: u64) -> bool {
    gate & OPEN != 0 && gate >> 32 != last
}

fn pause() {
    (0..PAUSES).for_each(|_| hint::spin_loop());
}

/// Locks a mutex whose data is sound at every moment, so that poisoning says nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn counts(n: usize) -> Vec<AtomicU32> {
        (0..n).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn every_task_runs_once_in_every_one_of_many_forks() {
        for n_workers in [1, 3] {
            let pool = ForkJoin::new(n_workers).unwrap();
            for round in 0..3000 {
                let seen = counts(round % 17);
                pool.run(seen.len(), &|i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1), "round {round}");
            }
        }
    }

    #[test]
    fn a_sleeping_worker_wakes_for_a_task_that_only_it_can_end() {
        let pool = ForkJoin::new(1).unwrap();
        for _ in 0..20 {
            // Long enough for the worker to fall asleep.
            while pool.shared.n_sleepers.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            let arrived = AtomicU32::new(0);
            pool.run(2, &|_| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn forks_within_tasks_and_from_several_callers_run_all_the_same() {
        let pool = ForkJoin::new(2).unwrap();
        let seen = counts(64);
        thread::scope(|scope| {
            for caller in 0..4 {
                let (pool, seen) = (&pool, &seen[caller * 16..][..16]);
                scope.spawn(move || {
                    pool.run(4, &|i| {
                        pool.run(4, &|j| {
                            seen[i * 4 + j].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                });
            }
        });
        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = ForkJoin::new(1).unwrap();
        for bad in [0, 1] {
            let arrived = AtomicU32::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(2, &|i| {
                    arrived.fetch_add(1, Ordering::SeqCst);
                    while arrived.load(Ordering::SeqCst) < 2 {
                        thread::yield_now();
                    }
                    assert!(i != bad, "task {i}");
                });
            }));
            let message = result.unwrap_err();
            assert_eq!(message.downcast_ref::<String>(), Some(&format!("task {bad}")));
        }
        let seen = counts(9);
        pool.run(9, &|i| {
            seen[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
}
