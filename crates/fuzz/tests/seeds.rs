//! Every target, on the stable toolchain: its seeds, what once failed, and mutations of the seeds.
//!
//! A panic here names the input; it is kept by adding it to `fuzz/regressions/<target>/`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail as its own lines do")]

use std::{fs, panic, path::Path};

use longreach_fuzz::{
    TARGETS, Target,
    mutate::{Rng, mutate},
    target,
};

/// Runs `target` and shows the input if it panics.
fn run(target: &Target, input: &[u8], what: &str) -> bool {
    panic::catch_unwind(|| (target.run)(input)).unwrap_or_else(|_| {
        let shown: String = input.escape_ascii().to_string();
        panic!("target {} panicked on {what}: b\"{shown}\"", target.name)
    })
}

fn try_target(name: &str) {
    let target = target(name).unwrap();
    let seeds = (target.seeds)();
    for (idx, seed) in seeds.iter().enumerate() {
        assert!(run(target, seed, "a seed"), "{name}: seed {idx} is not accepted");
        // Every place where a file or message may end; long seeds only at some of them.
        for len in (0..seed.len()).step_by(1 + seed.len() / 200) {
            run(target, &seed[..len], "a cut seed");
        }
    }
    let regressions = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/regressions")).join(name);
    if let Ok(entries) = fs::read_dir(&regressions) {
        for entry in entries {
            let path = entry.unwrap().path();
            run(target, &fs::read(&path).unwrap(), &path.display().to_string());
        }
    }
    let mut rng = Rng::new(name.bytes().fold(0, |hash, byte| hash << 8 ^ u64::from(byte)));
    for _ in 0..target.n_mutations {
        let (input, other) = (&seeds[rng.below(seeds.len())], &seeds[rng.below(seeds.len())]);
        run(target, &mutate(input, other, &mut rng), "a mutation");
    }
}

/// A test for each target, so that they run side by side, and a check that none is left out.
macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            try_target(stringify!($name));
        })*

        #[test]
        fn every_target_is_tried_here_and_known_to_cargo_fuzz() {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            let manifest =
                fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/Cargo.toml")).unwrap();
            for name in names {
                assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in fuzz/Cargo.toml");
            }
        }
    };
}

targets!(
    gguf,
    safetensors,
    tokenizer,
    chat_template,
    kv_push,
    worker_messages,
    group_messages,
    collective,
    http_body,
    grpc_request,
    etcd_values,
);
