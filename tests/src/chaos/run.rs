//! Rows and their rounds.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    catalogue::Catalogue,
    client::Manners,
    fleet::Fleet,
    launch::Programs,
    load::{Load, LoadConfig, Tally},
    procfs::Figures,
    report::RowReport,
    rows::{Event, Row, Stage},
    special,
    world::{Kind, World},
};
use crate::{
    cluster::model::ServedModel,
    tiny::{Error, Rng},
};

/// How long one request may take in all.
const PATIENCE: Duration = Duration::from_secs(180);

/// How long the streams may take to get going.
const BUSY_PATIENCE: Duration = Duration::from_secs(60);

/// How long workers may take to give everything back when nobody asks any more. What a lost peer held is given back
/// after the bound on hand-offs, which is part of it.
const REST_BOUND: Duration = Duration::from_secs(15);

/// How long a role may take to end at the end of a row.
const END_GRACE: Duration = Duration::from_secs(30);

/// Files and threads that a process may have gained over the rounds of a row.
const MAX_GAIN: usize = 64;

/// Everything that rows share.
pub struct Ground {
    /// The place.
    pub world: World,
    /// The programs.
    pub programs: Programs,
    /// What is served.
    pub model: ServedModel,
    /// What is asked.
    pub catalogue: Catalogue,
    /// Where logs of a row that failed are kept.
    pub keep: Option<PathBuf>,
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds of each row.
    pub n_rounds: usize,
    /// Streams at once.
    pub n_streams: usize,
    /// How long an overload lasts.
    pub overload: Duration,
    /// Of everything random.
    pub seed: u64,
}

/// A row in progress.
pub struct Running<'a> {
    pub(super) row: &'a Row,
    pub(super) effort: Effort,
    pub(super) catalogue: Catalogue,
    pub(super) fleet: Fleet,
    pub(super) report: RowReport,
    pub(super) rng: Rng,
    first_figures: BTreeMap<u32, Figures>,
}

/// Runs one row on a cluster of its own. `say` is told of every round.
pub async fn run_row(
    row: &Row,
    ground: &mut Ground,
    effort: Effort,
    say: &dyn Fn(&str),
) -> Result<RowReport, Error> {
    let mut report = RowReport { name: row.name, ..RowReport::default() };
    if row.needs_cables() && ground.world.kind() == Kind::Loopback {
        report.skipped = Some("hosts have no cables on loopback");
        return Ok(report);
    }
    ground.world.rewind();
    let shape = special::shape(row, effort);
    let fleet = Fleet::start(&mut ground.world, &ground.programs, &ground.model, shape).await?;
    // Every row has its own numbers, so that one run alone is the same as in the whole table.
    let rng =
        Rng::new(row.name.bytes().fold(effort.seed, |seed, byte| seed.wrapping_mul(31) ^ u64::from(byte)));
    let catalogue = ground.catalogue.clone();
    let mut running = Running { row, effort, catalogue, fleet, report, rng, first_figures: BTreeMap::new() };
    for round in 0..effort.n_rounds {
        let start = Instant::now();
        let outcome = running.round().await;
        running.report.n_rounds += 1;
        if let Err(error) = outcome {
            running.report.problems.push(format!("round {round}: {error}"));
        }
        say(&running.line(round, start.elapsed()));
        // What follows a broken round says nothing.
        if !running.report.passed() {
            break;
        }
    }
    running.end(ground.keep.as_ref()).await
}

impl Running<'_> {
    async fn round(&mut self) -> Result<(), Error> {
        match self.row.event {
            Event::ClientsGone => special::clients_gone(self).await?,
            Event::Overload => special::overload(self).await?,
            _ => self.strike().await?,
        }
        let rest_after = self.fleet.workers.until_at_rest(REST_BOUND).await?;
        self.report.rest_after = self.report.rest_after.max(rest_after);
        self.check_processes();
        Ok(())
    }

    /// Load, event, recovery, end of the load.
    async fn strike(&mut self) -> Result<(), Error> {
        let before = self.recoveries().await;
        let load = self.load();
        load.until_busy(BUSY_PATIENCE).await?;
        let mut stage = Stage { fleet: &mut self.fleet, load: &load, rng: &mut self.rng };
        stage.pause(Duration::from_secs(2)).await;
        self.report.n_struck += load.n_decoding();
        let struck = self.row.event.strike(&mut stage).await;
        let recovered = match struck {
            Ok(()) => self.until_recovered(&load).await,
            Err(error) => Err(error),
        };
        // The streams are heard to their end even if the cluster did not recover: what they saw is the finding.
        let tally = load.finish().await?;
        if tally.longest_pause > self.row.bound {
            self.report.problems.push(format!("a stream paused for {:.1?}", tally.longest_pause));
        }
        self.report.tally.add(tally);
        let now = self.recoveries().await;
        self.report.n_interrupted += now[0].saturating_sub(before[0]);
        self.report.n_resumed += now[1].saturating_sub(before[1]);
        recovered.map_err(|error| format!("{:?}: {error}", self.row.event).into())
    }

    /// Streams that routers saw interrupted, and resumed. A router that was started again has forgotten its own.
    async fn recoveries(&self) -> [u64; 2] {
        let count = |what: &str| format!("longreach_router_{what}_streams_total");
        [
            self.fleet.router_metric(&count("interrupted")).await,
            self.fleet.router_metric(&count("resumed")).await,
        ]
    }

    async fn until_recovered(&mut self, load: &Load) -> Result<(), Error> {
        let start = Instant::now();
        self.fleet.until_whole(self.row.bound).await?;
        self.fleet.until_registered(&self.fleet.shape.members(), self.row.bound).await?;
        load.until_tokens(1, self.row.bound).await?;
        self.report.whole_after = self.report.whole_after.max(start.elapsed());
        Ok(())
    }

    /// Clients for one round.
    pub(super) fn load(&mut self) -> Load {
        let manners = Manners {
            patience: PATIENCE,
            retries_lost: self.row.retries_lost(),
            comes_back: self.row.comes_back(),
        };
        Load::start(LoadConfig {
            catalogue: self.catalogue.clone(),
            routers: self.fleet.routers.clone(),
            n_streams: self.effort.n_streams,
            manners,
            seed: self.rng.bits(),
        })
    }

    /// No process may have ended by itself, and none may gain files or threads from round to round.
    fn check_processes(&mut self) {
        for fallen in self.fleet.fallen() {
            self.report.problems.push(format!("ended by itself: {fallen}"));
        }
        for (member, pid, now) in self.fleet.figures() {
            let first = *self.first_figures.entry(pid).or_insert(now);
            let gain = |first: usize, now: usize| now > first + MAX_GAIN;
            if gain(first.n_files, now.n_files) || gain(first.n_threads, now.n_threads) {
                self.report.problems.push(format!("{} grows: {first:?}, now {now:?}", member.name()));
            }
        }
    }

    fn line(&self, round: usize, took: Duration) -> String {
        let Tally { n_requests, n_whole, n_failed, longest_pause, .. } = self.report.tally;
        let took = took.as_secs_f64();
        format!(
            "{} round {}: {took:.1} s, so far {n_whole} of {n_requests} whole, {n_failed} failed, {} resumed, pause \
             {longest_pause:.1?}, whole after {:.1?}, at rest after {:.1?}",
            self.row.name,
            round + 1,
            self.report.n_resumed,
            self.report.whole_after,
            self.report.rest_after
        )
    }

    async fn end(mut self, keep: Option<&PathBuf>) -> Result<RowReport, Error> {
        if !self.report.passed()
            && let Some(keep) = keep
        {
            self.fleet.keep_logs(&keep.join(self.row.name))?;
        }
        if self.report.passed() {
            self.report.problems.extend(self.fleet.stop(END_GRACE).await?);
        }
        Ok(self.report)
    }
}
