//! The configuration of every role, generated from the command line that the role declares: a setting that is added is
//! tested without a new test.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use clap::{Arg, ArgAction, Args, FromArgMatches};
use longreach_decode::DecodeSettings;
use longreach_prefill::PrefillSettings;
use longreach_router::RouterSettings;
use longreach_service::{RoleArgs, Settings};
use toml::{Table, Value};

/// Values of every type that settings have, strict types first. A setting takes the first three that it accepts.
const VALUES: [&str; 22] = [
    "127.0.0.1:7001",
    "127.0.0.1:7002",
    "127.0.0.1:7003",
    "11s",
    "12s",
    "13s",
    "3 MiB",
    "5 MiB",
    "7 MiB",
    "f32",
    "bf16",
    "f16",
    "reference",
    "portable",
    "a2a",
    "ag_rs",
    "replicate",
    "gather",
    "as-stored",
    "true",
    "false",
    "2",
];
const NUMBERS: [&str; 2] = ["3", "4"];

fn command<S: Settings>() -> clap::Command {
    RoleArgs::<S>::augment_args(clap::Command::new("role"))
}

/// The settings of a role.
fn settings<S: Settings>() -> Vec<Arg> {
    let is_setting = |arg: &&Arg| !["config", "print_config"].contains(&arg.get_id().as_str());
    command::<S>().get_arguments().filter(is_setting).cloned().collect()
}

fn parse<S: Settings>(args: &[String]) -> Result<RoleArgs<S>, clap::Error> {
    let matches = command::<S>().try_get_matches_from([&["role".to_owned()], args].concat())?;
    RoleArgs::from_arg_matches(&matches)
}

fn flag(arg: &Arg, value: &str) -> String {
    format!("--{}={value}", arg.get_long().unwrap())
}

/// Three values for each setting, neighbours different: those of the file, the environment and the flags.
fn values<S: Settings>() -> Vec<(Arg, [String; 3])> {
    let values = |arg: Arg| {
        assert!(matches!(arg.get_action(), ArgAction::Set | ArgAction::Append), "{}: no flag", arg.get_id());
        let is_taken = |value: &&str| parse::<S>(&[flag(&arg, value)]).is_ok();
        let taken: Vec<_> = VALUES.into_iter().chain(NUMBERS).filter(is_taken).collect();
        assert!(taken.len() > 1, "{}: no values of its type; add some", arg.get_id());
        let values = [0, 1, 2].map(|nth| taken[nth % taken.len()].to_owned());
        (arg, values)
    };
    settings::<S>().into_iter().map(values).collect()
}

fn leaves(table: &Table, section: &str, found: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => leaves(inner, &format!("{section}{key}."), found),
            value => found.push((format!("{section}{key}"), value.clone())),
        }
    }
}

fn longreach(args: &[&str], variables: &[(String, String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longreach"));
    command.args(args).env_clear().envs(variables.iter().cloned());
    command.output().unwrap()
}

fn printed(output: &Output) -> Table {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).parse().unwrap()
}

/// Every setting at once: from the file, from the environment over it, from flags over both.
fn check_layers<S: Settings>(role: &str) {
    let values = values::<S>();
    let flags = |nth: usize| values.iter().map(|(arg, values)| flag(arg, &values[nth])).collect::<Vec<_>>();
    let want = [0, 1, 2].map(|nth| {
        let document = parse::<S>(&flags(nth)).unwrap().to_toml().unwrap();
        document.parse::<Table>().unwrap()
    });
    let found = want.each_ref().map(|table| {
        let mut found = Vec::new();
        leaves(table, "", &mut found);
        found
    });
    for (low, high) in [(0, 1), (1, 2)] {
        assert_eq!(found[low].len(), values.len(), "{role}: a flag sets nothing");
        for (a, b) in found[low].iter().zip(&found[high]) {
            assert!(a.0 == b.0 && a.1 != b.1, "{role}: {} is {} whatever it is set to", a.0, a.1);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("role.toml");
    fs::write(&file, toml::to_string(&want[0]).unwrap()).unwrap();
    let variables: Vec<_> = values
        .iter()
        .map(|(arg, values)| (arg.get_env().unwrap().to_str().unwrap().to_owned(), values[1].clone()))
        .collect();
    let base = [role, "--print-config", "--config", file.to_str().unwrap()];
    assert_eq!(printed(&longreach(&base, &[])), want[0], "{role}: file");
    assert_eq!(printed(&longreach(&base, &variables)), want[1], "{role}: environment over file");
    let flags = flags(2);
    let args: Vec<_> = base.into_iter().chain(flags.iter().map(String::as_str)).collect();
    assert_eq!(printed(&longreach(&args, &variables)), want[2], "{role}: flags over environment");
}

#[test]
fn every_setting_comes_from_file_environment_and_flag_in_this_order() {
    check_layers::<RouterSettings>("router");
    check_layers::<PrefillSettings>("prefill");
    check_layers::<DecodeSettings>("decode");
}

/// A sentence on standard error, and the exit code.
fn refusal(args: &[&str]) -> (String, Option<i32>) {
    let output = longreach(args, &[]);
    (String::from_utf8_lossy(&output.stderr).trim().to_owned(), output.status.code())
}

#[test]
fn what_cannot_be_ends_with_64_and_one_sentence_and_a_failed_start_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("role.toml");
    let path = file.to_str().unwrap();
    for role in ["router", "prefill", "decode"] {
        let (says, code) = refusal(&[role]);
        assert_eq!(code, Some(64), "{says}");
        assert!(says.ends_with(
            "model is not set: write it into the configuration file, or give --model or LONGREACH_MODEL"
        ));
        fs::write(&file, "model = \"m\"\n[cluster]\nnmae = \"x\"\n").unwrap();
        let (says, code) = refusal(&[role, "--config", path]);
        assert_eq!(code, Some(64), "{says}");
        let want = format!("longreach: {path}:3: there is no setting cluster.nmae; there are cluster.name, ");
        assert!(says.starts_with(&want) && says.lines().count() == 1, "{says}");
        fs::write(&file, "model = \"m\"\n[cluster]\nlease_ttl = 30\n").unwrap();
        let (says, code) = refusal(&[role, "--config", path]);
        assert_eq!(code, Some(64), "{says}");
        assert!(says.starts_with(&format!("longreach: {path}:3: cluster.lease_ttl: ")), "{says}");
        let (says, code) = refusal(&[role, "--log", "=,"]);
        assert_eq!(code, Some(64), "{says}");
        // Everything is as it should be, but for the model.
        let workers: &[&str] = if role == "router" { &["--decode", "http://127.0.0.1:1"] } else { &[] };
        let missing = dir.path().join("missing");
        let model: &[&str] = &[role, "--model", missing.to_str().unwrap()];
        let (says, code) = refusal(&[model, workers].concat());
        assert_eq!(code, Some(1), "{says}");
        assert!(says.contains("missing") && says.lines().count() == 1, "{says}");
    }
}

#[test]
fn contradictions_are_named() {
    let model = ["--model", "m"];
    for (args, says) in [
        (
            &["prefill", "--addr", "0.0.0.0:1"][..],
            "addr is 0.0.0.0:1; it must be an address that others can dial",
        ),
        (&["decode", "--addr", "[::]:1"], "addr is [::]:1; it must be an address that others can dial"),
        (&["prefill", "--cluster-etcd", "http://127.0.0.1:1"], "name is not set"),
        (&["decode", "--cluster-etcd", "http://127.0.0.1:1"], "group is not set"),
        (
            &["decode", "--cluster-etcd", "127.0.0.1:1"],
            "cluster.etcd is \"127.0.0.1:1\"; it must be http://host:port",
        ),
        (
            &[
                "decode",
                "--rank",
                "0",
                "--addr",
                "10.0.0.7:1",
                "--advertise",
                "a",
                "--peer-addr",
                "127.0.0.1:2",
            ],
            "peer_addr is 127.0.0.1:2; it must be an address that other hosts reach, as addr (10.0.0.7:1) is",
        ),
        (&["decode", "--rank", "2"], "rank is 2; it must be below ranks.count, which is 2"),
        (&["decode", "--rank", "1"], "cluster.etcd is not set"),
        (&["decode", "--ranks", "3", "--dcp", "2"], "ranks: "),
        (&["decode", "--threads", "0"], "engine.threads is 0; it must be at least 1"),
        (
            &["prefill", "--engine-max-batch-tokens", "4"],
            "engine.max_batch_tokens is 4; it must be at least engine.max_seqs",
        ),
        (
            &["prefill", "--engine-max-intake", "9223372036854775807"],
            "engine.max_intake is 9223372036854775807",
        ),
        (&["prefill", "--reuse-group-tokens-per-s", "0"], "reuse.group_tokens_per_s: is no cost"),
        (
            &["prefill", "--cluster-lease-ttl", "9000000000s"],
            "cluster.lease_ttl is 2500000h; it must be from 2s",
        ),
        (&["decode", "--cluster-etcd-server-name", "etcd"], "cluster.etcd_ca is not set"),
        (&["decode", "--cluster-etcd-user", "me"], "cluster.etcd_password_file is not set"),
        (&["router", "--decode", "http://a:1", "--sampling-temperature=-1"], "sampling.temperature is -1"),
        (
            &["router", "--decode", "http://a:1", "--serving-keep-alive-timeout", "0s"],
            "serving.keep_alive_timeout is 0; it must be longer than zero",
        ),
        (&["router"], "workers.decode is not set"),
        (&["router", "--decode", "http://a:1", "--cluster-etcd", "http://b:1"], "workers is a fixed list"),
        (&["router", "--decode", "a:1"], "decode is \"a:1\"; it must be http://host:port"),
    ] {
        let (said, code) = refusal(&[args, &model].concat());
        assert_eq!(code, Some(64), "{args:?}: {said}");
        assert!(said.starts_with(&format!("longreach: {says}")), "{args:?}: {said}");
    }
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples").join(name)
}

fn load_example<S: Settings>(name: &str) -> S {
    parse::<S>(&[format!("--config={}", example(name).display())]).unwrap().load().unwrap()
}

#[test]
fn the_examples_are_configurations_of_one_cluster() {
    let router = load_example::<RouterSettings>("router.toml");
    let prefill = load_example::<PrefillSettings>("prefill.toml");
    let decode = load_example::<DecodeSettings>("decode.toml");
    for cluster in [&prefill.cluster, &decode.cluster] {
        assert_eq!((&cluster.name, &cluster.etcd), (&router.cluster.name, &router.cluster.etcd));
    }
    assert_eq!(prefill.model, decode.model);
    assert_eq!(decode.rank, Some(0));
}
