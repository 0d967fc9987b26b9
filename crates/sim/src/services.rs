//! Who offers what, by address: stands for the listeners of all processes. An address answers while its process has
//! put something behind it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use longreach_engine::{EngineHandle, EngineInfo, KvDoor, KvInlet};
use tokio::{sync::watch, time::Instant};

use crate::{journal::Journal, net::NodeId};

/// All services of the cluster. Clones share them.
#[derive(Clone)]
pub(crate) struct Services {
    shared: Arc<Mutex<Shared>>,
    pub(crate) journal: Journal,
}

#[derive(Default)]
struct Shared {
    engines: BTreeMap<String, (NodeId, watch::Receiver<Option<EngineHandle>>)>,
    ranks: BTreeMap<String, Rank>,
    n_to_spoil: usize,
    harms: Vec<(Instant, &'static str)>,
    last_trouble: Option<Instant>,
    draining: BTreeSet<NodeId>,
}

/// The KV service of a rank.
struct Rank {
    node: NodeId,
    door: KvDoor,
    is_open: bool,
}

impl Services {
    pub(crate) fn new(journal: Journal) -> Self {
        Self { shared: Arc::default(), journal }
    }

    /// Puts the engines of a process, life after life, behind an address.
    pub(crate) fn set_engine(
        &self,
        endpoint: &str,
        node: NodeId,
        life: watch::Receiver<Option<EngineHandle>>,
    ) {
        self.shared().engines.insert(endpoint.to_owned(), (node, life));
    }

    /// The process at an address.
    pub(crate) fn engine_node(&self, endpoint: &str) -> Option<NodeId> {
        self.shared().engines.get(endpoint).map(|(node, _)| *node)
    }

    /// The engine behind an address; none while a group has not formed.
    pub(crate) fn engine(&self, endpoint: &str) -> Option<EngineHandle> {
        self.shared().engines.get(endpoint).and_then(|(_, life)| life.borrow().clone())
    }

    /// What the engine behind an address shows of itself.
    pub(crate) fn engine_info(&self, endpoint: &str) -> Option<EngineInfo> {
        self.engine(endpoint).map(|engine| engine.info())
    }

    /// Opens the door of a rank, or closes it.
    pub(crate) fn set_door(&self, endpoint: &str, node: NodeId, inlet: Option<KvInlet>) {
        let mut shared = self.shared();
        let closed = || Rank { node, door: KvDoor::default(), is_open: false };
        let rank = shared.ranks.entry(endpoint.to_owned()).or_insert_with(closed);
        rank.is_open = inlet.is_some();
        match inlet {
            Some(inlet) => rank.door.open(inlet),
            None => rank.door.close(),
        }
    }

    pub(crate) fn rank_node(&self, endpoint: &str) -> Option<NodeId> {
        self.shared().ranks.get(endpoint).map(|rank| rank.node)
    }

    pub(crate) fn is_open(&self, endpoint: &str) -> bool {
        self.shared().ranks.get(endpoint).is_some_and(|rank| rank.is_open)
    }

    pub(crate) fn door(&self, endpoint: &str) -> Option<KvDoor> {
        self.shared().ranks.get(endpoint).map(|rank| rank.door.clone())
    }

    /// Takes note of something that may cost a request an attempt.
    pub(crate) fn harm(&self, kind: &'static str) {
        self.journal.count(kind);
        self.shared().harms.push((Instant::now(), kind));
        self.trouble();
    }

    /// Takes note that something begins or ceases to be wrong.
    pub(crate) fn trouble(&self) {
        self.shared().last_trouble = Some(Instant::now());
    }

    /// When something last began or ceased to be wrong.
    pub(crate) fn last_trouble(&self) -> Option<Instant> {
        self.shared().last_trouble
    }

    /// How much harm was done since `time`, of the kinds that count.
    pub(crate) fn n_harms_since(&self, time: Instant, counts: impl Fn(&str) -> bool) -> usize {
        self.shared().harms.iter().filter(|(at, kind)| *at >= time && counts(kind)).count()
    }

    /// From now on `node` refuses new work, or takes it again.
    pub(crate) fn set_draining(&self, node: NodeId, draining: bool) {
        let nodes = &mut self.shared().draining;
        if draining {
            nodes.insert(node)
        } else {
            nodes.remove(&node)
        };
    }

    pub(crate) fn is_draining(&self, node: NodeId) -> bool {
        self.shared().draining.contains(&node)
    }

    /// Spoils the next chunk that is sent.
    pub(crate) fn spoil_next(&self) {
        self.shared().n_to_spoil += 1;
    }

    pub(crate) fn take_spoil(&self) -> bool {
        let mut shared = self.shared();
        let spoils = shared.n_to_spoil > 0;
        shared.n_to_spoil -= usize::from(spoils);
        spoils
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
