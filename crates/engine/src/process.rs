//! One rank of a decode group whose ranks are processes. It is the same rank as a thread's; only the communicator and
//! the control link are others.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

pub use longreach_collective::random_secret;
use longreach_collective::{
    ConnectError, ControlEnd, TcpConfig, TcpGroup,
    control::{ControlConfig, Reader},
};
use longreach_types::{Epoch, GroupSecret};
use tokio::runtime::Handle;

use crate::{
    group::{
        BuildError, EngineConfig, LeaderParts, LoadedRank, Model, RunningEngine, load_rank, start_follower,
        start_leader, targets,
    },
    inlet::KvInlet,
    transport::GrpcTransport,
};

/// How the ranks of a group find each other.
#[derive(Clone, Debug)]
pub struct Peers {
    /// Where each rank listens for its peers, in rank order.
    pub addrs: Vec<SocketAddr>,
    /// What only the members of this life of the group know: a connection counts when both sides have proved it.
    pub secret: GroupSecret,
    /// The group's life.
    pub epoch: Epoch,
    /// How long ranks may take to find each other, slow loaders included.
    pub connect_timeout: Duration,
}

/// One rank, loaded and not yet joined to its peers.
pub struct ProcessRank {
    model: Model,
    config: EngineConfig,
    idx: usize,
    epoch: Epoch,
    rank: LoadedRank,
}

/// A follower that runs.
pub struct RunningFollower {
    thread: JoinHandle<Result<(), String>>,
    _reader: Reader,
}

impl ProcessRank {
    /// Packs the share of rank `idx`.
    pub fn load(
        model: &Model,
        config: &EngineConfig,
        (idx, epoch): (usize, Epoch),
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let rank = load_rank(model, config, idx, epoch, progress)?;
        Ok(Self { model: model.clone(), config: config.clone(), idx, epoch, rank })
    }

    /// The rank's door for KV.
    pub fn inlet(&self) -> KvInlet {
        self.rank.inlet.clone()
    }

    /// Joins as rank 0 and starts the engine. `endpoints` say where each rank's inlet is served, in rank order.
    pub fn lead(
        self,
        listener: &TcpListener,
        peers: &Peers,
        endpoints: Vec<String>,
        runtime: &Handle,
    ) -> Result<RunningEngine, BuildError> {
        let group = self.connect(listener, peers)?;
        let ControlEnd::Leader(leader) = group.control else {
            return Err(BuildError::WrongEnd { rank: self.idx });
        };
        let parts = LeaderParts {
            rank: self.rank,
            world: Box::new(group.comm),
            control: Some(leader),
            targets: targets(&self.model, &self.config, endpoints),
            transport: Arc::new(GrpcTransport::default()),
        };
        start_leader(&self.model, &self.config, self.epoch, parts, runtime)
    }

    /// Joins as any other rank and starts following.
    pub fn follow(
        self,
        listener: &TcpListener,
        peers: &Peers,
        runtime: &Handle,
    ) -> Result<RunningFollower, BuildError> {
        let group = self.connect(listener, peers)?;
        let ControlEnd::Follower(link) = group.control else {
            return Err(BuildError::WrongEnd { rank: self.idx });
        };
        let world = Box::new(group.comm);
        let (thread, reader) = start_follower(self.idx, self.rank, world, link, (self.epoch, runtime))?;
        Ok(RunningFollower { thread, _reader: reader })
    }

    fn connect(&self, listener: &TcpListener, peers: &Peers) -> Result<TcpGroup, ConnectError> {
        TcpGroup::connect(
            listener,
            &TcpConfig {
                rank: self.idx,
                addrs: peers.addrs.clone(),
                secret: peers.secret.clone(),
                epoch: peers.epoch.0,
                connect_timeout: peers.connect_timeout,
                comm: self.config.comm,
                control: ControlConfig::default(),
            },
        )
    }
}

impl RunningFollower {
    /// Waits until the rank has left its group, and says why if it was not told to.
    pub async fn join(self) -> Result<(), String> {
        let thread = self.thread;
        let joined = tokio::task::spawn_blocking(move || {
            thread.join().unwrap_or_else(|_| Err("the rank's thread panicked".to_owned()))
        });
        joined.await.map_err(|error| error.to_string())?
    }
}
