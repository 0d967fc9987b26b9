//! Writes the seeds of every target into a folder for each, where `cargo fuzz` looks for them: `fuzz/corpus`.

use std::{error::Error, fs, path::PathBuf};

use longreach_fuzz::TARGETS;

fn main() -> Result<(), Box<dyn Error>> {
    let root = std::env::args_os().nth(1).map(PathBuf::from).ok_or("usage: longreach-fuzz FOLDER")?;
    for target in TARGETS {
        let dir = root.join(target.name);
        fs::create_dir_all(&dir)?;
        for (idx, seed) in (target.seeds)().iter().enumerate() {
            fs::write(dir.join(format!("seed-{idx:02}")), seed)?;
        }
    }
    Ok(())
}
