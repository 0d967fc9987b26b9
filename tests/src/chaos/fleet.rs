//! A cluster of processes: a real etcd, routers, prefill workers, and decode groups whose ranks are processes.
//!
//! Everything a row does to it is said in names of the cluster: kill this rank, stop that leader, cut this cable. The
//! processes are the product's own, started as an operator starts them; settings that would make a row wait for minutes
//! (how long a stopped peer is waited for, how long a lease lives) are set as configuration, never patched.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use longreach_cluster::{GroupId, Key, KeySpace};
use longreach_proto::inference::{GetModelRequest, model_service_client::ModelServiceClient};
use longreach_types::WorkerId;
use tempfile::TempDir;

use super::{
    client::{self, Routers},
    etcd::Etcd,
    launch::{self, Programs},
    pools::Workers,
    process::Process,
    procfs::Figures,
    world::World,
};
use crate::{
    cluster::{http::HttpClient, model::ServedModel},
    tiny::Error,
};

/// How long a cluster may take to start.
const START_PATIENCE: Duration = Duration::from_secs(90);

/// How long one question may take.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// How often something is looked at while it is awaited.
const LOOK: Duration = Duration::from_millis(20);

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Routers.
    pub n_routers: usize,
    /// Prefill workers.
    pub n_prefills: usize,
    /// Decode groups.
    pub n_groups: usize,
    /// Ranks of each group, each a process.
    pub n_ranks: usize,
    /// Requests that one router takes at once.
    pub max_inflight: usize,
    /// How long a rank waits for its peers before it ends the epoch.
    pub watchdog: Duration,
    /// How long a hand-off may stand still.
    pub handoff_timeout: Duration,
    /// How long a registration lives when nobody keeps it alive.
    pub lease: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            n_routers: 2,
            n_prefills: 2,
            n_groups: 2,
            n_ranks: 2,
            max_inflight: 4096,
            watchdog: Duration::from_secs(3),
            handoff_timeout: Duration::from_secs(10),
            lease: Duration::from_secs(5),
        }
    }
}

/// One process of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Member {
    /// A router.
    Router(usize),
    /// A prefill worker.
    Prefill(usize),
    /// A rank of a decode group. Rank 0 leads.
    Rank {
        /// The group.
        group: usize,
        /// The rank.
        rank: usize,
    },
}

/// The cluster.
pub struct Fleet {
    /// The store.
    pub etcd: Etcd,
    /// How it was made.
    pub shape: Shape,
    /// The workers, to be asked how they are.
    pub workers: Workers,
    /// The routers, as clients know them.
    pub routers: Routers,
    members: Vec<(Member, Process)>,
    dir: TempDir,
}

impl Shape {
    /// Every process of a role.
    pub fn members(&self) -> Vec<Member> {
        let groups = 0..self.n_groups;
        let ranks = groups.flat_map(|group| (0..self.n_ranks).map(move |rank| Member::Rank { group, rank }));
        let prefills = (0..self.n_prefills).map(Member::Prefill);
        ranks.chain(prefills).chain((0..self.n_routers).map(Member::Router)).collect()
    }
}

impl Member {
    /// Its stable name.
    pub fn name(self) -> String {
        match self {
            Self::Router(idx) => format!("router-{idx}"),
            Self::Prefill(idx) => format!("prefill-{idx}"),
            Self::Rank { group, rank } => format!("decode-{group}-rank-{rank}"),
        }
    }
}

impl Fleet {
    /// Starts a cluster of `shape` in `world`, which serves `model`, and waits until it is whole.
    pub async fn start(
        world: &mut World,
        programs: &Programs,
        model: &ServedModel,
        shape: Shape,
    ) -> Result<Self, Error> {
        let dir = TempDir::new()?;
        let etcd = Etcd::start(world, dir.path()).await?;
        let hosts = shape.members().into_iter().map(|member| Ok((member, world.host()?)));
        let hosts: Vec<_> = hosts.collect::<Result<_, Error>>()?;
        let plan = launch::Plan { programs, model, shape: &shape, etcd: etcd.endpoints(), hosts: &hosts };
        let mut members = Vec::new();
        for &(member, _) in &hosts {
            members.push((member, Process::new(plan.launch(member, dir.path())?)));
        }
        let addr = |wanted: Member| -> Result<SocketAddr, Error> {
            let host = hosts.iter().find(|(member, _)| *member == wanted);
            let (_, host) = host.ok_or_else(|| format!("no {}", wanted.name()))?;
            Ok((host.ip(), launch::GRPC_PORT).into())
        };
        let leaders = (0..shape.n_groups).map(|group| addr(Member::Rank { group, rank: 0 }));
        let prefills = (0..shape.n_prefills).map(|idx| addr(Member::Prefill(idx)));
        let routers = (0..shape.n_routers).map(|idx| addr(Member::Router(idx)));
        let workers = Workers::new(
            &leaders.collect::<Result<Vec<_>, _>>()?,
            &prefills.collect::<Result<Vec<_>, _>>()?,
        )?;
        let routers = Routers::new(&routers.collect::<Result<Vec<_>, _>>()?)?;
        let mut fleet = Self { etcd, shape, workers, routers, members, dir };
        fleet.members.iter_mut().try_for_each(|(_, process)| process.start())?;
        match fleet.until_whole(START_PATIENCE).await {
            Ok(_) => Ok(fleet),
            Err(error) => Err(format!("the cluster does not start: {error}\n{}", fleet.tails(20)).into()),
        }
    }

    /// The process of `member`.
    pub fn process(&mut self, member: Member) -> &mut Process {
        let found = self.members.iter_mut().find(|(other, _)| *other == member);
        &mut found.expect("rows name members of the shape").1
    }

    /// Waits until etcd knows exactly the workers `living`, and every group as ready; how long that took.
    pub async fn until_registered(&self, living: &[Member], patience: Duration) -> Result<Duration, Error> {
        let (start, wanted) = (Instant::now(), self.registrations(living)?);
        loop {
            let listed = self.registered().await;
            if listed.as_ref().is_ok_and(|listed| *listed == wanted) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > patience {
                return Err(
                    format!("etcd has {listed:?} after {patience:?}, and should have {wanted:?}").into()
                );
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The keys that should be there.
    fn registrations(&self, living: &[Member]) -> Result<BTreeSet<String>, Error> {
        let keys = KeySpace::new(launch::CLUSTER)?;
        let group = |idx: usize| GroupId(format!("decode-{idx}"));
        let of_member = |member: &Member| match *member {
            Member::Router(_) => None,
            Member::Prefill(_) => Some(Key::Prefill(WorkerId(member.name()))),
            Member::Rank { group: idx, rank } => Some(Key::Rank { group: group(idx), rank }),
        };
        let ready = (0..self.shape.n_groups).map(|idx| Key::Ready(group(idx)));
        let wanted = living.iter().filter_map(of_member).chain(ready);
        Ok(wanted.map(|key| keys.encode(&key)).collect::<Result<_, _>>()?)
    }

    /// The keys that are there, but for the epochs, which outlive everybody.
    async fn registered(&self) -> Result<BTreeSet<String>, Error> {
        let keys = self.etcd.keys(&format!("/longreach/v1/{}/", launch::CLUSTER)).await?;
        Ok(keys.into_iter().filter(|key| !key.ends_with("/epoch")).collect())
    }

    /// Waits until every worker answers and every router is ready and sees all workers; how long that took.
    pub async fn until_whole(&self, patience: Duration) -> Result<Duration, Error> {
        let start = Instant::now();
        self.workers.until_answering(patience).await?;
        for idx in 0..self.shape.n_routers {
            let sees_all = async || self.router_sees(idx).await.is_ok_and(|seen| seen);
            while !sees_all().await {
                if start.elapsed() > patience {
                    return Err(format!("{} does not see all workers", Member::Router(idx).name()).into());
                }
                tokio::time::sleep(LOOK).await;
            }
        }
        Ok(start.elapsed())
    }

    /// Whether a router is ready and knows every decode group.
    async fn router_sees(&self, idx: usize) -> Result<bool, Error> {
        let channel = client::lazy_channel(self.addr(Member::Router(idx), launch::GRPC_PORT)?)?;
        let asking = async {
            let model =
                ModelServiceClient::new(channel.clone()).get_model(GetModelRequest::default()).await?;
            let n_groups = model.into_inner().model.map_or(0, |model| model.groups.len());
            Ok::<_, Error>(n_groups == self.shape.n_groups && client::serves(&channel).await)
        };
        tokio::time::timeout(ASK_LIMIT, asking).await?
    }

    /// Whether `member` says that it is ready.
    pub async fn is_ready(&self, member: Member) -> bool {
        let addr = self.addr(member, launch::GRPC_PORT);
        let Ok(channel) = addr.and_then(client::lazy_channel) else { return false };
        client::serves(&channel).await
    }

    /// Waits until `member` says that it is ready.
    pub async fn until_ready(&self, member: Member, patience: Duration) -> Result<(), Error> {
        let start = Instant::now();
        while !self.is_ready(member).await {
            if start.elapsed() > patience {
                return Err(format!("{} is not ready after {patience:?}", member.name()).into());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    fn addr(&self, member: Member, port: u16) -> Result<SocketAddr, Error> {
        let found = self.members.iter().find(|(other, _)| *other == member);
        let (_, process) = found.ok_or_else(|| format!("no {}", member.name()))?;
        Ok((process.host().ip(), port).into())
    }

    /// A counter or gauge of a router, summed over the routers that answer.
    pub async fn router_metric(&self, name: &str) -> u64 {
        let mut sum = 0;
        for idx in 0..self.shape.n_routers {
            let Ok(addr) = self.addr(Member::Router(idx), launch::HTTP_PORT) else { continue };
            let asking = async { HttpClient::new(addr).get("/metrics").await?.text().await };
            let Ok(Ok(page)) = tokio::time::timeout(ASK_LIMIT, asking).await else { continue };
            sum += metric(&page, name);
        }
        sum
    }

    /// What the kernel says about every process of a role.
    pub fn figures(&self) -> Vec<(Member, u32, Figures)> {
        let figures =
            |(member, process): &(Member, Process)| Some((*member, process.pid()?, process.figures()?));
        self.members.iter().filter_map(figures).collect()
    }

    /// Processes that have ended though nobody ended them.
    pub fn fallen(&mut self) -> Vec<String> {
        let nodes = self.etcd.nodes_mut().iter_mut();
        let all = self.members.iter_mut().map(|(_, process)| process).chain(nodes);
        all.filter_map(|process| process.fell().map(|status| format!("{}: {status}", process.name())))
            .collect()
    }

    /// The last lines of every role's log.
    pub fn tails(&self, n_lines: usize) -> String {
        let tail = |process: &Process| {
            let text = std::fs::read_to_string(process.log()).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let lines = lines[lines.len().saturating_sub(n_lines)..].join("\n");
            format!("--- {}\n{lines}\n", process.name())
        };
        self.members.iter().map(|(_, process)| tail(process)).collect()
    }

    /// Copies every log to `to`.
    pub fn keep_logs(&self, to: &Path) -> Result<(), Error> {
        std::fs::create_dir_all(to)?;
        for process in self.members.iter().map(|(_, process)| process).chain(self.etcd.nodes()) {
            if let Some(name) = process.log().file_name() {
                std::fs::copy(process.log(), to.join(name))?;
            }
        }
        Ok(())
    }

    /// Ends every role as an operator does, routers first, and says which did not end well within `grace`.
    pub async fn stop(mut self, grace: Duration) -> Result<Vec<String>, Error> {
        let mut problems = Vec::new();
        self.members.sort_by_key(|(member, _)| *member);
        for (member, process) in &mut self.members {
            match process.end(grace).await? {
                Some(status) if status.success() => {}
                Some(status) => problems.push(format!("{} ended with {status}", member.name())),
                None => problems.push(format!("{} did not end within {grace:?}", member.name())),
            }
        }
        for node in self.etcd.nodes_mut() {
            node.kill().await?;
        }
        Ok(problems)
    }

    /// Where its files lie.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }
}

/// The sum of a metric over its labels, on a page of metrics.
fn metric(page: &str, name: &str) -> u64 {
    let value = |line: &str| {
        let (key, value) = line.rsplit_once(' ')?;
        let key = key.split('{').next()?;
        (key == name).then(|| value.parse::<f64>().ok()).flatten()
    };
    page.lines().filter_map(value).sum::<f64>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels() {
        let page = "# TYPE a counter\na_total{x=\"1\"} 3\na_total{x=\"2\"} 4\nab_total 9\n";
        assert_eq!(metric(page, "a_total"), 7);
        assert_eq!(metric(page, "ab_total"), 9);
        assert_eq!(metric(page, "b_total"), 0);
    }
}
