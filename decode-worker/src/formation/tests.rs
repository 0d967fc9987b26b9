//! A process whose rank does not come back from a life, which no real rank can be made to do.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use longreach_cluster::{KeySpace, LeaseId, MemoryCoordinator};
use longreach_types::{GroupSecret, GroupShape};
use tokio::{sync::mpsc, task::JoinSet};

use super::*;

const STUCK_TIMEOUT: Duration = Duration::from_secs(7);

/// Ranks whose lives are over for their peers when the test says so, and for this process, too, unless `is_stuck`.
struct Puppet {
    is_stuck: Arc<AtomicBool>,
    is_open: Arc<AtomicBool>,
    lives: mpsc::UnboundedSender<CancellationToken>,
}

struct PuppetLife {
    deserted: CancellationToken,
    is_stuck: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
#[error("these ranks only follow")]
struct OnlyFollows;

impl Ranks for Puppet {
    type Led = NoLife;
    type Followed = PuppetLife;
    type Error = OnlyFollows;

    fn has_leader(&self) -> bool {
        false
    }

    fn secret(&self) -> io::Result<GroupSecret> {
        Ok(GroupSecret::new([0; 32]))
    }

    async fn lead(&self, _: &EpochRecord, _: &CancellationToken) -> Result<NoLife, OnlyFollows> {
        Err(OnlyFollows)
    }

    async fn follow(&self, _: &EpochRecord, _: &CancellationToken) -> Result<PuppetLife, OnlyFollows> {
        self.is_open.store(true, Ordering::SeqCst);
        let deserted = CancellationToken::new();
        self.lives.send(deserted.clone()).unwrap();
        Ok(PuppetLife { deserted, is_stuck: Arc::clone(&self.is_stuck) })
    }

    fn close_doors(&self) {
        self.is_open.store(false, Ordering::SeqCst);
    }

    async fn serves(&self, _: &str) -> bool {
        false
    }
}

impl Followed for PuppetLife {
    fn deserted(&self) -> CancellationToken {
        self.deserted.clone()
    }

    fn leaver(&self) -> Box<dyn FnOnce() + Send> {
        let deserted = self.deserted.clone();
        Box::new(move || deserted.cancel())
    }

    async fn ended(self) -> Result<(), String> {
        self.deserted.cancelled().await;
        if self.is_stuck.load(Ordering::SeqCst) { std::future::pending().await } else { Ok(()) }
    }
}

/// No such value exists.
enum NoLife {}

impl Led for NoLife {
    fn engine(&self) -> &EngineHandle {
        match *self {}
    }

    fn deserted(&self) -> CancellationToken {
        match *self {}
    }

    async fn stop(self) {}
}

/// Rank 1 of a group of two whose leader is the test.
struct Stage {
    view: watch::Sender<GroupView>,
    lives: mpsc::UnboundedReceiver<CancellationToken>,
    is_stuck: Arc<AtomicBool>,
    is_open: Arc<AtomicBool>,
    is_serving: watch::Receiver<bool>,
    shutdown: CancellationToken,
    process: JoinSet<Result<Drained, Stuck>>,
    _registration: watch::Sender<RegistrationState>,
}

const OURS: Incarnation = Incarnation(4);

impl Stage {
    fn new() -> Self {
        let (lives_in, lives) = mpsc::unbounded_channel();
        let (is_stuck, is_open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let ranks =
            Puppet { is_stuck: Arc::clone(&is_stuck), is_open: Arc::clone(&is_open), lives: lives_in };
        let (view_in, view) = watch::channel(GroupView::default());
        let state = RegistrationState::Registered { incarnation: OURS, lease: LeaseId(1) };
        let (registration, state) = watch::channel(state);
        let (is_serving_in, is_serving) = watch::channel(false);
        let formation = Formation {
            cluster: Cluster {
                coordinator: Arc::new(MemoryCoordinator::default()),
                keys: KeySpace::new("c").unwrap(),
            },
            group: group(),
            fit: Fit { shape: GroupShape::new(2, 2).unwrap(), layout_hash: String::new() },
            ranks,
            drain_grace: Duration::from_secs(60),
            stuck_timeout: STUCK_TIMEOUT,
            view,
            registrations: [(1, state)].into(),
            life: watch::Sender::new(None),
            is_serving: is_serving_in,
            backoff: Backoff::of("rank"),
            seen: Epoch(0),
        };
        let (shutdown, mut process) = (CancellationToken::new(), JoinSet::new());
        let end = shutdown.clone();
        process.spawn(async move { formation.run(&end, &CancellationToken::new()).await });
        Self {
            view: view_in,
            lives,
            is_stuck,
            is_open,
            is_serving,
            shutdown,
            process,
            _registration: registration,
        }
    }

    /// Raises an epoch and gives the life in which the rank follows.
    async fn form(&mut self, epoch: u64) -> CancellationToken {
        let members = (0..2).map(member).collect();
        let record = EpochRecord { epoch: Epoch(epoch), secret: GroupSecret::new([0; 32]), members };
        self.view.send_modify(|view| view.epoch = Some(record));
        let life = self.lives.recv().await.unwrap();
        // A life that nobody has heard of is not ready for work.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!*self.is_serving.borrow());
        let ready = ReadyRecord {
            epoch: Epoch(epoch),
            endpoint: String::new(),
            n_ranks: 2,
            dcp_size: 2,
            layout_hash: String::new(),
            max_seq_len: 100,
        };
        self.view.send_modify(|view| drop(view.ready.insert(group(), ready)));
        self.is_serving.wait_for(|serves| *serves).await.unwrap();
        assert!(self.is_open.load(Ordering::SeqCst));
        life
    }

    /// How the process ended, and how long that took.
    async fn end(&mut self) -> (Result<Drained, Stuck>, Duration) {
        let since = Instant::now();
        let end = self.process.join_next().await.unwrap().unwrap();
        assert!(!*self.is_serving.borrow() && !self.is_open.load(Ordering::SeqCst));
        (end, since.elapsed())
    }
}

fn group() -> GroupId {
    GroupId("g".to_owned())
}

fn member(rank: usize) -> DecodeRegistration {
    DecodeRegistration {
        id: DecodeRegistration::id_of(&group(), rank),
        incarnation: OURS,
        rank,
        n_ranks: 2,
        dcp_size: 2,
        endpoint: String::new(),
        peer_addr: String::new(),
        layout_hash: String::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_comes_back_is_there_for_the_next_life_and_drains() {
    let mut stage = Stage::new();
    // The store loses its data after the second.
    for epoch in [6, 7, 1, 2] {
        let life = stage.form(epoch).await;
        life.cancel();
        stage.is_serving.wait_for(|serves| !serves).await.unwrap();
        assert!(!stage.is_open.load(Ordering::SeqCst));
    }
    stage.form(3).await;
    stage.shutdown.cancel();
    assert_eq!(stage.end().await, (Ok(Drained::Finished), Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_does_not_come_back_from_a_life_that_is_over_ends_its_process() {
    let mut stage = Stage::new();
    stage.form(1).await.cancel();
    stage.is_serving.wait_for(|serves| !serves).await.unwrap();
    let life = stage.form(2).await;
    stage.is_stuck.store(true, Ordering::SeqCst);
    life.cancel();
    let stuck = Stuck { epoch: Epoch(2), after: STUCK_TIMEOUT };
    assert_eq!(stage.end().await, (Err(stuck), STUCK_TIMEOUT));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_drains_does_not_wait_for_a_rank_that_does_not_come_back() {
    let mut stage = Stage::new();
    stage.form(1).await;
    stage.is_stuck.store(true, Ordering::SeqCst);
    stage.shutdown.cancel();
    let stuck = Stuck { epoch: Epoch(1), after: STUCK_TIMEOUT };
    assert_eq!(stage.end().await, (Err(stuck), STUCK_TIMEOUT));
}

/// A process that stands still for an hour comes to itself with all its timers over. Its ranks have not had a moment.
#[tokio::test(start_paused = true)]
async fn a_rank_of_a_process_that_stood_still_has_its_time_afterwards() {
    let mut stage = Stage::new();
    let life = stage.form(1).await;
    stage.is_stuck.store(true, Ordering::SeqCst);
    life.cancel();
    tokio::time::sleep(STUCK_TIMEOUT / 2).await;
    tokio::time::advance(Duration::from_secs(3600)).await;
    let (end, took) = stage.end().await;
    assert_eq!(end, Err(Stuck { epoch: Epoch(1), after: STUCK_TIMEOUT }));
    assert!(took >= STUCK_TIMEOUT * 2 / 5, "{took:?}");
}
