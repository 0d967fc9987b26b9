//! Where kernels run: one implementation and the threads it may use.
//!
//! Work is split over outputs, rows and heads only, never over a summed index, so the number of threads cannot
//! change a bit of any result.

use crate::{
    aligned::Pool,
    fork::ForkJoin,
    isa::Isa,
    simd::{Backend, Vector},
};

/// An implementation proven to run on this processor, with its threads. Every operation takes one.
#[derive(Debug)]
pub struct Exec {
    isa: Isa,
    backend: Backend,
    pool: Option<ForkJoin>,
    memory: Pool,
}

/// Why an [`Exec`] could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The processor lacks the instructions.
    #[error("this processor cannot run the {0} kernels; the best it can run is {best}", best = Isa::best())]
    Unavailable(Isa),
    /// No threads were asked for.
    #[error("n_threads is 0; it must be at least 1")]
    NoThreads,
    /// The threads could not be started.
    #[error("cannot start {n_threads} kernel threads")]
    Threads {
        /// Threads asked for.
        n_threads: usize,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl Exec {
    /// Proves that `isa` can run here. Work is split over `n_threads`, of which the caller's is one.
    pub fn new(isa: Isa, n_threads: usize) -> Result<Self, ExecError> {
        let backend = Backend::new(isa).ok_or(ExecError::Unavailable(isa))?;
        let pool = match n_threads {
            0 => return Err(ExecError::NoThreads),
            1 => None,
            _ => Some(
                ForkJoin::new(n_threads - 1).map_err(|source| ExecError::Threads { n_threads, source })?,
            ),
        };
        Ok(Self { isa, backend, pool, memory: Pool::default() })
    }

    /// The implementation that runs.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that work is split over.
    pub fn n_threads(&self) -> usize {
        self.pool.as_ref().map_or(1, ForkJoin::n_threads)
    }

    /// Where packed weights live.
    pub(crate) fn memory(&self) -> &Pool {
        &self.memory
    }

    /// The vector implementation, or none for the reference loops.
    pub(crate) fn vector(&self) -> Option<Vector> {
        self.backend.vector()
    }

    /// Calls `task(i)` for every `i < n_tasks`, in any order, on all threads.
    pub(crate) fn parallel(&self, n_tasks: usize, task: impl Fn(usize) + Sync) {
        match &self.pool {
            Some(pool) if n_tasks > 1 => {
                pool.run(n_tasks, &task);
            }
            _ => (0..n_tasks).for_each(task),
        }
    }

    /// Splits `data` into rows of `row_len` and calls `task(first_row, rows)` for runs of at least `grain`
    /// rows.
    pub(crate) fn parallel_rows(
        &self,
        data: &mut [f32],
        row_len: usize,
        grain: usize,
        task: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        if data.is_empty() {
            return;
        }
        let n_rows = data.len().div_ceil(row_len);
        let chunk = n_rows.div_ceil(self.n_threads() * 4).max(grain);
        if n_rows <= chunk {
            return task(0, data);
        }
        let len = data.len();
        let all = Disjoint::new(data);
        self.parallel(n_rows.div_ceil(chunk), |i| {
            let start = i * chunk * row_len;
            // SAFETY: each task has its own rows.
            let rows = unsafe { all.slice(start, (chunk * row_len).min(len - start)) };
            task(i * chunk, rows);
        });
    }
}

/// A mutable slice that several tasks write at disjoint places.
///
/// `chunks_mut` cannot express this: outputs of a matmul are columns of a row-major matrix.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only written through `slice`, whose contract makes the places disjoint.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), _slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No other live slice may overlap `start..start + len`.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the assertion, exclusive by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_threads_are_refused_and_one_needs_no_pool() {
        assert!(matches!(Exec::new(Isa::Portable, 0), Err(ExecError::NoThreads)));
        assert_eq!(Exec::new(Isa::Portable, 1).unwrap().n_threads(), 1);
        assert_eq!(Exec::new(Isa::Portable, 3).unwrap().n_threads(), 3);
    }

    #[test]
    fn every_row_is_visited_once_for_any_thread_count() {
        for n_threads in [1, 2, 3] {
            let exec = Exec::new(Isa::Portable, n_threads).unwrap();
            for n_rows in [0, 1, 7, 64] {
                let mut data = vec![0.0; n_rows * 5];
                exec.parallel_rows(&mut data, 5, 2, |first, rows| {
                    for (i, row) in rows.chunks_mut(5).enumerate() {
                        row.iter_mut().for_each(|x| *x += (first + i) as f32);
                    }
                });
                let expected: Vec<f32> = (0..n_rows).flat_map(|row| [row as f32; 5]).collect();
                assert_eq!(data, expected);
            }
        }
    }
}
