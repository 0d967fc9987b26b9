//! The rules of membership against real etcd servers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod calls;
mod conformance;
mod crowd;
mod mtls;
mod relay;
mod rules;
mod world;

use std::time::Duration;

use longreach_cluster::Revision;
use longreach_local::EtcdOptions;

/// Members that elect and expire soon. On a busy machine they may elect without need, which is a test too.
fn brisk(n_members: usize) -> EtcdOptions {
    EtcdOptions {
        n_members,
        heartbeat: Duration::from_millis(50),
        election: Duration::from_millis(500),
        ..EtcdOptions::default()
    }
}

/// Lets etcd forget what was before a revision, as its administrator or its own timer does.
async fn compact(endpoints: Vec<String>, revision: Revision) {
    let mut client = etcd_client::Client::connect(endpoints, None).await.unwrap();
    client.compact(i64::try_from(revision.0).unwrap(), None).await.unwrap();
}
