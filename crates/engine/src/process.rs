//! A rank of a decode group whose ranks are processes. It is the same rank as a thread's; only the communicator and the
//! control link are others.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

pub use longreach_collective::{ConnectCancel, random_secret};
use longreach_collective::{ControlEnd, TcpConfig, TcpGroup};
use longreach_types::GroupSecret;
use tokio::runtime::Handle;

use crate::{
    member::{LeaderParts, Member, RunningEngine, RunningFollower, targets},
    setup::BuildError,
    transport::GrpcTransport,
};

/// How the ranks of a group find each other.
#[derive(Clone, Debug)]
pub struct Peers {
    /// Where each rank listens for its peers, in rank order.
    pub addrs: Vec<SocketAddr>,
    /// What only the members of this life of the group know: a connection counts when both sides have proved it.
    pub secret: GroupSecret,
    /// How long ranks may take to find each other.
    pub connect_timeout: Duration,
    /// Ends the attempt sooner.
    pub cancel: ConnectCancel,
}

impl Member {
    /// Joins as rank 0 and starts the engine. `endpoints` say where each rank's door is served, in rank order.
    pub fn lead(
        self,
        listener: &TcpListener,
        peers: &Peers,
        endpoints: Vec<String>,
        runtime: &Handle,
    ) -> Result<RunningEngine, BuildError> {
        let group = self.connect(listener, peers)?;
        let ControlEnd::Leader(leader) = group.control else {
            return Err(BuildError::WrongEnd { rank: self.rank.idx });
        };
        let parts = LeaderParts {
            world: Box::new(group.comm),
            control: Some(leader),
            targets: targets(&self.rank.model, &self.rank.config, endpoints),
            transport: Arc::new(GrpcTransport::default()),
        };
        self.start_leader(parts, runtime)
    }

    /// Joins as any other rank and starts following.
    pub fn follow(self, listener: &TcpListener, peers: &Peers) -> Result<RunningFollower, BuildError> {
        let group = self.connect(listener, peers)?;
        let ControlEnd::Follower(link) = group.control else {
            return Err(BuildError::WrongEnd { rank: self.rank.idx });
        };
        self.start_follower(Box::new(group.comm), link)
    }

    fn connect(&self, listener: &TcpListener, peers: &Peers) -> Result<TcpGroup, BuildError> {
        let config = &self.rank.config;
        Ok(TcpGroup::connect(
            listener,
            &TcpConfig {
                rank: self.rank.idx,
                addrs: peers.addrs.clone(),
                secret: peers.secret.clone(),
                epoch: self.epoch.0,
                cancel: peers.cancel.clone(),
                connect_timeout: peers.connect_timeout,
                comm: config.comm,
                control: self.rank.plan.control(config),
            },
        )?)
    }
}
