//! One typed configuration for a role, from four layers: defaults, below a file, below the environment, below flags.
//!
//! A role declares each setting once, as a field of a struct that is read by clap and by serde. The field's clap id is
//! its key in the file (`engine.kv_mem`), and flag (`--engine-kv-mem`) and variable (`LONGREACH_ENGINE_KV_MEM`) follow
//! from it by rule. So there is one list of settings, which the command line, the file's check for unknown keys,
//! `--print-config` and the tests all read.
//!
//! Layers are merged as tables before anything is typed: a struct of options for each layer would be the same list
//! once more, with a merge that can forget a field.
//!
//! What the settings mean is the role's. It turns them into the configuration of its parts, and says what contradicts.

mod error;
mod file;
mod print;
mod sections;
#[cfg(test)]
mod tests;
mod values;

use std::{collections::BTreeSet, fmt, path::PathBuf};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};
use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

use self::file::ConfigFile;
pub use self::{
    error::ConfigError,
    sections::{Advertise, AdvertiseError, ClusterSection, TlsSection},
    values::{Span, Text},
};

/// Everything that can be set about a role: a struct of `#[arg(long)]` fields, and of `#[command(flatten)]` sections whose
/// fields have their whole key as id. It refuses unknown fields.
pub trait Settings: Args + Serialize + DeserializeOwned {
    /// Checks what types cannot say: what is missing, and what contradicts.
    fn validate(&self) -> Result<(), ConfigError>;

    /// What is logged.
    fn log(&self) -> &str;
}

/// The command line of a role: a file, and a flag for every setting.
#[derive(Clone, Debug)]
pub struct RoleArgs<S> {
    config: Option<PathBuf>,
    print_config: bool,
    given: S,
    /// Keys that flags or the environment set.
    explicit: BTreeSet<String>,
}

const CONFIG_ID: &str = "config";
const PRINT_ID: &str = "print_config";

impl<S: Settings> RoleArgs<S> {
    /// Whether the configuration was asked for and nothing else.
    pub fn prints_config(&self) -> bool {
        self.print_config
    }

    /// Merges the layers, and checks what comes out.
    pub fn load(&self) -> Result<S, ConfigError> {
        let settings: S = self.merge()?.1;
        settings.validate()?;
        Ok(settings)
    }

    /// The merged configuration as a file that says what every key is for.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        Ok(print::document(&keys_of::<S>(), &self.merge()?.0))
    }

    fn merge(&self) -> Result<(Table, S), ConfigError> {
        let mut defaults = Table::try_from(&self.given).map_err(ConfigError::Unwritable)?;
        let mut explicit = Table::new();
        for key in &self.explicit {
            if let Some(value) = take(&mut defaults, key) {
                put(&mut explicit, key, value);
            }
        }
        let file = self.config.clone().map(ConfigFile::read).transpose()?;
        let mut merged = defaults;
        if let Some(file) = &file {
            file.check_keys(&keys_of::<S>())?;
            overlay(&mut merged, file.table()?);
        }
        overlay(&mut merged, explicit);
        let settings = serde_path_to_error::deserialize(merged.clone()).map_err(|error| {
            let (key, reason) = (error.path().to_string(), error.inner().message().to_owned());
            match &file {
                Some(file) => file.bad_value(key, reason),
                None => ConfigError::BadValue { file: None, key, reason },
            }
        })?;
        Ok((merged, settings))
    }
}

impl<S: Args> Args for RoleArgs<S> {
    fn augment_args(command: Command) -> Command {
        let command = S::augment_args(command).mut_args(named);
        command.arg(config_arg()).arg(print_arg())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Args> FromArgMatches for RoleArgs<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_explicit = |key: &String| {
            let source = matches.value_source(key);
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        Ok(Self {
            config: matches.get_one::<PathBuf>(CONFIG_ID).cloned(),
            print_config: matches.get_flag(PRINT_ID),
            given: S::from_arg_matches(matches)?,
            explicit: keys_of::<S>().into_iter().map(|key| key.name).filter(is_explicit).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn config_arg() -> Arg {
    Arg::new(CONFIG_ID)
        .long("config")
        .env("LONGREACH_CONFIG")
        .value_name("FILE")
        .value_parser(clap::value_parser!(PathBuf))
        .help("A TOML file with settings; the environment and flags override it")
}

fn print_arg() -> Arg {
    Arg::new(PRINT_ID)
        .long("print-config")
        .action(clap::ArgAction::SetTrue)
        .help("Print the configuration that results, every setting explained, as a TOML file, and end")
}

/// Gives a setting the flag and the variable that follow from its key.
fn named(arg: Arg) -> Arg {
    let key = arg.get_id().to_string();
    let value_name = key.rsplit('.').next().map(str::to_uppercase);
    let arg = match (arg.get_value_names(), value_name) {
        (None, Some(name)) => arg.value_name(name),
        _ => arg,
    };
    arg.long(flag_of(&key)).env(variable_of(&key)).hide_env_values(true)
}

/// The flag of a key, without its dashes.
fn flag_of(key: &str) -> String {
    key.replace(['.', '_'], "-")
}

/// The variable of a key.
fn variable_of(key: &str) -> String {
    format!("LONGREACH_{}", key.replace('.', "_").to_uppercase())
}

/// A setting as the command declares it.
struct Key {
    name: String,
    help: String,
}

/// All settings of a role, in the order of their declaration.
fn keys_of<S: Args>() -> Vec<Key> {
    let command = S::augment_args(Command::new("settings"));
    let key = |arg: &Arg| {
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
        Key { name: arg.get_id().to_string(), help: help.unwrap_or_default() }
    };
    command.get_arguments().map(key).collect()
}

/// Lays `upper` over `lower`.
fn overlay(lower: &mut Table, upper: Table) {
    for (key, value) in upper {
        match (lower.get_mut(&key), value) {
            (Some(Value::Table(lower)), Value::Table(upper)) => overlay(lower, upper),
            (_, value) => drop(lower.insert(key, value)),
        }
    }
}

fn take(table: &mut Table, key: &str) -> Option<Value> {
    match key.split_once('.') {
        Some((section, rest)) => take(table.get_mut(section)?.as_table_mut()?, rest),
        None => table.remove(key),
    }
}

fn put(table: &mut Table, key: &str, value: Value) {
    let (first, value) = match key.split_once('.') {
        Some((section, rest)) => {
            let mut inner = match table.remove(section) {
                Some(Value::Table(inner)) => inner,
                _ => Table::new(),
            };
            put(&mut inner, rest, value);
            (section, Value::Table(inner))
        }
        None => (key, value),
    };
    table.insert(first.to_owned(), value);
}

/// How a key is set, for people who are told to.
struct HowToSet<'a>(&'a str);

impl fmt::Display for HowToSet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (flag, variable) = (flag_of(self.0), variable_of(self.0));
        write!(f, "write it into the configuration file, or give --{flag} or {variable}")
    }
}
