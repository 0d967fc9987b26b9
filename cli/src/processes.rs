//! `longreach up --processes`: etcd and every role as a process of its own on this machine, until Ctrl-C. A person can
//! kill or stop any of them and watch what happens.
//!
//! A role that ends is started again after a pause, with the same file: what an orchestrator would do. The roles are
//! this same program, told by files that stay where the summary says for as long as the cluster runs.

use std::{path::Path, pin::pin, sync::Arc, time::Duration};

use futures::future::join_all;
use longreach_local::{EtcdCluster, EtcdOptions, RoleProcess, RolePrograms, RoleSpec, Site};
use longreach_router::SamplingDefaults;
use longreach_service::{Exit, Signals};
use longreach_types::GroupShape;
use tempfile::TempDir;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    advice,
    args::UpArgs,
    error::CliError,
    model::{self, OpenedFiles},
    up::try_it,
};

/// Before a role that ended is started again: soon at first, then no more often than a machine can bear.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// A role that ran for so long is well; its end is the first one again.
const STEADY: Duration = Duration::from_secs(30);

/// How long roles may finish what they have. The router drains first.
const GRACE: Duration = Duration::from_secs(30);

/// Between two looks whether the router is ready.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// The processes, before they are watched.
struct Processes {
    // Dropped in this order: roles, then the store that they use, then the files.
    router: RoleProcess,
    workers: Vec<RoleProcess>,
    etcd: EtcdCluster,
    folder: TempDir,
}

/// Runs the command.
pub(crate) async fn run(args: UpArgs) -> Result<(), CliError> {
    let (engine, prefill_threads) = args.engine.config(2)?;
    let opened = model::open_files(args.engine.model.clone(), true).await?;
    let mut signals = Signals::install().map_err(|error| CliError::start(&error))?;
    let shape = engine.shape;
    let processes = Processes::prepare(&args, &opened, (shape, prefill_threads)).await?;
    let end = CancellationToken::new();
    let Processes { mut router, mut workers, etcd, folder } = processes;
    for process in workers.iter_mut().chain([&mut router]) {
        process.start().map_err(|error| CliError::start(&error))?;
    }
    let summary = summary(&opened.name, &router, &workers, (&etcd, folder.path()));
    let probe = router.probe();
    let mut watched = JoinSet::new();
    for process in [router].into_iter().chain(workers) {
        watched.spawn(supervise(process, end.clone()));
    }
    let mut ready = pin!(async {
        while !probe.is_ready().await {
            sleep(LOOK_PERIOD).await;
        }
    });
    let mut is_ready = false;
    let mut outcome = Ok(());
    let mut ended = Vec::new();
    loop {
        // All arms are cancel-safe: they wait for things that stay as they are.
        tokio::select! {
            () = &mut ready, if !is_ready => {
                is_ready = true;
                println!("{summary}");
            }
            Some(process) = watched.join_next() => {
                let (process, result) = process.map_err(|error| CliError::start(&error))?;
                outcome = outcome.and(result);
                ended.push(process);
                break;
            }
            _ = signals.next() => break,
        }
    }
    eprintln!("draining; once more ends it at once");
    end.cancel();
    let drained = tokio::select! {
        () = drain(watched, ended) => true,
        _ = signals.next() => false,
    };
    drop(etcd);
    eprintln!("stopped");
    if drained { outcome } else { Err(CliError::Start("ended before everything was finished".to_owned())) }
}

/// Ends the processes: the router first, so that nobody is sent to a worker that leaves.
async fn drain(mut watched: JoinSet<(RoleProcess, Result<(), CliError>)>, mut ended: Vec<RoleProcess>) {
    while let Some(process) = watched.join_next().await {
        // A watcher that panicked has killed its process.
        ended.extend(process.ok().map(|(process, _)| process));
    }
    let (routers, workers): (Vec<_>, Vec<_>) =
        ended.into_iter().partition(|process| process.grpc_addr().is_some());
    for processes in [routers, workers] {
        join_all(processes.into_iter().map(|mut process| async move {
            // One that had ended already has nothing to finish.
            if let Ok(status) = process.drain(GRACE).await {
                eprintln!("{} ended ({status})", process.name());
            }
        }))
        .await;
    }
}

/// Starts the process again whenever it ends, until `end`. A configuration that cannot be will not be better for it.
async fn supervise(mut process: RoleProcess, end: CancellationToken) -> (RoleProcess, Result<(), CliError>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let Some(status) = end.run_until_cancelled(process.wait()).await else { return (process, Ok(())) };
        let how = match &status {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        if status.is_ok_and(|status| status.code() == Some(Exit::BadConfig.code().into())) {
            let reason = format!("{} cannot be started: see its messages above", process.name());
            return (process, Err(CliError::Start(reason)));
        }
        pause = if started.elapsed() >= STEADY { FIRST_PAUSE } else { pause };
        eprintln!("longreach: {} ended ({how}); starting it again in {pause:?}", process.name());
        if end.run_until_cancelled(sleep(pause)).await.is_none() {
            return (process, Ok(()));
        }
        pause = (pause * 2).min(MAX_PAUSE);
        match process.start() {
            Ok(()) => {
                let id = process.id().unwrap_or_default();
                eprintln!("longreach: {} is started again, pid {id}", process.name());
            }
            Err(error) => eprintln!("longreach: {}", CliError::start(&error)),
        }
    }
}

impl Processes {
    async fn prepare(
        args: &UpArgs,
        opened: &OpenedFiles,
        (shape, prefill_threads): (GroupShape, usize),
    ) -> Result<Self, CliError> {
        let start_error = |error: &(dyn std::error::Error + 'static)| CliError::start(error);
        let folder = tempfile::Builder::new().prefix("longreach-").tempdir();
        let folder = folder.map_err(|error| start_error(&error))?;
        let program = std::env::current_exe().map_err(|error| start_error(&error))?;
        let etcd = EtcdCluster::start(EtcdOptions::default()).await.map_err(|error| start_error(&error))?;
        let mut site = Site::new(RolePrograms::Command(program), folder.path(), &opened.path);
        site.set("cluster.etcd", etcd.endpoints())
            .log_to(Arc::new(|name, line| eprintln!("{name:<10} | {line}")));
        for (key, value) in args.engine.settings() {
            site.set(key, value);
        }
        let router = RoleSpec::router("router")
            .set("model_name", opened.name.clone())
            .set("grpc_addr", args.grpc.to_string())
            .set("http_addr", args.http.to_string())
            // No balancer stands before this router that would have to hear of its end first.
            .set("drain.notice", "0s");
        let router = with_sampling(router, &advice::sampling(&opened.name, &opened.model.files));
        let prefills = (0..args.prefill_workers).map(|idx| {
            RoleSpec::prefill(format!("prefill-{idx}")).set("engine.threads", prefill_threads as i64)
        });
        let threads = (prefill_threads / shape.n_ranks()).max(1) as i64;
        let groups = (0..args.groups).flat_map(|group| (0..shape.n_ranks()).map(move |rank| (group, rank)));
        let ranks = groups.map(|(group, rank)| {
            RoleSpec::rank(format!("decode-{group}"), rank, shape.n_ranks())
                .set("ranks.dcp", shape.dcp_size() as i64)
                .set("engine.threads", threads)
        });
        let role = |spec| site.role(spec).map_err(|error| CliError::start(&error));
        let workers = prefills.chain(ranks).map(role).collect::<Result<_, _>>()?;
        Ok(Self { router: role(router)?, workers, etcd, folder })
    }
}

fn with_sampling(router: RoleSpec, advice: &SamplingDefaults) -> RoleSpec {
    let values = [
        ("sampling.temperature", advice.temperature),
        ("sampling.top_p", advice.top_p),
        ("sampling.min_p", advice.min_p),
        ("sampling.repetition_penalty", advice.repetition_penalty),
    ];
    let router = match advice.top_k {
        Some(top_k) => router.set("sampling.top_k", top_k),
        None => router,
    };
    let given = values.into_iter().filter_map(|(key, value)| Some((key, value?)));
    given.fold(router, |router, (key, value)| router.set(key, value))
}

/// What a person wants to know when the cluster is ready.
fn summary(
    name: &str,
    router: &RoleProcess,
    workers: &[RoleProcess],
    (etcd, folder): (&EtcdCluster, &Path),
) -> String {
    let pid = |process: &RoleProcess| process.id().unwrap_or_default();
    let row = |process: &RoleProcess| {
        let (name, addr) = (process.name(), process.http_addr());
        format!("{name:<10} pid {:<8} health and metrics http://{addr}\n", pid(process))
    };
    let grpc = router.grpc_addr().map_or_else(String::new, |addr| addr.to_string());
    let router_row =
        format!("router     pid {:<8} gRPC {grpc}, HTTP http://{}\n", pid(router), router.http_addr());
    let victim = workers.last().map_or("", RoleProcess::name);
    let victim_pid = workers.last().map_or(0, pid);
    format!(
        "\nLongreach is ready, every role a process of its own\n\nmodel      {name}\nfiles      {} (configuration and \
         logs, until the end)\netcd       {}\n{router_row}{}{}\nkill one and watch, {victim} for example:\n\n  kill -9 \
         {victim_pid}\n",
        folder.display(),
        etcd.endpoints().join(", "),
        workers.iter().map(row).collect::<String>(),
        try_it(name, router.http_addr()),
    )
}
