//! The coordinator of a cluster of processes: etcd.
//!
//! What the trait promises is what etcd offers; the work here is what its client leaves open. Every call is repeated
//! over all endpoints within a bound (`channels.rs`). A change whose answer was lost is not a failure and not a
//! conflict with itself: a repeated swap that meets the very value and lease it wanted to write has succeeded. That
//! is exact for values that say who wrote them, as ours do, by an incarnation or a nonce; a guard key for each change,
//! the usual alternative, would have to be cleaned up by somebody. Watches notice when they are cut off (`watch.rs`).
//!
//! Nothing here waits for etcd to be there: [`EtcdCoordinator::new`] sends nothing, and calls say
//! [`CoordinatorError::Unavailable`] within their bound.

mod channels;
mod config;
mod watch;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, KeyValue, LeaseKeepAliveStream, LeaseKeeper, PutOptions,
    ResponseHeader, Txn, TxnOp,
};
use tokio::time;
use tonic::Code;

use self::{
    channels::{Attempt, Channels, Fault},
    watch::EtcdWatch,
};
use crate::{
    coordinator::{
        BoxFuture, Coordinator, CoordinatorError, Entry, Expect, Lease, LeaseId, Revision, Snapshot, Swap,
        Watch,
    },
    keys::Prefix,
};

pub use self::config::{EtcdAuth, EtcdConfig, EtcdConfigError, EtcdIdentity, EtcdTls};

/// Keys of one answer to a snapshot. Ours are some hundred bytes, and etcd stops for as long as it gathers an answer.
const PAGE_LEN: i64 = 1000;
/// Longest answer: a page of keys of some kilobytes each.
const MAX_PAGE_BYTES: usize = 64 << 20;
/// How often a snapshot may be overtaken by a compaction between its pages.
const MAX_SNAPSHOTS: usize = 3;

/// A handle on an etcd cluster.
pub struct EtcdCoordinator {
    channels: Channels,
    /// Streams on which leases are kept alive. One that failed is not here.
    keepers: Mutex<HashMap<LeaseId, Keeper>>,
}

struct Keeper {
    requests: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

/// How a swap ended.
enum Swapped {
    Done(Revision),
    Refused(Option<Held>),
}

/// A key as etcd holds it.
struct Held {
    entry: Entry,
    lease: i64,
}

impl EtcdCoordinator {
    /// A handle; nothing is connected before the first call.
    pub fn new(config: EtcdConfig) -> Result<Self, EtcdConfigError> {
        Ok(Self::over(Channels::new(config)?))
    }

    fn over(channels: Channels) -> Self {
        Self { channels, keepers: Mutex::default() }
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<Lease, CoordinatorError> {
        let secs = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let secs = i64::try_from(secs.max(1)).unwrap_or(i64::MAX);
        let grant = |Attempt { mut client, .. }| async move {
            // An attempt whose answer was lost leaves a lease that expires, holding nothing.
            let granted = client.lease_grant(secs, None).await?;
            let ttl = Duration::from_secs(granted.ttl().unsigned_abs());
            Ok(Lease { id: LeaseId(granted.id()), ttl, revision: revision(granted.header())? })
        };
        self.channels.call(grant).await.map_err(unavailable)
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Duration, CoordinatorError> {
        // Taken out while it is used: a stream whose answer was not waited for must not be used again.
        let held = self.keepers.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
        if let Some(mut keeper) = held {
            let bound = self.channels.config().attempt_timeout;
            if let Ok(Ok(ttl)) = time::timeout(bound, keeper.renew()).await {
                return self.kept(lease, keeper, ttl);
            }
        }
        let renew = |Attempt { mut client, .. }| async move {
            let (requests, answers) = client.lease_keep_alive(lease.0).await?;
            let mut keeper = Keeper { requests, answers };
            // The library keeps the first answer to itself.
            let ttl = keeper.renew().await?;
            Ok((keeper, ttl))
        };
        match self.channels.call(renew).await {
            Ok((keeper, ttl)) => self.kept(lease, keeper, ttl),
            Err(fault) if fault.is_unknown_lease() => Err(CoordinatorError::LeaseLost(lease)),
            Err(fault) => Err(unavailable(fault)),
        }
    }

    /// etcd answers for a lease that it does not know with a time of zero.
    fn kept(&self, lease: LeaseId, keeper: Keeper, ttl: Duration) -> Result<Duration, CoordinatorError> {
        if ttl.is_zero() {
            return Err(CoordinatorError::LeaseLost(lease));
        }
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner).insert(lease, keeper);
        Ok(ttl)
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), CoordinatorError> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
        let revoke = |Attempt { mut client, .. }| async move { Ok(client.lease_revoke(lease.0).await?) };
        match self.channels.call(revoke).await {
            Err(fault) if fault.refusal() != Some(Code::NotFound) => Err(unavailable(fault)),
            _ => Ok(()),
        }
    }

    async fn swap(&self, swap: Swap) -> Result<Revision, CoordinatorError> {
        let wanted_lease = swap.lease.map_or(0, |lease| lease.0);
        let wanted = &swap;
        let swapped = self.channels.call(|Attempt { mut client, is_repeat, .. }| async move {
            let answer = client.txn(transaction(wanted)).await?;
            if answer.succeeded() {
                return Ok(Swapped::Done(revision(answer.header())?));
            }
            let (at, held) = read(&mut client, &wanted.key).await?;
            // An attempt before this one may have been it.
            Ok(match (&wanted.value, held) {
                (Some(value), Some(held))
                    if is_repeat && held.entry.value == *value && held.lease == wanted_lease =>
                {
                    Swapped::Done(held.entry.revision)
                }
                (None, None) if is_repeat => Swapped::Done(at),
                (_, held) => Swapped::Refused(held),
            })
        });
        match swapped.await {
            Ok(Swapped::Done(revision)) => Ok(revision),
            Ok(Swapped::Refused(held)) => {
                Err(CoordinatorError::Conflict { key: swap.key, current: held.map(|held| held.entry) })
            }
            Err(fault) => match (fault.refusal(), swap.lease) {
                (Some(Code::NotFound), Some(lease)) => Err(CoordinatorError::LeaseLost(lease)),
                _ => Err(unavailable(fault)),
            },
        }
    }

    async fn snapshot(&self, prefix: &Prefix) -> Result<Snapshot, CoordinatorError> {
        let mut n_tried = 1;
        loop {
            match self.read_pages(prefix).await {
                Ok(snapshot) => return Ok(snapshot),
                // Compacted between two pages.
                Err(fault) if fault.refusal() == Some(Code::OutOfRange) && n_tried < MAX_SNAPSHOTS => {
                    n_tried += 1;
                }
                Err(fault) => return Err(unavailable(fault)),
            }
        }
    }

    /// All keys of a prefix, every page as of the revision of the first.
    async fn read_pages(&self, prefix: &Prefix) -> Result<Snapshot, Fault> {
        let (mut start, end) = (prefix.as_str().as_bytes().to_vec(), end_of(prefix));
        let mut snapshot = Snapshot::default();
        loop {
            let at = i64::try_from(snapshot.revision.0).unwrap_or(i64::MAX);
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE_LEN).with_revision(at);
            let (from, options) = (&start, &options);
            let page = self.channels.call(|Attempt { client, .. }| async move {
                let mut kv = client.kv_client().max_decoding_message_size(MAX_PAGE_BYTES);
                Ok(kv.get(from.as_slice(), Some(options.clone())).await?)
            });
            let page = page.await?;
            if at == 0 {
                snapshot.revision = revision(page.header())?;
            }
            snapshot.entries.extend(page.kvs().iter().map(entry));
            match page.kvs().last() {
                // The first key after the last one.
                Some(last) if page.more() => start = [last.key(), b"\0"].concat(),
                _ => return Ok(snapshot),
            }
        }
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, CoordinatorError> {
        let get = |Attempt { mut client, .. }| async move { read(&mut client, key).await };
        let (_, held) = self.channels.call(get).await.map_err(unavailable)?;
        Ok(held.map(|held| held.entry))
    }

    async fn watch(&self, prefix: &Prefix, from: Revision) -> Result<Box<dyn Watch>, CoordinatorError> {
        let probe = self.channels.config().watch_probe;
        let start =
            |Attempt { client, endpoint, .. }| EtcdWatch::start(client, (prefix, from), (endpoint, probe));
        let watch = self.channels.call(start).await.map_err(unavailable)?;
        Ok(Box::new(watch))
    }
}

impl Keeper {
    /// Renews the lease; zero if etcd does not know it.
    async fn renew(&mut self) -> Result<Duration, Fault> {
        // The library's error for a stream that has ended would read as an unknown lease.
        let ended = || Fault::Ended { reason: String::new() };
        self.requests.keep_alive().await.map_err(|_| ended())?;
        let answer = self.answers.message().await?.ok_or_else(ended)?;
        Ok(Duration::from_secs(u64::try_from(answer.ttl()).unwrap_or(0)))
    }
}

impl Coordinator for EtcdCoordinator {
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, CoordinatorError>> {
        Box::pin(self.grant_lease(ttl))
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, CoordinatorError>> {
        Box::pin(self.keep_alive(lease))
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), CoordinatorError>> {
        Box::pin(self.revoke(lease))
    }

    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Revision, CoordinatorError>> {
        Box::pin(self.swap(swap))
    }

    fn snapshot<'a>(&'a self, prefix: &'a Prefix) -> BoxFuture<'a, Result<Snapshot, CoordinatorError>> {
        Box::pin(self.snapshot(prefix))
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, CoordinatorError>> {
        Box::pin(self.get(key))
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a Prefix,
        from: Revision,
    ) -> BoxFuture<'a, Result<Box<dyn Watch>, CoordinatorError>> {
        Box::pin(self.watch(prefix, from))
    }

    fn detached(&self) -> Option<Arc<dyn Coordinator>> {
        Some(Arc::new(Self::over(self.channels.unconnected())))
    }
}

fn transaction(swap: &Swap) -> Txn {
    let key = swap.key.as_str();
    let condition = match swap.expect {
        Expect::Absent => Compare::version(key, CompareOp::Equal, 0),
        Expect::At(revision) => {
            // No key was put at a revision beyond etcd's range.
            Compare::mod_revision(key, CompareOp::Equal, i64::try_from(revision.0).unwrap_or(i64::MAX))
        }
    };
    let change = match &swap.value {
        Some(value) => {
            let options = swap.lease.map(|lease| PutOptions::new().with_lease(lease.0));
            TxnOp::put(key, value.as_slice(), options)
        }
        None => TxnOp::delete(key, None),
    };
    Txn::new().when([condition]).and_then([change])
}

/// One key, and the revision at which it was read.
async fn read(client: &mut Client, key: &str) -> Result<(Revision, Option<Held>), Fault> {
    let answer = client.get(key, None).await?;
    let held = answer.kvs().first().map(|kv| Held { entry: entry(kv), lease: kv.lease() });
    Ok((revision(answer.header())?, held))
}

/// The first key after all keys of a prefix.
fn end_of(prefix: &Prefix) -> Vec<u8> {
    let mut end = prefix.as_str().as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        // It ends at a slash, so there is a next byte.
        *last += 1;
    }
    end
}

/// A key that is not text was not written by us. It is kept, with marks for what cannot be read, so that it is reported
/// as unreadable.
fn entry(kv: &KeyValue) -> Entry {
    Entry {
        key: String::from_utf8_lossy(kv.key()).into_owned(),
        value: kv.value().to_vec(),
        revision: Revision(kv.mod_revision().unsigned_abs()),
    }
}

fn revision(header: Option<&ResponseHeader>) -> Result<Revision, Fault> {
    let revision = header.map(ResponseHeader::revision).and_then(|revision| u64::try_from(revision).ok());
    revision.map(Revision).ok_or(Fault::NoRevision)
}

fn unavailable(fault: Fault) -> CoordinatorError {
    CoordinatorError::Unavailable(Box::new(fault))
}
