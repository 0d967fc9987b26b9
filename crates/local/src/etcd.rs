//! Real etcd servers on loopback: one, or three that form a cluster.
//!
//! Everything that can happen to an etcd can be made to happen: a member is killed, stopped and continued, restarted
//! with its data, or loses its data and joins again as a new member. The whole lives in a temporary folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use tempfile::TempDir;
use thiserror::Error;
use tokio::time::{self, Instant};
use tracing::debug;

use crate::{
    http,
    ports::free_ports,
    process::{Process, Signal},
};

/// Between two looks whether a member is ready.
const LOOK_PERIOD: Duration = Duration::from_millis(20);
/// How often a cluster is started on other ports because somebody took one of them.
const MAX_STARTS: usize = 3;
/// Ports of a member: for clients, for the other members, and for its health.
const PORTS_EACH: usize = 3;
/// Longest wait for one answer about the members.
const CALL_LIMIT: Duration = Duration::from_secs(2);

/// What to start.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// How many members.
    pub n_members: usize,
    /// The program, by its path or its name on the PATH.
    pub program: PathBuf,
    /// Between two heartbeats of a leader.
    pub heartbeat: Duration,
    /// How long members wait for a leader's heartbeat before they elect another. Shorter elects sooner; on a busy machine
    /// it elects without need. No lease is shorter than 1.5 times this.
    pub election: Duration,
    /// How long the start may take, elections included.
    pub start_limit: Duration,
    /// Files with which clients and servers prove who they are to each other. Without, there is no TLS.
    pub tls: Option<EtcdFiles>,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            n_members: 1,
            program: "etcd".into(),
            heartbeat: Duration::from_millis(100),
            election: Duration::from_secs(1),
            start_limit: Duration::from_secs(60),
            tls: None,
        }
    }
}

/// Paths of PEM files. The certificate serves as etcd's and as a client's, for 127.0.0.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdFiles {
    /// The authority that signed the certificates of both sides.
    pub ca: PathBuf,
    /// The certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Why etcd does not run as it should.
#[derive(Debug, Error)]
pub enum EtcdError {
    /// There is no etcd on this machine.
    #[error(
        "there is no program `{}`: install etcd so that it is on the PATH (as root: `apt-get install etcd-server`; or \
         take a release of etcd-io/etcd on GitHub)",
        program.display()
    )]
    Missing {
        /// What was looked for.
        program: PathBuf,
    },
    /// A member ended.
    #[error("etcd member {member} ended ({status}); its last words: {log}")]
    Ended {
        /// Which.
        member: usize,
        /// How.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },
    /// A member is not healthy, or there is no leader.
    #[error("etcd is not ready after {waited:?}; the last words of member {member}: {log}")]
    NotReady {
        /// Which.
        member: usize,
        /// How long.
        waited: Duration,
        /// The end of its log.
        log: String,
    },
    /// The system.
    #[error("cannot run etcd")]
    Io(#[from] io::Error),
    /// The members could not be changed.
    #[error("etcd's members could not be changed")]
    Members(#[source] etcd_client::Error),
}

/// A running etcd.
#[derive(Debug)]
pub struct EtcdCluster {
    options: EtcdOptions,
    // Before the folder: what writes there is gone when it is deleted.
    members: Vec<Member>,
    folder: TempDir,
}

#[derive(Debug)]
struct Member {
    process: Option<Process>,
    client_port: u16,
    peer_port: u16,
    health_port: u16,
    /// Whether it joins members that exist, and does not begin a cluster with others.
    joins: bool,
}

impl EtcdCluster {
    /// Starts etcd and waits until it is ready.
    pub async fn start(options: EtcdOptions) -> Result<Self, EtcdError> {
        for _ in 1..MAX_STARTS {
            match Self::try_start(options.clone()).await {
                Err(EtcdError::Ended { log, .. }) if log.contains("address already in use") => {
                    debug!("a port was taken, starting etcd on others");
                }
                other => return other,
            }
        }
        Self::try_start(options).await
    }

    async fn try_start(options: EtcdOptions) -> Result<Self, EtcdError> {
        let ports = free_ports(options.n_members * PORTS_EACH)?;
        let member = |ports: &[u16]| Member {
            process: None,
            client_port: ports[0],
            peer_port: ports[1],
            health_port: ports[2],
            joins: false,
        };
        let members = ports.chunks(PORTS_EACH).map(member).collect();
        let folder = tempfile::Builder::new().prefix("longreach-etcd-").tempdir()?;
        let mut cluster = Self { options, members, folder };
        for member in 0..cluster.members.len() {
            cluster.spawn(member)?;
        }
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    /// Where clients reach the members, whether they run or not.
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = self.scheme();
        self.members.iter().map(|member| format!("{scheme}://127.0.0.1:{}", member.client_port)).collect()
    }

    /// Waits until every member that runs is healthy: it has a leader and answers.
    pub async fn wait_ready(&mut self) -> Result<(), EtcdError> {
        for member in 0..self.members.len() {
            if self.members[member].process.is_some() {
                self.wait_healthy(member).await?;
            }
        }
        Ok(())
    }

    /// The member that leads, if it is known.
    pub async fn leader(&self) -> Option<usize> {
        for (idx, member) in self.members.iter().enumerate() {
            let metrics = http::get(member.health_port, "/metrics").await.unwrap_or_default();
            if metrics.lines().any(|line| line == "etcd_server_is_leader 1") {
                return Some(idx);
            }
        }
        None
    }

    /// Kills a member, as a power cut would.
    pub async fn kill(&mut self, member: usize) -> Result<(), EtcdError> {
        if let Some(mut process) = self.members[member].process.take() {
            process.kill().await?;
        }
        Ok(())
    }

    /// Stops a member: it keeps its connections and says nothing.
    pub fn stop(&self, member: usize) -> Result<(), EtcdError> {
        self.signal(member, Signal::STOP)
    }

    /// Continues a stopped member.
    pub fn cont(&self, member: usize) -> Result<(), EtcdError> {
        self.signal(member, Signal::CONT)
    }

    /// Kills a member if it runs and starts it with the data that it has. Does not wait: it is not ready before a
    /// majority is there.
    pub async fn restart(&mut self, member: usize) -> Result<(), EtcdError> {
        self.kill(member).await?;
        self.spawn(member)
    }

    /// Kills a member and deletes its data; then it joins the others as a new one. A single member begins again with
    /// nothing, as after a loss of the disk.
    pub async fn wipe(&mut self, member: usize) -> Result<(), EtcdError> {
        self.kill(member).await?;
        let data = self.data(member);
        if data.exists() {
            fs::remove_dir_all(data)?;
        }
        if self.members.len() > 1 {
            self.replace(member).await.map_err(EtcdError::Members)?;
            self.members[member].joins = true;
        }
        self.spawn(member)
    }

    /// Takes a member out of the cluster and puts a new one in its place, with its name and addresses. The others may be
    /// electing, and refuse changes for a moment after a change; so it is tried again.
    async fn replace(&self, member: usize) -> Result<(), etcd_client::Error> {
        let deadline = Instant::now() + self.options.start_limit;
        while let Err(error) = self.try_replace(member).await {
            debug!(%error, "etcd's members were not changed, trying again");
            if Instant::now() > deadline {
                return Err(error);
            }
            time::sleep(LOOK_PERIOD).await;
        }
        Ok(())
    }

    async fn try_replace(&self, member: usize) -> Result<(), etcd_client::Error> {
        let running = (0..self.members.len()).filter(|&other| self.members[other].process.is_some());
        let endpoints: Vec<_> = running.map(|other| self.endpoints()[other].clone()).collect();
        let mut options = ConnectOptions::new().with_timeout(CALL_LIMIT);
        if let Some(files) = &self.options.tls {
            let ca = Certificate::from_pem(fs::read(&files.ca)?);
            let identity = Identity::from_pem(fs::read(&files.cert)?, fs::read(&files.key)?);
            options = options.with_tls(TlsOptions::new().ca_certificate(ca).identity(identity));
        }
        let mut client = Client::connect(endpoints, Some(options)).await?;
        let url = self.peer_url(member);
        let held = client.member_list().await?;
        let held: Vec<_> = held.members().iter().filter(|held| held.peer_urls().contains(&url)).collect();
        match held[..] {
            // A member without a name has been added and has not started: an attempt before this one did it.
            [new] if new.name().is_empty() => return Ok(()),
            [old] => drop(client.member_remove(old.id()).await?),
            _ => {}
        }
        client.member_add([url.as_str()], None).await.map(drop)
    }

    fn spawn(&mut self, member: usize) -> Result<(), EtcdError> {
        let log = fs::File::create(self.log(member))?;
        let arguments = self.arguments(member);
        let program = self.options.program.clone();
        let started = Process::start(&program, |command| {
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        });
        let process = started.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => EtcdError::Missing { program },
            _ => EtcdError::Io(error),
        })?;
        self.members[member].process = Some(process);
        Ok(())
    }

    fn arguments(&self, member: usize) -> Vec<String> {
        let Member { client_port, health_port, joins, .. } = self.members[member];
        let (client, peer) = (format!("{}://127.0.0.1:{client_port}", self.scheme()), self.peer_url(member));
        let all: Vec<_> =
            (0..self.members.len()).map(|other| format!("m{other}={}", self.peer_url(other))).collect();
        let state = if joins { "existing" } else { "new" };
        let mut arguments: Vec<String> = [
            ("name", format!("m{member}")),
            ("data-dir", self.data(member).display().to_string()),
            ("listen-client-urls", client.clone()),
            ("advertise-client-urls", client),
            ("listen-peer-urls", peer.clone()),
            ("initial-advertise-peer-urls", peer),
            ("listen-metrics-urls", format!("http://127.0.0.1:{health_port}")),
            ("initial-cluster", all.join(",")),
            ("initial-cluster-state", state.to_owned()),
            ("initial-cluster-token", format!("longreach-{}", self.members[0].peer_port)),
            ("heartbeat-interval", self.options.heartbeat.as_millis().to_string()),
            ("election-timeout", self.options.election.as_millis().to_string()),
            // A member that comes back from a cut must not depose the leader that the others have.
            ("pre-vote", "true".to_owned()),
        ]
        .into_iter()
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
        if let Some(EtcdFiles { ca, cert, key }) = &self.options.tls {
            let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
            arguments.push("--client-cert-auth".to_owned());
            arguments.extend([file("trusted-ca-file", ca), file("cert-file", cert), file("key-file", key)]);
        }
        arguments
    }

    async fn wait_healthy(&mut self, member: usize) -> Result<(), EtcdError> {
        let start = Instant::now();
        loop {
            let Member { process, health_port, .. } = &mut self.members[member];
            if let Some(status) = process.as_mut().map(Process::ended).transpose()?.flatten() {
                return Err(EtcdError::Ended { member, status, log: self.last_words(member) });
            }
            let health = http::get(*health_port, "/health").await.unwrap_or_default();
            if health.contains(r#""health":"true""#) {
                return Ok(());
            }
            let waited = start.elapsed();
            if waited > self.options.start_limit {
                return Err(EtcdError::NotReady { member, waited, log: self.last_words(member) });
            }
            time::sleep(LOOK_PERIOD).await;
        }
    }

    fn signal(&self, member: usize, signal: Signal) -> Result<(), EtcdError> {
        match &self.members[member].process {
            Some(process) => Ok(process.signal(signal)?),
            None => Ok(()),
        }
    }

    fn scheme(&self) -> &'static str {
        if self.options.tls.is_some() { "https" } else { "http" }
    }

    fn peer_url(&self, member: usize) -> String {
        format!("http://127.0.0.1:{}", self.members[member].peer_port)
    }

    fn data(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("m{member}"))
    }

    fn log(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("m{member}.log"))
    }

    /// The end of a member's log, for an error that a person reads.
    fn last_words(&self, member: usize) -> String {
        let log = fs::read_to_string(self.log(member)).unwrap_or_default();
        let lines: Vec<_> = log.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}
