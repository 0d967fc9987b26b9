//! Ends streams whose client has stopped reading.
//!
//! Streams are pulled: while a client reads slowly, or not at all, nothing is asked of the router and little is
//! buffered, but the request keeps its place and its KV. A client that reads one token a second is welcome to them; one
//! that reads nothing for [`StreamConfig::stall_timeout`](crate::StreamConfig) is taken for gone. Only somebody outside
//! of the stream can notice, since a stream that nobody polls runs no code of its own: one task looks at all of them,
//! instead of a timer for each.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures::{Stream, StreamExt, stream::BoxStream};
use longreach_service::Lifecycle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::metrics::Metrics;

/// The longest pause between two looks.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// All streams that are being sent.
pub(crate) struct StallWatch {
    patience: Duration,
    streams: Mutex<Vec<Weak<dyn Stalling>>>,
    metrics: Metrics,
}

/// A stream of responses that the watch may end. What it ends with is its last item.
pub(crate) struct Watched<T>(Arc<Shared<T>>);

struct Shared<T> {
    state: Mutex<State<T>>,
    bell: Arc<Bell>,
}

/// What the stream rings when an item is there. Apart from the state, because a stream may do so while it is polled, and
/// because it keeps what it rings.
struct Bell(Mutex<Call>);

struct Call {
    waker: Waker,
    /// Since when an item has been there that nobody has come for.
    since: Option<Instant>,
}

struct State<T> {
    /// `None` once it is over.
    stream: Option<BoxStream<'static, T>>,
    /// Since when an item is with the connection and the next one is not wanted; `None` if one was and was not there. Then
    /// [`Call::since`] says whether anybody came when it was: a connection looks for items as long as there are any, and
    /// only then whether it can send them.
    idle_since: Option<Instant>,
    /// What a client that comes back is told.
    last_words: Option<T>,
}

/// What the watch does with a stream, whatever its items are.
trait Stalling: Send + Sync {
    /// Ends the stream if nobody has wanted an item since `limit`. Says whether it did.
    fn end_if_idle_since(&self, limit: Instant) -> bool;
}

impl StallWatch {
    /// Ends streams that nobody reads for `patience`.
    pub(crate) fn new(patience: Duration, metrics: Metrics) -> Self {
        Self { patience, streams: Mutex::default(), metrics }
    }

    /// How long a client may read nothing.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// `stream` under watch. If it is ended, `last_words` are its last item.
    pub(crate) fn watch<T: Send + 'static>(
        &self,
        stream: impl Stream<Item = T> + Send + 'static,
        last_words: T,
    ) -> Watched<T> {
        let state = State {
            stream: Some(stream.boxed()),
            idle_since: Some(Instant::now()),
            last_words: Some(last_words),
        };
        let bell = Bell(Mutex::new(Call { waker: Waker::noop().clone(), since: None }));
        let shared = Arc::new(Shared { state: Mutex::new(state), bell: Arc::new(bell) });
        let weak: Weak<Shared<T>> = Arc::downgrade(&shared);
        self.streams().push(weak);
        Watched(shared)
    }

    /// Looks at all streams again and again, as long as the process lives.
    pub(crate) async fn run(self: Arc<Self>, lifecycle: Lifecycle) {
        let token = lifecycle.token();
        let mut ticks =
            tokio::time::interval((self.patience / 4).clamp(Duration::from_millis(1), MAX_INTERVAL));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while token.run_until_cancelled(ticks.tick()).await.is_some() {
            self.look(Instant::now());
        }
    }

    fn look(&self, now: Instant) {
        let Some(limit) = now.checked_sub(self.patience) else { return };
        // A stream that is dropped here may give back much; nobody who opens one should wait for that.
        let streams = std::mem::take(&mut *self.streams());
        let mut alive = Vec::with_capacity(streams.len());
        for stream in streams {
            if let Some(strong) = stream.upgrade() {
                if strong.end_if_idle_since(limit) {
                    self.metrics.stalled();
                } else {
                    alive.push(stream);
                }
            }
        }
        self.streams().append(&mut alive);
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Weak<dyn Stalling>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bell {
    fn call(&self) -> MutexGuard<'_, Call> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        let mut call = self.call();
        call.since.get_or_insert_with(Instant::now);
        let waker = call.waker.clone();
        drop(call);
        waker.wake();
    }
}

impl<T: Send> Stalling for Shared<T> {
    fn end_if_idle_since(&self, limit: Instant) -> bool {
        let mut state = self.state();
        let idle_since = state.idle_since.or(self.bell.call().since);
        let is_stalled = state.stream.is_some() && idle_since.is_some_and(|since| since <= limit);
        if is_stalled {
            state.stream = None;
        }
        is_stalled
    }
}

impl<T> Stream for Watched<T> {
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.state();
        let Some(stream) = &mut state.stream else { return Poll::Ready(state.last_words.take()) };
        *self.0.bell.call() = Call { waker: context.waker().clone(), since: None };
        let waker = Waker::from(Arc::clone(&self.0.bell));
        let polled = stream.poll_next_unpin(&mut Context::from_waker(&waker));
        state.idle_since = match &polled {
            Poll::Pending => None,
            Poll::Ready(Some(_)) => Some(Instant::now()),
            Poll::Ready(None) => {
                (state.stream, state.last_words) = (None, None);
                None
            }
        };
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::stream;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn watch() -> StallWatch {
        StallWatch::new(PATIENCE, longreach_service::Metrics::new("router").register(Metrics::new))
    }

    /// Counts those that live.
    struct Held(Arc<AtomicUsize>);

    impl Held {
        fn new(n_held: &Arc<AtomicUsize>) -> Self {
            n_held.fetch_add(1, Ordering::SeqCst);
            Self(Arc::clone(n_held))
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_nobody_reads_gives_back_what_it_holds_and_ends_with_its_last_words() {
        let (watch, n_held) = (watch(), Arc::new(AtomicUsize::new(0)));
        let held = Held::new(&n_held);
        let numbers = stream::unfold((0, held), |(n, held)| async move { Some((n, (n + 1, held))) });
        let mut numbers = watch.watch(numbers, -1);
        for wanted in 0..20 {
            assert_eq!(numbers.next().await, Some(wanted));
            tokio::time::advance(PATIENCE - Duration::from_secs(1)).await;
            watch.look(Instant::now());
            assert_eq!(n_held.load(Ordering::SeqCst), 1, "slow is not stalled");
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        watch.look(Instant::now());
        assert_eq!(n_held.load(Ordering::SeqCst), 0);
        assert_eq!((numbers.next().await, numbers.next().await), (Some(-1), None));
        watch.look(Instant::now());
        assert!(watch.streams().is_empty(), "what is over is forgotten");
    }

    /// A connection that has sent what was there asks for more, and only when that comes looks whether it can be sent.
    #[tokio::test(start_paused = true)]
    async fn an_item_that_nobody_comes_for_is_one_that_nobody_wants() {
        let watch = watch();
        let (items, receiver) = tokio::sync::mpsc::channel(4);
        let mut stream = watch.watch(
            stream::unfold(receiver, |mut receiver: tokio::sync::mpsc::Receiver<i32>| async move {
                Some((receiver.recv().await?, receiver))
            }),
            -1,
        );
        assert_eq!(futures::poll!(stream.next()), Poll::Pending);
        tokio::time::advance(2 * PATIENCE).await;
        watch.look(Instant::now());
        items.send(7).await.unwrap();
        tokio::time::advance(PATIENCE - Duration::from_secs(1)).await;
        watch.look(Instant::now());
        assert_eq!(stream.next().await, Some(7), "it was wanted in time");
        assert_eq!(futures::poll!(stream.next()), Poll::Pending);
        items.send(8).await.unwrap();
        tokio::time::advance(PATIENCE).await;
        watch.look(Instant::now());
        assert!(items.is_closed(), "what the stream holds is given back");
        assert_eq!((stream.next().await, stream.next().await), (Some(-1), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_waits_for_its_workers_is_not_stalled() {
        let watch = watch();
        let mut silent = watch.watch(stream::pending::<i32>(), -1);
        let waiting = tokio::time::timeout(3 * PATIENCE, silent.next());
        assert!(waiting.await.is_err());
        watch.look(Instant::now());
        assert!(silent.0.state().stream.is_some());
        let mut short = watch.watch(stream::iter([1]), -1);
        assert_eq!((short.next().await, short.next().await), (Some(1), None));
        drop((silent, short));
        watch.look(Instant::now());
        assert!(watch.streams().is_empty());
    }
}
