//! The store as one process reaches it: the product's in-memory coordinator at the far end of the simulated network.
//!
//! A call may get lost on its way there, or on its way back when it has had its effect, which is what a caller must
//! bear. A watch looks again whenever a call changed something and at least every so often; it does not wait on the
//! coordinator's own bell, which wakes watchers in an order that no seed decides.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use longreach_cluster::{
    Batch, BoxFuture, Coordinator, CoordinatorError, Entry, Lease, LeaseId, MemoryCoordinator, Prefix,
    Revision, Snapshot, Swap, Watch, WatchError,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use crate::{
    journal::Journal,
    net::{Broken, Conn, Net, NodeId},
};

/// How long a call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a watch looks for leases that have ended.
const LOOK: Duration = Duration::from_millis(500);

/// The store, shared by the run.
#[derive(Clone)]
pub(crate) struct StoreHost {
    pub(crate) memory: MemoryCoordinator,
    pub(crate) node: NodeId,
    changed: Arc<Notify>,
    /// When something last began or ceased to be wrong with it.
    disturbed: Arc<Mutex<Option<Instant>>>,
}

/// The store, as `from` reaches it.
#[derive(Clone)]
pub(crate) struct SimStore {
    host: StoreHost,
    net: Net,
    from: NodeId,
    journal: Journal,
    /// How often an answer is lost whose call had its effect.
    lost_permille: u32,
}

impl StoreHost {
    pub(crate) fn new(node: NodeId) -> Self {
        Self {
            memory: MemoryCoordinator::default(),
            node,
            changed: Arc::default(),
            disturbed: Arc::default(),
        }
    }

    /// Something begins or ceases to be wrong. Watches look at once.
    pub(crate) fn disturb(&self) {
        *self.disturbed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.ring();
    }

    /// Whether nothing has been wrong with it since `time`.
    pub(crate) fn was_calm(&self, time: Instant) -> bool {
        self.disturbed.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|at| at < time)
    }

    /// What it holds, but for what its network does; none if it is away.
    pub(crate) fn peek(&self, prefix: &Prefix) -> Option<Vec<Entry>> {
        Some(self.memory.snapshot(prefix).now_or_never()?.ok()?.entries)
    }

    /// Lets watches look at once.
    pub(crate) fn ring(&self) {
        self.changed.notify_waiters();
    }
}

impl SimStore {
    pub(crate) fn new(host: StoreHost, net: Net, from: NodeId, journal: Journal, lost_permille: u32) -> Self {
        Self { host, net, from, journal, lost_permille }
    }

    /// A call there and back.
    fn call<'a, R: Send + 'a>(
        &'a self,
        call: impl Future<Output = Result<R, CoordinatorError>> + Send + 'a,
    ) -> BoxFuture<'a, Result<R, CoordinatorError>> {
        Box::pin(async move {
            let round_trip = async {
                let conn = self.net.connect(self.from, self.host.node).await?;
                let result = call.await;
                self.host.ring();
                conn.transit().await?;
                Ok::<_, Broken>(result)
            };
            let lost = || CoordinatorError::Unavailable(Box::new(Broken));
            match timeout(CALL_TIMEOUT, round_trip).await {
                Ok(Ok(result)) if result.is_ok() && self.net.draws(self.lost_permille) => {
                    self.journal.count("answer of the store lost");
                    Err(lost())
                }
                Ok(Ok(result)) => result,
                Ok(Err(Broken)) | Err(_) => Err(lost()),
            }
        })
    }
}

impl Coordinator for SimStore {
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, CoordinatorError>> {
        self.call(self.host.memory.grant_lease(ttl))
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, CoordinatorError>> {
        self.call(self.host.memory.keep_alive(lease))
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), CoordinatorError>> {
        self.call(self.host.memory.revoke(lease))
    }

    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Revision, CoordinatorError>> {
        self.call(self.host.memory.swap(swap))
    }

    fn snapshot<'a>(&'a self, prefix: &'a Prefix) -> BoxFuture<'a, Result<Snapshot, CoordinatorError>> {
        self.call(self.host.memory.snapshot(prefix))
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a Prefix,
        from: Revision,
    ) -> BoxFuture<'a, Result<Box<dyn Watch>, CoordinatorError>> {
        Box::pin(async move {
            let lost = |_: Broken| CoordinatorError::Unavailable(Box::new(Broken));
            let conn = self.net.connect(self.from, self.host.node).await.map_err(lost)?;
            let inner = self.call(self.host.memory.watch(prefix, from)).await?;
            let watch = SimWatch { inner, conn, changed: Arc::clone(&self.host.changed) };
            Ok(Box::new(watch) as Box<dyn Watch>)
        })
    }
}

struct SimWatch {
    inner: Box<dyn Watch>,
    conn: Conn,
    changed: Arc<Notify>,
}

impl Watch for SimWatch {
    fn next(&mut self) -> BoxFuture<'_, Result<Batch, WatchError>> {
        Box::pin(async move {
            loop {
                let changed = self.changed.notified();
                if let Some(news) = self.inner.next().now_or_never() {
                    // A watch whose connection breaks now is over, so nothing is lost with what it had.
                    return match self.conn.transit().await {
                        Ok(()) => news,
                        Err(broken) => Err(WatchError::Broken(Box::new(broken))),
                    };
                }
                tokio::select! {
                    biased;
                    broken = self.conn.broken() => return Err(WatchError::Broken(Box::new(broken))),
                    () = changed => {}
                    () = sleep(LOOK) => {}
                }
            }
        })
    }
}
