//! Draining, in paused time.

use std::future::pending;

use super::*;

const CONFIG: DrainConfig = DrainConfig {
    notice: Duration::from_secs(1),
    grace: Duration::from_secs(20),
    cancel_timeout: Duration::from_secs(2),
};

/// Work that takes `time`, or is cut off; whether it was finished.
fn work(lifecycle: &Lifecycle, takes: Duration) -> JoinHandle<bool> {
    let (in_flight, token) = (lifecycle.admit().unwrap(), lifecycle.token());
    lifecycle.spawn(async move {
        let _in_flight = in_flight;
        token.run_until_cancelled(time::sleep(takes)).await.is_some()
    })
}

#[tokio::test(start_paused = true)]
async fn drain_finishes_what_is_in_flight() {
    let lifecycle = Lifecycle::new();
    let job = work(&lifecycle, Duration::from_secs(15));
    let report = lifecycle.drain(CONFIG, pending()).await;
    assert!(job.await.unwrap());
    let took = Duration::from_secs(15);
    let want = DrainReport {
        reason: StopReason::Requested,
        end: DrainEnd::Finished,
        n_cut_off: 0,
        n_stuck: 0,
        took,
    };
    assert_eq!(report, want);
}

#[tokio::test(start_paused = true)]
async fn drain_cuts_off_what_is_not_finished_within_the_grace() {
    let lifecycle = Lifecycle::new();
    let jobs = [15, 22, 90].map(|secs| work(&lifecycle, Duration::from_secs(secs)));
    let report = lifecycle.drain(CONFIG, pending()).await;
    assert_eq!(
        (report.end, report.n_cut_off, report.took),
        (DrainEnd::GraceOver, 2, Duration::from_secs(21))
    );
    let mut finished = Vec::new();
    for job in jobs {
        finished.push(job.await.unwrap());
    }
    assert_eq!(finished, [true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn a_second_request_forces_the_end() {
    for force in [Duration::ZERO, Duration::from_secs(3)] {
        let lifecycle = Lifecycle::new();
        let job = work(&lifecycle, Duration::from_secs(15));
        let report = lifecycle.drain(CONFIG, time::sleep(force)).await;
        assert_eq!((report.end, report.took), (DrainEnd::Forced, force));
        assert!(lifecycle.admit().is_err(), "also when it was forced before new work was refused");
        assert!(!job.await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn not_ready_comes_first_then_refusal_then_cancellation() {
    let lifecycle = Lifecycle::new();
    lifecycle.started();
    let _job = work(&lifecycle, Duration::from_secs(90));
    let start = Instant::now();
    let order = async {
        lifecycle.readiness().wait_for(|readiness| *readiness == Readiness::Draining).await.unwrap();
        let not_ready = start.elapsed();
        let late = lifecycle.admit().unwrap();
        lifecycle.draining().cancelled().await;
        let refusing = start.elapsed();
        assert_eq!(lifecycle.admit().unwrap_err(), Draining);
        drop(late);
        lifecycle.token().cancelled().await;
        [not_ready, refusing, start.elapsed()]
    };
    let (_, order) = tokio::join!(lifecycle.drain(CONFIG, pending()), order);
    assert_eq!(order, [0, 1, 21].map(Duration::from_secs));
}

#[tokio::test(start_paused = true)]
async fn a_task_that_does_not_end_is_reported_and_not_waited_for() {
    let lifecycle = Lifecycle::new();
    lifecycle.spawn(pending::<()>());
    let report = lifecycle.drain(CONFIG, pending()).await;
    assert_eq!((report.end, report.n_stuck, report.took), (DrainEnd::Stuck, 1, Duration::from_secs(3)));
    assert_eq!(crate::Exit::from(report), crate::Exit::Failed);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_essential_task_stops_the_process() {
    let panics: fn() = || panic!("on purpose");
    for end in [|| (), panics] {
        let lifecycle = Lifecycle::new();
        lifecycle.spawn(async {});
        lifecycle.spawn_essential("engine", async move { end() });
        assert_eq!(lifecycle.stopped().await, StopReason::TaskEnded { name: "engine" });
        let report = lifecycle.drain(CONFIG, pending()).await;
        assert_eq!(report.reason, StopReason::TaskEnded { name: "engine" });
        assert_eq!(crate::Exit::from(report), crate::Exit::Failed);
    }
}

#[tokio::test(start_paused = true)]
async fn an_essential_task_that_ends_when_cancelled_is_no_reason() {
    let lifecycle = Lifecycle::new();
    let token = lifecycle.token();
    lifecycle.spawn_essential("engine", async move { token.cancelled().await });
    let report = lifecycle.drain(CONFIG, pending()).await;
    assert_eq!((report.reason, report.end), (StopReason::Requested, DrainEnd::Finished));
    assert_eq!(crate::Exit::from(report), crate::Exit::Clean);
}
