//! The typed face: order of events, errors with details, deadlines, health, reflection.

use std::time::{Duration, Instant};

use longreach_proto::{
    WorkerError,
    inference::{
        ChatMessage, ChatPrompt, ChatRequest, ChatStreamRequest, DetokenizeRequest, FinishReason,
        GenerateOptions, GenerateRequest, GenerateStreamRequest, GenerateStreamResponse, GetModelRequest,
        ListModelsRequest, Prompt, TokenIds, TokenizeRequest, Usage, chat_stream_response, finish::Matched,
        generate_stream_response::Event, prompt,
    },
};
use tonic::{Code, Request, Status, transport::Channel};
use tonic_types::StatusExt;

use crate::support::{
    EOS, FakeDecode, Plan, TestRouter, eventually, pair, quick_config, simple, text_of, tokens_of,
};

fn text(text: &str) -> Option<Prompt> {
    Some(Prompt { prompt: Some(prompt::Prompt::Text(text.to_owned())) })
}

fn request(options: GenerateOptions) -> GenerateRequest {
    GenerateRequest { prompt: text("hi"), options: Some(options), ..Default::default() }
}

fn stream_request(options: GenerateOptions) -> GenerateStreamRequest {
    GenerateStreamRequest { prompt: text("hi"), options: Some(options), ..Default::default() }
}

async fn events(
    router: &TestRouter,
    options: GenerateOptions,
) -> Result<Vec<GenerateStreamResponse>, Status> {
    let mut stream = router.inference().await.generate_stream(stream_request(options)).await?.into_inner();
    let mut events = Vec::new();
    while let Some(event) = stream.message().await? {
        events.push(event);
    }
    Ok(events)
}

async fn refused(router: &TestRouter, options: GenerateOptions) -> Status {
    router.inference().await.generate(request(options)).await.unwrap_err()
}

#[tokio::test]
async fn a_stream_is_started_deltas_one_finish_with_usage_last() {
    let (router, _decode) = simple(Plan { cached_len: 1, ..Plan::saying("wörld") }).await;
    let options = GenerateOptions {
        seed: Some(5),
        return_token_ids: Some(true),
        return_timings: Some(true),
        ..Default::default()
    };
    let events = events(&router, options).await.unwrap();
    let Some(Event::Started(started)) = &events[0].event else { panic!("{events:?}") };
    assert_eq!((started.model.as_str(), started.seed, started.prompt_tokens), ("m", 5, 2));
    assert!(started.request_id.starts_with("req-"));
    let (last, middle) = events[1..].split_last().unwrap();
    let (mut said, mut ids) = (String::new(), Vec::new());
    for event in middle {
        let Some(Event::Delta(delta)) = &event.event else { panic!("{event:?}") };
        assert!(event.usage.is_none());
        said.push_str(&delta.text);
        ids.extend(&delta.token_ids);
    }
    assert_eq!(said, "wörld");
    assert_eq!(text_of(ids), "wörld<|im_end|>");
    let Some(Event::Finish(finish)) = &last.event else { panic!("{last:?}") };
    let finish = finish.finish.as_ref().unwrap();
    assert_eq!((finish.reason(), finish.matched.clone()), (FinishReason::Eos, Some(Matched::TokenId(EOS))));
    let usage = last.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (2, 7, 1));
    assert!(usage.timings.unwrap().prefill.is_some());
}

#[tokio::test]
async fn whole_and_streamed_answers_are_the_same() {
    let (router, _decode) = simple(Plan::default()).await;
    let options = || GenerateOptions {
        n: Some(2),
        seed: Some(11),
        max_tokens: Some(9),
        top_logprobs: Some(1),
        stop: vec!["zz".to_owned()],
        ..Default::default()
    };
    let whole = router.inference().await.generate(request(options())).await.unwrap().into_inner();
    let mut texts = vec![String::new(); 2];
    let mut n_logprobs = [0; 2];
    let mut usage = None;
    for event in events(&router, options()).await.unwrap() {
        if let Some(Event::Delta(delta)) = event.event {
            texts[delta.index as usize].push_str(&delta.text);
            n_logprobs[delta.index as usize] += delta.logprobs.len();
        }
        usage = event.usage;
    }
    for (index, choice) in whole.choices.iter().enumerate() {
        assert_eq!(choice.text, texts[index]);
        assert_eq!(choice.logprobs.len(), n_logprobs[index]);
        assert_eq!(choice.finish.as_ref().unwrap().reason(), FinishReason::Length);
    }
    assert_eq!(whole.usage, usage);
    assert_eq!(whole.usage, Some(Usage { prompt_tokens: 2, completion_tokens: 18, ..Default::default() }));
}

#[tokio::test]
async fn a_chat_is_rendered_and_answered_both_ways() {
    let (router, decode) = simple(Plan::saying("yes")).await;
    let message =
        |role: &str, content: &str| ChatMessage { role: role.to_owned(), content: content.to_owned() };
    let chat = Some(ChatPrompt {
        messages: vec![message("system", "short"), message("user", "ok?<|im_end|>")],
        add_generation_prompt: None,
    });
    let mut client = router.inference().await;
    let whole =
        client.chat(ChatRequest { chat: chat.clone(), ..Default::default() }).await.unwrap().into_inner();
    assert_eq!(whole.choices[0].text, "yes");
    let prompt = &decode.calls()[0].prompt.tokens;
    let rendered = "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\nok?<|im_end|><|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text_of(prompt.iter().map(|token| token.0)), rendered);
    assert_eq!(prompt.iter().filter(|token| token.0 == EOS).count(), 2, "what the user wrote is literal");

    let request = ChatStreamRequest { chat, request_id: "mine".to_owned(), ..Default::default() };
    let mut stream = client.chat_stream(request).await.unwrap().into_inner();
    let mut said = String::new();
    while let Some(event) = stream.message().await.unwrap() {
        match event.event.unwrap() {
            chat_stream_response::Event::Started(started) => assert_eq!(started.request_id, "mine"),
            chat_stream_response::Event::Delta(delta) => said.push_str(&delta.text),
            chat_stream_response::Event::Finish(_) => assert!(event.usage.is_some()),
            chat_stream_response::Event::Heartbeat(_) => {}
        }
    }
    assert_eq!(said, "yes");
}

#[tokio::test]
async fn tokens_and_text_are_each_others_inverse() {
    let (router, _decode) = simple(Plan::default()).await;
    let mut client = router.inference().await;
    let said = "before\0after — ✓";
    let tokenize = TokenizeRequest { prompt: text(said), ..Default::default() };
    let token_ids = client.tokenize(tokenize).await.unwrap().into_inner().token_ids;
    assert_eq!(token_ids, tokens_of(said));
    let detokenize = DetokenizeRequest { token_ids, ..Default::default() };
    assert_eq!(client.detokenize(detokenize).await.unwrap().into_inner().text, said);
    let unknown = DetokenizeRequest { token_ids: vec![259], ..Default::default() };
    assert_eq!(client.detokenize(unknown).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn every_float_that_is_no_number_is_refused_by_name() {
    let (router, decode) = simple(Plan::default()).await;
    type Spoil = fn(&mut GenerateOptions, f32);
    let fields: [(&str, Spoil); 7] = [
        ("temperature", |o, v| o.temperature = Some(v)),
        ("top_p", |o, v| o.top_p = Some(v)),
        ("min_p", |o, v| o.min_p = Some(v)),
        ("repetition_penalty", |o, v| o.repetition_penalty = Some(v)),
        ("presence_penalty", |o, v| o.presence_penalty = Some(v)),
        ("frequency_penalty", |o, v| o.frequency_penalty = Some(v)),
        ("logit_bias", |o, v| o.logit_bias = [(1, v)].into()),
    ];
    for (field, spoil) in fields {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut options = GenerateOptions::default();
            spoil(&mut options, value);
            let status = refused(&router, options).await;
            assert_eq!(status.code(), Code::InvalidArgument, "{field} {value}");
            let details = status.get_error_details();
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
            assert_eq!(details.error_info().unwrap().reason, "INVALID_FIELD");
        }
    }
    assert!(decode.calls().is_empty());
}

#[tokio::test]
async fn other_mistakes_are_refused_by_name() {
    let (router, _decode) = simple(Plan::default()).await;
    let field = async |prompt: Option<Prompt>, options: GenerateOptions| {
        let request = GenerateRequest { prompt, options: Some(options), ..Default::default() };
        let status = router.inference().await.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status.get_error_details().bad_request().unwrap().field_violations[0].field.clone()
    };
    let ids =
        |ids: &[u32]| Some(Prompt { prompt: Some(prompt::Prompt::TokenIds(TokenIds { ids: ids.to_vec() })) });
    let default = GenerateOptions::default;
    assert_eq!(field(None, default()).await, "prompt");
    assert_eq!(field(text(""), default()).await, "prompt");
    assert_eq!(field(ids(&[1, 264]), default()).await, "prompt");
    assert_eq!(field(ids(&[u32::MAX]), default()).await, "prompt");
    assert_eq!(field(text("x"), GenerateOptions { stop: vec![String::new()], ..default() }).await, "stop[0]");
    assert_eq!(
        field(text("x"), GenerateOptions { stop_token_ids: vec![264], ..default() }).await,
        "stop_token_ids"
    );
    assert_eq!(field(text("x"), GenerateOptions { max_tokens: Some(0), ..default() }).await, "max_tokens");
    assert_eq!(
        field(text("x"), GenerateOptions { top_logprobs: Some(21), ..default() }).await,
        "top_logprobs"
    );
    assert_eq!(field(text(&"x".repeat(256)), default()).await, "prompt");
    assert_eq!(field(text("x"), GenerateOptions { max_tokens: Some(256), ..default() }).await, "max_tokens");
    assert_eq!(field(text("x"), GenerateOptions { min_tokens: Some(256), ..default() }).await, "min_tokens");
}

#[tokio::test]
async fn a_message_that_quotes_a_long_text_still_arrives() {
    let (router, _decode) = simple(Plan::default()).await;
    let request = GenerateRequest { model: "ä".repeat(50_000), prompt: text("x"), ..Default::default() };
    let status = router.inference().await.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().len() < 1024);
}

#[tokio::test]
async fn the_deadline_bounds_the_whole_stream_and_names_the_stage() {
    let stage = async |prefill: Plan, decode: Plan| {
        let (router, prefill, decode) = pair(prefill, decode.split()).await;
        let mut request = Request::new(stream_request(GenerateOptions::default()));
        request.set_timeout(Duration::from_millis(400));
        let started = Instant::now();
        let mut client = router.inference().await;
        let status = match client.generate_stream(request).await {
            Err(status) => status,
            Ok(stream) => {
                let mut stream = stream.into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(_)) => {}
                        Ok(None) => panic!("the stream ended well"),
                        Err(status) => break status,
                    }
                }
            }
        };
        assert!(started.elapsed() < Duration::from_secs(1));
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        eventually("nobody works", async || decode.n_open() + prefill.n_open() == 0).await;
        status.get_error_details().error_info().map(|info| info.metadata["stage"].clone())
    };
    let hang = |n| Plan { hang_after: Some(n), ..Plan::default() };
    let slow = Plan { queue: Duration::from_secs(60), ..Plan::default() };
    assert_eq!(stage(Plan::default(), slow).await.as_deref(), Some("queue"));
    assert_eq!(stage(hang(0), Plan::default()).await.as_deref(), Some("prefill"));
    assert_eq!(stage(Plan::default(), hang(3)).await.as_deref(), Some("decode"));
}

#[tokio::test]
async fn quiet_streams_have_heartbeats_and_a_cancel_frees_the_group() {
    let decode = FakeDecode::start(|_, _| Plan { hang_after: Some(1), ..Plan::saying("xy") }).await;
    let mut config = quick_config();
    config.streams.heartbeat_interval = Duration::from_millis(20);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let mut client = router.inference().await;
    let mut stream =
        client.generate_stream(stream_request(GenerateOptions::default())).await.unwrap().into_inner();
    let mut n_heartbeats = 0;
    while n_heartbeats < 2 {
        let event = stream.message().await.unwrap().unwrap().event.unwrap();
        n_heartbeats += usize::from(matches!(event, Event::Heartbeat(_)));
    }
    drop(stream);
    eventually("the group is cancelled", async || decode.n_open() == 0).await;
}

#[tokio::test]
async fn a_router_whose_places_are_taken_does_not_tokenize_either() {
    let decode = FakeDecode::start(|_, _| Plan { hang_after: Some(1), ..Plan::saying("xy") }).await;
    let mut config = quick_config();
    (config.limits.max_choices, config.limits.max_inflight) = (1, 1);
    let router = TestRouter::start_with(config, &[&decode], &[]).await;
    let mut client = router.inference().await;
    let tokenize = || TokenizeRequest { prompt: text("x"), ..Default::default() };
    client.tokenize(tokenize()).await.unwrap();
    let mut held =
        client.generate_stream(stream_request(GenerateOptions::default())).await.unwrap().into_inner();
    held.message().await.unwrap();
    assert_eq!(client.tokenize(tokenize()).await.unwrap_err().code(), Code::ResourceExhausted);
    let detokenize = DetokenizeRequest { token_ids: vec![1], ..Default::default() };
    assert_eq!(client.detokenize(detokenize).await.unwrap_err().code(), Code::ResourceExhausted);
    drop(held);
    eventually("the place is free again", async || client.clone().tokenize(tokenize()).await.is_ok()).await;
}

#[tokio::test]
async fn headers_wait_for_a_worker_so_that_a_refusal_can_be_retried() {
    let full = || WorkerError::QueueFull { queue: "waiting", len: 8, max: 8 };
    let (router, _decode) = simple(Plan { refuse: Some(full), ..Plan::default() }).await;
    let mut client = router.inference().await;
    let status = client.generate_stream(stream_request(GenerateOptions::default())).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
    let details = status.get_error_details();
    assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_secs(1)));
    assert!(details.quota_failure().unwrap().violations[0].subject.contains("8 of 8"));
}

#[tokio::test]
async fn priority_and_salt_reach_the_worker() {
    let (router, decode) = simple(Plan::saying("x")).await;
    let options =
        GenerateOptions { priority: Some(-3), cache_salt: Some("tenant".to_owned()), ..Default::default() };
    router.inference().await.generate(request(options)).await.unwrap();
    let call = &decode.calls()[0];
    assert_eq!((call.priority, call.prompt.cache_salt.as_slice()), (-3, b"tenant".as_slice()));
}

/// The end tokens that the tokenizer's files name are news to a worker, which reads the model's only: it would go on.
#[tokio::test]
async fn a_worker_is_told_every_token_that_ends_an_output() {
    let (router, decode) = simple(Plan::saying("x")).await;
    let mut client = router.inference().await;
    for (stop_token_ids, ignore_eos, want) in [
        (vec![], false, vec![EOS]),
        (vec![5], false, vec![5, EOS]),
        (vec![5], true, vec![5]),
        (vec![EOS], false, vec![EOS]),
    ] {
        let max_tokens = Some(4);
        let options = GenerateOptions {
            stop_token_ids,
            ignore_eos: Some(ignore_eos),
            max_tokens,
            ..Default::default()
        };
        client.generate(request(options)).await.unwrap();
        let told = decode.calls().last().unwrap().sampling.stop_token_ids.clone();
        assert_eq!(told.into_iter().map(|token| token.0).collect::<Vec<_>>(), want);
    }
}

#[tokio::test]
async fn the_model_is_described_with_limits_and_groups() {
    let (router, _decode) = simple(Plan::default()).await;
    let mut models = router.models().await;
    let listed = models.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    let model = models.get_model(GetModelRequest::default()).await.unwrap().into_inner().model.unwrap();
    assert_eq!(listed, std::slice::from_ref(&model));
    let limits = model.limits.unwrap();
    assert_eq!((limits.max_context_len, limits.vocab_size, limits.max_choices), (256, 264, 64));
    assert!(model.capabilities.unwrap().chat);
    let group = &model.groups[0];
    assert_eq!((group.name.as_str(), group.n_ranks, group.dcp_size), ("g", 2, 2));
    let unknown = GetModelRequest { name: "other".to_owned() };
    assert_eq!(models.get_model(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn five_hundred_streams_opened_and_cancelled_in_turn_leave_the_connection_alive() {
    let (router, decode) = simple(Plan { pace: Duration::from_millis(1), ..Plan::default() }).await;
    let mut client = router.inference().await;
    for _ in 0..500 {
        let request = stream_request(GenerateOptions::default());
        let mut stream = client.generate_stream(request).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
    }
    eventually("every stream is cancelled", async || decode.n_open() == 0).await;
    assert!(
        client.generate(request(GenerateOptions { max_tokens: Some(2), ..Default::default() })).await.is_ok()
    );
}

#[tokio::test]
async fn health_is_told_for_each_service_and_for_all() {
    use tonic_health::pb::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    };
    let (router, decode) = simple(Plan::default()).await;
    let mut health = HealthClient::new(router.channel().await);
    let status = async |health: &mut HealthClient<Channel>, service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        health.check(request).await.map(|answer| answer.into_inner().status())
    };
    for service in ["", "longreach.inference.v1.InferenceService", "longreach.inference.v1.ModelService"] {
        let wanted = async || status(&mut health.clone(), service).await.unwrap() == ServingStatus::Serving;
        eventually("the service is healthy", wanted).await;
    }
    assert_eq!(status(&mut health, "other").await.unwrap_err().code(), Code::NotFound);
    decode.kill();
    let wanted = async || status(&mut health.clone(), "").await.unwrap() == ServingStatus::NotServing;
    eventually("no group, no health", wanted).await;
}

#[tokio::test]
async fn both_forms_of_reflection_list_the_public_services() {
    macro_rules! services {
        ($router:expr, $version:ident) => {{
            use tonic_reflection::pb::$version::{
                ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
                server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
            };
            let mut client = ServerReflectionClient::new($router.channel().await);
            let list = MessageRequest::ListServices(String::new());
            let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
            let requests = futures::stream::iter([request]);
            let mut answers = client.server_reflection_info(requests).await.unwrap().into_inner();
            match answers.message().await.unwrap().unwrap().message_response {
                Some(MessageResponse::ListServicesResponse(list)) => {
                    list.service.into_iter().map(|service| service.name).collect::<Vec<String>>()
                }
                other => panic!("{other:?}"),
            }
        }};
    }
    let (router, _decode) = simple(Plan::default()).await;
    for mut names in [services!(router, v1), services!(router, v1alpha)] {
        names.sort();
        let public: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| name.starts_with("longreach")).collect();
        assert_eq!(
            public,
            ["longreach.inference.v1.InferenceService", "longreach.inference.v1.ModelService"]
        );
        assert!(names.iter().any(|name| name == "grpc.health.v1.Health"), "{names:?}");
    }
}

#[tokio::test]
async fn a_prompt_of_three_million_tokens_passes_the_message_limits() {
    let decode = FakeDecode::start_sized(Default::default(), 4_000_000, |_, _| Plan::saying("x")).await;
    let router = TestRouter::start(&[&decode], &[]).await;
    let ids = vec![200; 3_000_000];
    let prompt = Some(Prompt { prompt: Some(prompt::Prompt::TokenIds(TokenIds { ids })) });
    let mut client = router.inference().await.max_encoding_message_size(usize::MAX);
    let answer =
        client.generate(GenerateRequest { prompt, ..Default::default() }).await.unwrap().into_inner();
    assert_eq!(answer.usage.unwrap().prompt_tokens, 3_000_000);
    assert_eq!(decode.calls()[0].prompt.tokens.len(), 3_000_000);
}
