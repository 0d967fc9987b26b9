//! Some hundred seeds in every CI. Thousands: `cargo run -p longreach-sim -- --seeds 10000`.

use std::collections::BTreeMap;

use longreach_sim::{Report, run_seed};

const N_SEEDS: u64 = 400;

/// A simulation that injects nothing proves nothing: what must have been injected and have had its effect in that many
/// seeds, and how often at least.
const MUST_HAPPEN: &[(&str, u64)] = &[
    // What is done to the cluster.
    ("process killed", 50),
    ("host vanished", 20),
    ("process stopped", 30),
    ("process drains", 30),
    ("process retired", 5),
    ("link cut", 40),
    ("link to the store cut", 10),
    ("connections reset", 30),
    ("message lost and sent again", 100),
    ("message of a hand-off repeated", 100),
    ("message of a hand-off held back", 100),
    ("chunk spoilt", 10),
    ("store away", 10),
    ("store compacted", 5),
    ("watches broken", 5),
    ("lease lost", 5),
    ("answer of the store lost", 50),
    ("router killed", 5),
    ("burst of requests", 5),
    ("rank computes for ever", 5),
    ("epoch raised by a rival", 5),
    ("store wiped", 5),
    ("client left", 100),
    ("slow client", 100),
    // What it leads to.
    ("request complete", 2_000),
    ("request refused: overloaded", 50),
    ("request refused: nobody ready", 10),
    ("request repeated after its router was lost", 10),
    ("output resumed", 20),
    ("hand-off done", 500),
    ("prompt computed by its decode group", 20),
    ("prompt tokens found in a cache", 1_000),
    ("sequence preempted", 10),
    ("repeated chunk recognised", 100),
    ("commit overtook a chunk", 100),
    ("late chunk ignored", 10),
    ("late hand-off refused", 3),
    ("hand-off stood still", 5),
    ("prompt took longer than its hand-off may stand still", 20),
    ("epoch ended by a failure", 20),
    ("watchdog ended an epoch", 1),
    ("watchdog of a follower ended an epoch", 1),
    ("epoch ended in good order", 20),
    ("process with a stuck rank ended", 1),
    ("call into another life refused", 1),
];

#[test]
fn some_hundred_seeds_hold_and_everything_that_can_go_wrong_does() {
    let mut counts = BTreeMap::new();
    for seed in 0..N_SEEDS {
        let report = run_seed(seed, false);
        assert_holds(seed, &report);
        for (kind, n) in report.counts {
            *counts.entry(kind).or_default() += n;
        }
    }
    let missing: Vec<_> = MUST_HAPPEN
        .iter()
        .filter(|(kind, least)| counts.get(kind).copied().unwrap_or(0_u64) < *least)
        .map(|(kind, least)| format!("{kind}: {:?}, at least {least}", counts.get(kind)))
        .collect();
    assert!(missing.is_empty(), "too rare in {N_SEEDS} seeds: {missing:#?}");
}

#[test]
fn a_seed_repeats_its_history_to_the_byte() {
    for seed in [3, 1_000_003, u64::MAX] {
        let (first, again) = (run_seed(seed, true), run_seed(seed, true));
        let differs = first.log.iter().zip(&again.log).find(|(first, again)| first != again);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!((first.n_lines, first.digest), (again.n_lines, again.digest), "seed {seed}");
        assert!(first.n_lines > 10);
    }
}

fn assert_holds(seed: u64, report: &Report) {
    assert!(
        report.violations.is_empty(),
        "seed {seed}: {:#?}\nagain with its log: cargo run -p longreach-sim -- --seed {seed} --log",
        report.violations
    );
}
