//! The failure table: what is done to the cluster, and what clients may see of it.
//!
//! An event ends when everything it took away is back, so that what follows can be held to a bound: from then on the
//! service must be whole again in so long.

use std::time::Duration;

use super::{
    fleet::{Fleet, Member},
    load::Load,
    pools,
    process::Process,
};
use crate::tiny::{Error, Rng};

/// How long a moment to strike may be waited for.
const MOMENT_PATIENCE: Duration = Duration::from_secs(60);

/// How long a role may take to end when it is asked to.
const DRAIN_PATIENCE: Duration = Duration::from_secs(60);

/// From the return of etcd until its registrations are right; those of the dead live for the rest of their lease.
const REGISTERED_BOUND: Duration = Duration::from_secs(10);

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name on the command line.
    pub name: &'static str,
    /// What happens.
    pub event: Event,
    /// Decode groups. With one, streams can go on only when that one is back.
    pub n_groups: usize,
    /// From the end of the event until the service is whole again. No stream may pause for longer either, whatever happens.
    pub bound: Duration,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing: what the load looks like undisturbed.
    Nothing,
    /// A prefill worker is killed while it does so.
    PrefillKilled(Phase),
    /// A process is killed, and started again a moment later.
    Killed(Who),
    /// All ranks of a decode group are killed at once, and started again a moment later.
    GroupKilled,
    /// A process stands still for longer than its peers wait, and goes on.
    Stopped(Who),
    /// A process loses its cable for longer than its peers wait, and gets it back.
    CutOff(Who),
    /// All of etcd stands still for so long.
    EtcdPaused(Duration),
    /// The node of etcd that leads is killed, and started again.
    EtcdLeaderKilled,
    /// Every node of etcd is killed, and all are started again.
    EtcdKilled,
    /// A node of etcd loses its disk and comes back empty.
    EtcdWiped,
    /// Every process is asked to end and started again, one after another.
    Rolling,
    /// Clients go away.
    ClientsGone,
    /// Ten times the requests that are taken.
    Overload,
}

/// What a prefill worker is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It computes a prompt.
    Computing,
    /// It has computed a prompt, and KV is still on its way.
    Sending,
}

/// One process of a kind, at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// A prefill worker.
    Prefill,
    /// A rank that does not lead.
    Rank,
    /// A rank that leads.
    Leader,
    /// A router.
    Router,
}

/// Where an event happens.
pub struct Stage<'a> {
    /// To whom.
    pub fleet: &'a mut Fleet,
    /// Into which load.
    pub load: &'a Load,
    /// When, and to which of several.
    pub rng: &'a mut Rng,
}

const fn row(name: &'static str, event: Event, bound_seconds: u64) -> Row {
    Row { name, event, n_groups: 2, bound: Duration::from_secs(bound_seconds) }
}

/// A row with a single decode group.
const fn lone(name: &'static str, event: Event, bound_seconds: u64) -> Row {
    Row { n_groups: 1, ..row(name, event, bound_seconds) }
}

/// Every row.
pub const ROWS: [Row; 23] = [
    row("quiet", Event::Nothing, 5),
    row("prefill-killed-computing", Event::PrefillKilled(Phase::Computing), 15),
    row("prefill-killed-sending", Event::PrefillKilled(Phase::Sending), 15),
    row("prefill-cut-off", Event::CutOff(Who::Prefill), 20),
    row("rank-killed", Event::Killed(Who::Rank), 20),
    row("leader-killed", Event::Killed(Who::Leader), 20),
    row("group-killed", Event::GroupKilled, 20),
    lone("lone-rank-killed", Event::Killed(Who::Rank), 20),
    lone("lone-leader-killed", Event::Killed(Who::Leader), 20),
    row("rank-stopped", Event::Stopped(Who::Rank), 20),
    row("leader-stopped", Event::Stopped(Who::Leader), 20),
    row("rank-cut-off", Event::CutOff(Who::Rank), 20),
    row("leader-cut-off", Event::CutOff(Who::Leader), 20),
    row("router-killed", Event::Killed(Who::Router), 15),
    row("etcd-paused-5", Event::EtcdPaused(Duration::from_secs(5)), 10),
    row("etcd-paused-30", Event::EtcdPaused(Duration::from_secs(30)), 10),
    row("etcd-paused-120", Event::EtcdPaused(Duration::from_secs(120)), 10),
    row("etcd-leader-killed", Event::EtcdLeaderKilled, 10),
    row("etcd-killed", Event::EtcdKilled, 10),
    row("etcd-wiped", Event::EtcdWiped, 10),
    row("rolling-restart", Event::Rolling, 20),
    row("clients-gone", Event::ClientsGone, 1),
    row("overload", Event::Overload, 10),
];

impl Row {
    /// Whether clients may lose their router, and then ask another.
    pub fn retries_lost(&self) -> bool {
        matches!(self.event, Event::Killed(Who::Router))
    }

    /// Whether there is a time in which nobody can take a request that is new.
    pub fn comes_back(&self) -> bool {
        self.n_groups == 1
    }

    /// Whether hosts need cables of their own.
    pub fn needs_cables(&self) -> bool {
        matches!(self.event, Event::CutOff(_))
    }
}

impl Event {
    /// Does it, and brings back what it took away.
    pub async fn strike(self, stage: &mut Stage<'_>) -> Result<(), Error> {
        match self {
            Self::Nothing | Self::ClientsGone | Self::Overload => stage.pause(Duration::from_secs(1)).await,
            Self::PrefillKilled(phase) => return stage.kill_prefill(phase).await,
            Self::Killed(who) => return stage.kill(who).await,
            Self::GroupKilled => return stage.kill_group().await,
            Self::Stopped(who) => return stage.stop(who).await,
            Self::CutOff(who) => return stage.cut(who).await,
            Self::EtcdPaused(time) => return stage.pause_etcd(time).await,
            Self::EtcdLeaderKilled => return stage.kill_etcd_leader().await,
            Self::EtcdKilled => return stage.kill_etcd().await,
            Self::EtcdWiped => return stage.wipe_etcd().await,
            Self::Rolling => return stage.roll().await,
        }
        Ok(())
    }
}

impl Stage<'_> {
    /// Waits for a random part of `most`.
    pub async fn pause(&mut self, most: Duration) {
        let micros = self.rng.below(most.as_micros() as usize + 1);
        tokio::time::sleep(Duration::from_micros(micros as u64)).await;
    }

    fn pick(&mut self, who: Who) -> Member {
        let shape = &self.fleet.shape;
        let (n_ranks, group) = (shape.n_ranks, self.rng.below(shape.n_groups));
        match who {
            Who::Prefill => Member::Prefill(self.rng.below(shape.n_prefills)),
            Who::Router => Member::Router(self.rng.below(shape.n_routers)),
            Who::Leader => Member::Rank { group, rank: 0 },
            Who::Rank => Member::Rank { group, rank: 1 + self.rng.below(n_ranks - 1) },
        }
    }

    /// Longer than peers wait for one that stands still.
    fn beyond_watchdog(&self) -> Duration {
        self.fleet.shape.watchdog.mul_f64(1.5) + Duration::from_secs(1)
    }

    async fn kill_prefill(&mut self, phase: Phase) -> Result<(), Error> {
        let idx = self.rng.below(self.fleet.shape.n_prefills);
        let is_at_it = |load: &pools::Load| match phase {
            Phase::Computing => load.n_held("running") > 0,
            Phase::Sending => load.n_held("sending") > 0,
        };
        let start = std::time::Instant::now();
        while !self.fleet.workers.prefill(idx).await.is_ok_and(|load| is_at_it(&load)) {
            if start.elapsed() > MOMENT_PATIENCE {
                return Err(format!("prefill-{idx} is never {phase:?}").into());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.kill_member(Member::Prefill(idx)).await
    }

    async fn kill(&mut self, who: Who) -> Result<(), Error> {
        let member = self.pick(who);
        self.kill_member(member).await
    }

    async fn kill_member(&mut self, member: Member) -> Result<(), Error> {
        self.fleet.process(member).kill().await?;
        self.pause(Duration::from_secs(2)).await;
        self.fleet.process(member).start()
    }

    async fn kill_group(&mut self) -> Result<(), Error> {
        let (group, n_ranks) = (self.rng.below(self.fleet.shape.n_groups), self.fleet.shape.n_ranks);
        for rank in 0..n_ranks {
            self.fleet.process(Member::Rank { group, rank }).kill().await?;
        }
        self.pause(Duration::from_secs(2)).await;
        for rank in 0..n_ranks {
            self.fleet.process(Member::Rank { group, rank }).start()?;
        }
        Ok(())
    }

    async fn stop(&mut self, who: Who) -> Result<(), Error> {
        let (member, time) = (self.pick(who), self.beyond_watchdog());
        self.fleet.process(member).stop()?;
        tokio::time::sleep(time).await;
        self.pause(Duration::from_secs(2)).await;
        Ok(self.fleet.process(member).go_on()?)
    }

    async fn cut(&mut self, who: Who) -> Result<(), Error> {
        let (member, time) = (self.pick(who), self.beyond_watchdog());
        if !self.fleet.process(member).host().cut()? {
            return Err("hosts have no cables here".into());
        }
        tokio::time::sleep(time).await;
        self.pause(Duration::from_secs(2)).await;
        self.fleet.process(member).host().heal()
    }

    async fn pause_etcd(&mut self, time: Duration) -> Result<(), Error> {
        for node in self.fleet.etcd.nodes_mut() {
            node.stop()?;
        }
        tokio::time::sleep(time / 2).await;
        let dead = self.pick(Who::Prefill);
        self.fleet.process(dead).kill().await?;
        tokio::time::sleep(time / 2).await;
        for node in self.fleet.etcd.nodes_mut() {
            node.go_on()?;
        }
        self.bury(dead).await
    }

    /// Waits until etcd has forgotten a worker that died while nobody could be told, and brings it back.
    async fn bury(&mut self, dead: Member) -> Result<(), Error> {
        let mut living = self.fleet.shape.members();
        living.retain(|member| *member != dead);
        self.fleet.until_registered(&living, REGISTERED_BOUND + self.fleet.shape.lease).await?;
        self.fleet.process(dead).start()
    }

    async fn kill_etcd_leader(&mut self) -> Result<(), Error> {
        let leader = self.fleet.etcd.until_led(MOMENT_PATIENCE).await?;
        self.fleet.etcd.nodes_mut()[leader].kill().await?;
        self.pause(Duration::from_secs(5)).await;
        self.fleet.etcd.nodes_mut()[leader].start()
    }

    async fn kill_etcd(&mut self) -> Result<(), Error> {
        for node in self.fleet.etcd.nodes_mut() {
            node.kill().await?;
        }
        let dead = self.pick(Who::Prefill);
        self.fleet.process(dead).kill().await?;
        self.pause(Duration::from_secs(5)).await;
        self.fleet.etcd.nodes_mut().iter_mut().try_for_each(Process::start)?;
        self.fleet.etcd.until_led(MOMENT_PATIENCE).await?;
        self.bury(dead).await
    }

    async fn wipe_etcd(&mut self) -> Result<(), Error> {
        let idx = self.rng.below(super::etcd::N_NODES);
        self.fleet.etcd.wipe(idx).await
    }

    /// One after another, each only when the one before is ready again: as an orchestrator does it.
    async fn roll(&mut self) -> Result<(), Error> {
        let mut members = self.fleet.shape.members();
        self.rng.shuffle(&mut members);
        for member in members {
            let ended = self.fleet.process(member).end(DRAIN_PATIENCE).await?;
            match ended {
                Some(status) if status.success() => {}
                ended => return Err(format!("{} did not end well: {ended:?}", member.name()).into()),
            }
            self.fleet.process(member).start()?;
            self.fleet.until_ready(member, MOMENT_PATIENCE).await?;
        }
        Ok(())
    }
}
