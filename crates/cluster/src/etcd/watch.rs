//! A watch of one prefix in etcd.
//!
//! A watch that is cut off is silent, and so is a quiet prefix. To tell them apart a silent watch asks for a progress
//! report, which a member that lives answers at once; that notices a stopped member, a cut link and a lost watch
//! alike. Pings of the connection would notice the first two, but not as soon: etcd forbids them more often than
//! every five seconds. A member that has lost its leader ends the watch itself, because it was asked to.
//!
//! It never resumes: its user takes a snapshot, which is small here, and starts anew.

use std::time::Duration;

use etcd_client::{Client, WatchOptions, WatchResponse, WatchStream};
use tokio::time::{self, Instant};

use super::{channels::Fault, entry, revision};
use crate::{
    coordinator::{Batch, BoxFuture, Change, Revision, Watch, WatchError},
    keys::Prefix,
};

/// Longest message from etcd: up to a thousand revisions come in one.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// A running watch.
pub(super) struct EtcdWatch {
    stream: WatchStream,
    endpoint: String,
    /// The first revision of interest.
    from: Revision,
    probe: Duration,
    /// When something came, or was asked for.
    since: Instant,
    /// Whether a progress report is due.
    asked: bool,
}

impl EtcdWatch {
    /// Starts a watch for changes at revision `from` and later.
    pub(super) async fn start(
        client: Client,
        (prefix, from): (&Prefix, Revision),
        (endpoint, probe): (String, Duration),
    ) -> Result<Self, Fault> {
        // One revision earlier than asked for, and that one is passed over. Members up to 3.4.35 and 3.5.17 lose a
        // deletion at exactly the revision that was compacted (etcd issue 19179); so started, the watch is refused as
        // compacted instead.
        let start = i64::try_from(from.0.saturating_sub(1).max(1)).unwrap_or(i64::MAX);
        let options = WatchOptions::new().with_prefix().with_start_revision(start).with_progress_notify();
        let mut watches = client.watch_client().max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut stream = watches.watch(prefix.as_str(), Some(options)).await?;
        let created = stream.message().await?.ok_or(Fault::Ended { reason: String::new() })?;
        if created.canceled() && created.compact_revision() == 0 {
            return Err(Fault::Ended { reason: created.cancel_reason().to_owned() });
        }
        // etcd lets a watch wait for the future. A store that was wiped would be silent until it has grown as old.
        let at = revision(created.header())?;
        if at.0 + 1 < from.0 {
            return Err(Fault::Behind { at: at.0, wanted: from.0 - 1 });
        }
        Ok(Self { stream, endpoint, from, probe, since: Instant::now(), asked: false })
    }

    async fn next(&mut self) -> Result<Batch, WatchError> {
        loop {
            // Cancel-safe: a message is handled in the poll that takes it, and when to ask is kept in `self`.
            match time::timeout_at(self.since + self.probe, self.stream.message()).await {
                Ok(message) => {
                    let message = message.map_err(|error| broken(error.into()))?;
                    let response = message.ok_or_else(|| broken(Fault::Ended { reason: String::new() }))?;
                    (self.since, self.asked) = (Instant::now(), false);
                    let batch = self.read(&response)?;
                    if !batch.changes.is_empty() {
                        return Ok(batch);
                    }
                }
                Err(_) if self.asked => {
                    let silent = Fault::Silent { endpoint: self.endpoint.clone(), waited: self.probe };
                    return Err(broken(silent));
                }
                Err(_) => {
                    (self.since, self.asked) = (Instant::now(), true);
                    // The queue holds many requests, and no second one is made before an answer: this does not wait.
                    self.stream.request_progress().await.map_err(|error| broken(error.into()))?;
                }
            }
        }
    }

    fn read(&self, response: &WatchResponse) -> Result<Batch, WatchError> {
        if response.compact_revision() > 0 {
            let compacted = response.compact_revision().unsigned_abs();
            return Err(WatchError::Compacted { oldest: Revision(compacted + 1) });
        }
        if response.canceled() {
            return Err(broken(Fault::Ended { reason: response.cancel_reason().to_owned() }));
        }
        let changes = response.events().iter().filter_map(|event| event.kv()).map(|kv| {
            let entry = entry(kv);
            // The first version of a key is 1; a deletion has none.
            if kv.version() == 0 {
                Change::Delete { key: entry.key, revision: entry.revision }
            } else {
                Change::Put(entry)
            }
        });
        Ok(Batch { changes: changes.filter(|change| change.revision() >= self.from).collect() })
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self) -> BoxFuture<'_, Result<Batch, WatchError>> {
        Box::pin(self.next())
    }
}

fn broken(fault: Fault) -> WatchError {
    WatchError::Broken(Box::new(fault))
}
