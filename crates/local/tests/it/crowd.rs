//! Many workers that come and go.

use std::{collections::BTreeMap, sync::Arc};

use longreach_cluster::{Coordinator, RegistrationState, register};
use longreach_local::EtcdCluster;
use longreach_types::Incarnation;
use tokio::{
    sync::watch,
    time::{Duration, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::world::{Follower, PATIENCE, coordinator, spec};

const N_WORKERS: usize = 200;
/// Once round: every worker has left and come back about twice.
const N_ROUNDS: usize = 6;

struct Crowd {
    store: Arc<dyn Coordinator>,
    tasks: TaskTracker,
    workers: BTreeMap<String, (watch::Receiver<RegistrationState>, CancellationToken)>,
}

impl Crowd {
    /// Threads of their own would be of no use here: nothing else runs.
    fn enter(&mut self, id: &str) {
        let (state_in, state) = watch::channel(RegistrationState::default());
        let leave = CancellationToken::new();
        let spec = spec(id, Duration::from_secs(60));
        self.tasks.spawn(register(Arc::clone(&self.store), spec, state_in, leave.clone()));
        self.workers.insert(id.to_owned(), (state, leave));
    }

    /// The lives of all, when all are registered.
    async fn lives(&mut self) -> Vec<(&str, Incarnation)> {
        let mut lives = Vec::new();
        for (id, (state, _)) in &mut self.workers {
            let registered = state.wait_for(|state| matches!(state, RegistrationState::Registered { .. }));
            match *timeout(PATIENCE, registered).await.unwrap().unwrap() {
                RegistrationState::Registered { incarnation, .. } => lives.push((id.as_str(), incarnation)),
                other => panic!("{other:?}"),
            }
        }
        lives
    }
}

/// Some die and are started again, so fast that their keys are taken over; some leave first. The follower itself checks
/// that nobody comes twice and nobody leaves who was not there.
#[tokio::test]
async fn the_view_of_two_hundred_flapping_workers_converges() {
    let etcd = EtcdCluster::start(crate::brisk(1)).await.unwrap();
    let store = coordinator(etcd.endpoints());
    let mut crowd = Crowd { store: Arc::clone(&store), tasks: TaskTracker::new(), workers: BTreeMap::new() };
    let ids: Vec<_> = (0..N_WORKERS).map(|n| format!("w{n:03}")).collect();
    ids.iter().for_each(|id| crowd.enter(id));
    let mut follower = Follower::new(store);
    follower.until_members(&crowd.lives().await).await;
    for round in 0..N_ROUNDS {
        let flapping = ids.iter().skip(round % 3).step_by(3);
        for (n, id) in flapping.enumerate() {
            let (_, leave) = crowd.workers.remove(id).unwrap();
            if n % 2 == 0 {
                leave.cancel();
            }
            crowd.enter(id);
        }
        // Every second round the view is not waited for.
        if round % 2 == 0 {
            follower.until_members(&crowd.lives().await).await;
        }
    }
    follower.until_members(&crowd.lives().await).await;
    // All leave but one.
    let stays = crowd.workers.remove("w000").unwrap();
    crowd.workers.values().for_each(|(_, leave)| leave.cancel());
    follower.until("one worker", |follower| follower.members.len() == 1).await;
    assert_eq!(follower.members.keys().collect::<Vec<_>>(), ["w000"]);
    stays.1.cancel();
    follower.until_members(&[]).await;
}
