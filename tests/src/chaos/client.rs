//! One client: asks, counts every token, and knows which routers serve.
//!
//! It behaves as an application behind a balancer does: it asks a router only while the router says that it serves, and,
//! where the row allows it, it asks another when the connection is lost, or comes back when it was told that nobody is
//! there yet. It never repeats anything else: a request that fails for another reason is a finding.

use std::{
    error::Error as _,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use longreach_proto::inference::{
    GenerateStreamRequest, GenerateStreamResponse, generate_stream_response::Event,
    inference_service_client::InferenceServiceClient,
};
use tonic::{
    Code, Status, Streaming,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt;

use super::{
    catalogue::Case,
    judge::{self, Verdict},
};
use crate::{
    cluster::ask::{Output, is_length},
    tiny::Error,
};

/// How long a router may take to say whether it serves before another is asked.
const HEALTH_LIMIT: Duration = Duration::from_secs(2);

/// Pause before all routers are asked again when none serves.
const NOBODY_PAUSE: Duration = Duration::from_millis(50);

/// The routers, as a balancer knows them.
#[derive(Clone, Debug)]
pub struct Routers {
    channels: Arc<[Channel]>,
}

/// How a client asks.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// How long one request may take in all. Longer than anything but a hang.
    pub patience: Duration,
    /// Whether a lost connection is answered by asking another router.
    pub retries_lost: bool,
    /// Whether a client that is told that nobody is there to work for it comes back when it was told to.
    pub comes_back: bool,
}

/// What a client saw of one request.
#[derive(Clone, Debug)]
pub struct Seen {
    /// How the output compares.
    pub verdict: Verdict,
    /// From the request to its first token.
    pub first_token: Duration,
    /// The longest time between two tokens.
    pub longest_pause: Duration,
    /// How often another router had to be asked.
    pub n_retries: u32,
    /// How often the request was turned away before it was taken.
    pub n_refused: u32,
    /// The status, of a request that failed.
    pub status: Option<Status>,
}

/// What happens on the way of one request, for those who wait for a moment to strike.
pub trait Watcher {
    /// The first token came.
    fn began(&self) {}
    /// A token came.
    fn token(&self) {}
    /// The request came to an end, after its first token or not.
    fn ended(&self, _had_begun: bool) {}
}

/// One output as it grows.
struct Account {
    output: Output,
    n_finishes: usize,
    asked: Instant,
    first_token: Option<Duration>,
    last_token: Option<Instant>,
    longest_pause: Duration,
}

impl Routers {
    /// The routers at `addrs`. Connections are made when they are needed.
    pub fn new(addrs: &[SocketAddr]) -> Result<Self, Error> {
        Ok(Self { channels: addrs.iter().map(|&addr| lazy_channel(addr)).collect::<Result<_, _>>()? })
    }

    /// A client of the router `idx`, counted around, whether it serves or not.
    pub fn any(&self, idx: usize) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channels[idx % self.channels.len()].clone())
    }

    /// A router that serves, counted from `first`; it waits until there is one.
    async fn serving(&self, first: usize) -> Channel {
        loop {
            for offset in 0..self.channels.len() {
                let channel = &self.channels[(first + offset) % self.channels.len()];
                if serves(channel).await {
                    return channel.clone();
                }
            }
            tokio::time::sleep(NOBODY_PAUSE).await;
        }
    }
}

/// A connection to `addr`, made when it is needed, that notices a peer which has gone silently.
pub fn lazy_channel(addr: SocketAddr) -> Result<Channel, Error> {
    let endpoint = Endpoint::from_shared(format!("http://{addr}"))?
        .connect_timeout(Duration::from_secs(2))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_lazy())
}

/// Whether the process behind `channel` says that it serves.
pub async fn serves(channel: &Channel) -> bool {
    let mut health = HealthClient::new(channel.clone());
    let answer = tokio::time::timeout(HEALTH_LIMIT, health.check(HealthCheckRequest::default())).await;
    matches!(answer, Ok(Ok(answer)) if answer.get_ref().status() == ServingStatus::Serving)
}

/// Asks for `case` with `salt`, first of the router `first`, and compares what comes.
pub async fn ask(
    routers: &Routers,
    (case, salt, first): (&Case, &str, usize),
    manners: Manners,
    watcher: &impl Watcher,
) -> Seen {
    let mut request = case.ask.stream_request();
    if let Some(options) = &mut request.options {
        options.cache_salt = Some(salt.to_owned());
    }
    let asked = Instant::now();
    let (mut n_retries, mut n_refused) = (0, 0);
    loop {
        let mut account = Account::new();
        let patience = manners.patience.saturating_sub(asked.elapsed());
        let reading = async {
            let router = routers.serving(first + n_retries as usize).await;
            read(router, request.clone(), &mut account, watcher).await
        };
        let status = match tokio::time::timeout(patience, reading).await {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some(status),
            Err(_) => Some(Status::deadline_exceeded("the client waited as long as it could: a hang")),
        };
        watcher.ended(account.first_token.is_some());
        // Tokens that came before the loss must have been right, whatever comes of the next attempt.
        let is_right_so_far = case.expected.tokens.starts_with(&account.output.tokens);
        let is_lost = status.as_ref().is_some_and(is_connection_loss);
        if manners.retries_lost && is_lost && is_right_so_far {
            n_retries += 1;
            continue;
        }
        let hint = status.as_ref().and_then(come_back_after);
        if let (true, true, Some(hint)) = (manners.comes_back, account.output.tokens.is_empty(), hint) {
            n_refused += 1;
            tokio::time::sleep(hint).await;
            continue;
        }
        return Seen { n_retries, n_refused, ..account.into_seen(case, status) };
    }
}

async fn read(
    router: Channel,
    request: GenerateStreamRequest,
    account: &mut Account,
    watcher: &impl Watcher,
) -> Result<(), Status> {
    let mut events = InferenceServiceClient::new(router).generate_stream(request).await?.into_inner();
    account.read(&mut events, watcher).await
}

/// When to come back, if nobody was there to take the request.
fn come_back_after(status: &Status) -> Option<Duration> {
    let is_nobody_there = status.code() == Code::Unavailable && status.source().is_none();
    status.get_details_retry_info().filter(|_| is_nobody_there)?.retry_delay
}

/// Whether the router, or the way to it, is gone. Whatever a router that lives says has no source.
fn is_connection_loss(status: &Status) -> bool {
    status.source().is_some() && !matches!(status.code(), Code::DeadlineExceeded)
}

impl Account {
    fn new() -> Self {
        Self {
            output: Output::default(),
            n_finishes: 0,
            asked: Instant::now(),
            first_token: None,
            last_token: None,
            longest_pause: Duration::ZERO,
        }
    }

    async fn read(
        &mut self,
        events: &mut Streaming<GenerateStreamResponse>,
        watcher: &impl Watcher,
    ) -> Result<(), Status> {
        while let Some(event) = events.next().await {
            self.take(event?, watcher);
        }
        Ok(())
    }

    fn take(&mut self, event: GenerateStreamResponse, watcher: &impl Watcher) {
        match &event.event {
            Some(Event::Delta(delta)) if !delta.token_ids.is_empty() => self.mark(watcher),
            Some(Event::Finish(_)) => {
                self.n_finishes += 1;
                if self.n_finishes > 1 {
                    return;
                }
            }
            _ => {}
        }
        self.output.take(event);
    }

    /// Takes the time of a token.
    fn mark(&mut self, watcher: &impl Watcher) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(last) => self.longest_pause = self.longest_pause.max(now - last),
            None => {
                self.first_token = Some(now - self.asked);
                watcher.began();
            }
        }
        watcher.token();
    }

    fn into_seen(self, case: &Case, status: Option<Status>) -> Seen {
        let verdict = match &status {
            Some(status) => Verdict::Failed {
                problem: format!("{:?}: {}", status.code(), status.message()),
                n_tokens: self.output.tokens.len(),
            },
            None => self.verdict(&case.expected),
        };
        let first_token = self.first_token.unwrap_or_default();
        let longest_pause = self.longest_pause;
        Seen { verdict, first_token, longest_pause, n_retries: 0, n_refused: 0, status }
    }

    /// Compares an output that ended with OK: tokens, bits of log-probabilities, text, and that it ended once.
    fn verdict(&self, expected: &Output) -> Verdict {
        let (got, n_tokens) = (&self.output, self.output.tokens.len());
        let tokens = judge::compare(&expected.tokens, &got.tokens);
        if tokens != Verdict::Whole {
            return tokens;
        }
        if self.n_finishes != 1 || !is_length(&got.finish) {
            let problem = format!("{} finishes, {:?}", self.n_finishes, got.finish);
            return Verdict::Failed { problem, n_tokens };
        }
        if (&got.text, &got.logprobs) != (&expected.text, &expected.logprobs) {
            return Verdict::Altered { at: n_tokens };
        }
        if got.usage().completion_tokens as usize != n_tokens {
            let problem = format!("{n_tokens} tokens, but {:?}", got.usage());
            return Verdict::Failed { problem, n_tokens };
        }
        Verdict::Whole
    }
}
