//! Files that are read again when they have changed.
//!
//! They are looked at when a connection is made and the last look is some seconds old: a process needs no task for it
//! that could be forgotten, and a process without new connections needs no new certificate. Contents are compared,
//! not times of change, because a mounted secret is replaced by a link and may keep its times.
//!
//! Files that are broken, half written or missing change nothing: the last good ones stay in use, and the log says so
//! once for each state they are in.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{task::spawn_blocking, time::Instant};
use tracing::{info, warn};

use crate::{error::TlsError, files::read};

/// How long changed files may go unnoticed. Shorter notices sooner; longer reads less. A mounted secret takes about a
/// minute to arrive anyway.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(10);

type Parse<T> = dyn Fn(&[Vec<u8>]) -> Result<T, TlsError> + Send + Sync;

/// What was made of some files, as they were when they were last good.
pub(crate) struct Reloading<T> {
    paths: Vec<PathBuf>,
    parse: Box<Parse<T>>,
    interval: Duration,
    state: Mutex<State<T>>,
}

struct State<T> {
    current: Arc<T>,
    contents: Vec<Vec<u8>>,
    next_check: Instant,
    /// Whether somebody looks at the files now. A volume that hangs must not take one thread after another.
    is_checking: bool,
    /// What the log has said is wrong.
    complained: Option<Fault>,
}

/// Somebody looks at the files.
struct Checking<'a, T: Send + Sync + 'static>(&'a Reloading<T>);

impl<T: Send + Sync + 'static> Drop for Checking<'_, T> {
    fn drop(&mut self) {
        self.0.state().is_checking = false;
    }
}

/// A state of the files that cannot be used.
#[derive(PartialEq, Eq)]
enum Fault {
    Unreadable(String),
    Contents(Vec<Vec<u8>>),
}

impl<T: Send + Sync + 'static> Reloading<T> {
    /// Reads the files for the first time; now every fault is an error.
    pub(crate) fn load(
        paths: Vec<PathBuf>,
        interval: Duration,
        parse: impl Fn(&[Vec<u8>]) -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, TlsError> {
        let contents = paths.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
        let current = Arc::new(parse(&contents)?);
        let state = State {
            current,
            contents,
            next_check: Instant::now() + interval,
            is_checking: false,
            complained: None,
        };
        Ok(Arc::new(Self { paths, parse: Box::new(parse), interval, state: Mutex::new(state) }))
    }

    /// What is to be used for a new connection. One caller looks at the files when it is time; others go on with what
    /// there is.
    pub(crate) async fn current(self: &Arc<Self>) -> Arc<T> {
        {
            let (mut state, now) = (self.state(), Instant::now());
            if now < state.next_check || state.is_checking {
                return Arc::clone(&state.current);
            }
            (state.next_check, state.is_checking) = (now + self.interval, true);
        }
        let this = Arc::clone(self);
        // Off the runtime: a volume may hang. If the task is lost, the last good files stay in use.
        let _lost = spawn_blocking(move || {
            let _checking = Checking(&this);
            this.check();
        })
        .await;
        Arc::clone(&self.state().current)
    }

    fn check(&self) {
        let contents = match self.paths.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>() {
            Ok(contents) => contents,
            Err(error) => return self.complain(Fault::Unreadable(error.to_string()), &error),
        };
        if self.state().contents == contents {
            self.state().complained = None;
            return;
        }
        match (self.parse)(&contents) {
            Ok(new) => {
                let mut state = self.state();
                (state.current, state.contents, state.complained) = (Arc::new(new), contents, None);
                info!(files = ?self.paths, "certificates have changed; new connections use the new ones");
            }
            Err(error) => self.complain(Fault::Contents(contents), &error),
        }
    }

    fn complain(&self, fault: Fault, error: &TlsError) {
        let mut state = self.state();
        if state.complained.as_ref() != Some(&fault) {
            warn!(%error, "changed certificates cannot be used; going on with the last good ones");
            state.complained = Some(fault);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        !self.state().is_checking
    }

    /// Everything in it is replaced at once, so it is whole even if a thread panicked.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
