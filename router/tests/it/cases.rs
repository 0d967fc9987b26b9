//! Request bodies that have broken servers in the field, sent byte for byte.

use std::fs;

use serde::Deserialize;
use serde_json::Value;

use crate::support::{Answer, FakeDecode, Plan, TestRouter, simple};

#[derive(Deserialize)]
struct Case {
    case: String,
    endpoint: String,
    raw_body: String,
    want: String,
}

/// What this router answers to each case; where the field allows two answers, ours.
const ANSWERS: [(&str, u16); 28] = [
    ("TXT-1", 400),
    ("TXT-1b", 400),
    ("TXT-1c", 400),
    ("TXT-1d", 200),
    ("TXT-2", 200),
    ("TXT-5", 200),
    ("VAL-1", 400),
    ("VAL-1b", 400),
    ("VAL-1c", 400),
    ("VAL-2", 501),
    ("VAL-4", 400),
    ("VAL-5", 400),
    ("VAL-5b", 400),
    ("VAL-6", 400),
    ("SMP-2", 200),
    ("SMP-2b", 200),
    ("SMP-4", 200),
    ("SMP-4b", 200),
    ("SMP-7", 400),
    ("STP-4", 400),
    ("STP-4b", 200),
    ("STP-4c", 200),
    ("STP-1", 200),
    ("TPL-4", 200),
    ("API-1", 200),
    ("API-2", 200),
    ("REQ-1", 400),
    ("SMP-5", 0),
];

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases/inputs/http_cases.jsonl");
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

async fn router() -> (TestRouter, FakeDecode) {
    simple(Plan::default()).await
}

fn check(case: &Case, answer: &Answer) {
    let body = &case.raw_body;
    let status = match ANSWERS.iter().find(|(name, _)| *name == case.case) {
        // Nothing is likelier than zero: as documented, the best token stays. Beyond [0, 1] there is no meaning.
        Some(("SMP-5", _)) => {
            if body.contains("\"top_p\": 0,") {
                200
            } else {
                400
            }
        }
        Some((_, status)) => *status,
        None => panic!("{} has no answer; it wants {:?}", case.case, case.want),
    };
    assert_eq!(answer.status, status, "{} {body}: {}, wanted {:?}", case.case, answer.text(), case.want);
    if status != 200 {
        let error = &answer.json()["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        assert!(error["param"].is_string(), "the field is named: {error}");
    }
}

#[tokio::test]
async fn every_case_gets_its_answer_and_the_server_stays_up() {
    let (router, _decode) = router().await;
    let cases = cases();
    assert_eq!(cases.len(), 36);
    for case in &cases {
        let answer = router.http.post(&case.endpoint, &case.raw_body).await;
        check(case, &answer);
    }
    assert_eq!(router.http.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn a_zero_byte_ends_nothing() {
    let (router, _decode) = router().await;
    let n_tokens = async |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":"{prompt}","max_tokens":1}}"#);
        router.http.post("/v1/completions", body).await.json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(n_tokens(r"before\u0000after").await, "before\0after".len() as u64);
    assert_eq!(n_tokens("before").await, 6);
}

#[tokio::test]
async fn tiny_temperatures_give_the_text_of_temperature_zero() {
    let (router, _decode) = router().await;
    let text = async |temperature: &str| {
        let body = format!(r#"{{"prompt":"a","temperature":{temperature},"max_tokens":8}}"#);
        router.http.post("/v1/completions", body).await.json()["choices"][0]["text"].clone()
    };
    let greedy = text("0").await;
    for temperature in ["-0.0", "0.0001", "1e-30", "1e-300"] {
        assert_eq!(text(temperature).await, greedy, "{temperature}");
    }
}

#[tokio::test]
async fn an_output_without_limit_and_end_takes_the_room_that_is_left() {
    let (router, _decode) = router().await;
    let body = r#"{"model":"m","prompt":"8 tokens","ignore_eos":true}"#;
    let answer: Value = router.http.post("/v1/completions", body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 248);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_never_cut() {
    let (router, _decode) = router().await;
    let body = format!(r#"{{"model":"m","prompt":"needle {}"}}"#, "x".repeat(512));
    let answer = router.http.post("/v1/completions", body).await;
    assert_eq!(answer.status, 400);
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("256") && message.contains("519"), "{message}");
}
