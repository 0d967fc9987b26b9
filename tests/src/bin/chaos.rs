//! Runs rows of the failure table and prints what came of them: `cargo xtask chaos`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command for people: the terminal is its output"
)]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};
use longreach_decode::DecodeSettings;
use longreach_prefill::PrefillSettings;
use longreach_router::RouterSettings;
use longreach_service::{Exit, RoleArgs, run_role};
use longreach_tests::{
    chaos::{
        catalogue::{self, Lengths},
        launch::Programs,
        report::{RowReport, Table},
        rows::{ROWS, Row},
        run::{Effort, Ground, run_row},
        world::{Entered, World, enter},
    },
    cluster::{model::ServedModel, seed},
    tiny::Error,
};

/// Attacks a cluster of real processes and compares what its clients get with what they should.
#[derive(Debug, Parser)]
#[command(name = "chaos")]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    role: Option<RoleCommand>,
    /// Rows to run, by name; a name that another begins with means both. Default: all.
    #[arg(long = "row")]
    rows: Vec<String>,
    /// Rounds of each row.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Streams at once.
    #[arg(long, default_value_t = 200)]
    streams: usize,
    /// Of everything random; printed, so that a run can be repeated.
    #[arg(long)]
    seed: Option<u64>,
    /// How long an overload lasts, in seconds.
    #[arg(long, default_value_t = 60)]
    overload: u64,
    /// The folder of the programs longreach-router, longreach-prefill and longreach-decode. Default: this program is all
    /// of them, so that a test attacks what it was built with.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Stay in the network of this machine, on loopback.
    #[arg(long)]
    loopback: bool,
    /// Keep the logs of rows that fail in this folder.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Say which rows there are.
    #[arg(long)]
    list: bool,
}

/// A role of the attacked cluster, as this process.
#[derive(Debug, Subcommand)]
enum RoleCommand {
    /// A router.
    #[command(hide = true)]
    Router(Box<RoleArgs<RouterSettings>>),
    /// A prefill worker.
    #[command(hide = true)]
    Prefill(Box<RoleArgs<PrefillSettings>>),
    /// A rank of a decode group.
    #[command(hide = true)]
    Decode(Box<RoleArgs<DecodeSettings>>),
}

impl RoleCommand {
    fn run(self) -> Exit {
        match self {
            Self::Router(args) => run_role(*args, longreach_router::run),
            Self::Prefill(args) => run_role(*args, longreach_prefill::run),
            Self::Decode(args) => run_role(*args, longreach_decode::run),
        }
    }
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if let Some(role) = args.role.take() {
        return role.run().code().into();
    }
    if args.list {
        ROWS.iter().for_each(|row| println!("{}", row.name));
        return ExitCode::SUCCESS;
    }
    match begin(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("chaos: {error}");
            ExitCode::FAILURE
        }
    }
}

fn begin(args: Args) -> Result<ExitCode, Error> {
    let world = if args.loopback {
        World::loopback(std::process::id())
    } else {
        match enter()? {
            Entered::Inside => World::namespaces()?,
            Entered::Ran(status) => {
                return Ok(ExitCode::from(
                    status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1),
                ));
            }
            Entered::Impossible => {
                eprintln!("no namespaces on this machine: hosts are addresses of loopback");
                World::loopback(std::process::id())
            }
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run(args, world))
}

async fn run(args: Args, world: World) -> Result<ExitCode, Error> {
    let is_wanted =
        |row: &&Row| args.rows.is_empty() || args.rows.iter().any(|name| row.name.starts_with(name));
    let rows: Vec<&Row> = ROWS.iter().filter(is_wanted).collect();
    if rows.is_empty() {
        return Err("no row has that name; --list names them".into());
    }
    let seed = args.seed.unwrap_or_else(seed);
    println!("seed {seed}, {:?}", world.kind());
    let model = ServedModel::golden("llama", Some(8192))?;
    let lengths = Lengths { max_prompt_len: 2500, min_output_len: 24, max_output_len: 160 };
    let catalogue = catalogue::make(&model, lengths, args.streams, seed).await?;
    let programs = match args.programs {
        Some(dir) => Programs::of_roles(&dir)?,
        None => Programs::One(std::env::current_exe()?),
    };
    let mut ground = Ground { world, programs, model, catalogue, keep: args.keep };
    let overload = Duration::from_secs(args.overload);
    let effort = Effort { n_rounds: args.rounds, n_streams: args.streams, overload, seed };
    let mut reports = Vec::new();
    for row in rows {
        let report = match run_row(row, &mut ground, effort, &|line| println!("{line}")).await {
            Ok(report) => report,
            Err(error) => {
                RowReport { name: row.name, problems: vec![error.to_string()], ..RowReport::default() }
            }
        };
        report.findings().for_each(|finding| println!("  {finding}"));
        reports.push(report);
    }
    println!("\n{}\nseed {seed}", Table(&reports));
    let has_passed = reports.iter().all(|report| report.skipped.is_some() || report.passed());
    Ok(if has_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
