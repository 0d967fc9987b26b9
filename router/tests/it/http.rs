//! The OpenAI face: shapes, streams, errors, cancellation.

use std::time::Duration;

use longreach_proto::WorkerError;
use serde_json::{Value, json};

use crate::support::{FakeDecode, Plan, TestRouter, eventually, pair, quick_config, simple};

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"model": "m", "prompt": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn chunks(events: &[String]) -> Vec<Value> {
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

#[tokio::test]
async fn a_chat_answer_has_the_original_shape() {
    let (router, _decode) = simple(Plan { cached_len: 16, ..Plan::saying("Hello, wörld 😀") }).await;
    let answer = router.http.post_json("/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut answer = answer.json();
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    answer["id"] = json!("");
    answer["created"] = json!(0);
    // ChatML around "hi", one token for each byte and control token; the output and its end token.
    let (prompt, output) = ("user\nhi\nassistant\n".len() + 3, "Hello, wörld 😀".len() + 1);
    assert_eq!(
        answer,
        json!({
            "id": "", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{
                "index": 0, "message": {"role": "assistant", "content": "Hello, wörld 😀", "refusal": null},
                "logprobs": null, "finish_reason": "stop",
            }],
            "usage": {
                "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
        })
    );
}

#[tokio::test]
async fn a_chat_stream_is_role_pieces_finish_usage_done() {
    let (router, _decode) = simple(Plan::saying("día")).await;
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let answer = router.http.post_json("/v1/chat/completions", &body).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    let chunks = chunks(&answer.events());
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "día");
    let pieces = &chunks[1..chunks.len() - 2];
    assert_eq!(pieces.len(), 3, "í comes in one piece: {pieces:?}");
    assert!(pieces.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
    let finish = &chunks[chunks.len() - 2];
    assert_eq!(
        finish["choices"][0],
        json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"})
    );
    let usage = &chunks[chunks.len() - 1];
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(5)));
    assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["usage"].is_null()));
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"])
    );
}

#[tokio::test]
async fn usage_is_absent_from_a_stream_that_did_not_ask_for_it() {
    let (router, _decode) = simple(Plan::saying("x")).await;
    let answer = router.http.post_json("/v1/completions", &completion(json!({"stream": true}))).await;
    assert!(chunks(&answer.events()).iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn each_choice_has_its_own_text_seed_and_one_finish() {
    let (router, decode) = simple(Plan::default()).await;
    let body = chat(json!({"n": 3, "seed": 7, "max_tokens": 8, "stream": true}));
    let chunks = chunks(&router.http.post_json("/v1/chat/completions", &body).await.events());
    let mut texts = vec![String::new(); 3];
    let mut finishes = vec![0; 3];
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        finishes[index] += usize::from(!choice["finish_reason"].is_null());
        assert!(finishes[index] == 0 || choice["finish_reason"] == "length", "nothing after the finish");
    }
    assert_eq!(finishes, [1, 1, 1]);
    assert!(texts.iter().all(|text| text.len() == 8));
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2]);
    // The first choice is what the same request without n gives.
    let alone = chat(json!({"seed": 7, "max_tokens": 8}));
    let alone = router.http.post_json("/v1/chat/completions", &alone).await.json();
    assert_eq!(alone["choices"][0]["message"]["content"], json!(texts[0]));
    assert!(decode.calls().iter().any(|call| call.sampling.seed == 7));
}

#[tokio::test]
async fn several_prompts_have_their_choices_in_order_and_echo() {
    let (router, decode) = simple(Plan::saying("!")).await;
    let body = completion(json!({"prompt": ["one", "two"], "n": 2, "echo": true}));
    let answer = router.http.post_json("/v1/completions", &body).await.json();
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["one!", "one!", "two!", "two!"]);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(6), &json!(8))
    );
    assert_eq!(decode.calls().len(), 4);
}

#[tokio::test]
async fn no_part_of_a_stop_string_is_streamed_and_the_group_is_cancelled() {
    let (router, decode) = simple(Plan { hang_after: Some(12), ..Plan::saying("ABC DEFGHIJ KLM") }).await;
    let body =
        completion(json!({"stop": ["DEFGHIJ"], "stream": true, "stream_options": {"include_usage": true}}));
    let chunks = chunks(&router.http.post_json("/v1/completions", &body).await.events());
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "ABC ");
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[chunks.len() - 1]["usage"]["completion_tokens"], 11, "up to the end of the stop");
    eventually("the group is cancelled", async || decode.n_open() == 0).await;
}

#[tokio::test]
async fn log_probabilities_have_both_shapes_and_no_infinity() {
    let (router, _decode) = simple(Plan::saying("é")).await;
    let body = chat(json!({"logprobs": true, "top_logprobs": 2}));
    let answer = router.http.post_json("/v1/chat/completions", &body).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 3, "two bytes and the end token");
    assert_eq!((&content[0]["token"], &content[0]["bytes"]), (&json!("bytes:\\xc3"), &json!([0xc3])));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"][1]["logprob"], -9999.0);

    let body = completion(json!({"logprobs": 2, "stream": true}));
    let chunks = chunks(&router.http.post_json("/v1/completions", &body).await.events());
    let logprobs: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["logprobs"])
        .filter(|value| !value.is_null())
        .collect();
    let all = |key: &str| -> Vec<Value> {
        logprobs.iter().flat_map(|piece| piece[key].as_array().unwrap().clone()).collect()
    };
    assert_eq!(all("tokens"), [json!("bytes:\\xc3"), json!("bytes:\\xa9"), json!("<|im_end|>")]);
    assert_eq!(all("text_offset"), [json!(0), json!(1), json!(1)]);
    assert_eq!(all("top_logprobs")[0], json!({"bytes:\\xc3": -0.5, "\u{1}": -9999.0}));
}

#[tokio::test]
async fn errors_have_the_original_shape() {
    let (router, decode) = simple(Plan::default()).await;
    let error = async |body: Value| {
        let answer = router.http.post_json("/v1/chat/completions", &body).await;
        (answer.status, answer.json()["error"].clone())
    };
    let (status, body) = error(chat(json!({"model": "other"}))).await;
    assert_eq!(status, 404);
    assert_eq!(
        body,
        json!({"message": "model \"other\" is not served here; \"m\" is", "type": "invalid_request_error",
            "param": "model", "code": "model_not_found"})
    );
    let (status, body) = error(chat(json!({"max_tokens": 1000}))).await;
    assert_eq!((status, &body["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!(body["param"], "max_tokens");
    assert!(body["message"].as_str().unwrap().contains("256"), "{body}");
    let (status, body) = error(chat(json!({"temperature": -1}))).await;
    assert_eq!((status, &body["param"]), (400, &json!("temperature")));
    let (status, body) = error(chat(json!({"tools": [{"type": "function"}]}))).await;
    assert_eq!((status, &body["param"]), (501, &json!("tools")));
    assert!(decode.calls().is_empty(), "no worker is bothered with what cannot be");
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused() {
    let decode = FakeDecode::start(|_, _| Plan::saying("x")).await;
    let mut config = quick_config();
    config.limits.max_body_bytes = 1024;
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let sized = async |len: usize| {
        let frame = completion(json!({"prompt": "", "max_tokens": 1})).to_string().len();
        let body = completion(json!({"prompt": "a".repeat(len - frame), "max_tokens": 1})).to_string();
        assert_eq!(body.len(), len);
        router.http.post("/v1/completions", body).await
    };
    assert_eq!(sized(1024).await.json()["error"]["code"], "context_length_exceeded");
    let answer = sized(1025).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (413, &json!("body_too_large")));
}

#[tokio::test]
async fn what_does_not_fit_is_refused_at_once_with_a_hint() {
    let decode = FakeDecode::start(|_, _| Plan { hang_after: Some(1), ..Plan::saying("xy") }).await;
    let mut config = quick_config();
    (config.limits.max_choices, config.limits.max_inflight) = (2, 3);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let path = "/v1/completions";
    let mut held = router.http.open(path, &completion(json!({"n": 2, "stream": true}))).await;
    held.next_event().await.unwrap();
    let refused = router.http.post_json(path, &completion(json!({"n": 2}))).await;
    assert_eq!((refused.status, refused.headers["retry-after"].as_str()), (429, "1"));
    assert_eq!(refused.json()["error"]["code"], "overloaded");
    drop(held);
    eventually("the place is free again", async || decode.n_open() == 0).await;
    let mut admitted = router.http.open(path, &completion(json!({"n": 2, "stream": true}))).await;
    assert_eq!(admitted.status, 200);
    admitted.next_event().await.unwrap();
}

#[tokio::test]
async fn a_full_queue_on_a_worker_is_the_clients_turn_to_wait() {
    let full = || WorkerError::QueueFull { queue: "waiting", len: 8, max: 8 };
    let (router, decode) = simple(Plan { refuse: Some(full), ..Plan::default() }).await;
    let answer = router.http.post_json("/v1/completions", &completion(json!({"stream": true}))).await;
    assert_eq!((answer.status, answer.headers["retry-after"].as_str()), (429, "1"));
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("8 of 8"));
    assert_eq!(decode.calls().len(), 1, "backpressure is not retried");
}

#[tokio::test]
async fn what_is_not_there_is_said_in_the_error_object() {
    let router = TestRouter::start(&[], &[]).await;
    for (path, status, code) in [
        ("/v1/chat/completions", 405, "method_not_allowed"),
        ("/v1/models/%FF", 404, "model_not_found"),
        ("/v2", 404, "unknown_url"),
    ] {
        let answer = router.http.get(path).await;
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (status, &json!(code)), "{path}");
    }
}

/// The clients that users have retry whatever is 500 or more, unless they are told that it is no use.
#[tokio::test]
async fn a_server_error_says_whether_to_try_again() {
    let (router, _decode) = simple(Plan::default()).await;
    let cannot = json!({"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "x"}]});
    let answer = router.http.post_json("/v1/chat/completions", &cannot).await;
    assert_eq!((answer.status, answer.headers["x-should-retry"].as_str()), (501, "false"));
    let nobody = TestRouter::start(&[], &[]).await;
    let answer = nobody.http.post_json("/v1/completions", &completion(json!({}))).await;
    assert_eq!((answer.status, answer.headers.get("x-should-retry")), (503, None));
}

#[tokio::test]
async fn without_workers_the_answer_is_503_and_not_ready() {
    let router = TestRouter::start(&[], &[]).await;
    let answer = router.http.post_json("/v1/completions", &completion(json!({}))).await;
    assert_eq!((answer.status, answer.headers["retry-after"].as_str()), (503, "1"));
    let ready = router.http.get("/readyz").await;
    assert_eq!((ready.status, ready.text().as_str()), (503, "waiting for a decode group\n"));
    assert_eq!(router.http.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn a_failure_after_the_headers_is_an_error_event_and_no_done() {
    let broken = || WorkerError::Internal("the invariant".to_owned());
    let (router, _decode) = simple(Plan { fail_after: Some((2, broken)), ..Plan::default() }).await;
    let answer = router.http.post_json("/v1/completions", &completion(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events.len(), 3, "{events:?}");
    let error: Value = serde_json::from_str(&events[2]).unwrap();
    assert_eq!(error["error"]["code"], "internal");
    assert!(events.iter().all(|event| event != "[DONE]"));
}

#[tokio::test]
async fn text_cannot_end_or_forge_an_event() {
    let text = ": ready\r\nb\rc\n\n: x\ndata: [DONE]\n\n";
    let (router, _decode) = simple(Plan::saying(text)).await;
    let chunks = chunks(
        &router.http.post_json("/v1/completions", &completion(json!({"stream": true}))).await.events(),
    );
    let got: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(got, text);
}

#[tokio::test]
async fn a_quiet_stream_says_that_it_lives() {
    let decode = FakeDecode::start(|_, _| Plan { hang_after: Some(1), ..Plan::saying("xy") }).await;
    let mut config = quick_config();
    config.streams.heartbeat_interval = Duration::from_millis(20);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let mut stream = router.http.open("/v1/completions", &completion(json!({"stream": true}))).await;
    assert!(stream.next_event().await.unwrap().contains("\"x\""));
    for _ in 0..2 {
        assert_eq!(stream.next_event().await.unwrap().trim_end(), ": keep-alive");
    }
}

#[tokio::test]
async fn a_stream_in_the_queue_gets_its_headers_after_a_while() {
    let decode =
        FakeDecode::start(|_, _| Plan { queue: Duration::from_millis(300), ..Plan::saying("x") }).await;
    let mut config = quick_config();
    config.streams.heartbeat_interval = Duration::from_millis(20);
    config.streams.max_header_wait = Duration::from_millis(40);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let mut stream = router.http.open("/v1/completions", &completion(json!({"stream": true}))).await;
    assert_eq!(stream.next_event().await.unwrap().trim_end(), ": keep-alive");
    let mut last = String::new();
    while let Some(event) = stream.next_event().await {
        last = event;
    }
    assert_eq!(last, "[DONE]");
}

#[tokio::test]
async fn a_client_that_leaves_frees_both_sides_whatever_it_waited_for() {
    let during = |prefill: Plan, decode: Plan| async move {
        let (router, prefill, decode) = pair(prefill, decode.split()).await;
        for stream in [true, false] {
            let body = completion(json!({"stream": stream})).to_string();
            let head = crate::support::post_head("/v1/completions", body.len());
            let connection = router.http.write(&head, body.as_bytes()).await;
            eventually("the group works", async || decode.n_open() == 1).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
            let left = std::time::Instant::now();
            drop(connection);
            eventually("nobody works", async || decode.n_open() + prefill.n_open() == 0).await;
            assert!(left.elapsed() < Duration::from_millis(500), "took {:?}", left.elapsed());
        }
        eventually("the end is counted", async || {
            router.metric("longreach_router_requests_in_flight").await == 0.0
        })
        .await;
    };
    let hang = |n| Plan { hang_after: Some(n), ..Plan::default() };
    let slow = || Plan { queue: Duration::from_secs(60), ..Plan::default() };
    during(Plan::default(), slow()).await; // before blocks are reserved
    during(hang(0), Plan::default()).await; // before the first token
    during(hang(1), Plan::default()).await; // while KV is on its way
    during(Plan::default(), hang(2)).await; // while tokens are generated
}

#[tokio::test]
async fn names_of_requests_are_echoed_and_may_repeat() {
    let (router, decode) = simple(Plan::saying("x")).await;
    let body = completion(json!({"request_id": "same"}));
    let (one, other) = tokio::join!(
        router.http.post_json("/v1/completions", &body),
        router.http.post_json("/v1/completions", &body)
    );
    assert_eq!((one.status, other.status), (200, 200));
    assert_eq!(one.headers["x-request-id"], "same");
    let ids: Vec<_> = decode.calls().into_iter().map(|call| call.request_id.0).collect();
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.starts_with("same-")), "{ids:?}");
}

#[tokio::test]
async fn models_are_listed_with_their_limit() {
    let (router, _decode) = simple(Plan::default()).await;
    let list = router.http.get("/v1/models").await.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("m")));
    assert_eq!(list["data"][0]["max_model_len"], 256);
    assert_eq!(router.http.get("/v1/models/m").await.json()["object"], "model");
    assert_eq!(router.http.get("/v1/models/org/other").await.status, 404);
}

#[tokio::test]
async fn requests_are_counted_by_how_they_ended() {
    let (router, _decode) = simple(Plan::saying("abc")).await;
    router.http.post_json("/v1/completions", &completion(json!({}))).await;
    router.http.post_json("/v1/completions", &completion(json!({"n": 0}))).await;
    router.http.post_json("/v1/completions", &completion(json!({"stop": [""]}))).await;
    router.http.post("/v1/completions", "{").await;
    // The model has this id and the tokenizer has not, which is noticed when the request has its place already.
    let padding = completion(json!({"prompt": [1, 260], "echo": true}));
    assert_eq!(router.http.post_json("/v1/completions", &padding).await.status, 400);
    let text = router.http.get("/metrics").await.text();
    for line in [
        "longreach_router_requests_total{method=\"completions\",code=\"OK\"} 1",
        "longreach_router_requests_total{method=\"completions\",code=\"INVALID_ARGUMENT\"} 4",
        "longreach_router_requests_in_flight 0",
        "longreach_router_ttft_seconds_count 1",
        "longreach_router_inter_token_latency_seconds_count 2",
        "longreach_router_queue_seconds_count 1",
        "longreach_router_completion_tokens_total 4",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn what_is_not_there_is_said_in_json() {
    let router = TestRouter::start(&[], &[]).await;
    let answer = router.http.post_json("/v1/embeddings", &json!({})).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (404, &json!("unknown_url")));
}

#[tokio::test]
async fn a_reader_that_stops_reading_stops_the_worker_and_nobody_else() {
    let decode = FakeDecode::start_sized(Default::default(), 100_000_000, |_, _| Plan::default()).await;
    let router = TestRouter::start(&[&decode], &[]).await;
    let endless = completion(json!({"stream": true}));
    let mut slow = router.http.open("/v1/completions", &endless).await;
    slow.next_event().await.unwrap();
    // Buffers on the way fill up, and then nothing moves.
    let mut before = 0;
    eventually("the worker stands still", async || {
        before = decode.n_said();
        tokio::time::sleep(Duration::from_millis(300)).await;
        decode.n_said() == before
    })
    .await;
    assert!(decode.n_said() < 500_000, "{} tokens lie somewhere", decode.n_said());
    assert_eq!(decode.n_open(), 1, "it is paused, not ended");
    let quick = router.http.post_json("/v1/completions", &completion(json!({"max_tokens": 8}))).await;
    assert_eq!(quick.status, 200);
}
