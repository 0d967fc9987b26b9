//! Runs seeds of the simulation, or one of them again.

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Instant,
};

use clap::Parser;
use longreach_sim::{Report, run_seed};

/// Simulates the cluster: many seeds, or one again with its log.
#[derive(Debug, Parser)]
#[command(name = "longreach-sim", version)]
struct Args {
    /// Run this seed only, twice, and compare.
    #[arg(long)]
    seed: Option<u64>,
    /// Print the event log of that seed.
    #[arg(long)]
    log: bool,
    /// How many seeds to run.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// How many seeds may fail before the rest is left.
    #[arg(long, default_value_t = 5)]
    max_failures: usize,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let passed = match args.seed {
        Some(seed) => run_one(seed, args.log),
        None => run_many(&args),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // Nobody reads what is printed.
        Err(_) => ExitCode::FAILURE,
    }
}

fn run_one(seed: u64, log: bool) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    let (first, again) = (run_seed(seed, log), run_seed(seed, false));
    for line in &first.log {
        writeln!(out, "{line}")?;
    }
    for (kind, n) in &first.counts {
        writeln!(out, "{n:>8}  {kind}")?;
    }
    let repeats = first.digest == again.digest;
    writeln!(out, "seed {seed}: {} events, digest {:016x}, repeats: {repeats}", first.n_lines, first.digest)?;
    show_violations(&mut out, seed, &first)?;
    Ok(repeats && first.violations.is_empty())
}

fn run_many(args: &Args) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    let started = Instant::now();
    let mut total = Report::default();
    let (mut n_failed, mut n_run) = (0, 0);
    for seed in args.from..args.from + args.seeds {
        let report = run_seed(seed, false);
        n_run += 1;
        total.n_lines += report.n_lines;
        for (kind, n) in &report.counts {
            *total.counts.entry(kind).or_default() += n;
        }
        if !report.violations.is_empty() {
            n_failed += 1;
            show_violations(&mut out, seed, &report)?;
            if n_failed >= args.max_failures {
                break;
            }
        }
    }
    for (kind, n) in &total.counts {
        writeln!(out, "{n:>10}  {kind}")?;
    }
    let spent = started.elapsed();
    writeln!(
        out,
        "{n_run} seeds from {}, {n_failed} failed, {} events, {spent:.1?}",
        args.from, total.n_lines
    )?;
    Ok(n_failed == 0)
}

fn show_violations(out: &mut impl Write, seed: u64, report: &Report) -> io::Result<()> {
    for violation in &report.violations {
        writeln!(out, "seed {seed}: {violation}")?;
    }
    if !report.violations.is_empty() {
        writeln!(out, "again with its log: cargo run -p longreach-sim -- --seed {seed} --log")?;
    }
    Ok(())
}
