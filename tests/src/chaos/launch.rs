//! How each process of a role is started: its program, its configuration, its place.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use super::{
    fleet::{Member, Shape},
    process::Launch,
    world::Host,
};
use crate::{cluster::model::ServedModel, tiny::Error};

/// Name of the cluster in etcd.
pub const CLUSTER: &str = "chaos";

/// Where every process serves gRPC.
pub const GRPC_PORT: u16 = 7000;

/// Where every process serves metrics.
pub const HTTP_PORT: u16 = 7001;

/// Where a rank listens for its peers.
const PEER_PORT: u16 = 7002;

/// The programs of the roles.
#[derive(Clone, Debug)]
pub enum Programs {
    /// One for each role, in this folder, as they are installed.
    Roles(PathBuf),
    /// One that is told its role by its first argument.
    One(PathBuf),
}

/// Everything that decides how processes are started.
pub struct Plan<'a> {
    /// The programs.
    pub programs: &'a Programs,
    /// What is served.
    pub model: &'a ServedModel,
    /// How many of what.
    pub shape: &'a Shape,
    /// Where etcd is.
    pub etcd: Vec<String>,
    /// Where each process is.
    pub hosts: &'a [(Member, Host)],
}

impl Programs {
    /// The product's own in `dir`.
    pub fn of_roles(dir: &Path) -> Result<Self, Error> {
        for role in ["router", "prefill", "decode"] {
            let program = dir.join(format!("longreach-{role}"));
            if !program.is_file() {
                return Err(format!("{} is not there: build it first", program.display()).into());
            }
        }
        Ok(Self::Roles(dir.canonicalize()?))
    }

    /// Whose program and first argument are those of `role`.
    fn of(&self, role: &str) -> (PathBuf, Option<OsString>) {
        match self {
            Self::Roles(dir) => (dir.join(format!("longreach-{role}")), None),
            Self::One(program) => (program.clone(), Some(role.into())),
        }
    }
}

impl Plan<'_> {
    /// How `member` is started; its configuration and its log go to `dir`.
    pub fn launch(&self, member: Member, dir: &Path) -> Result<Launch, Error> {
        let name = member.name();
        let host = self.hosts.iter().find(|(other, _)| *other == member);
        let host = host.map(|(_, host)| host.clone()).ok_or_else(|| format!("no host for {name}"))?;
        let (role, own) = match member {
            Member::Router(_) => ("router", self.router(&host)),
            Member::Prefill(_) => ("prefill", self.prefill(&name, &host)),
            Member::Rank { group, rank } => ("decode", self.rank((group, rank), &host)),
        };
        let config = dir.join(format!("{name}.toml"));
        let model = quoted(&self.model.path.to_string_lossy());
        fs::write(&config, format!("model = {model}\n{own}{}", self.cluster()))?;
        let (program, first) = self.programs.of(role);
        let args = first.into_iter().chain([OsString::from("--config"), config.into_os_string()]).collect();
        let log = dir.join(format!("{name}.log"));
        Ok(Launch { name, host, program, args, log })
    }

    fn cluster(&self) -> String {
        let etcd: Vec<String> = self.etcd.iter().map(|url| quoted(url)).collect();
        let (etcd, lease) = (etcd.join(", "), self.shape.lease.as_secs());
        format!("[cluster]\nname = \"{CLUSTER}\"\netcd = [{etcd}]\nlease_ttl = \"{lease}s\"\n")
    }

    fn router(&self, host: &Host) -> String {
        let (ip, max_inflight) = (host.ip(), self.shape.max_inflight);
        // A peer that is cut off says nothing: the shorter these are, the sooner a stream goes on elsewhere. Still long
        // against the pauses of processes that share two cores.
        let silence = self.shape.watchdog.as_millis() / 2;
        format!(
            "grpc_addr = \"{ip}:{GRPC_PORT}\"\nhttp_addr = \"{ip}:{HTTP_PORT}\"\nmodel_name = \"tiny\"\n\
             [limits]\nmax_inflight = {max_inflight}\n\
             [workers]\nconnect_timeout = \"1s\"\nkeep_alive_interval = \"{silence}ms\"\n\
             keep_alive_timeout = \"{silence}ms\"\npoll_interval = \"200ms\"\n\
             [drain]\nnotice = \"1s\"\n"
        )
    }

    fn prefill(&self, name: &str, host: &Host) -> String {
        let ip = host.ip();
        format!(
            "name = \"{name}\"\naddr = \"{ip}:{GRPC_PORT}\"\nhttp_addr = \"{ip}:{HTTP_PORT}\"\n{}threads = 1\n",
            self.engine()
        )
    }

    fn rank(&self, (group, rank): (usize, usize), host: &Host) -> String {
        let (ip, n_ranks) = (host.ip(), self.shape.n_ranks);
        let (watchdog, beat) = (self.shape.watchdog.as_millis(), self.shape.watchdog.as_millis() / 6);
        format!(
            "group = \"decode-{group}\"\nrank = {rank}\naddr = \"{ip}:{GRPC_PORT}\"\npeer_addr = \"{ip}:{PEER_PORT}\"\n\
             http_addr = \"{ip}:{HTTP_PORT}\"\n\
             [ranks]\ncount = {n_ranks}\nlocal_prefill_max = 32\ncollective_timeout = \"{watchdog}ms\"\n\
             heartbeat_interval = \"{beat}ms\"\nheartbeat_silence = \"{watchdog}ms\"\nconnect_timeout = \"3s\"\n{}",
            self.engine()
        )
    }

    /// What all workers of the cluster must have the same of, and bounds that fit a small model.
    fn engine(&self) -> String {
        let timeout = self.shape.handoff_timeout.as_millis();
        format!("[engine]\nkv_mem = \"32MiB\"\nkv_dtype = \"f32\"\nhandoff_timeout = \"{timeout}ms\"\n")
    }
}

/// A text as TOML writes it.
fn quoted(text: &str) -> String {
    format!("{text:?}")
}
