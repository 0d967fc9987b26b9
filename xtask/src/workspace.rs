//! What cargo knows about this workspace.

use std::path::PathBuf;

use serde::Deserialize;

use crate::failure::Failure;
use crate::process;

/// Prefix that the packages of the libraries share; tables and messages leave it out.
const PREFIX: &str = "longreach-";

/// The workspace: where it is and what is in it.
pub(crate) struct Workspace {
    /// Folder of the root manifest.
    pub(crate) root: PathBuf,
    /// Where cargo puts what it builds.
    pub(crate) target: PathBuf,
    /// Its crates, in the order in which cargo names them.
    pub(crate) crates: Vec<Crate>,
}

/// One crate of the workspace and the crates of the workspace that it depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Crate {
    /// Name without the common prefix.
    pub(crate) name: String,
    /// Crates it is built with.
    pub(crate) depends: Vec<String>,
    /// Crates that only its tests use.
    pub(crate) in_tests: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

impl Workspace {
    /// Asks cargo.
    pub(crate) fn load() -> Result<Self, Failure> {
        let mut command = process::cargo(&["metadata", "--format-version", "1", "--no-deps"]);
        parse(&process::capture(&mut command)?)
    }
}

fn parse(json: &str) -> Result<Workspace, Failure> {
    let metadata: Metadata = serde_json::from_str(json).map_err(|error| Failure::Output {
        command: "cargo metadata".to_owned(),
        reason: error.to_string(),
    })?;
    let crates = metadata.packages.into_iter().map(Package::into_crate).collect();
    Ok(Workspace { root: metadata.workspace_root, target: metadata.target_directory, crates })
}

impl Package {
    fn into_crate(self) -> Crate {
        let ours = self.dependencies.into_iter().filter(|dependency| dependency.path.is_some());
        let (tests, build): (Vec<_>, Vec<_>) = ours.partition(|d| d.kind.as_deref() == Some("dev"));
        let names = |list: Vec<Dependency>| list.iter().map(|d| short_name(&d.name)).collect();
        Crate { name: short_name(&self.name), depends: names(build), in_tests: names(tests) }
    }
}

fn short_name(package: &str) -> String {
    package.strip_prefix(PREFIX).unwrap_or(package).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_arrows_inside_the_workspace_are_kept_and_told_apart_by_kind() {
        let json = r#"{"workspace_root": "/w", "target_directory": "/w/target", "packages": [{
            "name": "longreach-kv", "dependencies": [
                {"name": "longreach-types", "kind": null, "path": "/w/crates/types"},
                {"name": "sha2", "kind": null},
                {"name": "longreach-model", "kind": "dev", "path": "/w/crates/model"},
                {"name": "proptest", "kind": "dev"}]}]}"#;
        let kv = Crate { name: "kv".into(), depends: vec!["types".into()], in_tests: vec!["model".into()] };
        assert_eq!(parse(json).unwrap().crates, [kv]);
    }
}
