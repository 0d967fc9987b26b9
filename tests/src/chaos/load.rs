//! Many clients at once, each asking one request after another until it is told to stop.
//!
//! The number of streams is kept, not the rate: whatever the cluster suffers, as many are in flight when the next thing
//! happens. What is random comes from the seed: which requests, in which order, and which of them share a prefix cache.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    catalogue::Catalogue,
    client::{self, Manners, Routers, Seen, Watcher},
    judge::Verdict,
};
use crate::tiny::{Error, Rng};

/// Looks at how many streams run.
const LOOK: Duration = Duration::from_millis(5);

/// The most findings that are kept as text.
const MAX_FINDINGS: usize = 20;

/// What is asked, and how.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// The requests.
    pub catalogue: Catalogue,
    /// Who is asked.
    pub routers: Routers,
    /// Streams at once.
    pub n_streams: usize,
    /// How each client behaves.
    pub manners: Manners,
    /// Of everything random.
    pub seed: u64,
}

/// Clients at work.
pub struct Load {
    clients: JoinSet<Tally>,
    stop: CancellationToken,
    live: Arc<Live>,
    n_streams: usize,
}

/// How the clients fare now.
#[derive(Debug, Default)]
pub struct Live {
    n_decoding: AtomicUsize,
    n_tokens: AtomicUsize,
}

/// What came of requests.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests that were asked.
    pub n_requests: usize,
    /// Answers that are whole.
    pub n_whole: usize,
    /// Tokens that did not come: of outputs that ended too early or left some out.
    pub n_lost: usize,
    /// Tokens that came more than once.
    pub n_duplicated: usize,
    /// Outputs with a wrong token, or wrong bits.
    pub n_altered: usize,
    /// Requests that failed.
    pub n_failed: usize,
    /// Requests for which another router was asked.
    pub n_retried: usize,
    /// How often a request was turned away before it was taken.
    pub n_refused: usize,
    /// The longest time between two tokens of one output.
    pub longest_pause: Duration,
    /// The longest wait for a first token.
    pub longest_wait: Duration,
    /// What was wrong, the first few.
    pub findings: Vec<String>,
}

impl Watcher for Arc<Live> {
    fn began(&self) {
        self.n_decoding.fetch_add(1, Ordering::Relaxed);
    }

    fn token(&self) {
        self.n_tokens.fetch_add(1, Ordering::Relaxed);
    }

    fn ended(&self, had_begun: bool) {
        if had_begun {
            self.n_decoding.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Load {
    /// Starts all clients.
    pub fn start(config: LoadConfig) -> Self {
        let (stop, live) = (CancellationToken::new(), Arc::new(Live::default()));
        let mut clients = JoinSet::new();
        let n_streams = config.n_streams;
        let config = Arc::new(config);
        for idx in 0..n_streams {
            clients.spawn(client(Arc::clone(&config), idx, stop.clone(), Arc::clone(&live)));
        }
        Self { clients, stop, live, n_streams }
    }

    /// Streams that have had their first token and not their last.
    pub fn n_decoding(&self) -> usize {
        self.live.n_decoding.load(Ordering::Relaxed)
    }

    /// Tokens that have come.
    pub fn n_tokens(&self) -> usize {
        self.live.n_tokens.load(Ordering::Relaxed)
    }

    /// Waits until a third of the streams decode at the same moment; the others are on their way to it.
    pub async fn until_busy(&self, patience: Duration) -> Result<(), Error> {
        let start = Instant::now();
        while self.n_decoding() * 3 < self.n_streams {
            if start.elapsed() > patience {
                return Err(format!("only {} of {} streams decode", self.n_decoding(), self.n_streams).into());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until the streams have had `n` more tokens: service goes on.
    pub async fn until_tokens(&self, n: usize, patience: Duration) -> Result<Duration, Error> {
        let (start, before) = (Instant::now(), self.n_tokens());
        while self.n_tokens() < before + n {
            if start.elapsed() > patience {
                return Err(format!("no {n} tokens came in {patience:?}").into());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(start.elapsed())
    }

    /// Begins nothing more, waits for what was begun, and says how it all went.
    pub async fn finish(mut self) -> Result<Tally, Error> {
        self.stop.cancel();
        let mut tally = Tally::default();
        while let Some(client) = self.clients.join_next().await {
            tally.add(client?);
        }
        Ok(tally)
    }
}

async fn client(config: Arc<LoadConfig>, idx: usize, stop: CancellationToken, live: Arc<Live>) -> Tally {
    let mut rng = Rng::new(config.seed ^ (idx as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut tally = Tally::default();
    while !stop.is_cancelled() {
        let case = &config.catalogue[rng.below(config.catalogue.len())];
        // Three of four find nothing of theirs in a cache; the others may find anything.
        let salt = if rng.below(4) == 0 { "shared".to_owned() } else { format!("{:x}", rng.bits()) };
        let seen = client::ask(&config.routers, (case, &salt, idx), config.manners, &live).await;
        tally.note(&seen, case.expected.tokens.len());
    }
    tally
}

impl Tally {
    /// Counts one request whose output should have been `n_expected` tokens long.
    pub fn note(&mut self, seen: &Seen, n_expected: usize) {
        self.n_requests += 1;
        self.n_retried += usize::from(seen.n_retries > 0);
        self.n_refused += seen.n_refused as usize;
        self.longest_pause = self.longest_pause.max(seen.longest_pause);
        self.longest_wait = self.longest_wait.max(seen.first_token);
        match &seen.verdict {
            Verdict::Whole => self.n_whole += 1,
            Verdict::Lost { n_tokens } => self.n_lost += n_tokens,
            Verdict::Duplicated { n_tokens } => self.n_duplicated += n_tokens,
            Verdict::Altered { .. } => self.n_altered += 1,
            Verdict::Failed { n_tokens, .. } => {
                self.n_failed += 1;
                self.n_lost += n_expected.saturating_sub(*n_tokens);
            }
        }
        if seen.verdict != Verdict::Whole {
            self.find(format!("{:?}", seen.verdict));
        }
    }

    /// Keeps what was wrong, if there is room.
    pub fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    /// Adds another tally to this one.
    pub fn add(&mut self, other: Self) {
        self.n_requests += other.n_requests;
        self.n_whole += other.n_whole;
        self.n_lost += other.n_lost;
        self.n_duplicated += other.n_duplicated;
        self.n_altered += other.n_altered;
        self.n_failed += other.n_failed;
        self.n_retried += other.n_retried;
        self.n_refused += other.n_refused;
        self.longest_pause = self.longest_pause.max(other.longest_pause);
        self.longest_wait = self.longest_wait.max(other.longest_wait);
        other.findings.into_iter().for_each(|finding| self.find(finding));
    }

    /// Whether every answer was whole.
    pub fn is_clean(&self) -> bool {
        self.n_whole == self.n_requests
    }
}
