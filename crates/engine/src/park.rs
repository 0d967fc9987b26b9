//! How a rank's thread waits: it sleeps until what it waits for wakes it.
//!
//! The thread is no part of a runtime, and channels need none. A wait on the runtime's own terms would end in a panic
//! when that runtime shuts down first.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for `future`, which must need no runtime.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    wait_until(None, future).expect("there is no time at which it gives up")
}

/// Waits for `future`, but no longer than `limit`.
pub(crate) fn wait_for<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    wait_until(Some(Instant::now() + limit), future)
}

fn wait_until<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => thread::park(),
            Some(Duration::ZERO) => return None,
            Some(left) => thread::park_timeout(left),
        }
    }
}
