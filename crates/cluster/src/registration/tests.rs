//! A registration through the troubles of its store, in paused time.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::task::TaskTracker;

use super::*;
use crate::{
    coordinator::{BoxFuture, Snapshot, Watch},
    keys::{KeySpace, Prefix},
    memory::MemoryCoordinator,
    record::PrefillRegistration,
};

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
        self.worker_of(Arc::new(self.store.clone()), cancel)
    }

    /// Starts a worker that knows the store by another handle.
    fn worker_of(
        &self,
        store: Arc<dyn Coordinator>,
        cancel: CancellationToken,
    ) -> watch::Receiver<RegistrationState> {
        let (state, seen) = watch::channel(RegistrationState::Pending);
        let spec = RegistrationSpec {
            key: KEY.to_owned(),
            value: |incarnation| value_of("p", incarnation),
            ttl: TTL,
            backoff: Backoff::of("worker"),
        };
        self.tasks.spawn(register(store, spec, state, cancel));
        seen
    }

    async fn registered_value(&self) -> Option<Vec<u8>> {
        let keys = KeySpace::new("c").unwrap();
        let mut entries = self.store.snapshot(keys.all()).await.unwrap().entries;
        entries.pop().map(|entry| entry.value)
    }
}

fn value_of(id: &str, incarnation: Incarnation) -> Vec<u8> {
    let id = WorkerId(id.to_owned());
    let endpoint = "http://h:1".to_owned();
    PrefillRegistration { id, incarnation, endpoint, layout_hash: String::new() }.encode()
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
        assert_eq!(at.registered_value().await, Some(value_of("p", incarnation)));
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
    assert_eq!(at.registered_value().await, Some(value_of("p", second)));
}

#[tokio::test(start_paused = true)]
async fn a_key_of_another_worker_is_waited_for_until_its_lease_ends() {
    for value in [value_of("other", Incarnation(1)), b"{}".to_vec()] {
        let at = Fixture::new();
        let lease = at.store.grant_lease(TTL).await.unwrap().id;
        at.store.put_if_absent(KEY.to_owned(), value, lease).await.unwrap();
        let start = Instant::now();
        let mut state = at.worker(at.cancel.clone());
        let (incarnation, _) = registered(&mut state).await;
        assert!(start.elapsed() >= TTL && start.elapsed() < 2 * TTL, "{:?}", start.elapsed());
        assert_eq!(at.registered_value().await, Some(value_of("p", incarnation)));
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_life_takes_over_at_once_from_one_that_died_without_a_word() {
    let at = Fixture::new();
    let lease = at.store.grant_lease(TTL).await.unwrap().id;
    // As from a store that has counted further than this one.
    let earlier = Incarnation(900);
    at.store.put_if_absent(KEY.to_owned(), value_of("p", earlier), lease).await.unwrap();
    let start = Instant::now();
    let mut state = at.worker(at.cancel.clone());
    let (incarnation, _) = registered(&mut state).await;
    assert!(start.elapsed() < Duration::from_secs(1) && incarnation > earlier, "{incarnation}");
    // The end of the dead one's lease takes nothing with it.
    at.store.expire_lease(lease);
    assert_eq!(at.registered_value().await, Some(value_of("p", incarnation)));
}

#[tokio::test(start_paused = true)]
async fn no_value_of_a_held_key_ends_the_registration() {
    let at = Fixture::new();
    let lease = at.store.grant_lease(TTL).await.unwrap().id;
    at.store.put_if_absent(KEY.to_owned(), value_of("p", Incarnation(u64::MAX)), lease).await.unwrap();
    let mut state = at.worker(at.cancel.clone());
    assert_eq!(registered(&mut state).await.0, Incarnation(u64::MAX));
}

#[tokio::test(start_paused = true)]
async fn of_two_processes_with_one_name_the_newer_stays_and_the_older_says_so() {
    let at = Fixture::new();
    let mut older = at.worker(at.cancel.clone());
    let (first, _) = registered(&mut older).await;
    let mut newer = at.worker(at.cancel.clone());
    let (second, _) = registered(&mut newer).await;
    assert!(second > first);
    let start = Instant::now();
    older.wait_for(|state| *state == RegistrationState::Superseded { by: second }).await.unwrap();
    assert!(start.elapsed() <= LOOK_PERIOD);
    // It leaves the newer one alone, and stays away when the name is free again.
    time::sleep(10 * TTL).await;
    assert_eq!(at.registered_value().await, Some(value_of("p", second)));
    assert_eq!(registered(&mut newer).await.0, second);
    at.cancel.cancel();
    older.wait_for(|state| *state == RegistrationState::Left).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_process_that_lost_its_lease_to_a_newer_one_does_not_take_it_back() {
    let at = Fixture::new();
    let mut older = at.worker(at.cancel.clone());
    let (_, lease) = registered(&mut older).await;
    at.store.expire_lease(lease);
    let mut newer = at.worker(at.cancel.clone());
    let (second, _) = registered(&mut newer).await;
    older.wait_for(|state| *state == RegistrationState::Superseded { by: second }).await.unwrap();
    assert_eq!(at.registered_value().await, Some(value_of("p", second)));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_set_back_to_a_backup_keeps_nobody_out() {
    let at = Fixture::new();
    let mut state = at.worker(at.cancel.clone());
    let (first, _) = registered(&mut state).await;
    // An earlier life of this process, as the backup has it.
    let held = at.store.get(KEY).await.unwrap().unwrap();
    let value = Some(value_of("p", Incarnation(first.0 - 1)));
    at.store
        .swap(Swap { key: held.key, expect: Expect::At(held.revision), value, lease: None })
        .await
        .unwrap();
    state
        .wait_for(|state| matches!(state, RegistrationState::Registered { incarnation, .. } if *incarnation != first))
        .await
        .unwrap();
    let (second, _) = registered(&mut state).await;
    assert!(second > first);
    assert_eq!(at.registered_value().await, Some(value_of("p", second)));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_vanished_under_a_living_lease_is_a_new_incarnation() {
    let at = Fixture::new();
    let mut state = at.worker(at.cancel.clone());
    let (first, _) = registered(&mut state).await;
    let held = at.store.get(KEY).await.unwrap().unwrap();
    let delete = Swap { key: held.key, expect: Expect::At(held.revision), value: None, lease: None };
    at.store.swap(delete).await.unwrap();
    let start = Instant::now();
    // The state `Lost` may pass unseen.
    state.wait_for(|state| matches!(state, RegistrationState::Registered { incarnation, .. } if *incarnation != first))
        .await
        .unwrap();
    let (second, _) = registered(&mut state).await;
    assert!(start.elapsed() <= 2 * LOOK_PERIOD && second > first);
    assert_eq!(at.registered_value().await, Some(value_of("p", second)));
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

/// A store that does what it is asked at once and whose answers about leases take their time.
#[derive(Default)]
struct SlowAnswers {
    store: MemoryCoordinator,
    grant: Duration,
    keep_alive: Duration,
    /// Whether the next wish to end a lease is lost on its way.
    loses_revoke: AtomicBool,
}

impl Coordinator for SlowAnswers {
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, CoordinatorError>> {
        Box::pin(async move {
            let answer = self.store.grant_lease(ttl).await;
            time::sleep(self.grant).await;
            answer
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, CoordinatorError>> {
        Box::pin(async move {
            let answer = self.store.keep_alive(lease).await;
            time::sleep(self.keep_alive).await;
            answer
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), CoordinatorError>> {
        if self.loses_revoke.swap(false, Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        self.store.revoke(lease)
    }

    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Revision, CoordinatorError>> {
        self.store.swap(swap)
    }

    fn snapshot<'a>(&'a self, prefix: &'a Prefix) -> BoxFuture<'a, Result<Snapshot, CoordinatorError>> {
        self.store.snapshot(prefix)
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a Prefix,
        from: Revision,
    ) -> BoxFuture<'a, Result<Box<dyn Watch>, CoordinatorError>> {
        self.store.watch(prefix, from)
    }
}

/// ETC-8: a lease's time runs from when it was asked for, also where the answer takes most of it.
#[tokio::test(start_paused = true)]
async fn answers_that_take_most_of_a_lease_do_not_lose_it() {
    let slow = TTL - Duration::from_millis(100);
    for (grant, keep_alive) in [(Duration::ZERO, TTL / 2), (Duration::ZERO, slow), (slow, slow)] {
        let at = Fixture::new();
        let store = SlowAnswers { store: at.store.clone(), grant, keep_alive, ..SlowAnswers::default() };
        let mut state = at.worker_of(Arc::new(store), at.cancel.clone());
        let (first, _) = registered(&mut state).await;
        state.mark_unchanged();
        time::sleep(20 * TTL).await;
        assert!(!state.has_changed().unwrap(), "{:?} with {grant:?}, {keep_alive:?}", *state.borrow());
        assert_eq!(at.registered_value().await, Some(value_of("p", first)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_ended_also_where_the_first_attempt_was_given_up() {
    let at = Fixture::new();
    let store = SlowAnswers { store: at.store.clone(), loses_revoke: true.into(), ..SlowAnswers::default() };
    let mut state = at.worker_of(Arc::new(store), at.cancel.clone());
    let (_, lease) = registered(&mut state).await;
    let held = at.store.get(KEY).await.unwrap().unwrap();
    let delete = Swap { key: held.key, expect: Expect::At(held.revision), value: None, lease: None };
    at.store.swap(delete).await.unwrap();
    state.wait_for(|state| matches!(state, RegistrationState::Lost { .. })).await.unwrap();
    // It is ending the lease now, and will not come to an end with that.
    at.cancel.cancel();
    state.wait_for(|state| *state == RegistrationState::Left).await.unwrap();
    assert!(matches!(at.store.keep_alive(lease).await, Err(CoordinatorError::LeaseLost(_))));
}

#[test]
fn a_registration_is_renewed_while_the_runtime_of_its_process_is_stuck() {
    // This test's own runtime is never polled after the start, which is as stuck as can be.
    let store = MemoryCoordinator::default();
    let ttl = Duration::from_millis(400);
    let spec = RegistrationSpec {
        key: KEY.to_owned(),
        value: |incarnation| value_of("p", incarnation),
        ttl,
        backoff: Backoff::of("worker"),
    };
    let shared: Arc<dyn Coordinator> = Arc::new(store.clone());
    let registration = Registration::spawn(&shared, spec).unwrap();
    let mut state = registration.state();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let first = runtime.block_on(registered(&mut state));
    let (_never, stuck) = std::sync::mpsc::channel::<()>();
    assert!(stuck.recv_timeout(4 * ttl).is_err());
    assert_eq!(runtime.block_on(registered(&mut state)), first);
    assert!(runtime.block_on(store.get(KEY)).unwrap().is_some());
    runtime.block_on(registration.leave());
    assert_eq!(*state.borrow(), RegistrationState::Left);
    assert_eq!(runtime.block_on(store.get(KEY)).unwrap(), None);
}
