//! One run: a cluster comes up, clients ask, faults happen, everything heals, and nothing may be left over.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use longreach_cluster::{
    Coordinator, Entry, EpochRecord, Expect, GroupId, Key, KeySpace, LeaseId, PrefillRegistration,
    ReadyRecord, Record, RegistrationState, Swap, raise_epoch, read_epoch,
};
use longreach_router::{WorkerSource, simulation::SimRouter};
use longreach_service::Lifecycle;
use longreach_types::{Epoch, GroupSecret, WorkerId};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    client::Request,
    dial::{STOOD_STILL, SimDial},
    faults::{self, COMPUTES_FOR_EVER},
    journal::{Journal, Report},
    net::{Death, Net, NodeId},
    rng::Rng,
    scenario::Scenario,
    services::Services,
    store::StoreHost,
    worker::{Group, Prefill, Process, key_space},
};

/// How long views may take to converge after everything has healed: the longest lease, and the pauses of retries.
const CONVERGENCE: Duration = Duration::from_secs(75);

/// Longer than any run.
const MAX_RUN: Duration = Duration::from_secs(900);

/// The first number of requests that have no excuse to fail.
const PROBES: usize = 20_000;

/// Everything in one run.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) journal: Journal,
    pub(crate) net: Net,
    pub(crate) host: StoreHost,
    pub(crate) services: Services,
    pub(crate) keys: KeySpace,
    pub(crate) groups: Vec<Group>,
    pub(crate) prefills: Vec<Prefill>,
    pub(crate) routers: Vec<RouterSlot>,
    pub(crate) clients: TaskTracker,
    processes: Mutex<BTreeMap<NodeId, Process>>,
    /// Processes that do not come back.
    retired: Mutex<BTreeSet<NodeId>>,
    registrations: Mutex<BTreeMap<String, watch::Receiver<RegistrationState>>>,
}

/// A router's process, and the router in it while it lives.
pub(crate) struct RouterSlot {
    pub(crate) node: NodeId,
    life: Mutex<Option<RouterLife>>,
}

#[derive(Clone)]
struct RouterLife {
    router: Arc<SimRouter>,
    alive: CancellationToken,
    _lifecycle: Lifecycle,
}

/// Runs one seed from beginning to end.
pub(crate) async fn run(seed: u64, keep_log: bool) -> Report {
    let scenario = Scenario::new(seed);
    let journal = Journal::new(keep_log);
    journal.note(format_args!("{scenario:?}"));
    let world = Arc::new(World::new(scenario, journal.clone()));
    let failed = journal.failed.clone();
    let finished = failed.run_until_cancelled(timeout(MAX_RUN, world.live())).await;
    if matches!(finished, Some(Err(_))) {
        journal.violation(format!("the run did not end within {MAX_RUN:?}"));
    }
    // However long a prompt waited at its prefill worker.
    if world.scenario.is_calm() && journal.n(STOOD_STILL) > 0 {
        journal.violation("nothing was wrong, and a hand-off stood still");
    }
    world.routers.iter().for_each(RouterSlot::kill);
    world.net.shut_down().await;
    journal.report()
}

impl World {
    fn new(scenario: Scenario, journal: Journal) -> Self {
        let net = Net::new(scenario.net, scenario.seed, journal.clone());
        let store = net.add_node("store");
        net.boot(store);
        let shape = &scenario.shape;
        let groups = (0..shape.n_groups).map(|idx| new_group(&net, &scenario, idx)).collect();
        let prefills = (0..shape.n_prefills).map(|idx| {
            let id = format!("prefill-{idx}");
            let node = net.add_node(id.clone());
            Prefill { idx, id: WorkerId(id), node }
        });
        let prefills = prefills.collect();
        let routers = (0..shape.n_routers).map(|idx| {
            let node = net.add_node(format!("router-{idx}"));
            RouterSlot { node, life: Mutex::new(None) }
        });
        let routers = routers.collect();
        Self {
            host: StoreHost::new(store),
            services: Services::new(journal.clone()),
            keys: key_space(),
            groups,
            prefills,
            routers,
            clients: TaskTracker::new(),
            processes: Mutex::default(),
            retired: Mutex::default(),
            registrations: Mutex::default(),
            scenario,
            journal,
            net,
        }
    }

    /// The whole life of the cluster.
    async fn live(self: &Arc<Self>) {
        self.worker_nodes().into_iter().for_each(|node| self.boot_worker(node));
        (0..self.routers.len()).for_each(|router| self.boot_router(router));
        self.converge("at first").await;
        let faults = TaskTracker::new();
        for fault in faults::plan(&self.scenario) {
            faults.spawn(fault.run(Arc::clone(self)));
        }
        let mut rng = Rng::new(self.scenario.seed, 4);
        for idx in 0..self.scenario.n_requests {
            self.clients.spawn(Request::new(self, idx).run(Arc::clone(self)));
            let pause = self.scenario.pause.mul_f64(rng.below(2000) as f64 / 1000.0);
            sleep(pause).await;
        }
        faults.close();
        faults.wait().await;
        self.journal.note(format_args!("all is well again"));
        self.settle().await;
        self.converge("after all faults").await;
        for idx in 0..2 * self.routers.len() {
            Request::probe(self, PROBES + idx).run(Arc::clone(self)).await;
        }
        self.settle().await;
    }

    /// Waits until all clients have ended; then nothing may be held for them.
    async fn settle(&self) {
        self.clients.close();
        self.clients.wait().await;
        self.clients.reopen();
        let idle_by = Instant::now() + self.reclaim();
        while let Some(leftover) = self.leftover() {
            if Instant::now() > idle_by {
                self.journal.violation(format!("left over: {leftover}"));
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// How long blocks may stay held after the last client has gone. Where nothing was wrong that is the way of the
    /// news; otherwise a silence, or a hand-off that stands still, must be noticed first. A rank that computes for ever is
    /// given up by the others, and then by its own process.
    fn reclaim(&self) -> Duration {
        let Scenario { shape, net, .. } = &self.scenario;
        let way = Duration::from_secs(1) + 20 * net.max_delay;
        if self.scenario.is_calm() {
            return way;
        }
        let stuck = if self.journal.n(COMPUTES_FOR_EVER) > 0 { self.stuck_timeout() } else { Duration::ZERO };
        way + shape.watchdog + stuck + net.silence.max(shape.handoff_timeout)
    }

    /// What is still held, if anything.
    fn leftover(&self) -> Option<String> {
        let endpoints =
            self.groups.iter().map(Group::endpoint).chain(self.prefills.iter().map(Prefill::endpoint));
        for endpoint in endpoints {
            if let Some(info) = self.services.engine_info(&endpoint).filter(|info| !info.is_idle()) {
                return Some(format!("{endpoint}: {info:?}"));
            }
        }
        for group in &self.groups {
            let receiving = group.rank_faces.iter().position(|face| face.n_receiving() > 0);
            if let Some(rank) = receiving {
                return Some(format!("{} rank {rank} still waits for a hand-off", group.id));
            }
        }
        for (idx, slot) in self.routers.iter().enumerate() {
            let own_tokens = slot.life().as_ref().map_or(0, |life| life.router.own_tokens());
            if own_tokens > 0 {
                return Some(format!("router {idx} believes to have {own_tokens} tokens of work"));
            }
        }
        None
    }

    /// Waits until every router knows exactly the workers that there are.
    async fn converge(&self, when: &str) {
        let converged_by = Instant::now() + CONVERGENCE;
        loop {
            let Err(difference) = self.compare_views().await else { return };
            if Instant::now() > converged_by {
                self.journal.violation(format!("{when} views do not converge: {difference}"));
                return;
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    async fn compare_views(&self) -> Result<(), String> {
        let snapshot = self.host.memory.snapshot(self.keys.all()).await.map_err(|error| error.to_string())?;
        let (mut groups, mut prefills, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
        for entry in &snapshot.entries {
            match self.keys.parse(&entry.key) {
                Some(Key::Ready(group)) => {
                    let ready = ReadyRecord::decode(&entry.value).map_err(|error| error.to_string())?;
                    groups.push((WorkerId(group.0), ready.epoch.0));
                }
                Some(Key::Epoch(group)) => {
                    let record = EpochRecord::decode(&entry.value).map_err(|error| error.to_string())?;
                    epochs.push((WorkerId(group.0), record.epoch.0));
                }
                Some(Key::Prefill(id)) => {
                    let found =
                        PrefillRegistration::decode(&entry.value).map_err(|error| error.to_string())?;
                    prefills.push((id, found.incarnation.0));
                }
                _ => {}
            }
        }
        let formed: Vec<_> = self
            .groups
            .iter()
            .filter(|group| !self.retired().contains(&group.nodes[0]))
            .map(|group| {
                let info = self.services.engine_info(&group.endpoint());
                (WorkerId(group.id.0.clone()), info.map_or(0, |info| info.epoch.0))
            })
            .collect();
        check_equal("groups as formed and as stored", &formed, &groups)?;
        // A leader that is not the one whom the store knows does not go on. Data that was lost is not put back.
        let fenced = groups.iter().find(|(id, live)| {
            let raised = epochs.iter().find(|(group, _)| group == id);
            raised.is_some_and(|(_, raised)| raised > live)
        });
        if let Some(fenced) = fenced {
            return Err(format!("group {fenced:?} is in an epoch before the one that is stored: {epochs:?}"));
        }
        let prefills_left = self.prefills.iter().filter(|prefill| !self.retired().contains(&prefill.node));
        let registered: Vec<_> = prefills_left.map(|prefill| self.registered(&prefill.id)).collect();
        check_equal("prefill workers as they live and as stored", &registered, &prefills)?;
        for slot in &self.routers {
            let Some(life) = slot.life().clone() else { return Err("a router is down".to_owned()) };
            let [mut decodes, mut known] = life.router.members();
            decodes.sort();
            known.sort();
            check_equal("groups as stored and as a router knows them", &groups, &decodes)?;
            check_equal("prefill workers as stored and as a router knows them", &prefills, &known)?;
            if !life.router.is_ready(groups.len() + prefills.len()) {
                return Err("a router has not heard from all workers".to_owned());
            }
        }
        Ok(())
    }

    fn registered(&self, id: &WorkerId) -> (WorkerId, u64) {
        let key = self.keys.encode(&Key::Prefill(id.clone())).unwrap_or_default();
        let state = self.registrations().get(&key).map(|state| *state.borrow());
        let life = match state {
            Some(RegistrationState::Registered { incarnation, .. }) => incarnation.0,
            _ => 0,
        };
        (id.clone(), life)
    }

    pub(crate) fn registrations(
        &self,
    ) -> MutexGuard<'_, BTreeMap<String, watch::Receiver<RegistrationState>>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What runs, or ran last, on each node of a worker.
    pub(crate) fn processes(&self) -> MutexGuard<'_, BTreeMap<NodeId, Process>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn process(&self, node: NodeId) -> Process {
        self.processes().get(&node).cloned().unwrap_or_default()
    }

    /// What the store holds under `key`, as nobody but the simulation can see it; none while it is away.
    pub(crate) fn stored(&self, key: &Key) -> Option<Option<Vec<u8>>> {
        let key = self.keys.encode(key).ok()?;
        let entries = self.host.peek(self.keys.all())?;
        Some(entries.into_iter().find(|entry| entry.key == key).map(|entry| entry.value))
    }

    /// Whether nothing has been wrong with the store, nor on the way of `node` to it, since `time`.
    pub(crate) fn store_was_calm(&self, node: NodeId, time: Instant) -> bool {
        self.scenario.lost_permille == 0
            && self.host.was_calm(time)
            && self.net.was_calm(&[node, self.host.node], time)
    }

    /// The ranks of this node with peers that can notice that one computes for ever, because none of them does.
    pub(crate) fn ranks_with_peers(&self, node: NodeId) -> Vec<usize> {
        let is_well = |group: &&Group| !group.nodes.iter().any(|&node| self.net.is_stuck(node));
        let with_peers = self.groups.iter().filter(|group| group.nodes.len() > 1).filter(is_well);
        let ranks = with_peers.flat_map(|group| group.nodes.iter().enumerate());
        ranks.filter(|(_, member)| **member == node).map(|(rank, _)| rank).collect()
    }

    /// Raises a group's epoch as a second process of its leader's name would, which then is gone.
    pub(crate) async fn raise_as_rival(&self, group: &Group) -> bool {
        let Ok(Some((last, _))) = read_epoch(&self.host.memory, &self.keys, &group.id).await else {
            return false;
        };
        let secret = GroupSecret::new([0; 32]);
        let make = |epoch| EpochRecord { epoch, secret, members: last.members };
        let raised = raise_epoch(&self.host.memory, &self.keys, (&group.id, Epoch(0)), make).await;
        self.host.ring();
        raised.is_ok()
    }

    /// Takes all its data from the store.
    pub(crate) async fn wipe_store(&self) {
        for Entry { key, revision, .. } in self.host.peek(self.keys.all()).unwrap_or_default() {
            let swap = Swap { key, expect: Expect::At(revision), value: None, lease: None };
            // A store that is away cannot be wiped either.
            let _away = self.host.memory.swap(swap).await;
        }
    }

    pub(crate) fn retired(&self) -> MutexGuard<'_, BTreeSet<NodeId>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a worker out for good, unless it is the last of its role.
    pub(crate) fn retire(&self, node: NodeId) -> bool {
        let leaders: Vec<_> = self.groups.iter().map(|group| group.nodes[0]).collect();
        let prefills: Vec<_> = self.prefills.iter().map(|prefill| prefill.node).collect();
        let Some(role) = [leaders, prefills].into_iter().find(|role| role.contains(&node)) else {
            return false;
        };
        let mut retired = self.retired();
        let n_left = role.iter().filter(|node| !retired.contains(node)).count();
        n_left > 1 && retired.insert(node)
    }

    /// The lease of one of the registered workers.
    pub(crate) fn some_lease(&self, rng: &mut Rng) -> Option<LeaseId> {
        let leases: Vec<_> = self
            .registrations()
            .values()
            .filter_map(|state| match *state.borrow() {
                RegistrationState::Registered { lease, .. } => Some(lease),
                _ => None,
            })
            .collect();
        (!leases.is_empty()).then(|| rng.pick(&leases))
    }

    /// The processes of workers.
    pub(crate) fn worker_nodes(&self) -> Vec<NodeId> {
        let groups = self.groups.iter().flat_map(|group| group.nodes.iter().copied());
        let mut nodes: Vec<_> = groups.chain(self.prefills.iter().map(|prefill| prefill.node)).collect();
        nodes.sort();
        nodes.dedup();
        nodes
    }

    /// All processes but the store.
    pub(crate) fn all_nodes(&self) -> Vec<NodeId> {
        let mut nodes = self.worker_nodes();
        nodes.extend(self.routers.iter().map(|router| router.node));
        nodes
    }

    /// Whether there was a decode group and a prefill worker that a router could have worked with since `time`, with
    /// nothing wrong with them or between them.
    pub(crate) fn had_calm_pair(&self, router: usize, time: Instant) -> bool {
        let router = self.routers[router].node;
        self.groups.iter().any(|group| {
            self.prefills.iter().any(|prefill| {
                let nodes = [&[router, prefill.node], &*group.nodes].concat();
                self.net.was_calm(&nodes, time)
            })
        })
    }

    /// Ends a worker's process, if it runs.
    pub(crate) fn kill_worker(&self, node: NodeId, death: Death) -> bool {
        if !self.net.kill(node, death) {
            return false;
        }
        self.process(node).end();
        for group in &self.groups {
            for (rank, _) in group.nodes.iter().enumerate().filter(|(_, member)| **member == node) {
                group.rank_faces[rank].show(0);
                self.services.set_door(&group.rank_endpoint(rank), node, None);
                if rank == 0 {
                    self.services.set_engine(&group.endpoint(), node, watch::channel(None).1);
                }
            }
        }
        for prefill in self.prefills.iter().filter(|prefill| prefill.node == node) {
            self.services.set_engine(&prefill.endpoint(), node, watch::channel(None).1);
        }
        true
    }

    /// Starts a router, if it does not run.
    pub(crate) fn boot_router(self: &Arc<Self>, idx: usize) {
        let slot = &self.routers[idx];
        if slot.life().is_some() {
            return;
        }
        self.net.boot(slot.node);
        let dial = SimDial {
            net: self.net.clone(),
            services: self.services.clone(),
            from: slot.node,
            shape: Arc::new(self.scenario.shape.clone()),
        };
        let lifecycle = Lifecycle::new();
        let config = (self.scenario.workers, self.scenario.recovery);
        let seed = Rng::new(self.scenario.seed, 5 + idx as u64).next();
        let router = Arc::new(SimRouter::new(config, Arc::new(dial), &lifecycle, seed));
        let source = WorkerSource::Cluster { coordinator: self.store(slot.node), keys: self.keys.clone() };
        let follower = Arc::clone(&router);
        self.net.spawn_on(slot.node, async move {
            follower.follow(source, CancellationToken::new()).await;
        });
        let alive = CancellationToken::new();
        *slot.life() = Some(RouterLife { router, alive, _lifecycle: lifecycle });
    }

    pub(crate) fn kill_router(&self, idx: usize) {
        let slot = &self.routers[idx];
        self.net.kill(slot.node, Death::Killed);
        slot.kill();
    }

    /// A router that lives, and a token that is cancelled when it does not any more.
    pub(crate) fn router(&self, idx: usize) -> Option<(Arc<SimRouter>, CancellationToken)> {
        let life = self.routers[idx].life();
        life.as_ref().map(|life| (Arc::clone(&life.router), life.alive.clone()))
    }
}

impl RouterSlot {
    fn life(&self) -> MutexGuard<'_, Option<RouterLife>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the router, with all its outputs.
    fn kill(&self) {
        if let Some(life) = self.life().take() {
            life.alive.cancel();
            life.router.disconnect();
        }
    }
}

fn new_group(net: &Net, scenario: &Scenario, idx: usize) -> Group {
    let shape = &scenario.shape;
    let id = GroupId(format!("decode-{idx}"));
    let first = net.add_node(format!("{id}-0"));
    let others = (1..shape.n_ranks)
        .map(|rank| if shape.ranks_apart { net.add_node(format!("{id}-{rank}")) } else { first });
    let nodes: Vec<_> = std::iter::once(first).chain(others).collect();
    let listeners = nodes.iter().map(|_| Mutex::default()).collect();
    let rank_faces = nodes.iter().map(|_| Default::default()).collect();
    Group {
        id,
        nodes,
        listeners: Arc::new(listeners),
        secrets: Arc::new(Mutex::new(Rng::new(scenario.seed, 100 + idx as u64))),
        rank_faces,
    }
}

fn check_equal<T: PartialEq + std::fmt::Debug>(what: &str, left: &T, right: &T) -> Result<(), String> {
    if left == right { Ok(()) } else { Err(format!("{what} differ: {left:?} and {right:?}")) }
}
