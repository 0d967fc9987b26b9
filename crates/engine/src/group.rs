//! Groups whose ranks are threads of this process: a decode group, and the prefill worker's group of one.

use std::sync::Arc;

use longreach_collective::{control::local_control, local_group};
use longreach_types::{Epoch, GroupShape};
use tokio::runtime::Handle;

use crate::{
    inlet::KvInlet,
    member::{LeaderParts, Member, Rank, RunningEngine, World, targets},
    setup::{BuildError, EngineConfig, Model},
    transport::{GrpcTransport, KvTransport},
};

/// Builds and starts the engine of a prefill worker.
pub fn start_prefill(
    model: &Model,
    config: &EngineConfig,
    transport: Arc<dyn KvTransport>,
    runtime: &Handle,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<RunningEngine, BuildError> {
    let config = EngineConfig { shape: GroupShape::SINGLE, ..config.clone() };
    let member = Rank::load(model, &config, 0, progress)?.enlist(Epoch(1));
    let world = local_worlds(1, &config).remove(0);
    member.start_leader(LeaderParts { world, control: None, targets: Vec::new(), transport }, runtime)
}

fn local_worlds(n_ranks: usize, config: &EngineConfig) -> Vec<World> {
    local_group(n_ranks, config.comm).into_iter().map(|comm| Box::new(comm) as World).collect()
}

/// All ranks of a decode group, loaded. Cheap to clone.
#[derive(Clone)]
pub struct DecodeGroup {
    ranks: Vec<Rank>,
}

/// One life of a [`DecodeGroup`], before it runs.
pub struct GroupLife {
    members: Vec<Member>,
}

impl DecodeGroup {
    /// Packs every rank's share. `progress` is called with layers done and in all, over all ranks.
    pub fn load(
        model: &Model,
        config: &EngineConfig,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let (n_ranks, n_layers) = (config.shape.n_ranks(), model.config.n_layers);
        let load = |rank: usize| {
            let report = |done: usize, _: usize| progress(rank * n_layers + done, n_ranks * n_layers);
            Rank::load(model, config, rank, &report)
        };
        Ok(Self { ranks: (0..n_ranks).map(load).collect::<Result<_, _>>()? })
    }

    /// Bytes of packed weights of each rank, in rank order.
    pub fn weight_bytes(&self) -> Vec<usize> {
        self.ranks.iter().map(Rank::weight_bytes).collect()
    }

    /// The group in the life `epoch`. The last life must have ended.
    pub fn enlist(&self, epoch: Epoch) -> GroupLife {
        GroupLife { members: self.ranks.iter().map(|rank| rank.enlist(epoch)).collect() }
    }
}

impl GroupLife {
    /// The door of each rank in this life, in rank order.
    pub fn inlets(&self) -> Vec<KvInlet> {
        self.members.iter().map(Member::inlet).collect()
    }

    /// Starts the threads. `endpoints` say where each rank's door can be reached, in rank order.
    pub fn start(self, endpoints: Vec<String>, runtime: &Handle) -> Result<RunningEngine, BuildError> {
        let n_ranks = self.members.len();
        if endpoints.len() != n_ranks {
            return Err(BuildError::Endpoints { want: n_ranks, got: endpoints.len() });
        }
        let mut members = self.members.into_iter();
        let Some(first) = members.next() else { return Err(BuildError::Endpoints { want: 0, got: 0 }) };
        let config = &first.rank.config;
        let (leader, links) = local_control(n_ranks, first.rank.plan.control(config));
        let mut worlds = local_worlds(n_ranks, config).into_iter();
        let Some(world) = worlds.next() else { return Err(BuildError::Endpoints { want: 0, got: 0 }) };
        // A rank joins while its peers do, so each is started on a thread of its own.
        std::thread::scope(|scope| {
            let starts: Vec<_> = members
                .zip(worlds)
                .zip(links)
                .map(|((member, world), link)| scope.spawn(|| member.start_follower(world, link)))
                .collect();
            let parts = LeaderParts {
                world,
                control: Some(leader),
                targets: targets(&first.rank.model, &first.rank.config, endpoints),
                transport: Arc::new(GrpcTransport::default()),
            };
            let engine = first.start_leader(parts, runtime);
            let followers: Vec<_> =
                starts.into_iter().map(|start| start.join().unwrap_or(Err(BuildError::Lost))).collect();
            let mut engine = engine?;
            engine.adopt(followers.into_iter().collect::<Result<Vec<_>, _>>()?);
            Ok(engine)
        })
    }
}
