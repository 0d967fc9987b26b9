//! The two rows whose event is what clients do: they go away, or there are far too many of them.

use std::time::{Duration, Instant};

use futures::StreamExt;
use longreach_proto::inference::generate_stream_response::Event as StreamEvent;
use tokio::task::JoinSet;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::{
    client::{self, Manners, Watcher},
    fleet::Shape,
    load::Tally,
    rows::{Event, Row},
    run::{Effort, Running},
};
use crate::tiny::Error;

/// Clients that go away at once.
const N_GONE: usize = 10;

/// How soon both sides must hold nothing when they have gone.
const GONE_BOUND: Duration = Duration::from_millis(100);

/// Tokens of an output that nobody waits for.
const OUTPUT_LEN: u32 = 400;

/// How long clients may wait to get as far as they want before they go.
const REACH_PATIENCE: Duration = Duration::from_secs(60);

/// How much more is asked than is taken.
const OVERLOAD: usize = 10;

/// How soon a request that is turned away must be.
const REFUSAL_BOUND: Duration = Duration::from_secs(2);

/// Memory that a process may gain in the second half of an overload.
const MAX_GAIN_BYTES: u64 = 24 << 20;

/// The cluster that a row needs.
pub fn shape(row: &Row, effort: Effort) -> Shape {
    let shape = Shape { n_groups: row.n_groups, ..Shape::default() };
    match row.event {
        Event::Overload => Shape { max_inflight: effort.n_streams.div_ceil(shape.n_routers), ..shape },
        _ => shape,
    }
}

/// Ten clients with long prompts go away: before their first token, and after it.
pub async fn clients_gone(running: &mut Running<'_>) -> Result<(), Error> {
    for n_events in [0, 1 + running.rng.below(30)] {
        let took = go_away(running, n_events).await?;
        running.report.whole_after = running.report.whole_after.max(took);
        if took > GONE_BOUND {
            let problem = format!("clients gone after {n_events} tokens: all is given back after {took:.1?}");
            running.report.problems.push(problem);
        }
    }
    Ok(())
}

/// Opens streams, reads `n_tokens` pieces of each, drops all at the same moment, and waits until nothing is held.
async fn go_away(running: &mut Running<'_>, n_tokens: usize) -> Result<Duration, Error> {
    let mut longest: Vec<_> = running.catalogue.iter().collect();
    longest.sort_by_key(|case| std::cmp::Reverse(case.expected.usage().prompt_tokens));
    let mut clients = JoinSet::new();
    for case in longest.into_iter().take(N_GONE) {
        let mut request = case.ask.stream_request();
        if let Some(options) = &mut request.options {
            options.cache_salt = Some(format!("{:x}", running.rng.bits()));
            // Clients go away before the end, also where several tokens come in a piece.
            (options.max_tokens, options.ignore_eos) = (Some(OUTPUT_LEN), Some(true));
        }
        let mut router = running.fleet.routers.any(running.rng.below(2));
        clients.spawn(async move {
            let mut events = router.generate_stream(request).await?.into_inner();
            let mut n_read = 0;
            while n_read < n_tokens {
                let event = events.next().await.ok_or(Status::aborted("ended too early"))??;
                n_read += usize::from(matches!(event.event, Some(StreamEvent::Delta(_))));
            }
            Ok::<_, Status>(events)
        });
    }
    let mut streams = Vec::new();
    if n_tokens == 0 {
        // Before any first token: while prompts are computed or on their way.
        let works = |loads: &[super::pools::Load]| loads.iter().any(|load| load.n_seqs > 0);
        running.fleet.workers.until(REACH_PATIENCE, works).await?;
        let within = Duration::from_micros(running.rng.below(50_000) as u64);
        tokio::time::sleep(within).await;
    } else {
        while let Some(stream) = clients.join_next().await {
            streams.push(stream??);
        }
    }
    running.report.n_struck += N_GONE;
    let gone = Instant::now();
    clients.shutdown().await;
    drop(streams);
    running.fleet.workers.until_at_rest(REACH_PATIENCE).await?;
    Ok(gone.elapsed())
}

/// Ten times the clients that the routers take, for as long as the effort says.
pub async fn overload(running: &mut Running<'_>) -> Result<(), Error> {
    let until = Instant::now() + running.effort.overload;
    let mut clients = JoinSet::new();
    for idx in 0..running.effort.n_streams * OVERLOAD {
        let (routers, catalogue) = (running.fleet.routers.clone(), running.catalogue.clone());
        let mut rng = crate::tiny::Rng::new(running.rng.bits());
        clients.spawn(async move {
            let mut outcome = Overloaded::default();
            while Instant::now() < until {
                let case = &catalogue[rng.below(catalogue.len())];
                let salt = format!("{:x}", rng.bits());
                let manners =
                    Manners { patience: REACH_PATIENCE * 3, retries_lost: false, comes_back: false };
                let asked = Instant::now();
                let seen = client::ask(&routers, (case, &salt, idx), manners, &Nobody).await;
                match seen.status.as_ref().filter(|status| status.code() == Code::ResourceExhausted) {
                    Some(status) => outcome.refused(status, asked.elapsed()).await,
                    None => outcome.tally.note(&seen, case.expected.tokens.len()),
                }
            }
            outcome
        });
    }
    let memory = watch_memory(running, until).await;
    let mut all = Overloaded::default();
    while let Some(outcome) = clients.join_next().await {
        all.add(outcome?);
    }
    let problems = &mut running.report.problems;
    problems.extend(memory);
    if all.n_refused == 0 {
        problems.push("nobody was turned away".to_owned());
    }
    if all.n_without_hint > 0 {
        problems.push(format!("{} were turned away without a hint when to come back", all.n_without_hint));
    }
    if all.slowest_refusal > REFUSAL_BOUND {
        problems.push(format!("one was turned away only after {:.1?}", all.slowest_refusal));
    }
    all.tally.n_refused += all.n_refused;
    running.report.whole_after = running.report.whole_after.max(all.slowest_refusal);
    running.report.tally.add(all.tally);
    Ok(())
}

/// What came of the requests of one client, or of all.
#[derive(Default)]
struct Overloaded {
    tally: Tally,
    n_refused: usize,
    n_without_hint: usize,
    slowest_refusal: Duration,
}

impl Overloaded {
    /// Counts a refusal, and waits as long as it asks to.
    async fn refused(&mut self, status: &Status, after: Duration) {
        self.n_refused += 1;
        self.slowest_refusal = self.slowest_refusal.max(after);
        let hint = status.get_details_retry_info().and_then(|info| info.retry_delay);
        self.n_without_hint += usize::from(hint.is_none());
        tokio::time::sleep(hint.unwrap_or(Duration::from_secs(1))).await;
    }

    fn add(&mut self, other: Self) {
        self.tally.add(other.tally);
        self.n_refused += other.n_refused;
        self.n_without_hint += other.n_without_hint;
        self.slowest_refusal = self.slowest_refusal.max(other.slowest_refusal);
    }
}

/// Nobody watches.
struct Nobody;

impl Watcher for Nobody {}

/// Looks at every process's memory until `until`: what any gained between the middle and the end is a problem if it is
/// much.
async fn watch_memory(running: &Running<'_>, until: Instant) -> Vec<String> {
    let middle = until - running.effort.overload / 2;
    tokio::time::sleep_until(middle.into()).await;
    let before = running.fleet.figures();
    tokio::time::sleep_until(until.into()).await;
    let after = running.fleet.figures();
    let mut problems = Vec::new();
    for ((member, pid, before), (_, pid_after, after)) in before.into_iter().zip(after) {
        if pid == pid_after && after.rss_bytes > before.rss_bytes + MAX_GAIN_BYTES {
            let mib = |bytes: u64| bytes >> 20;
            let (before, after) = (mib(before.rss_bytes), mib(after.rss_bytes));
            problems.push(format!("{} grew from {before} to {after} MiB", member.name()));
        }
    }
    problems
}
