//! A worker that keeps itself registered and a router that follows, over one etcd.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longreach_cluster::{
    Backoff, Coordinator, EtcdConfig, EtcdCoordinator, Key, KeySpace, MemberEvent, Membership,
    PrefillRegistration, Record, Registration, RegistrationSpec, RegistrationState, Watcher,
};
use longreach_types::{Incarnation, WorkerId};
use tokio::time::timeout;

/// Longest wait for what must come, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A coordinator that notices trouble soon.
pub(crate) fn coordinator(endpoints: Vec<String>) -> Arc<dyn Coordinator> {
    let config = EtcdConfig {
        endpoints,
        connect_timeout: Duration::from_millis(500),
        attempt_timeout: Duration::from_millis(1_000),
        request_timeout: Duration::from_secs(3),
        watch_probe: Duration::from_millis(500),
        ..EtcdConfig::default()
    };
    Arc::new(EtcdCoordinator::new(config).unwrap())
}

pub(crate) fn keys() -> KeySpace {
    KeySpace::new("c").unwrap()
}

pub(crate) fn backoff() -> Backoff {
    Backoff::new(Duration::from_millis(50), Duration::from_secs(1), 7)
}

/// A registration of worker `id`.
pub(crate) fn spec(
    id: &str,
    ttl: Duration,
) -> RegistrationSpec<impl Fn(Incarnation) -> Vec<u8> + Send + Sync + 'static> {
    let id = WorkerId(id.to_owned());
    let key = keys().encode(&Key::Prefill(id.clone())).unwrap();
    let value = move |incarnation| {
        let endpoint = "http://h:1".to_owned();
        PrefillRegistration { id: id.clone(), incarnation, endpoint, layout_hash: String::new() }.encode()
    };
    RegistrationSpec { key, value, ttl, backoff: backoff() }
}

/// Registers worker `id`, on a thread of its own.
pub(crate) fn register(store: &Arc<dyn Coordinator>, id: &str, ttl: Duration) -> Registration {
    Registration::spawn(store, spec(id, ttl)).unwrap()
}

/// Waits for a life of the worker, other than `not`.
pub(crate) async fn registered(registration: &Registration, not: Option<Incarnation>) -> Incarnation {
    let mut state = registration.state();
    let found = |state: &RegistrationState| match state {
        RegistrationState::Registered { incarnation, .. } => {
            Some(*incarnation).filter(|life| Some(*life) != not)
        }
        _ => None,
    };
    let now = timeout(PATIENCE, state.wait_for(|state| found(state).is_some())).await.unwrap().unwrap();
    found(&now).unwrap()
}

/// What a router knows.
pub(crate) struct Follower {
    watcher: Watcher,
    membership: Membership,
    /// Every event so far, as text, to be shown when something is amiss.
    pub(crate) heard: Vec<MemberEvent>,
    pub(crate) members: BTreeMap<String, Incarnation>,
}

impl Follower {
    pub(crate) fn new(store: Arc<dyn Coordinator>) -> Self {
        Self {
            watcher: Watcher::new(store, keys().all().clone(), backoff()),
            membership: Membership::new(keys()),
            heard: Vec::new(),
            members: BTreeMap::new(),
        }
    }

    /// Follows until the view fits.
    pub(crate) async fn until(&mut self, what: &str, fits: impl Fn(&Self) -> bool) {
        let follow = async {
            while !fits(self) {
                let event = self.watcher.next().await;
                for event in self.membership.apply(event) {
                    self.hear(event);
                }
            }
        };
        let outcome = timeout(PATIENCE, follow).await;
        assert!(outcome.is_ok(), "{what}: {:?} after {:?}", self.members, self.heard);
    }

    pub(crate) async fn until_members(&mut self, want: &[(&str, Incarnation)]) {
        let want: BTreeMap<_, _> = want.iter().map(|(id, life)| ((*id).to_owned(), *life)).collect();
        let what = format!("{want:?}");
        self.until(&what, |follower| follower.members == want).await;
    }

    pub(crate) async fn until_interrupted(&mut self) {
        let before = self.n_interruptions();
        self.until("an interruption", |follower| follower.n_interruptions() > before).await;
    }

    pub(crate) fn n_interruptions(&self) -> usize {
        self.heard.iter().filter(|event| matches!(event, MemberEvent::Interrupted)).count()
    }

    /// Nobody comes twice or leaves without having come.
    fn hear(&mut self, event: MemberEvent) {
        match &event {
            MemberEvent::PrefillJoined(joined) => {
                let before = self.members.insert(joined.id.0.clone(), joined.incarnation);
                assert_eq!(before, None, "{:?}", self.heard);
            }
            MemberEvent::PrefillLeft { id, incarnation } => {
                assert_eq!(self.members.remove(&id.0), Some(*incarnation), "{:?}", self.heard);
            }
            _ => {}
        }
        self.heard.push(event);
    }
}
