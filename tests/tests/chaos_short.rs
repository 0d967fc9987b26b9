//! The failure table in short: a few rows, a few streams, one round each. `cargo xtask chaos` runs it at length.
//!
//! The rows run in a process of their own, because it puts itself and the cluster it attacks into namespaces where the
//! machine allows that; the roles are processes of the same program, so what is attacked is what was built.

use std::process::Command;

use longreach_tests::cluster::{report, seed};

/// One row of each kind of process.
const ROWS: [&str; 5] =
    ["prefill-killed-sending", "lone-rank-killed", "leader-killed", "etcd-leader-killed", "router-killed"];

#[test]
fn streams_survive_the_loss_of_any_process() {
    let mut chaos = Command::new(env!("CARGO_BIN_EXE_chaos"));
    chaos.args(["--rounds", "1", "--streams", "24", "--seed", &seed().to_string()]);
    chaos.args(ROWS.iter().flat_map(|row| ["--row", row]));
    let output = chaos.output().unwrap();
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    report(&said);
    assert!(output.status.success(), "{said}\n{complained}");
}
