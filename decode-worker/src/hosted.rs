//! The ranks of a decode process: all of a group as threads, or one that meets its peers over TCP.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use longreach_cluster::{DecodeRegistration, EpochRecord};
use longreach_engine::{
    BuildError, DecodeGroup, EngineConfig, EngineHandle, KvDoor, Model, Rank, RunningEngine, RunningFollower,
    process::{ConnectCancel, Peers, random_secret},
};
use longreach_tls::{Role, Security};
use longreach_types::GroupSecret;
use tokio::{
    runtime::Handle,
    task::{JoinHandle, spawn_blocking},
};
use tokio_util::sync::CancellationToken;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::ranks::{Followed, Led, Ranks};

/// The ranks of this process, loaded.
pub(crate) struct Hosted {
    ranks: Loaded,
    /// The door of each hosted rank.
    doors: Vec<KvDoor>,
    connect_timeout: Duration,
    /// With which other groups are asked.
    security: Security,
}

enum Loaded {
    /// All, as threads.
    Whole(DecodeGroup),
    /// One, which meets its peers over TCP.
    One { rank: Box<Rank>, idx: usize, listener: Arc<TcpListener> },
}

/// Why ranks did not come together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeetError {
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("cannot find rank {rank} at {addr}: {source}")]
    Resolve { rank: usize, addr: String, source: io::Error },
    #[error("cannot find rank {rank}: {addr} has no address")]
    NoAddress { rank: usize, addr: String },
    #[error("building the group: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl Hosted {
    /// Packs the one rank that is hosted and listens for its peers, or all. `connect_timeout` is how long ranks may take
    /// to find each other.
    pub(crate) fn load(
        model: &Model,
        config: &EngineConfig,
        one: Option<(usize, TcpListener)>,
        (connect_timeout, security): (Duration, Security),
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let (ranks, n_doors) = match one {
            Some((idx, listener)) => {
                let rank = Box::new(Rank::load(model, config, idx, progress)?);
                (Loaded::One { rank, idx, listener: Arc::new(listener) }, 1)
            }
            None => (Loaded::Whole(DecodeGroup::load(model, config, progress)?), config.shape.n_ranks()),
        };
        // One for each: clones of a door are the same door.
        let doors = std::iter::repeat_with(KvDoor::default).take(n_doors).collect();
        Ok(Self { ranks, doors, connect_timeout, security })
    }

    /// The door of each hosted rank, in rank order.
    pub(crate) fn doors(&self) -> &[KvDoor] {
        &self.doors
    }

    /// Bytes of packed weights of each hosted rank.
    pub(crate) fn weight_bytes(&self) -> Vec<usize> {
        match &self.ranks {
            Loaded::Whole(group) => group.weight_bytes(),
            Loaded::One { rank, .. } => vec![rank.weight_bytes()],
        }
    }

    async fn peers(&self, record: &EpochRecord) -> Result<Peers, MeetError> {
        let mut addrs = Vec::new();
        for member in &record.members {
            addrs.push(resolve(member).await?);
        }
        let (secret, connect_timeout) = (record.secret.clone(), self.connect_timeout);
        Ok(Peers { addrs, secret, connect_timeout, cancel: ConnectCancel::default() })
    }
}

impl Ranks for Hosted {
    type Led = RunningEngine;
    type Followed = RunningFollower;
    type Error = MeetError;

    fn has_leader(&self) -> bool {
        matches!(self.ranks, Loaded::Whole(_) | Loaded::One { idx: 0, .. })
    }

    fn secret(&self) -> io::Result<GroupSecret> {
        random_secret()
    }

    async fn lead(&self, record: &EpochRecord, moot: &CancellationToken) -> Result<RunningEngine, MeetError> {
        let endpoints: Vec<_> = record.members.iter().map(|member| member.endpoint.clone()).collect();
        let runtime = Handle::current();
        match &self.ranks {
            Loaded::Whole(group) => {
                let life = group.enlist(record.epoch);
                self.doors.iter().zip(life.inlets()).for_each(|(door, inlet)| door.open(inlet));
                Ok(spawn_blocking(move || life.start(endpoints, &runtime)).await??)
            }
            Loaded::One { rank, listener, .. } => {
                let peers = self.peers(record).await?;
                let (member, listener) = (rank.enlist(record.epoch), Arc::clone(listener));
                self.doors.iter().for_each(|door| door.open(member.inlet()));
                let cancel = peers.cancel.clone();
                let joining = spawn_blocking(move || member.lead(&listener, &peers, endpoints, &runtime));
                joined(joining, &cancel, moot).await
            }
        }
    }

    async fn follow(
        &self,
        record: &EpochRecord,
        moot: &CancellationToken,
    ) -> Result<RunningFollower, MeetError> {
        let Loaded::One { rank, listener, .. } = &self.ranks else {
            return Err(BuildError::WrongEnd { rank: 0 }.into());
        };
        let peers = self.peers(record).await?;
        let (member, listener) = (rank.enlist(record.epoch), Arc::clone(listener));
        self.doors.iter().for_each(|door| door.open(member.inlet()));
        let cancel = peers.cancel.clone();
        let joining = spawn_blocking(move || member.follow(&listener, &peers));
        joined(joining, &cancel, moot).await
    }

    fn close_doors(&self) {
        self.doors.iter().for_each(KvDoor::close);
    }

    async fn serves(&self, endpoint: &str) -> bool {
        // The bound is the caller's.
        let Ok(channel) = self.security.channel(endpoint, Role::Decode, |endpoint| endpoint) else {
            return false;
        };
        let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
        answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving)
    }
}

impl Led for RunningEngine {
    fn engine(&self) -> &EngineHandle {
        &self.handle
    }

    fn deserted(&self) -> CancellationToken {
        Self::deserted(self)
    }

    async fn stop(self) {
        // Its failure is known already, and a stopped life has nothing more to say.
        let _ended = Self::stop(self).await;
    }
}

impl Followed for RunningFollower {
    fn deserted(&self) -> CancellationToken {
        Self::deserted(self)
    }

    fn leaver(&self) -> Box<dyn FnOnce() + Send> {
        let leaver = Self::leaver(self);
        Box::new(move || leaver.announce())
    }

    fn ended(self) -> impl Future<Output = Result<(), String>> + Send {
        self.join()
    }
}

/// Waits for a rank that joins its peers.
async fn joined<T>(
    mut joining: JoinHandle<Result<T, BuildError>>,
    cancel: &ConnectCancel,
    moot: &CancellationToken,
) -> Result<T, MeetError> {
    // Biased: what has been reached counts. The other arm only waits.
    tokio::select! {
        biased;
        joined = &mut joining => return Ok(joined??),
        () = moot.cancelled() => {}
    }
    cancel.cancel();
    Ok(joining.await??)
}

async fn resolve(member: &DecodeRegistration) -> Result<SocketAddr, MeetError> {
    let (rank, addr) = (member.rank, member.peer_addr.clone());
    let found = tokio::net::lookup_host(&addr).await.map(|mut addrs| addrs.next());
    match found {
        Ok(found) => found.ok_or(MeetError::NoAddress { rank, addr }),
        Err(source) => Err(MeetError::Resolve { rank, addr, source }),
    }
}
