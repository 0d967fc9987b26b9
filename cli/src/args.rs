//! What people may type.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use longreach::certs::CertRequest;
use longreach_decode::DecodeSettings;
use longreach_engine::EngineConfig;
use longreach_kernels::Isa;
use longreach_prefill::PrefillSettings;
use longreach_router::RouterSettings;
use longreach_service::{Exit, RoleArgs, run_role};
use longreach_types::{GroupShape, KvDtype, MergeForm, QueryForm, WeightForm};

use crate::error::CliError;

/// Serves large language models with prefill and decode apart, and each KV cache split by position over a group.
#[derive(Debug, Parser)]
#[command(name = "longreach", version, about, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Own(OwnCommand),
    #[command(flatten)]
    Role(RoleCommand),
}

/// What the command does itself.
#[derive(Debug, Subcommand)]
pub(crate) enum OwnCommand {
    /// Start a whole cluster on this machine: router, prefill workers and a decode group.
    Up(UpArgs),
    /// Talk to a running cluster in the terminal.
    Chat(ChatArgs),
    /// Run the engines on one prompt, with no servers.
    Generate(GenerateArgs),
    /// Make a development CA and a certificate for each role.
    Certs(CertsArgs),
    /// One rank of a decode group, started by another command of this program.
    #[command(hide = true)]
    Rank(RankArgs),
}

/// One role of a cluster as this process; each has a program of its own too.
#[derive(Debug, Subcommand)]
pub(crate) enum RoleCommand {
    /// Serve a model to clients, with the workers of a cluster.
    Router(Box<RoleArgs<RouterSettings>>),
    /// Compute prompts, and send their KV to decode groups.
    Prefill(Box<RoleArgs<PrefillSettings>>),
    /// Make output, with all ranks of a decode group or with one of them.
    Decode(Box<RoleArgs<DecodeSettings>>),
}

/// What a model is served with, whatever serves it.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArgs {
    /// A path, a Hugging Face name (org/name), or nothing for SmolLM2-135M-Instruct.
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Ranks of the decode group, 1 to 8. With 1, 2, 4 or 8 the answers are the same bits.
    #[arg(long, value_name = "N")]
    pub(crate) decode_ranks: Option<usize>,
    /// Ranks that share one sequence's positions; divides the ranks. Default: all of them.
    #[arg(long, value_name = "D")]
    dcp: Option<usize>,
    /// How weights are held: as-stored or f32 (large and slow, to compare with f32 references).
    #[arg(long, default_value = "as-stored", value_name = "FORM")]
    weights: WeightForm,
    /// Number format of the KV cache: f16, f32 or bf16.
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    kv_dtype: KvDtype,
    /// KV memory of each rank and each prefill worker, in MiB.
    #[arg(long, default_value_t = 512, value_name = "MIB")]
    kv_mib: usize,
    /// The longest sequence, prompt and output. Default: what model and KV memory allow.
    #[arg(long, value_name = "TOKENS")]
    max_seq_len: Option<usize>,
    /// How partial attention is merged: a2a or ag_rs.
    #[arg(long, default_value = "a2a", value_name = "FORM")]
    merge: MergeForm,
    /// How a rank comes by its queries: replicate or gather.
    #[arg(long, default_value = "replicate", value_name = "FORM")]
    query: QueryForm,
    /// Kernels: reference, portable, avx2 or avx512. All give the same bits. Default: the fastest this machine has.
    #[arg(long, value_name = "ISA")]
    isa: Option<Isa>,
    /// Compute threads, shared by the ranks of the group; a prefill worker uses all of them. Default: all cores.
    #[arg(long, value_name = "T")]
    threads: Option<usize>,
    /// Prompts with at most this many uncached tokens may be prefilled on the decode group itself, where that is
    /// cheaper than a hand-off.
    #[arg(long, value_name = "TOKENS")]
    local_prefill_max: Option<usize>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Prefill workers.
    #[arg(long, default_value_t = 1, value_name = "P", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) prefill_workers: u16,
    /// Run etcd and every role as a process of its own, to kill one and watch. etcd must be installed.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Decode groups; more than one only as processes.
    #[arg(long, default_value_t = 1, value_name = "G", requires = "processes")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) groups: u16,
    /// Where the OpenAI API, health and metrics are served.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDR")]
    pub(crate) http: SocketAddr,
    /// Where gRPC is served.
    #[arg(long, default_value = "127.0.0.1:50051", value_name = "ADDR")]
    pub(crate) grpc: SocketAddr,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ChatArgs {
    /// What to say. Without it, a conversation: one line a turn, an empty line or Ctrl-D ends it.
    pub(crate) prompt: Option<String>,
    /// The cluster's gRPC address.
    #[arg(long, default_value = "127.0.0.1:50051", value_name = "ADDR")]
    pub(crate) grpc: String,
    /// A system message.
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// The most tokens of an answer.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) max_tokens: u32,
    /// 0 is greedy.
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f32>,
    /// Makes the answer repeatable.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// The prompt, as text.
    #[arg(long, required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// The prompt, as token ids: 1,2,3.
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub(crate) prompt_ids: Option<Vec<u32>>,
    /// How many of the last prompt ids are output of an earlier run that is to be continued.
    #[arg(long, default_value_t = 0, value_name = "N", requires = "prompt_ids")]
    pub(crate) resumed: usize,
    /// The most output tokens, resumed ones included.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(crate) max_tokens: usize,
    /// Key of the sampling noise.
    #[arg(long, default_value_t = 0, value_name = "S")]
    pub(crate) seed: u64,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub(crate) temperature: f32,
    /// Go on past the model's end-of-sequence tokens.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Log-probabilities of the K most likely tokens with each output token.
    #[arg(long, value_name = "K")]
    pub(crate) logprobs: Option<usize>,
    /// Run every rank of the decode group as a process of its own, joined over TCP.
    #[arg(long)]
    pub(crate) rank_processes: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CertsArgs {
    /// Where the files go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// A host name or address under which clients know the router; may be given again. localhost is always there.
    #[arg(long = "name", value_name = "HOST")]
    names: Vec<String>,
    /// The cluster whose roles get the certificates.
    #[arg(long, default_value = "default", value_name = "NAME")]
    cluster: String,
    /// How long the certificates are good.
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=3650))]
    days: u16,
    /// Replace files that are there.
    #[arg(long)]
    force: bool,
}

impl CertsArgs {
    /// Makes the files, and says how they are used.
    pub(crate) fn run(self) -> Result<(), CliError> {
        let Self { out, names, cluster, days, force } = self;
        let request = CertRequest { out, names, cluster, days, force };
        let made = request.write().map_err(|error| CliError::start(&error))?;
        println!("{made}");
        Ok(())
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct RankArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Which rank.
    #[arg(long)]
    pub(crate) rank: usize,
}

impl RoleCommand {
    /// Runs the role's process to its end.
    pub(crate) fn run(self) -> Exit {
        match self {
            Self::Router(args) => run_role(*args, longreach_router::run),
            Self::Prefill(args) => run_role(*args, longreach_prefill::run),
            Self::Decode(args) => run_role(*args, longreach_decode::run),
        }
    }
}

impl EngineArgs {
    /// The same arguments, as settings of roles. Shape and threads are not among them.
    pub(crate) fn settings(&self) -> Vec<(&'static str, toml::Value)> {
        let count = |n: usize| toml::Value::from(i64::try_from(n).unwrap_or(i64::MAX));
        let given = [
            ("engine.weights", Some(self.weights.to_string().into())),
            ("engine.kv_dtype", Some(self.kv_dtype.to_string().into())),
            ("engine.kv_mem", Some(format!("{} MiB", self.kv_mib).into())),
            ("engine.max_seq_len", self.max_seq_len.map(count)),
            ("engine.isa", self.isa.map(|isa| isa.to_string().into())),
            ("ranks.merge", Some(self.merge.to_string().into())),
            ("ranks.query", Some(self.query.to_string().into())),
            ("ranks.local_prefill_max", self.local_prefill_max.map(count)),
        ];
        given.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// The same arguments, as a child process takes them.
    pub(crate) fn to_args(&self, shape: GroupShape) -> Vec<String> {
        let given = [
            ("--model", self.model.clone()),
            ("--decode-ranks", Some(shape.n_ranks().to_string())),
            ("--dcp", Some(shape.dcp_size().to_string())),
            ("--weights", Some(self.weights.to_string())),
            ("--kv-dtype", Some(self.kv_dtype.to_string())),
            ("--kv-mib", Some(self.kv_mib.to_string())),
            ("--max-seq-len", self.max_seq_len.map(|len| len.to_string())),
            ("--merge", Some(self.merge.to_string())),
            ("--query", Some(self.query.to_string())),
            ("--isa", self.isa.map(|isa| isa.to_string())),
            ("--threads", self.threads.map(|n| n.to_string())),
        ];
        let flags = given.into_iter().filter_map(|(flag, value)| value.map(|value| [flag.to_owned(), value]));
        flags.flatten().collect()
    }

    /// The engine that these arguments describe, with `default_ranks` where no number was given; and the threads of a
    /// prefill worker.
    pub(crate) fn config(&self, default_ranks: usize) -> Result<(EngineConfig, usize), CliError> {
        let n_ranks = self.decode_ranks.unwrap_or(default_ranks);
        let shape = GroupShape::new(n_ranks, self.dcp.unwrap_or(n_ranks))
            .map_err(|error| CliError::Usage(format!("{error}; see --decode-ranks and --dcp")))?;
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_threads = self.threads.unwrap_or(n_cores);
        if n_threads == 0 {
            return Err(CliError::Usage("--threads is 0; give at least 1".to_owned()));
        }
        let kv_bytes = self.kv_mib.checked_mul(1 << 20).ok_or_else(|| {
            CliError::Usage(format!("--kv-mib is {}; no machine can address as much", self.kv_mib))
        })?;
        let base = EngineConfig::default();
        let mut sched = base.sched;
        sched.local_prefill_max = self.local_prefill_max.unwrap_or(sched.local_prefill_max);
        let config = EngineConfig {
            shape,
            weights: self.weights,
            kv_dtype: self.kv_dtype,
            merge_form: self.merge,
            query_form: self.query,
            kv_bytes,
            max_seq_len: self.max_seq_len,
            n_threads: (n_threads / n_ranks).max(1),
            isa: self.isa.unwrap_or(base.isa),
            sched,
            ..base
        };
        Ok((config, n_threads))
    }
}
