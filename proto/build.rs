//! Compiles the `.proto` files with a pure-Rust compiler, so that no `protoc` is needed.

use std::{env, error::Error, fs, path::Path};

use prost::Message;

/// Every package root that is compiled. A file added under one of them is found by itself.
const ROOTS: [&str; 2] = ["longreach/inference/v1", "longreach/worker/v1"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut files = Vec::new();
    for root in ROOTS {
        println!("cargo:rerun-if-changed={root}");
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "proto") {
                println!("cargo:rerun-if-changed={}", path.display());
                files.push(path);
            }
        }
    }
    files.sort();
    let descriptors = protox::compile(files, ["."])?;
    let out = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?;
    fs::write(Path::new(&out).join("longreach.fds"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".longreach.worker.v1").compile_fds(descriptors)?;
    Ok(())
}
