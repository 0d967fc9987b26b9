//! What goes wrong: the plan of a seed, and how each fault is brought about and undone.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use crate::{
    client::Request,
    net::{Death, NodeId},
    rng::Rng,
    scenario::Scenario,
    world::World,
};

/// How it is written down that a rank's step does not end.
pub(crate) const COMPUTES_FOR_EVER: &str = "rank computes for ever";

/// One fault: when, what, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) at: Duration,
    kind: Kind,
    lasts: Duration,
    /// Decides whom it hits.
    aim: u64,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Kill,
    Vanish,
    Freeze,
    Cut,
    Reset,
    Store(StoreTrouble),
    StoreCut,
    RouterKilled,
    Spoil,
    Burst,
    Drain,
    /// A rank's step does not end.
    Stuck,
    /// A second process of a leader's name raises an epoch, and is gone.
    Rival,
}

/// What goes wrong with the store itself.
#[derive(Clone, Copy, Debug)]
enum StoreTrouble {
    Away,
    WatchesBroken,
    Compacted,
    LeaseLost,
    /// All its data.
    Wiped,
}

/// How often each kind is drawn.
const KINDS: &[(Kind, usize)] = &[
    (Kind::Kill, 5),
    (Kind::Vanish, 2),
    (Kind::Freeze, 3),
    (Kind::Cut, 4),
    (Kind::Reset, 3),
    (Kind::Store(StoreTrouble::Away), 2),
    (Kind::StoreCut, 2),
    (Kind::Store(StoreTrouble::WatchesBroken), 1),
    (Kind::Store(StoreTrouble::Compacted), 1),
    (Kind::Store(StoreTrouble::LeaseLost), 1),
    (Kind::RouterKilled, 1),
    (Kind::Spoil, 2),
    (Kind::Burst, 1),
    (Kind::Drain, 3),
    (Kind::Stuck, 1),
    (Kind::Rival, 1),
    (Kind::Store(StoreTrouble::Wiped), 1),
];

/// The faults of a scenario, in no order.
pub(crate) fn plan(scenario: &Scenario) -> Vec<Fault> {
    let mut rng = Rng::new(scenario.seed, 2);
    let total: usize = KINDS.iter().map(|(_, weight)| weight).sum();
    let mut draw = || {
        let mut n = rng.below(total);
        let kind = KINDS.iter().find(|(_, weight)| {
            let hit = n < *weight;
            n = n.wrapping_sub(*weight);
            hit
        });
        let lasts = rng.pick(&[20, 300, 2_000, 8_000, 20_000]);
        let over = scenario.faults_over.as_millis() as usize;
        Fault {
            at: Duration::from_millis(rng.range(0, over) as u64),
            kind: kind.map_or(Kind::Kill, |(kind, _)| *kind),
            lasts: Duration::from_millis(rng.range(lasts / 2, lasts) as u64),
            aim: rng.next(),
        }
    };
    (0..scenario.n_faults).map(|_| draw()).collect()
}

impl Fault {
    /// Brings it about, and undoes it in the end.
    pub(crate) async fn run(self, world: Arc<World>) {
        sleep(self.at).await;
        let mut rng = Rng::new(self.aim, 3);
        let workers = world.worker_nodes();
        match self.kind {
            Kind::Kill => self.end_life(&world, rng.pick(&workers), Death::Killed).await,
            Kind::Vanish => self.end_life(&world, rng.pick(&workers), Death::Vanished).await,
            Kind::Freeze => self.freeze(&world, rng.pick(&workers)).await,
            Kind::Cut => {
                let (a, b) = link(&world, &mut rng);
                self.cut(&world, (a, b), "link cut").await;
            }
            Kind::Reset => {
                let (a, b) = link(&world, &mut rng);
                world.net.reset(a, b);
                note(&world, "connections reset", &[a, b]);
            }
            Kind::Store(trouble) => self.trouble_store(trouble, &world, &mut rng).await,
            Kind::StoreCut => {
                let nodes = world.all_nodes();
                self.cut(&world, (rng.pick(&nodes), world.host.node), "link to the store cut").await;
            }
            Kind::RouterKilled => {
                let router = rng.below(world.routers.len());
                world.kill_router(router);
                note(&world, "router killed", &[world.routers[router].node]);
                sleep(self.lasts.min(Duration::from_secs(3))).await;
                world.boot_router(router);
            }
            Kind::Drain => {
                let node = rng.pick(&workers);
                note(&world, "process drains", &[node]);
                if !world.drain_worker(node).await {
                    note(&world, "drain cut off", &[node]);
                }
                if rng.chance(300) && world.retire(node) {
                    note(&world, "process retired", &[node]);
                }
                // A new version takes some time to start.
                sleep(self.lasts.min(Duration::from_secs(10))).await;
                world.boot_worker(node);
            }
            Kind::Stuck => {
                let node = rng.pick(&workers);
                let ranks = world.ranks_with_peers(node);
                if !ranks.is_empty() && world.net.set_stuck(node, rng.pick(&ranks)) {
                    note(&world, COMPUTES_FOR_EVER, &[node]);
                }
            }
            Kind::Rival => {
                let group = &world.groups[rng.below(world.groups.len())];
                if world.raise_as_rival(group).await {
                    note(&world, "epoch raised by a rival", &[group.nodes[0]]);
                }
            }
            Kind::Spoil => world.services.spoil_next(),
            Kind::Burst => {
                world.journal.count("burst of requests");
                for i in 0..40 {
                    let request = Request::new(&world, 10_000 + i);
                    world.clients.spawn(request.run(Arc::clone(&world)));
                }
            }
        }
    }

    async fn trouble_store(self, trouble: StoreTrouble, world: &World, rng: &mut Rng) {
        match trouble {
            StoreTrouble::Away => {
                note(world, "store away", &[]);
                world.host.memory.set_available(false);
                sleep(self.lasts).await;
                world.host.memory.set_available(true);
                world.host.disturb();
                note_end(world, "store back", &[]);
            }
            StoreTrouble::WatchesBroken => {
                note(world, "watches broken", &[]);
                world.host.memory.break_watches();
                world.host.disturb();
            }
            StoreTrouble::Compacted => {
                note(world, "store compacted", &[]);
                world.host.memory.compact();
                world.host.memory.break_watches();
                world.host.disturb();
            }
            StoreTrouble::Wiped => {
                note(world, "store wiped", &[]);
                world.wipe_store().await;
                world.host.disturb();
            }
            StoreTrouble::LeaseLost => {
                if let Some(lease) = world.some_lease(rng) {
                    note(world, "lease lost", &[]);
                    world.host.memory.expire_lease(lease);
                    world.host.disturb();
                }
            }
        }
    }

    async fn end_life(self, world: &Arc<World>, node: NodeId, death: Death) {
        if !world.kill_worker(node, death) {
            return;
        }
        let kind = if death == Death::Killed { "process killed" } else { "host vanished" };
        note(world, kind, &[node]);
        sleep(self.lasts.min(Duration::from_secs(10))).await;
        note_end(world, "process started again", &[node]);
        world.boot_worker(node);
    }

    async fn freeze(self, world: &World, node: NodeId) {
        if world.net.set_frozen(node, true) {
            note(world, "process stopped", &[node]);
            sleep(self.lasts).await;
            world.net.set_frozen(node, false);
            note_end(world, "process continued", &[node]);
        }
    }

    async fn cut(self, world: &World, (a, b): (NodeId, NodeId), kind: &'static str) {
        if world.net.set_cut(a, b, true) {
            note(world, kind, &[a, b]);
            sleep(self.lasts).await;
            world.net.set_cut(a, b, false);
            note_end(world, "link healed", &[a, b]);
        }
    }
}

/// Something goes wrong.
fn note(world: &World, kind: &'static str, nodes: &[NodeId]) {
    log(world, kind, nodes);
    world.services.harm(kind);
}

/// Something is well again.
fn note_end(world: &World, kind: &'static str, nodes: &[NodeId]) {
    log(world, kind, nodes);
    world.journal.count(kind);
    world.services.trouble();
}

fn log(world: &World, kind: &'static str, nodes: &[NodeId]) {
    let names: Vec<_> = nodes.iter().map(|&node| world.net.name(node)).collect();
    world.journal.note(format_args!("FAULT {kind} {}", names.join(" ")));
}

/// Two nodes that speak to each other.
fn link(world: &World, rng: &mut Rng) -> (NodeId, NodeId) {
    let (nodes, workers) = (world.all_nodes(), world.worker_nodes());
    loop {
        let (a, b) = (rng.pick(&nodes), rng.pick(&workers));
        if a != b {
            return (a, b);
        }
    }
}
