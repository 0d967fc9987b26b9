//! Ranks of a decode group as processes of their own.
//!
//! The command starts one child for every rank but the first, which it is itself. Each child binds its addresses and
//! says them in a line on its standard output; when all have, each is sent a line with everybody's. Nobody picks a port
//! for another, so no two can collide. A child whose parent dies sees its standard input or its links close, and ends.

use std::{net::SocketAddr, process::Stdio, time::Duration};

use longreach_engine::{
    EngineConfig, Member, Model, Rank, RunningEngine,
    process::{ConnectCancel, Peers, random_secret},
    serve::Door,
};
use longreach_proto::worker::kv_server;
use longreach_tls::Security;
use longreach_types::Epoch;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, Command},
    runtime::Handle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

use crate::{
    args::RankArgs,
    error::CliError,
    model::{self, blocking},
};

/// How long ranks may take to load and find each other.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);

/// Any free port of this machine.
const FREE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Where one rank is.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct RankAddrs {
    /// For its peers.
    peer: SocketAddr,
    /// Its KV service.
    kv: String,
}

/// What a child needs of the others.
#[derive(Debug, Deserialize, Serialize)]
struct GroupAddrs {
    peers: Vec<SocketAddr>,
    /// In hexadecimal; pipes between parent and child are as private as their memory.
    secret: String,
    epoch: u64,
}

/// The other ranks of a group whose rank 0 is an engine of this process.
pub(crate) struct RankProcesses {
    children: Vec<(Child, ChildStdin)>,
    close: CancellationToken,
    tasks: TaskTracker,
}

/// A rank's listeners.
struct Bound {
    peer: std::net::TcpListener,
    door: Door,
    addrs: RankAddrs,
}

async fn bind() -> Result<Bound, CliError> {
    let peer = std::net::TcpListener::bind(FREE).map_err(|error| CliError::start(&error))?;
    let door = Door::open(FREE, Security::Plaintext).await.map_err(|error| CliError::start(&error))?;
    let peer_addr = peer.local_addr().map_err(|error| CliError::start(&error))?;
    let addrs = RankAddrs { peer: peer_addr, kv: door.endpoint() };
    Ok(Bound { peer, door, addrs })
}

/// Serves a rank's KV door until `close`.
fn serve(door: Door, rank: &Member, (tasks, close): (&TaskTracker, &CancellationToken)) {
    let routes = Routes::new(kv_server(rank.inlet().into()));
    let close = close.clone();
    tasks.spawn(async move {
        if let Err(error) = door.serve(routes, close).await {
            tracing::error!(%error, "KV service ended");
        }
    });
}

impl RankProcesses {
    /// Starts the children, loads rank 0, and returns its engine when the group has formed.
    pub(crate) async fn start(
        model: &Model,
        config: &EngineConfig,
        engine_args: &[String],
    ) -> Result<(RunningEngine, Self), CliError> {
        let mut children = Vec::new();
        let mut addrs = Vec::new();
        let own = bind().await?;
        addrs.push(own.addrs.clone());
        for rank in 1..config.shape.n_ranks() {
            let (child, stdin, its_addrs) = spawn_child(rank, engine_args).await?;
            children.push((child, stdin));
            addrs.push(its_addrs);
        }
        let secret = random_secret().map_err(|error| CliError::start(&error))?.to_hex();
        let group = GroupAddrs { peers: addrs.iter().map(|rank| rank.peer).collect(), secret, epoch: 1 };
        let line = serde_json::to_string(&group).map_err(|error| CliError::start(&error))? + "\n";
        for (_, stdin) in &mut children {
            stdin.write_all(line.as_bytes()).await.map_err(|error| CliError::start(&error))?;
        }
        let peers = peers(&group)?;
        let (loading, config) = (model.clone(), config.clone());
        let bar = model::progress("packing");
        let rank = blocking(move || Rank::load(&loading, &config, 0, &bar)).await?.enlist(Epoch(group.epoch));
        let (tasks, close) = (TaskTracker::new(), CancellationToken::new());
        serve(own.door, &rank, (&tasks, &close));
        let endpoints = addrs.into_iter().map(|rank| rank.kv).collect();
        let (listener, runtime) = (own.peer, Handle::current());
        let engine = blocking(move || rank.lead(&listener, &peers, endpoints, &runtime)).await?;
        Ok((engine, Self { children, close, tasks }))
    }

    /// Waits for every child, once the engine has stopped and told them to leave.
    pub(crate) async fn join(self) -> Result<(), CliError> {
        let Self { children, close, tasks } = self;
        let mut outcome = Ok(());
        close.cancel();
        tasks.close();
        tasks.wait().await;
        for (rank, (mut child, stdin)) in children.into_iter().enumerate() {
            drop(stdin);
            let status = child.wait().await.map_err(|error| CliError::start(&error))?;
            if !status.success() {
                outcome = outcome.and(Err(CliError::Start(format!("rank {} ended with {status}", rank + 1))));
            }
        }
        outcome
    }
}

async fn spawn_child(
    rank: usize,
    engine_args: &[String],
) -> Result<(Child, ChildStdin, RankAddrs), CliError> {
    let program = std::env::current_exe().map_err(|error| CliError::start(&error))?;
    let mut child = Command::new(program)
        .arg("rank")
        .args(engine_args)
        .args(["--rank", &rank.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| CliError::start(&error))?;
    let lost = || CliError::Start(format!("rank {rank} said nothing; see its messages above"));
    let stdin = child.stdin.take().ok_or_else(lost)?;
    let stdout = child.stdout.take().ok_or_else(lost)?;
    let line = BufReader::new(stdout).lines().next_line().await.map_err(|error| CliError::start(&error))?;
    let addrs = serde_json::from_str(&line.ok_or_else(lost)?).map_err(|error| CliError::start(&error))?;
    Ok((child, stdin, addrs))
}

fn peers(group: &GroupAddrs) -> Result<Peers, CliError> {
    Ok(Peers {
        addrs: group.peers.clone(),
        secret: group.secret.parse().map_err(|error| CliError::start(&error))?,
        connect_timeout: CONNECT_TIMEOUT,
        cancel: ConnectCancel::default(),
    })
}

/// `longreach rank`: what a child runs.
pub(crate) async fn run_child(args: RankArgs) -> Result<(), CliError> {
    let (config, _) = args.engine.config(1)?;
    let model = model::open_files(args.engine.model.clone(), false).await?.model;
    let own = bind().await?;
    println!("{}", serde_json::to_string(&own.addrs).map_err(|error| CliError::start(&error))?);
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    let line = input.next_line().await.map_err(|error| CliError::start(&error))?;
    let Some(line) = line else { return Ok(()) };
    let group: GroupAddrs = serde_json::from_str(&line).map_err(|error| CliError::start(&error))?;
    let peers = peers(&group)?;
    let rank = blocking(move || Rank::load(&model, &config, args.rank, &|_, _| {})).await?;
    let rank = rank.enlist(Epoch(group.epoch));
    let (tasks, close) = (TaskTracker::new(), CancellationToken::new());
    serve(own.door, &rank, (&tasks, &close));
    let listener = own.peer;
    let follower = blocking(move || rank.follow(&listener, &peers)).await?;
    let outcome = follower.join().await.map_err(CliError::Start);
    close.cancel();
    tasks.close();
    tasks.wait().await;
    outcome
}
