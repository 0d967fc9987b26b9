//! What clients see of an output: text, stops, log-probabilities, several choices, usage, on both faces.

use futures::StreamExt;
use longreach_proto::inference::{FinishReason, finish::Matched, generate_stream_response::Event};
use longreach_tests::{
    cluster::{
        TestCluster,
        ask::{Ask, Output},
        cluster_config,
        model::ServedModel,
        report, tiny_engine,
    },
    tiny::Error,
};
use longreach_types::GroupShape;
use serde_json::{Value, json};

fn prompt(n_tokens: u32) -> Vec<u32> {
    (0..n_tokens).map(|i| 97 + i * i % 26).collect()
}

async fn tiny() -> Result<TestCluster, Error> {
    let model = ServedModel::golden("llama", None)?;
    TestCluster::start(&model, cluster_config(tiny_engine(2, 2))).await
}

/// The text of an SSE stream, and its last usage.
async fn streamed(cluster: &TestCluster, path: &str, body: &Value) -> Result<(String, Value), Error> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = cluster.http.post(path, &body).await?.events().await?;
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{events:?}");
    let (mut text, mut usage) = (String::new(), Value::Null);
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event)?;
        for choice in event["choices"].as_array().ok_or("no choices")? {
            text += choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        }
        usage = event["usage"].clone();
    }
    Ok((text, usage))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_says_paris_in_the_same_words_on_every_face() -> Result<(), Error> {
    let model = ServedModel::default_model()?;
    let mut engine = longreach_engine::EngineConfig { shape: GroupShape::new(2, 2)?, ..Default::default() };
    engine.kv_bytes = 64 << 20;
    engine.sched.local_prefill_max = 0;
    let cluster = TestCluster::start(&model, cluster_config(engine)).await?;
    let mut ask = Ask::chat("Name the capital of France.").max_tokens(24);
    ask.options.ignore_eos = None;
    let start = std::time::Instant::now();
    let unary = Output::from(ask.generate(&cluster).await?);
    report(&format!("{:?} after {:?}", unary.text, start.elapsed()));
    assert!(unary.text.contains("Paris"), "{:?}", unary.text);
    let stream = ask.output(&cluster).await?;
    assert_eq!((&stream.text, &stream.tokens, &stream.finish), (&unary.text, &unary.tokens, &unary.finish));
    let path = "/v1/chat/completions";
    let whole = cluster.http.post(path, &ask.body()).await?.json().await?;
    assert_eq!(whole["choices"][0]["message"]["content"], unary.text, "{whole}");
    let (text, usage) = streamed(&cluster, path, &ask.body()).await?;
    assert_eq!(text, unary.text);
    assert_eq!(usage["completion_tokens"], unary.tokens.len());
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_the_output_wherever_tokens_cut_it() -> Result<(), Error> {
    let model = ServedModel::golden("llama", None)?;
    let cluster = TestCluster::start(&model, cluster_config(tiny_engine(2, 2))).await?;
    let ask = Ask::tokens(prompt(30)).sampled(11).letters().max_tokens(60);
    let whole = ask.output(&cluster).await?;
    // Where each token ends in the text.
    let mut ends = Vec::new();
    for token in &whole.tokens {
        ends.push(ends.last().unwrap_or(&0) + model.spelling(*token)?.len());
    }
    for (start, len) in [(5, 3), (9, 4), (20, 1), (31, 5)] {
        let stop = &whole.text[start..start + len];
        let first = whole.text.find(stop).ok_or("a part of the text is in the text")?;
        let mut stopping = ask.clone();
        stopping.options.stop = vec!["##".to_owned(), stop.to_owned()];
        let stopped = stopping.output(&cluster).await?;
        assert_eq!(stopped.text, whole.text[..first], "{stop:?}");
        let finish = stopped.finish.clone().ok_or("no finish")?;
        assert_eq!(finish.reason(), FinishReason::StopString);
        assert_eq!(finish.matched, Some(Matched::Stop(stop.to_owned())));
        // Paid for up to the token that completed the string; shown up to the last one with text that is shown.
        let n_made = ends.iter().take_while(|&&end| end < first + len).count() + 1;
        assert_eq!(stopped.usage().completion_tokens as usize, n_made, "{stop:?}");
        assert_eq!(stopped.tokens, whole.tokens[..stopped.tokens.len()]);
        let n_shown = ends.iter().take_while(|&&end| end < first).count() + usize::from(first > 0);
        assert_eq!(stopped.tokens.len(), n_shown, "{stop:?}");
        let (text, usage) = streamed(&cluster, "/v1/completions", &stopping.body()).await?;
        assert_eq!(text, stopped.text);
        assert_eq!(usage["completion_tokens"], n_made);
        stopping.options.include_stop = Some(true);
        assert_eq!(stopping.output(&cluster).await?.text, whole.text[..first + len]);
    }
    // The workers have stopped as well: nobody decodes on behind a stop that only the router sees.
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

/// KVX-17: the first token is sampled elsewhere than the others, and must come with the same report.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_probabilities_are_whole_on_both_faces_from_the_first_token_on() -> Result<(), Error> {
    let cluster = tiny().await?;
    let ask = Ask::tokens(prompt(40)).logprobs(5).max_tokens(8);
    let response = ask.generate(&cluster).await?;
    let choice = &response.choices[0];
    assert_eq!((choice.token_ids.len(), choice.logprobs.len()), (8, 8));
    for (token, entry) in choice.token_ids.iter().zip(&choice.logprobs) {
        let sampled = entry.sampled.as_ref().ok_or("no sampled token")?;
        assert_eq!(sampled.token_id, *token);
        assert_eq!(entry.top.len(), 5);
        assert_eq!(&entry.top[0], sampled, "greedy takes the most likely");
        assert!(entry.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
        let mass: f32 = entry.top.iter().map(|top| top.logprob.exp()).sum();
        assert!(mass > 0.0 && mass <= 1.0001, "{mass}");
    }
    let stream = ask.output(&cluster).await?;
    let want = Output::from(response.clone());
    assert_eq!((&stream.tokens, &stream.logprobs), (&want.tokens, &want.logprobs));

    let answer = cluster.http.post("/v1/completions", &ask.body()).await?.json().await?;
    let logprobs = &answer["choices"][0]["logprobs"];
    let got: Vec<f64> = serde_json::from_value(logprobs["token_logprobs"].clone())?;
    let want: Vec<f32> = choice
        .logprobs
        .iter()
        .filter_map(|entry| entry.sampled.as_ref())
        .map(|sampled| sampled.logprob)
        .collect();
    assert_eq!(got.iter().map(|&logprob| logprob as f32).collect::<Vec<_>>(), want);
    assert!(logprobs["top_logprobs"].as_array().is_some_and(|top| top.len() == 8), "{logprobs}");
    let chat = Ask::chat("hello").logprobs(2).max_tokens(4);
    let answer = cluster.http.post("/v1/chat/completions", &chat.body()).await?.json().await?;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().ok_or("no logprobs")?;
    assert_eq!(content.len(), 4, "{answer}");
    assert!(content.iter().all(|entry| entry["top_logprobs"].as_array().is_some_and(|top| top.len() == 2)));
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_choices_are_three_outputs_of_one_prompt() -> Result<(), Error> {
    let cluster = tiny().await?;
    let mut ask = Ask::tokens(prompt(33)).sampled(5).max_tokens(10);
    let alone = ask.output(&cluster).await?;
    ask.options.n = Some(3);
    let whole = ask.generate(&cluster).await?;
    assert_eq!(whole.choices.iter().map(|choice| choice.index).collect::<Vec<_>>(), [0, 1, 2]);
    let tokens: Vec<_> = whole.choices.iter().map(|choice| choice.token_ids.clone()).collect();
    assert_eq!(tokens[0], alone.tokens, "the first has the request's own seed");
    assert!(tokens[0] != tokens[1] && tokens[1] != tokens[2] && tokens[0] != tokens[2]);
    let usage = whole.usage.unwrap_or_default();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (33, 30));

    let mut streamed = vec![Vec::new(); 3];
    let mut n_finished = 0;
    let mut events = ask.open(&cluster).await?;
    while let Some(event) = events.next().await {
        match event?.event {
            Some(Event::Delta(delta)) => streamed[delta.index as usize].extend(delta.token_ids),
            Some(Event::Finish(_)) => n_finished += 1,
            _ => {}
        }
    }
    assert_eq!((streamed, n_finished), (tokens, 3));
    let answer = cluster.http.post("/v1/completions", &ask.body()).await?.json().await?;
    let texts: Vec<&Value> = (0..3).map(|index| &answer["choices"][index]["text"]).collect();
    assert_eq!(texts, whole.choices.iter().map(|choice| &choice.text).collect::<Vec<_>>());
    cluster.assert_pools_whole().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_counts_what_a_cache_gave() -> Result<(), Error> {
    let cluster = tiny().await?;
    let ask = Ask::tokens(prompt(50)).max_tokens(5);
    let usage = |answer: &Value| {
        let usage = &answer["usage"];
        let cached = &usage["prompt_tokens_details"]["cached_tokens"];
        [&usage["prompt_tokens"], &usage["completion_tokens"], cached]
            .map(|count| count.as_u64().unwrap_or(u64::MAX))
    };
    let cold = cluster.http.post("/v1/completions", &ask.body()).await?.json().await?;
    assert_eq!(usage(&cold), [50, 5, 0]);
    let warm = cluster.http.post("/v1/completions", &ask.body()).await?.json().await?;
    assert_eq!(usage(&warm), [50, 5, 48], "12 full blocks of 4");
    let grpc = ask.output(&cluster).await?.usage();
    assert_eq!((grpc.prompt_tokens, grpc.completion_tokens, grpc.cached_tokens), (50, 5, 48));
    let mut salted = ask.clone();
    salted.options.cache_salt = Some("somebody else".to_owned());
    assert_eq!(salted.output(&cluster).await?.usage().cached_tokens, 0);
    cluster.stop().await
}
