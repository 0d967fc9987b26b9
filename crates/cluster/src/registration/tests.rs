//! A registration through the troubles of its store, in paused time.

use tokio_util::task::TaskTracker;

use super::*;
use crate::{keys::KeySpace, memory::MemoryCoordinator};

const TTL: Duration = Duration::from_secs(30);
const KEY: &str = "/longreach/v1/c/prefill/p";

struct Fixture {
    store: MemoryCoordinator,
    tasks: TaskTracker,
    cancel: CancellationToken,
}

impl Fixture {
    fn new() -> Self {
        Self {
            store: MemoryCoordinator::default(),
            tasks: TaskTracker::new(),
            cancel: CancellationToken::new(),
        }
    }

    /// Starts a worker and returns its state.
    fn worker(&self, cancel: CancellationToken) -> watch::Receiver<RegistrationState> {
        let (state, seen) = watch::channel(RegistrationState::Pending);
        let spec = RegistrationSpec {
            key: KEY.to_owned(),
            value: |incarnation: Incarnation| incarnation.0.to_be_bytes().to_vec(),
            ttl: TTL,
            backoff: Backoff::default(),
        };
        self.tasks.spawn(register(Arc::new(self.store.clone()), spec, state, cancel));
        seen
    }

    async fn registered_value(&self) -> Option<Vec<u8>> {
        let keys = KeySpace::new("c").unwrap();
        let mut entries = self.store.snapshot(keys.all()).await.unwrap().entries;
        entries.pop().map(|entry| entry.value)
    }
}

async fn registered(state: &mut watch::Receiver<RegistrationState>) -> (Incarnation, LeaseId) {
    let registered = |state: &RegistrationState| matches!(state, RegistrationState::Registered { .. });
    let RegistrationState::Registered { incarnation, lease } = *state.wait_for(registered).await.unwrap()
    else {
        panic!("waited for")
    };
    (incarnation, lease)
}

#[tokio::test(start_paused = true)]
async fn a_worker_stays_registered_for_many_times_its_lease_and_takes_its_key_along() {
    let at = Fixture::new();
    let mut state = at.worker(at.cancel.clone());
    let (incarnation, _) = registered(&mut state).await;
    for _ in 0..20 {
        time::sleep(TTL).await;
        assert_eq!(at.registered_value().await, Some(incarnation.0.to_be_bytes().to_vec()));
    }
    at.cancel.cancel();
    state.wait_for(|state| *state == RegistrationState::Left).await.unwrap();
    assert_eq!(at.registered_value().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_an_event_and_begins_a_new_incarnation() {
    let at = Fixture::new();
    let mut state = at.worker(at.cancel.clone());
    let (first, lease) = registered(&mut state).await;
    at.store.expire_lease(lease);
    // The next keep-alive hears of it. The state `Lost` may pass unseen, the new incarnation cannot.
    time::sleep(TTL).await;
    let (second, _) = registered(&mut state).await;
    assert!(second > first);
    assert_eq!(at.registered_value().await, Some(second.0.to_be_bytes().to_vec()));
}

#[tokio::test(start_paused = true)]
async fn a_second_life_waits_for_the_lease_of_the_first() {
    let at = Fixture::new();
    // The first life dies without a word.
    let lease = at.store.grant_lease(TTL).await.unwrap().id;
    at.store.put_if_absent(KEY.to_owned(), vec![0], lease).await.unwrap();
    let start = Instant::now();
    let mut state = at.worker(at.cancel.clone());
    let (incarnation, _) = registered(&mut state).await;
    assert!(start.elapsed() >= TTL && start.elapsed() < 2 * TTL, "{:?}", start.elapsed());
    assert_eq!(at.registered_value().await, Some(incarnation.0.to_be_bytes().to_vec()));
}

#[tokio::test(start_paused = true)]
async fn an_outage_shorter_or_longer_than_the_lease_changes_no_incarnation() {
    for outage in [TTL / 6, TTL, 10 * TTL] {
        let at = Fixture::new();
        let mut state = at.worker(at.cancel.clone());
        let before = registered(&mut state).await;
        at.store.set_available(false);
        time::sleep(outage).await;
        if outage > TTL {
            let (incarnation, lease) = before;
            assert_eq!(*state.borrow(), RegistrationState::Unconfirmed { incarnation, lease });
        }
        at.store.set_available(true);
        time::sleep(TTL).await;
        assert_eq!(registered(&mut state).await, before, "outage of {outage:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_starts_before_its_store_and_leaves_after_it_within_a_bound() {
    let at = Fixture::new();
    at.store.set_available(false);
    let mut state = at.worker(at.cancel.clone());
    time::sleep(10 * TTL).await;
    assert_eq!(*state.borrow(), RegistrationState::Pending);
    at.store.set_available(true);
    registered(&mut state).await;
    at.store.set_available(false);
    let start = Instant::now();
    at.cancel.cancel();
    at.tasks.close();
    at.tasks.wait().await;
    assert!(start.elapsed() <= FAREWELL_TIMEOUT);
    assert_eq!(*state.borrow(), RegistrationState::Left);
}
