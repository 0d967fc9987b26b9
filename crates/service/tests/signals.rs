//! Real signals. In a process of its own, because handlers are the process's.

use std::{process::Command, time::Duration};

use longreach_service::{DrainConfig, DrainEnd, Exit, Lifecycle, Readiness, Signal, Signals, StopReason};

fn raise(signal: &str) {
    let status = Command::new("kill")
        .args([signal, &std::process::id().to_string()])
        .status()
        .expect("a system has `kill`");
    assert!(status.success());
}

#[tokio::test]
async fn the_first_signal_drains_and_the_second_forces_the_end() {
    let lifecycle = Lifecycle::new();
    lifecycle.started();
    let signals = Signals::install().unwrap();
    // Work that would never finish by itself.
    let work = lifecycle.admit().unwrap();
    let minute = Duration::from_secs(60);
    let config = DrainConfig { notice: Duration::ZERO, grace: minute, cancel_timeout: minute };
    let people = async {
        raise("-TERM");
        lifecycle.readiness().wait_for(|readiness| *readiness == Readiness::Draining).await.unwrap();
        lifecycle.draining().cancelled().await;
        raise("-INT");
        lifecycle.token().cancelled().await;
        drop(work);
    };
    let (report, ()) = tokio::join!(lifecycle.run(signals, config), people);
    assert_eq!(report.reason, StopReason::Signal(Signal::Terminate));
    assert_eq!((report.end, report.n_cut_off), (DrainEnd::Forced, 1));
    assert!(report.took < minute);
    assert_eq!(Exit::from(report), Exit::Clean);
}
