//! What is done when workers are lost: the same tokens, or one typed error.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use longreach_proto::{
    WorkerError,
    inference::{GenerateOptions, GenerateRequest, Prompt, prompt},
};
use longreach_types::KvDtype;
use proptest::{prelude::*, test_runner::TestRunner};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::support::{
    FakeDecode, FakePrefill, Handoffs, Plan, TestRouter, eventually, pair, quick_config, simple,
};

fn gone() -> WorkerError {
    WorkerError::Unavailable("gone")
}

async fn say(router: &TestRouter, max_tokens: u32) -> Result<String, Status> {
    let request = GenerateRequest {
        prompt: Some(Prompt { prompt: Some(prompt::Prompt::Text("prompt".to_owned())) }),
        options: Some(GenerateOptions { seed: Some(3), max_tokens: Some(max_tokens), ..Default::default() }),
        ..Default::default()
    };
    let answer = router.inference().await.generate(request).await?.into_inner();
    let usage = answer.usage.unwrap();
    assert_eq!(usage.prompt_tokens, 6, "tokens of earlier legs are no prompt");
    let text = answer.choices[0].text.clone();
    assert_eq!(usage.completion_tokens as usize, text.len());
    Ok(text)
}

/// What is said when nothing goes wrong.
async fn undisturbed(max_tokens: u32) -> String {
    let (router, _decode) = simple(Plan::default()).await;
    say(&router, max_tokens).await.unwrap()
}

/// How one call is disturbed.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Refused,
    FailsAfter(usize),
    IsCutAfter(usize),
}

fn faults() -> impl Strategy<Value = Vec<Option<Fault>>> {
    let fault = prop_oneof![
        Just(Fault::Refused),
        (0_usize..6).prop_map(Fault::FailsAfter),
        (0_usize..6).prop_map(Fault::IsCutAfter),
    ];
    prop::collection::vec(prop::option::of(fault), 0..3)
}

/// `plan` with the fault of call `n_call`.
fn disturbed(faults: &[Option<Fault>], n_call: usize, plan: Plan) -> Plan {
    match faults.get(n_call).copied().flatten() {
        None => plan,
        Some(Fault::Refused) => Plan { refuse: Some(gone), ..plan },
        Some(Fault::FailsAfter(n)) => Plan { fail_after: Some((n, gone)), ..plan },
        Some(Fault::IsCutAfter(n)) => Plan { cut_after: Some(n), ..plan },
    }
}

#[test]
fn an_output_with_faults_is_the_output_without() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let wanted = runtime.block_on(undisturbed(12));
    let config = ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() };
    let mut runner = TestRunner::new(config);
    let cases = (faults(), faults(), any::<bool>());
    let result = runner.run(&cases, |(decode_faults, prefill_faults, is_split)| {
        let said = runtime.block_on(async move {
            let handoffs = Arc::new(Handoffs::default());
            let prefill = FakePrefill::start(Arc::clone(&handoffs), move |n, _| {
                disturbed(&prefill_faults, n, Plan::default())
            })
            .await;
            let decode = FakeDecode::start_with(handoffs, move |n, _| {
                disturbed(&decode_faults, n, Plan { prefilled_here: !is_split, ..Plan::default() })
            })
            .await;
            let mut config = quick_config();
            config.recovery.max_attempts = 8;
            let router = TestRouter::start_with(config, &[&decode], &[&prefill]).await;
            say(&router, 12).await.unwrap()
        });
        prop_assert_eq!(&said, &wanted);
        Ok(())
    });
    result.unwrap();
}

#[tokio::test]
async fn a_worker_that_stands_still_with_its_connection_open_is_noticed() {
    let is_first = Arc::new(AtomicBool::new(true));
    let plan = move |_: usize, _: &longreach_proto::worker::GenerateRequest| Plan {
        freeze_after: is_first.swap(false, Ordering::SeqCst).then_some(3),
        ..Plan::default()
    };
    let one = FakeDecode::start(plan.clone()).await;
    let other = FakeDecode::start(plan).await;
    let mut config = quick_config();
    config.workers.keep_alive_interval = Duration::from_millis(100);
    config.workers.keep_alive_timeout = Duration::from_millis(200);
    let router = TestRouter::start_with(config, &[&one, &other], &[]).await;
    let started = Instant::now();
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
    assert!(started.elapsed() < Duration::from_secs(5), "took {:?}", started.elapsed());
}

/// A prompt may take longer than the window, and its worker may be lost after that: the window is for waiting.
#[tokio::test]
async fn time_in_which_workers_were_at_work_is_no_waiting() {
    let window = Duration::from_millis(300);
    let decode = FakeDecode::start(move |n, _| match n {
        0 => Plan { cut_after: Some(0), ..Plan::default() },
        1 => Plan { cut_after: Some(0), cut_pause: 3 * window, ..Plan::default() },
        _ => Plan::default(),
    })
    .await;
    let mut config = quick_config();
    config.recovery.recovery_window = window;
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
}

/// A group that cannot take the output over is nobody to try at once. Until it was so, its being there had the one that
/// had failed asked again without a pause.
#[tokio::test]
async fn a_group_that_forms_is_not_stormed_because_another_is_there_that_does_not_fit() {
    let plan = |n: usize, _: &longreach_proto::worker::GenerateRequest| match n {
        0 => Plan { cut_after: Some(3), ..Plan::default() },
        _ => Plan { refuse: Some(|| WorkerError::Unavailable("the group is forming")), ..Plan::default() },
    };
    let (one, other) = (FakeDecode::start(plan).await, FakeDecode::start(plan).await);
    other.set_kv_dtype(KvDtype::F32);
    one.set_kv_dtype(KvDtype::F16);
    let router = TestRouter::start(&[&one, &other], &[]).await;
    assert_eq!(say(&router, 12).await.unwrap_err().code(), Code::Aborted);
    let n_calls = one.calls().len() + other.calls().len();
    assert!((3..40).contains(&n_calls), "{n_calls} calls within the window of two seconds");
}

/// Once every worker has failed an output, one that answers is a better guess than one that is gone, however idle that
/// seems.
#[tokio::test]
async fn a_worker_that_is_gone_is_asked_after_all_that_are_there() {
    let handoffs = Arc::new(Handoffs::default());
    let gone_one = FakePrefill::start(Arc::clone(&handoffs), |_, _| Plan::default()).await;
    let other = FakePrefill::start(Arc::clone(&handoffs), |n, _| match n {
        0 => Plan { hang_after: Some(0), ..Plan::default() },
        1 => Plan { refuse: Some(|| WorkerError::Aborted("it stood still".to_owned())), ..Plan::default() },
        _ => Plan::default(),
    })
    .await;
    let decode = FakeDecode::start_with(handoffs, |_, _| Plan::default().split()).await;
    let router = TestRouter::start(&[&decode], &[&gone_one, &other]).await;
    gone_one.kill();
    // Work that makes the one that is there the dearer choice.
    let mut busy = tokio::task::JoinSet::new();
    let mut client = router.inference().await;
    busy.spawn(async move {
        let request = GenerateRequest {
            prompt: Some(Prompt { prompt: Some(prompt::Prompt::Text("a long prompt".repeat(9))) }),
            ..Default::default()
        };
        client.generate(request).await.map(drop)
    });
    eventually("it is busy", async || other.calls().len() == 1).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
}

#[tokio::test]
async fn a_client_whose_time_is_over_is_no_fault_of_its_worker() {
    let (router, _decode) = simple(Plan { hang_after: Some(2), ..Plan::default() }).await;
    for _ in 0..4 {
        let mut request = tonic::Request::new(GenerateRequest {
            prompt: Some(Prompt { prompt: Some(prompt::Prompt::Text("prompt".to_owned())) }),
            ..Default::default()
        });
        request.set_timeout(Duration::from_millis(150));
        let status = router.inference().await.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded);
    }
    assert_eq!(router.metric("longreach_router_interrupted_streams_total").await, 0.0);
}

#[tokio::test]
async fn a_leg_that_takes_over_gets_the_tokens_and_their_number() {
    let cut = Plan { cut_after: Some(5), ..Plan::default() };
    let decode = FakeDecode::start(move |n, _| if n == 0 { cut.clone() } else { Plan::default() }).await;
    let router = TestRouter::start(&[&decode], &[]).await;
    let said = say(&router, 12).await.unwrap();
    let calls = decode.calls();
    assert_eq!(calls.len(), 2, "a stream that ends without a finish is a failure");
    assert_eq!((calls[0].prompt.tokens.len(), calls[0].prompt.n_resumed), (6, 0));
    assert_eq!((calls[1].prompt.tokens.len(), calls[1].prompt.n_resumed), (11, 5));
    let resumed: String = calls[1].prompt.tokens[6..].iter().map(|token| char::from(token.0 as u8)).collect();
    assert_eq!(resumed, said[..5]);
    assert_eq!((calls[1].sampling.seed, calls[1].sampling.max_tokens), (3, 12));
    assert_eq!(router.metric("longreach_router_resumed_streams_total").await, 1.0);
}

/// A long output outlives any number of restarts; one whose worker fails again and again where it is, does not.
#[tokio::test]
async fn attempts_count_while_nothing_comes_of_them() {
    for (cut_after, is_lost) in [(20, false), (3, true)] {
        let cut = move |_: usize, _: &longreach_proto::worker::GenerateRequest| Plan {
            cut_after: Some(cut_after),
            ..Plan::default()
        };
        let (one, other) = (FakeDecode::start(cut).await, FakeDecode::start(cut).await);
        let router = TestRouter::start(&[&one, &other], &[]).await;
        let said = say(&router, 110).await;
        if is_lost {
            said.unwrap_err();
            let n_calls = one.calls().len() + other.calls().len();
            assert_eq!(n_calls, quick_config().recovery.max_attempts as usize);
        } else {
            assert_eq!(said.unwrap(), undisturbed(110).await);
        }
    }
}

#[tokio::test]
async fn a_worker_that_dies_with_its_connections_is_replaced_by_another() {
    let hang = Plan { hang_after: Some(4), ..Plan::default() };
    let plan = move |n: usize, call: &longreach_proto::worker::GenerateRequest| {
        if n == 0 && call.prompt.n_resumed == 0 { hang.clone() } else { Plan::default() }
    };
    let one = FakeDecode::start(plan.clone()).await;
    let other = FakeDecode::start(plan).await;
    let router = TestRouter::start(&[&one, &other], &[]).await;
    let dying = async {
        loop {
            for (worker, survivor) in [(&one, &other), (&other, &one)] {
                if !worker.calls().is_empty() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    worker.kill();
                    return survivor;
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (said, survivor) = tokio::join!(say(&router, 12), dying);
    let undisturbed = undisturbed(12).await;
    assert_eq!(said.unwrap(), undisturbed);
    assert_eq!(survivor.calls()[0].prompt.n_resumed, 4);
}

#[tokio::test]
async fn a_prefill_that_fails_is_repeated_and_its_reservation_given_back() {
    for n_events in [0, 1] {
        let failing = Plan { fail_after: Some((n_events, gone)), ..Plan::default() };
        let handoffs = Arc::new(Handoffs::default());
        let prefill =
            FakePrefill::start(
                Arc::clone(&handoffs),
                move |n, _| {
                    if n == 0 { failing.clone() } else { Plan::default() }
                },
            )
            .await;
        let decode = FakeDecode::start_with(handoffs, |_, _| Plan::default().split()).await;
        let router = TestRouter::start(&[&decode], &[&prefill]).await;
        say(&router, 6).await.unwrap();
        assert_eq!((prefill.calls().len(), decode.calls().len()), (2, 2));
        assert_eq!(prefill.calls()[1].prompt.n_resumed, n_events, "the first token is not lost");
        assert_eq!((prefill.n_open(), decode.n_open()), (0, 0));
    }
}

#[tokio::test]
async fn a_prefill_worker_lost_after_the_group_decodes_is_not_missed() {
    let lost = Plan { lost_at_handoff: true, ..Plan::default() };
    let slow = Plan { pace: Duration::from_millis(10), ..Plan::default() };
    let (router, prefill, decode) = pair(lost, slow.split()).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
    assert_eq!((prefill.calls().len(), decode.calls().len()), (1, 1));
}

#[tokio::test]
async fn a_first_token_that_ends_the_output_needs_no_group() {
    let (router, prefill, decode) = pair(Plan::default(), Plan::default().split()).await;
    assert_eq!(say(&router, 1).await.unwrap().len(), 1);
    assert_eq!((prefill.calls().len(), decode.calls().len()), (1, 1));
    crate::support::eventually("the reservation is given back", async || decode.n_open() == 0).await;
}

#[tokio::test]
async fn an_output_that_lost_its_worker_after_its_last_token_is_complete() {
    let cut = Plan { cut_after: Some(3), ..Plan::saying("ab") };
    let (router, decode) = simple(cut).await;
    let body = serde_json::json!({"prompt": "x"});
    let answer = router.http.post_json("/v1/completions", &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&"ab".into(), &"stop".into())
    );
    let cut = Plan { cut_after: Some(4), ..Plan::default() };
    let (router, limited) = simple(cut).await;
    assert_eq!(say(&router, 4).await.unwrap().len(), 4);
    assert_eq!((decode.calls().len(), limited.calls().len()), (1, 1));
}

#[tokio::test]
async fn a_gap_in_the_tokens_never_reaches_the_client() {
    let (router, decode) = simple(Plan { skip_idx: Some(3), ..Plan::default() }).await;
    let status = say(&router, 12).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("output token 4 came where 3 was due"), "{}", status.message());
    assert_eq!(decode.calls().len(), 1);
}

#[tokio::test]
async fn what_another_worker_could_not_mend_is_not_retried() {
    let refusals: [(fn() -> WorkerError, Code); 4] = [
        (|| WorkerError::Invalid("no".to_owned()), Code::InvalidArgument),
        (|| WorkerError::QueueFull { queue: "waiting", len: 1, max: 1 }, Code::ResourceExhausted),
        (|| WorkerError::Internal("bug".to_owned()), Code::Internal),
        (
            || WorkerError::LayoutMismatch { field: "n_layers", expected: "2".into(), got: "3".into() },
            Code::FailedPrecondition,
        ),
    ];
    for (refuse, code) in refusals {
        let (router, decode) = simple(Plan { refuse: Some(refuse), ..Plan::default() }).await;
        assert_eq!(say(&router, 4).await.unwrap_err().code(), code);
        assert_eq!(decode.calls().len(), 1, "{code:?}");
    }
}

#[tokio::test]
async fn attempts_are_bounded_and_the_tokens_sent_are_named() {
    let spoilt = || WorkerError::Aborted("spoilt".to_owned());
    let failing = Plan { fail_after: Some((2, spoilt)), ..Plan::default() };
    let (router, decode) = simple(failing).await;
    let status = say(&router, 12).await.unwrap_err();
    assert_eq!((status.code(), decode.calls().len()), (Code::Aborted, 3));
    let details = status.get_error_details();
    assert_eq!(details.error_info().unwrap().metadata["emitted_tokens"], "6");
}

#[tokio::test]
async fn a_group_that_hands_its_streams_over_costs_no_attempt() {
    let leaving = Plan { fail_after: Some((2, gone)), ..Plan::default() };
    let (router, decode) = simple(leaving).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
    assert!(decode.calls().len() > 3, "more often than attempts may fail");
}

#[tokio::test]
async fn a_full_worker_is_passed_over_and_that_all_are_full_is_an_answer() {
    let full: fn() -> WorkerError = || WorkerError::QueueFull { queue: "waiting", len: 1, max: 1 };
    let refusing = move |_: usize, _: &_| Plan { refuse: Some(full), ..Plan::default() };
    let (one, other) = (FakeDecode::start(refusing).await, FakeDecode::start(|_, _| Plan::default()).await);
    let router = TestRouter::start(&[&one, &other], &[]).await;
    let wanted = undisturbed(4).await;
    for _ in 0..10 {
        assert_eq!(say(&router, 4).await.unwrap(), wanted);
    }
    let (one, other) = (FakeDecode::start(refusing).await, FakeDecode::start(refusing).await);
    let router = TestRouter::start(&[&one, &other], &[]).await;
    assert_eq!(say(&router, 4).await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!((one.calls().len(), other.calls().len()), (1, 1), "each is asked once");
}

#[tokio::test]
async fn without_a_token_sent_a_lost_request_can_be_sent_again() {
    let (router, decode) = simple(Plan { refuse: Some(gone), ..Plan::default() }).await;
    let status = say(&router, 12).await.unwrap_err();
    assert_eq!((status.code(), decode.calls().len()), (Code::Unavailable, 3));
    assert!(status.get_error_details().retry_info().is_some());
}

#[tokio::test]
async fn an_interrupted_output_waits_for_a_worker_and_gives_up_in_time() {
    let decode = FakeDecode::start(|_, _| Plan { hang_after: Some(2), ..Plan::default() }).await;
    let mut config = quick_config();
    config.recovery.recovery_window = Duration::from_millis(300);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let dying = async {
        crate::support::eventually("the group works", async || decode.n_open() == 1).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        decode.kill();
        Instant::now()
    };
    let (said, died) = tokio::join!(say(&router, 12), dying);
    assert_eq!(said.unwrap_err().code(), Code::Aborted);
    let waited = died.elapsed().as_millis();
    assert!((250..3000).contains(&waited), "waited {waited} ms");
}

#[tokio::test]
async fn an_output_that_has_begun_waits_for_room_where_a_new_one_is_turned_away() {
    let full: fn() -> WorkerError = || WorkerError::QueueFull { queue: "waiting", len: 1, max: 1 };
    let decode = FakeDecode::start(move |call, _| match call {
        0 => Plan { fail_after: Some((2, gone)), ..Plan::default() },
        1..4 => Plan { refuse: Some(full), ..Plan::default() },
        _ => Plan::default(),
    })
    .await;
    let router = TestRouter::start(&[&decode], &[]).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
    assert_eq!(decode.calls().len(), 5, "more refusals than attempts are allowed");
}

#[tokio::test]
async fn a_prefill_worker_that_is_not_there_yet_costs_no_attempt() {
    let handoffs = Arc::<Handoffs>::default();
    let decode = FakeDecode::start_with(Arc::clone(&handoffs), |_, _| Plan::default().split()).await;
    let starting = |call, _: &_| Plan { refuse: (call < 4).then_some(gone as _), ..Plan::default() };
    let prefill = FakePrefill::start(handoffs, starting).await;
    let router = TestRouter::start(&[&decode], &[&prefill]).await;
    assert_eq!(say(&router, 12).await.unwrap(), undisturbed(12).await);
    assert_eq!(prefill.calls().len(), 5);
}
