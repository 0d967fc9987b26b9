//! The Python packages that the interop clients and `buf lint` need, in a virtual environment of the project.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;
use crate::process;

/// A virtual environment that holds exactly what `tests/python/requirements.txt` pins.
pub(crate) struct Python {
    bin: PathBuf,
}

impl Python {
    /// The environment of the workspace at `root`, installed or not.
    pub(crate) fn of(root: &Path) -> Self {
        Self { bin: venv(root).join("bin") }
    }

    /// A program of the environment.
    pub(crate) fn program(&self, name: &str) -> Command {
        Command::new(self.bin.join(name))
    }
}

/// Makes the environment. The list it was made from is kept inside it, so that nothing is done while the two are
/// equal and everything is done again when the pins change.
pub(crate) fn install(root: &Path) -> Result<(), Failure> {
    let requirements = root.join("tests/python/requirements.txt");
    let wanted = fs::read_to_string(&requirements)
        .map_err(|source| Failure::File { path: requirements.clone(), source })?;
    let receipt = venv(root).join("installed.txt");
    if fs::read_to_string(&receipt).is_ok_and(|installed| installed == wanted) {
        println!("the Python packages are there");
        return Ok(());
    }
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv(root)))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
    process::run(Python::of(root).program("python").args(pip).arg(&requirements))?;
    fs::write(&receipt, wanted).map_err(|source| Failure::File { path: receipt, source })
}

fn venv(root: &Path) -> PathBuf {
    root.join(".venv")
}
