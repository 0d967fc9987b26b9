//! The workers a router knows: who is there, how loaded each is, and how it behaved.
//!
//! One [`Pool`] holds the workers of one [`Role`]; both roles share all code. The figures that routing compares
//! lie together under one lock, which is held for the scan of a choice and never across an await. Work in flight
//! is counted by [`Lease`]s, whose drop gives it back however a request ends. One connection for each worker,
//! because a balanced channel goes on sending to endpoints that are dead.

mod dial;
mod fleet;
mod role;

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use longreach_service::Lifecycle;
use longreach_tls::handshake_error;
use longreach_types::WorkerId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::dial::{DecodeCalls, Dial, DialError, PrefillCalls};
pub(crate) use self::{
    dial::GrpcDial,
    fleet::Fleet,
    role::{Decode, Load, Prefill, Role},
};
use crate::{
    health::{Health, Outcome},
    random::Random,
    routing::{self, Candidate, Tier},
};

/// How much busier than the least busy worker another may be and still be its equal.
const SLACK_PERCENT: u64 = 25;

/// The same for the worker a session is drawn to: computing its KV again elsewhere costs more than a wait.
const SESSION_SLACK_PERCENT: u64 = 200;

/// How connections to workers are kept and how often their load is read.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// How long a connection may take. Shorter finds a dead host sooner; longer bears a busy one.
    pub connect_timeout: Duration,
    /// How often a quiet connection is checked. Shorter finds a cut cable sooner; longer sends less.
    pub keep_alive_interval: Duration,
    /// How long the answer to such a check may take.
    pub keep_alive_timeout: Duration,
    /// How often a worker's load is read, give or take a fifth. Shorter routes on fresher figures; longer asks less of
    /// the workers.
    pub poll_interval: Duration,
    /// Decode groups compute every prompt themselves: the router is ready without a prefill worker.
    pub prefill_optional: bool,
    /// How long a worker is kept whose registration is gone although it goes on answering. Longer outlasts longer
    /// trouble of the cluster's store, which may forget everybody; shorter sooner obeys an operator who took a worker
    /// out by hand. A worker that drains stops answering by itself.
    pub unlisted_grace: Duration,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            keep_alive_interval: Duration::from_secs(5),
            keep_alive_timeout: Duration::from_secs(5),
            poll_interval: Duration::from_millis(500),
            prefill_optional: false,
            unlisted_grace: Duration::from_secs(60),
        }
    }
}

/// Where one life of a worker is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Its name.
    pub(crate) name: WorkerId,
    /// Tells its lives apart: incarnation or epoch.
    pub(crate) life: u64,
    /// `http://host:port`.
    pub(crate) endpoint: String,
    /// How it holds KV, in the words of its registration; `None` where there is none.
    pub(crate) layout: Option<String>,
}

/// Whether a worker can do what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// It cannot.
    No,
    /// It can, but others are likelier to see it through.
    Poor,
    /// It can.
    Good,
}

/// What a request asks of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    /// Tokens of work.
    pub(crate) tokens: u64,
    /// The longest the sequence may become.
    pub(crate) seq_len: usize,
    /// The client's session, if it has one.
    pub(crate) session: Option<&'a str>,
    /// Workers that have failed this request.
    pub(crate) failed: &'a [WorkerId],
}

/// Nobody can take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PickError {
    /// No worker of the role is known and described.
    Nobody,
    /// There are workers, and none fits.
    NoneFits,
}

/// The workers of one role.
pub(crate) struct Pool<R: Role> {
    members: Mutex<Vec<Member<R>>>,
    config: WorkerConfig,
    started: Instant,
    next_key: AtomicU64,
    lifecycle: Lifecycle,
    dial: Arc<dyn Dial>,
    random: Random,
    fleet: Arc<Fleet>,
}

struct Member<R: Role> {
    key: u64,
    address: Address,
    client: R::Client,
    /// What it said of itself; `None` until it has.
    info: Option<Arc<R::Info>>,
    load: Load,
    /// Tokens of work that others than this router gave it, at the last reading.
    foreign_tokens: u64,
    /// Tokens of work this router has with it.
    own_tokens: u64,
    reachable: bool,
    /// Since when it is not registered any more; it is used for want of others while it answers.
    unlisted_since: Option<Duration>,
    health: Health,
    /// Stops its poller when it leaves.
    cancel: CancellationToken,
}

/// Work in flight on one worker. Dropping it takes the work off the worker's account.
pub(crate) struct Lease<R: Role> {
    pool: Arc<Pool<R>>,
    key: u64,
    tokens: u64,
    /// The worker's name.
    pub(crate) name: WorkerId,
    /// To call it.
    pub(crate) client: R::Client,
}

impl<R: Role> Pool<R> {
    /// No workers yet. What the pool runs, it runs as tasks of `lifecycle`; ties are broken by `random`.
    pub(crate) fn new(
        config: WorkerConfig,
        lifecycle: Lifecycle,
        (dial, fleet): (Arc<dyn Dial>, Arc<Fleet>),
        random: Random,
    ) -> Arc<Self> {
        Arc::new(Self {
            members: Mutex::new(Vec::new()),
            config,
            started: Instant::now(),
            next_key: AtomicU64::new(0),
            lifecycle,
            dial,
            random,
            fleet,
        })
    }

    /// Makes `wanted` the workers of the pool. One that stays keeps its connection and its record. One that is wanted
    /// no more stays for a while if it answers: a store that lost its leases must not take the cluster with it. For the
    /// same reason a new life at the same place is the same worker; it may only have registered anew.
    pub(crate) fn set_members(self: &Arc<Self>, wanted: &[Address]) {
        let now = self.started.elapsed();
        let by_name: HashMap<&WorkerId, &Address> =
            wanted.iter().map(|address| (&address.name, address)).collect();
        let mut known = HashSet::new();
        self.members().retain_mut(|member| {
            let successor = by_name.get(&member.address.name).copied();
            if let Some(address) = successor.filter(|address| address.endpoint == member.address.endpoint) {
                member.renew(address);
                self.note_layout(address);
                known.insert(address.name.clone());
                return true;
            }
            let answers = member.info.is_some() && member.reachable;
            if successor.is_some() || !answers {
                member.leave("it is not registered any more");
                self.fleet.left(R::NAME, &member.address.name);
                return false;
            }
            if member.unlisted_since.is_none() {
                let worker = &member.address.name;
                tracing::info!(role = R::NAME, %worker, "worker is not registered any more, and answers");
                member.unlisted_since = Some(now);
            }
            true
        });
        for address in wanted.iter().filter(|address| !known.contains(&address.name)) {
            self.add(address.clone());
        }
        self.fleet.counted(R::NAME, self.members().len());
    }

    /// A registration that says its layout is compared before the worker is first asked.
    fn note_layout(&self, address: &Address) {
        if let Some(layout) = &address.layout {
            self.fleet.registered(R::NAME, &address.name, layout);
        }
    }

    /// Parts with a worker that is not registered any more, if it is.
    fn drop_unlisted(&self, key: u64, is_over: impl Fn(Duration) -> bool, why: &str) {
        self.members().retain(|member| {
            let is_over = member.key == key && member.unlisted_since.is_some_and(&is_over);
            if is_over {
                member.leave(why);
                self.fleet.left(R::NAME, &member.address.name);
            }
            !is_over
        });
        self.fleet.counted(R::NAME, self.members().len());
    }

    fn add(self: &Arc<Self>, address: Address) {
        let client = match R::dial(&*self.dial, &address.endpoint) {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!(role = R::NAME, worker = %address.name, %error, "worker has no usable address");
                return;
            }
        };
        tracing::info!(role = R::NAME, worker = %address.name, endpoint = %address.endpoint, "worker joined");
        self.note_layout(&address);
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let cancel = self.lifecycle.token();
        self.lifecycle.spawn(Arc::clone(self).poll(key, client.clone(), cancel.clone()));
        self.members().push(Member {
            key,
            address,
            client,
            info: None,
            load: Load::default(),
            foreign_tokens: 0,
            own_tokens: 0,
            reachable: true,
            unlisted_since: None,
            health: Health::default(),
            cancel,
        });
    }

    /// Reads one worker's load again and again, until it leaves.
    async fn poll(self: Arc<Self>, key: u64, client: R::Client, cancel: CancellationToken) {
        let patience = self.config.connect_timeout + self.config.keep_alive_timeout;
        loop {
            // What is lost when the second arm is dropped is the answer to a question that is asked again. Biased, so
            // that a simulated run is repeated by its seed.
            let answer = tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                answer = tokio::time::timeout(patience, R::describe(&client)) => answer,
            };
            match answer {
                Ok(Ok(info)) => self.update(key, info),
                Ok(Err(status)) => self.unreachable(key, &problem(&status)),
                Err(_) => self.unreachable(key, "no answer in time"),
            }
            let pause = self.pause();
            if cancel.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    /// The pause between two readings, up to a fifth longer or shorter: workers that came together are not asked
    /// together for ever, and neither do all routers ask at once.
    fn pause(&self) -> Duration {
        let percent = 80 + self.random.next_u64() % 41;
        self.config.poll_interval.saturating_mul(percent as u32) / 100
    }

    fn update(&self, key: u64, info: R::Info) {
        let (now, grace) = (self.started.elapsed(), self.config.unlisted_grace);
        self.drop_unlisted(
            key,
            |since| now.saturating_sub(since) >= grace,
            "its registration did not come back",
        );
        self.with_member(key, |member| {
            if member.info.is_none() || !member.reachable {
                tracing::info!(role = R::NAME, worker = %member.address.name, "worker answers");
            }
            self.fleet.described(R::NAME, &member.address.name, R::layout(&info));
            member.load = R::load(&info);
            member.foreign_tokens = member.load.tokens.saturating_sub(member.own_tokens);
            member.info = Some(Arc::new(info));
            member.reachable = true;
        });
    }

    fn unreachable(&self, key: u64, problem: &str) {
        self.drop_unlisted(key, |_| true, problem);
        self.with_member(key, |member| {
            if member.reachable {
                tracing::info!(role = R::NAME, worker = %member.address.name, problem, "worker does not answer");
            }
            member.reachable = false;
        });
    }

    /// Chooses a worker for `demand` among those that fit, a poor fit only if there is no better.
    pub(crate) fn pick(
        self: &Arc<Self>,
        demand: &Demand<'_>,
        fit: impl Fn(&R::Info) -> Fit,
    ) -> Result<Lease<R>, PickError> {
        let now = self.started.elapsed();
        let mut members = self.members();
        let mut indices = Vec::with_capacity(members.len());
        let mut candidates = Vec::with_capacity(members.len());
        let mut anybody = false;
        for (idx, member) in members.iter().enumerate() {
            let Some(info) = &member.info else { continue };
            anybody = true;
            let fit = fit(info);
            if demand.seq_len <= member.load.max_seq_len && fit != Fit::No {
                indices.push(idx);
                candidates.push(Self::candidate(member, demand, fit, now));
            }
        }
        let slack_percent = if demand.session.is_some() { SESSION_SLACK_PERCENT } else { SLACK_PERCENT };
        let draws = [self.random.next_u64(), self.random.next_u64()];
        let Some(chosen) = routing::choose(&candidates, slack_percent, draws) else {
            return Err(if anybody { PickError::NoneFits } else { PickError::Nobody });
        };
        let member = &mut members[indices[chosen]];
        member.health.claim(now);
        member.own_tokens += demand.tokens;
        Ok(Lease {
            pool: Arc::clone(self),
            key: member.key,
            tokens: demand.tokens,
            name: member.address.name.clone(),
            client: member.client.clone(),
        })
    }

    fn candidate(member: &Member<R>, demand: &Demand<'_>, fit: Fit, now: Duration) -> Candidate {
        let is_listed = member.unlisted_since.is_none() && fit == Fit::Good;
        let tier = if !member.reachable {
            Tier::Lost
        } else if !is_listed || demand.failed.contains(&member.address.name) {
            Tier::Suspect
        } else {
            member.health.tier(now)
        };
        let tokens = member.foreign_tokens + member.own_tokens + demand.tokens;
        Candidate {
            cost: tokens / member.load.n_shares.max(1),
            tier,
            affinity: demand.session.map_or(0, |session| affinity(session, &member.address.name)),
        }
    }

    /// What every worker that has described itself said.
    pub(crate) fn infos(&self) -> Vec<Arc<R::Info>> {
        self.members().iter().filter_map(|member| member.info.clone()).collect()
    }

    /// Whether somebody else than `worker` could be asked who has not `failed`; `None` if it is no worker of this pool.
    pub(crate) fn has_alternative(&self, worker: &WorkerId, failed: &[WorkerId]) -> Option<bool> {
        let members = self.members();
        members.iter().find(|member| member.address.name == *worker)?;
        let can = |member: &Member<R>| {
            let name = &member.address.name;
            member.info.is_some() && member.reachable && name != worker && !failed.contains(name)
        };
        Some(members.iter().any(can))
    }

    /// Workers that are described and reachable.
    pub(crate) fn n_ready(&self) -> usize {
        self.members().iter().filter(|member| member.info.is_some() && member.reachable).count()
    }

    /// The limits of the most capable worker.
    pub(crate) fn limits(&self) -> Option<(usize, usize)> {
        let members = self.members();
        let described = members.iter().filter(|member| member.info.is_some());
        described.map(|member| (member.load.max_seq_len, member.load.vocab_size)).max()
    }

    /// The lives that are members, in the order in which they came.
    #[cfg(feature = "simulation")]
    pub(crate) fn lives(&self) -> Vec<(WorkerId, u64)> {
        let life = |member: &Member<R>| (member.address.name.clone(), member.address.life);
        self.members().iter().map(life).collect()
    }

    /// Tokens of work of this router, over all members.
    #[cfg(feature = "simulation")]
    pub(crate) fn own_tokens(&self) -> u64 {
        self.members().iter().map(|member| member.own_tokens).sum()
    }

    fn with_member(&self, key: u64, change: impl FnOnce(&mut Member<R>)) {
        // A worker that has left meanwhile has no account to change.
        if let Some(member) = self.members().iter_mut().find(|member| member.key == key) {
            change(member);
        }
    }

    /// Figures stay valid if another thread panicked while it held them.
    fn members(&self) -> MutexGuard<'_, Vec<Member<R>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Role> Member<R> {
    fn renew(&mut self, address: &Address) {
        self.unlisted_since = None;
        if self.address != *address {
            tracing::info!(role = R::NAME, worker = %address.name, life = address.life, "worker has a new life");
            self.address = address.clone();
            self.health = Health::default();
        }
    }

    fn leave(&self, why: &str) {
        tracing::info!(role = R::NAME, worker = %self.address.name, why, "worker left");
        self.cancel.cancel();
    }
}

impl<R: Role> Lease<R> {
    /// Records what became of the work.
    pub(crate) fn report(&self, outcome: Outcome) {
        let now = self.pool.started.elapsed();
        self.pool.with_member(self.key, |member| member.health.record(outcome, now));
    }
}

impl<R: Role> Drop for Lease<R> {
    fn drop(&mut self) {
        self.pool.with_member(self.key, |member| {
            member.own_tokens = member.own_tokens.saturating_sub(self.tokens);
        });
    }
}

/// What keeps a worker from answering; if it is a certificate, an operator must know whose.
fn problem(status: &tonic::Status) -> String {
    handshake_error(status).map_or_else(|| status.message().to_owned(), ToString::to_string)
}

/// How strongly `session` is drawn to worker `name`: the highest of all workers is its home. The hash has no key, so
/// that every router sends a session to the same home.
fn affinity(session: &str, name: &WorkerId) -> u64 {
    let mut hasher = DefaultHasher::new();
    (session, name).hash(&mut hasher);
    hasher.finish().max(1)
}
