//! Roles as children on loopback: each a real process with a configuration file, as a deployment would start it.
//!
//! A [`Site`] is what the processes of one cluster share: programs, a folder, a model, etcd. A [`RoleSpec`] is what one of
//! them is told besides. A [`RoleProcess`] is it: it can be killed, stopped, continued, restarted and drained, and it is
//! restarted with the same file and so at the same addresses.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use longreach_local::{RoleError, RolePrograms, RoleSpec, Site};
//! # async fn example(etcd: Vec<String>) -> Result<(), RoleError> {
//! let mut site = Site::new(RolePrograms::Command("longreach".into()), "folder", "model");
//! site.set("cluster.etcd", etcd).set("engine.kv_mem", "8 MiB");
//! let mut rank = site.role(RoleSpec::rank("decode-0", 1, 2).set("ranks.heartbeat_silence", "2s"))?;
//! rank.start()?;
//! rank.wait_ready(Duration::from_secs(20)).await?;
//! rank.kill().await?;
//! rank.start()?;
//! # Ok(())
//! # }
//! ```
//!
//! Readiness is asked over HTTP, of the process itself: what its log says is for people.

use std::{
    env, fmt, fs,
    io::{self, BufRead, BufReader},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use thiserror::Error;
use tokio::{
    process::Command,
    time::{self, Instant},
};
use toml::{Table, Value};

use crate::{
    http,
    ports::free_ports,
    process::{Process, Signal},
};

/// Between two looks whether a process is ready.
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// Every variable of ours begins so; a child is told by its file only.
const VARIABLE_PREFIX: &str = "LONGREACH_";

/// How much of a log an error quotes.
const QUOTED_LOG_BYTES: usize = 2_000;

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serves clients.
    Router,
    /// Computes prompts.
    Prefill,
    /// Decodes: a whole group, or one rank of it.
    Decode,
}

/// What is started.
#[derive(Clone, Debug)]
pub enum RolePrograms {
    /// One program with a subcommand for each role.
    Command(PathBuf),
    /// A program for each role.
    Each {
        /// `longreach-router`.
        router: PathBuf,
        /// `longreach-prefill`.
        prefill: PathBuf,
        /// `longreach-decode`.
        decode: PathBuf,
    },
}

/// Takes a line that a process has logged: its name, and the line.
pub type LineSink = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// What the processes of one cluster share.
#[derive(Clone)]
pub struct Site {
    programs: RolePrograms,
    folder: PathBuf,
    settings: Vec<(String, Value)>,
    sink: Option<LineSink>,
}

/// What one process is told besides what its site says.
#[derive(Clone, Debug)]
pub struct RoleSpec {
    role: Role,
    name: String,
    settings: Vec<(String, Value)>,
}

/// A role's process, running or not.
pub struct RoleProcess {
    role: Role,
    name: String,
    programs: RolePrograms,
    config: PathBuf,
    log: PathBuf,
    sink: Option<LineSink>,
    http_port: u16,
    grpc_port: Option<u16>,
    process: Option<Process>,
}

/// Asks a process how it is, wherever the [`RoleProcess`] is kept.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    http_port: u16,
}

/// Why a role's process is not as it should be.
#[derive(Debug, Error)]
pub enum RoleError {
    /// The system.
    #[error("cannot run {name}")]
    Io {
        /// Which.
        name: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Settings that are no TOML.
    #[error("the settings of {name} cannot be written")]
    Settings {
        /// Whose.
        name: String,
        /// Why.
        #[source]
        source: toml::ser::Error,
    },
    /// It ended.
    #[error("{name} ended ({status}); its last words: {log}")]
    Ended {
        /// Which.
        name: String,
        /// How.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },
    /// It runs and is not ready.
    #[error("{name} is not ready after {waited:?}: {says}; its last words: {log}")]
    NotReady {
        /// Which.
        name: String,
        /// How long.
        waited: Duration,
        /// What it says when asked.
        says: String,
        /// The end of its log.
        log: String,
    },
    /// It was not started, or has ended.
    #[error("{name} does not run")]
    NotRunning {
        /// Which.
        name: String,
    },
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

impl Role {
    /// Whether the role has the setting `key`; sections that only some roles have are set for those.
    fn has(self, key: &str) -> bool {
        match key.split('.').next().unwrap_or_default() {
            "ranks" => self == Self::Decode,
            "engine" | "reuse" => self != Self::Router,
            "workers" | "limits" | "sampling" | "recovery" | "serving" => self == Self::Router,
            _ => true,
        }
    }
}

impl Site {
    /// Processes of `programs` that serve `model`. Configuration files and logs go into `folder`, which exists.
    pub fn new(programs: RolePrograms, folder: impl Into<PathBuf>, model: impl AsRef<Path>) -> Self {
        let model = model.as_ref().to_string_lossy().into_owned();
        let settings = vec![("model".to_owned(), Value::from(model))];
        Self { programs, folder: folder.into(), settings, sink: None }
    }

    /// Sets `key`, as in `engine.kv_mem`, for every role that has it.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.settings.push((key.to_owned(), value.into()));
        self
    }

    /// Has every line that a process logs told to `sink`. Otherwise it goes to the file `NAME.log` of the folder.
    pub fn log_to(&mut self, sink: LineSink) -> &mut Self {
        self.sink = Some(sink);
        self
    }

    /// Where files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Prepares a process: chooses ports and writes its file. It is not started.
    pub fn role(&self, spec: RoleSpec) -> Result<RoleProcess, RoleError> {
        let RoleSpec { role, name, settings } = spec;
        let io = |source| RoleError::Io { name: name.clone(), source };
        let ports = free_ports(2).map_err(io)?;
        let (http_port, grpc_port) = (ports[0], (role == Role::Router).then_some(ports[1]));
        let mut table = Table::new();
        let here = |port: u16| Value::from(SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string());
        put(&mut table, "http_addr", here(http_port));
        match grpc_port {
            Some(port) => put(&mut table, "grpc_addr", here(port)),
            // Others find it by its registration.
            None => put(&mut table, "addr", here(0)),
        }
        for (key, value) in self.settings.iter().filter(|(key, _)| role.has(key)).chain(&settings) {
            put(&mut table, key, value.clone());
        }
        let http_port = settle(&mut table, "http_addr", http_port);
        let grpc_port = grpc_port.map(|port| settle(&mut table, "grpc_addr", port));
        let text =
            toml::to_string(&table).map_err(|source| RoleError::Settings { name: name.clone(), source })?;
        let config = self.folder.join(format!("{name}.toml"));
        fs::write(&config, text).map_err(io)?;
        let log = self.folder.join(format!("{name}.log"));
        let (programs, sink) = (self.programs.clone(), self.sink.clone());
        Ok(RoleProcess { role, name, programs, config, log, sink, http_port, grpc_port, process: None })
    }
}

impl RoleSpec {
    /// A router.
    pub fn router(name: impl Into<String>) -> Self {
        Self { role: Role::Router, name: name.into(), settings: Vec::new() }
    }

    /// A prefill worker; its name in the cluster is `name`.
    pub fn prefill(name: impl Into<String>) -> Self {
        let name = name.into();
        Self { role: Role::Prefill, name: name.clone(), settings: Vec::new() }.set("name", name)
    }

    /// A whole decode group of `n_ranks` in one process.
    pub fn group(group: impl Into<String>, n_ranks: usize) -> Self {
        let group = group.into();
        let spec = Self { role: Role::Decode, name: group.clone(), settings: Vec::new() };
        spec.set("group", group).set("ranks.count", as_value(n_ranks))
    }

    /// Rank `rank` of a decode group of `n_ranks`, called `GROUP-RANK`.
    pub fn rank(group: impl Into<String>, rank: usize, n_ranks: usize) -> Self {
        let group = group.into();
        let name = format!("{group}-{rank}");
        Self { name, ..Self::group(group, n_ranks) }.set("rank", as_value(rank))
    }

    /// Sets `key`, over what the site says.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.settings.push((key.to_owned(), value.into()));
        self
    }
}

impl Probe {
    /// Whether it says that it is ready.
    pub async fn is_ready(self) -> bool {
        self.get("/health/ready").await.is_ok_and(|answer| is_ok(&answer))
    }

    /// Its numbers, as a scraper gets them.
    pub async fn metrics(self) -> io::Result<String> {
        let answer = self.get("/metrics").await?;
        let body = answer.split_once("\r\n\r\n").filter(|_| is_ok(&answer)).map(|(_, body)| body.to_owned());
        body.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    async fn get(self, path: &str) -> io::Result<String> {
        http::get(self.http_port, path).await
    }
}

impl RoleProcess {
    /// Its role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Its name, unique in its site.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Its number, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.process.as_ref().and_then(Process::id)
    }

    /// Where it answers operators; a router also clients.
    pub fn http_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.http_port).into()
    }

    /// Where a router serves gRPC.
    pub fn grpc_addr(&self) -> Option<SocketAddr> {
        self.grpc_port.map(|port| (Ipv4Addr::LOCALHOST, port).into())
    }

    /// Starts it, with the file and the addresses that it had before. Does not wait.
    pub fn start(&mut self) -> Result<(), RoleError> {
        let (program, subcommand) = match (&self.programs, self.role) {
            (RolePrograms::Command(program), role) => (program, Some(role.to_string())),
            (RolePrograms::Each { router, .. }, Role::Router) => (router, None),
            (RolePrograms::Each { prefill, .. }, Role::Prefill) => (prefill, None),
            (RolePrograms::Each { decode, .. }, Role::Decode) => (decode, None),
        };
        let log = self.open_log().map_err(|source| self.io(source))?;
        let process = Process::start(program, |command| {
            forget_variables(command);
            command.args(subcommand).arg("--config").arg(&self.config);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        });
        self.process = Some(process.map_err(|source| self.io(source))?);
        Ok(())
    }

    /// Waits until it says that it is ready.
    pub async fn wait_ready(&mut self, limit: Duration) -> Result<(), RoleError> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                return Err(RoleError::Ended { name: self.name.clone(), status, log: self.last_words() });
            }
            let says = match self.probe().get("/health/ready").await {
                Ok(answer) if is_ok(&answer) => return Ok(()),
                Ok(answer) => answer.lines().last().unwrap_or_default().to_owned(),
                Err(error) => error.to_string(),
            };
            if started.elapsed() >= limit {
                let (name, log) = (self.name.clone(), self.last_words());
                return Err(RoleError::NotReady { name, waited: started.elapsed(), says, log });
            }
            time::sleep(LOOK_PERIOD).await;
        }
    }

    /// Asks it how it is.
    pub fn probe(&self) -> Probe {
        Probe { http_port: self.http_port }
    }

    /// How it ended, if it was started and has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, RoleError> {
        let name = || self.name.clone();
        let process = self.process.as_mut().ok_or_else(|| RoleError::NotRunning { name: name() })?;
        process.ended().map_err(|source| RoleError::Io { name: name(), source })
    }

    /// Waits for its end.
    pub async fn wait(&mut self) -> Result<ExitStatus, RoleError> {
        let name = || self.name.clone();
        let process = self.process.as_mut().ok_or_else(|| RoleError::NotRunning { name: name() })?;
        process.wait().await.map_err(|source| RoleError::Io { name: name(), source })
    }

    /// Kills it, as a power cut would, and waits until it is gone.
    pub async fn kill(&mut self) -> Result<(), RoleError> {
        match self.process.take() {
            Some(mut process) => process.kill().await.map(drop).map_err(|source| self.io(source)),
            None => Ok(()),
        }
    }

    /// Stops it: it keeps its connections and says nothing.
    pub fn stop(&self) -> Result<(), RoleError> {
        self.signal(Signal::STOP)
    }

    /// Continues it after [`Self::stop`].
    pub fn cont(&self) -> Result<(), RoleError> {
        self.signal(Signal::CONT)
    }

    /// Asks it to drain and to end. [`Self::wait`] says when it has.
    pub fn ask_to_end(&self) -> Result<(), RoleError> {
        self.signal(Signal::TERM)
    }

    /// Has it drain and end, and kills it if it has not within `grace`.
    pub async fn drain(&mut self, grace: Duration) -> Result<ExitStatus, RoleError> {
        let name = || self.name.clone();
        let mut process = self.process.take().ok_or_else(|| RoleError::NotRunning { name: name() })?;
        process.terminate(grace).await.map_err(|source| RoleError::Io { name: name(), source })
    }

    /// Drains it and starts it again.
    pub async fn restart(&mut self, grace: Duration) -> Result<(), RoleError> {
        self.drain(grace).await?;
        self.start()
    }

    /// Everything that it has logged to its file, in all its lives.
    pub fn log(&self) -> String {
        fs::read(&self.log).map_or_else(|_| String::new(), |log| String::from_utf8_lossy(&log).into_owned())
    }

    fn signal(&self, signal: Signal) -> Result<(), RoleError> {
        let Some(process) = &self.process else {
            return Err(RoleError::NotRunning { name: self.name.clone() });
        };
        process.signal(signal).map_err(|source| self.io(source))
    }

    fn io(&self, source: io::Error) -> RoleError {
        RoleError::Io { name: self.name.clone(), source }
    }

    fn last_words(&self) -> String {
        let log = self.log();
        let start = log.len().saturating_sub(QUOTED_LOG_BYTES);
        let start = (start..=log.len()).find(|&at| log.is_char_boundary(at)).unwrap_or(0);
        log[start..].trim().to_owned()
    }

    /// Where the process writes its log.
    fn open_log(&self) -> io::Result<Stdio> {
        let file = fs::OpenOptions::new().create(true).append(true).open(&self.log)?;
        let Some(sink) = self.sink.clone() else { return Ok(file.into()) };
        let (reader, writer) = io::pipe()?;
        let name = self.name.clone();
        // It ends with the process, which holds the only other end.
        thread::Builder::new()
            .name(format!("log of {name}"))
            .spawn(move || tell(reader, file, &name, &sink))?;
        Ok(writer.into())
    }
}

/// Passes lines on until the pipe closes, and keeps them in the file too.
fn tell(reader: io::PipeReader, mut file: fs::File, name: &str, sink: &LineSink) {
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        sink(name, &line);
        // A full disk must not stop the process that logs.
        let _lost = io::Write::write_all(&mut file, format!("{line}\n").as_bytes());
    }
}

/// The variables of this process would override the file of a child.
fn forget_variables(command: &mut Command) {
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with(VARIABLE_PREFIX)) {
        command.env_remove(name);
    }
}

fn is_ok(answer: &str) -> bool {
    answer.split(' ').nth(1) == Some("200")
}

fn as_value(count: usize) -> Value {
    // Counts of ranks are small; one that is not would be refused by the child.
    Value::from(i64::try_from(count).unwrap_or(i64::MAX))
}

/// The port of an address that was set; a free one becomes `chosen`, so that it is the same in the next life.
fn settle(table: &mut Table, key: &str, chosen: u16) -> u16 {
    let addr = table.get(key).and_then(Value::as_str).and_then(|addr| addr.parse::<SocketAddr>().ok());
    match addr {
        Some(mut addr) if addr.port() == 0 => {
            addr.set_port(chosen);
            put(table, key, addr.to_string().into());
            chosen
        }
        // What is no address is the child's to refuse.
        addr => addr.map_or(chosen, |addr| addr.port()),
    }
}

/// Sets `key`, as in `section.name`.
fn put(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        Some((section, rest)) => {
            let inner = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                put(inner, rest, value);
            }
        }
        None => drop(table.insert(key.to_owned(), value)),
    }
}
