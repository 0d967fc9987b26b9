//! A real etcd of three nodes, each on its own host, whose members can be killed, stopped, cut off and wiped.
//!
//! `longreach_local::EtcdCluster` keeps all its members at one address, where no cable can be cut between them.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use etcd_client::{Client, ConnectOptions, GetOptions};

use super::{
    process::{Launch, Process},
    world::{Host, World},
};
use crate::tiny::Error;

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// How long one question may take; a node that stands still gives no answer.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// How often something is looked at while it is awaited.
const LOOK: Duration = Duration::from_millis(50);

/// How long an election may take on a machine that is busy with models.
const ELECTION_PATIENCE: Duration = Duration::from_secs(30);

/// Nodes of the cluster.
pub const N_NODES: usize = 3;

/// The cluster.
pub struct Etcd {
    dir: PathBuf,
    nodes: Vec<Process>,
}

impl Etcd {
    /// Starts all nodes and waits until they have a leader. Data and logs lie under `dir`.
    pub async fn start(world: &mut World, dir: &Path) -> Result<Self, Error> {
        let hosts: Vec<Host> = (0..N_NODES).map(|_| world.host()).collect::<Result<_, _>>()?;
        let mut etcd = Self { dir: dir.to_owned(), nodes: Vec::new() };
        for (idx, host) in hosts.iter().enumerate() {
            let (name, log) = (node_name(idx), dir.join(format!("{}.log", node_name(idx))));
            let args = etcd.args(idx, &hosts, "new");
            let launch = Launch { name, host: host.clone(), program: "etcd".into(), args, log };
            etcd.nodes.push(Process::new(launch));
        }
        etcd.nodes.iter_mut().try_for_each(Process::start)?;
        etcd.until_led(ELECTION_PATIENCE).await?;
        Ok(etcd)
    }

    fn args(&self, idx: usize, hosts: &[Host], state: &str) -> Vec<OsString> {
        let (client, peer) = (url(&hosts[idx], CLIENT_PORT), url(&hosts[idx], PEER_PORT));
        let member = |(idx, host): (usize, &Host)| format!("{}={}", node_name(idx), url(host, PEER_PORT));
        let members: Vec<String> = hosts.iter().enumerate().map(member).collect();
        let flags = [
            ("--name", node_name(idx)),
            ("--listen-client-urls", client.clone()),
            ("--advertise-client-urls", client),
            ("--listen-peer-urls", peer.clone()),
            ("--initial-advertise-peer-urls", peer),
            ("--initial-cluster", members.join(",")),
            ("--initial-cluster-state", state.to_owned()),
        ];
        let mut args: Vec<OsString> =
            flags.into_iter().flat_map(|(flag, value)| [flag.into(), value.into()]).collect();
        // Otherwise a node that comes back disturbs the leader with an election it cannot win.
        args.push("--pre-vote=true".into());
        args.extend(["--data-dir".into(), self.data_dir(idx).into()]);
        args
    }

    fn data_dir(&self, idx: usize) -> PathBuf {
        self.dir.join(format!("{}.data", node_name(idx)))
    }

    /// Where clients reach each node.
    pub fn endpoints(&self) -> Vec<String> {
        self.nodes.iter().map(|node| url(node.host(), CLIENT_PORT)).collect()
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Process] {
        &self.nodes
    }

    /// The nodes.
    pub fn nodes_mut(&mut self) -> &mut [Process] {
        &mut self.nodes
    }

    /// The node that leads now, if one does and says so.
    async fn leader(&self) -> Option<usize> {
        for idx in 0..N_NODES {
            let asking = async {
                let status = self.client(idx).await?.status().await?;
                let member = status.header().map(etcd_client::ResponseHeader::member_id);
                Ok::<_, Error>(status.leader() != 0 && member == Some(status.leader()))
            };
            if let Ok(Ok(true)) = tokio::time::timeout(ASK_LIMIT, asking).await {
                return Some(idx);
            }
        }
        None
    }

    /// Waits until a node leads.
    pub async fn until_led(&self, patience: Duration) -> Result<usize, Error> {
        let start = Instant::now();
        while start.elapsed() < patience {
            if let Some(leader) = self.leader().await {
                return Ok(leader);
            }
            tokio::time::sleep(LOOK).await;
        }
        Err("etcd has no leader".into())
    }

    /// Every key under `prefix`, as any node that answers has them.
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, Error> {
        let mut problem = Error::from("no node was asked");
        for idx in 0..N_NODES {
            let asking = async {
                let options = GetOptions::new().with_prefix().with_keys_only();
                let answer = self.client(idx).await?.get(prefix, Some(options)).await?;
                Ok::<_, Error>(answer.kvs().iter().map(|entry| Ok(entry.key_str()?.to_owned())).collect())
            };
            match tokio::time::timeout(ASK_LIMIT, asking).await {
                Ok(Ok(keys)) => return keys,
                Ok(Err(error)) => problem = error,
                Err(_) => problem = format!("{} does not answer", node_name(idx)).into(),
            }
        }
        Err(problem)
    }

    /// Replaces a node by an empty one of the same name, as after the loss of its disk.
    pub async fn wipe(&mut self, idx: usize) -> Result<(), Error> {
        self.nodes[idx].kill().await?;
        std::fs::remove_dir_all(self.data_dir(idx))?;
        let other = self.until_led(ELECTION_PATIENCE).await?;
        let peer = url(self.nodes[idx].host(), PEER_PORT);
        let mut client = self.client(other).await?;
        let members = client.member_list().await?;
        let old = members.members().iter().find(|member| member.peer_urls().contains(&peer));
        let old = old.ok_or("no such member")?.id();
        self.healthy(async || Ok(self.client(other).await?.member_remove(old).await.map(drop)?)).await?;
        let peers = [peer];
        self.healthy(async || Ok(self.client(other).await?.member_add(&peers, None).await.map(drop)?))
            .await?;
        let hosts: Vec<Host> = self.nodes.iter().map(|node| node.host().clone()).collect();
        let args = self.args(idx, &hosts, "existing");
        self.nodes[idx].set_args(args);
        self.nodes[idx].start()
    }

    /// Repeats a change of members until etcd takes it: it refuses any while it has not seen its members for a while.
    async fn healthy(&self, change: impl AsyncFn() -> Result<(), Error>) -> Result<(), Error> {
        let start = Instant::now();
        while let Err(error) = change().await {
            if start.elapsed() > ELECTION_PATIENCE {
                return Err(error);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    async fn client(&self, idx: usize) -> Result<Client, Error> {
        let options = ConnectOptions::new().with_connect_timeout(ASK_LIMIT).with_timeout(ASK_LIMIT);
        Ok(Client::connect([url(self.nodes[idx].host(), CLIENT_PORT)], Some(options)).await?)
    }
}

fn node_name(idx: usize) -> String {
    format!("etcd-{idx}")
}

fn url(host: &Host, port: u16) -> String {
    format!("http://{}:{port}", host.ip())
}
