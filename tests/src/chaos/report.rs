//! What a run found, as a table for people.

use std::{fmt, time::Duration};

use super::load::Tally;

/// What came of one row.
#[derive(Clone, Debug, Default)]
pub struct RowReport {
    /// The row.
    pub name: &'static str,
    /// Rounds that were run.
    pub n_rounds: usize,
    /// What clients saw.
    pub tally: Tally,
    /// Streams that were decoding when the event came.
    pub n_struck: usize,
    /// Streams that lost a worker.
    pub n_interrupted: u64,
    /// Those of them that went on.
    pub n_resumed: u64,
    /// The longest time until the service was whole again.
    pub whole_after: Duration,
    /// The longest time until all workers had given back everything, after the last stream.
    pub rest_after: Duration,
    /// What was not as it should be, besides outputs.
    pub problems: Vec<String>,
    /// Why the row was not run.
    pub skipped: Option<&'static str>,
}

/// What came of all rows.
pub struct Table<'a>(pub &'a [RowReport]);

impl RowReport {
    /// Whether everything was as it should be.
    pub fn passed(&self) -> bool {
        self.tally.is_clean() && self.problems.is_empty()
    }

    /// In a word.
    pub fn verdict(&self) -> String {
        match self.skipped {
            Some(reason) => format!("not run: {reason}"),
            None if self.passed() => "pass".to_owned(),
            None => "FAIL".to_owned(),
        }
    }

    /// Everything that was not as it should be, a line each.
    pub fn findings(&self) -> impl Iterator<Item = String> + '_ {
        self.problems.iter().chain(&self.tally.findings).map(|finding| format!("{}: {finding}", self.name))
    }
}

/// Titles of the columns.
const TITLES: [&str; 15] = [
    "row",
    "rounds",
    "streams",
    "running",
    "interrupted",
    "resumed",
    "lost",
    "duplicated",
    "altered",
    "failed",
    "refused",
    "longest pause",
    "whole after",
    "at rest after",
    "verdict",
];

impl RowReport {
    /// What stands under each title.
    fn cells(&self) -> [String; TITLES.len()] {
        let tally = &self.tally;
        [
            self.name.to_owned(),
            self.n_rounds.to_string(),
            tally.n_requests.to_string(),
            self.n_struck.to_string(),
            (self.n_interrupted + tally.n_retried as u64).to_string(),
            (self.n_resumed + tally.n_retried as u64).to_string(),
            tally.n_lost.to_string(),
            tally.n_duplicated.to_string(),
            tally.n_altered.to_string(),
            tally.n_failed.to_string(),
            tally.n_refused.to_string(),
            seconds(tally.longest_pause),
            seconds(self.whole_after),
            seconds(self.rest_after),
            self.verdict(),
        ]
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![TITLES.map(str::to_owned)];
        lines.extend(self.0.iter().map(RowReport::cells));
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..TITLES.len()).map(width).collect();
        for line in &lines {
            let [name, rest @ .., verdict] = line;
            write!(f, "{name:<0$}", widths[0])?;
            for (cell, width) in rest.iter().zip(&widths[1..]) {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f, "  {verdict}")?;
        }
        Ok(())
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2}s", time.as_secs_f64())
}
