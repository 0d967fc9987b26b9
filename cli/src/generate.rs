//! `longreach generate`: the whole engine path on one prompt, with no servers.

use std::{sync::Arc, time::Instant};

use longreach_engine::{EngineConfig, EnginePair, Generated, GrpcTransport, Model, start_prefill};
use longreach_proto::worker::OutputToken;
use longreach_text::{StreamOptions, TextError, TextModel, TextStream};
use longreach_types::{FinishReason, Prompt, RequestId, SamplingParams, TokenId};
use serde::Serialize;
use tokio::runtime::Handle;

use crate::{
    args::GenerateArgs,
    error::CliError,
    model::{self, OpenedFiles, blocking},
    ranks::RankProcesses,
};

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    model: String,
    prompt_ids: Vec<u32>,
    token_ids: Vec<u32>,
    /// None where the model has no tokenizer.
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<Logprobs>>,
    finish_reason: &'static str,
    usage: UsageReport,
    timings: Timings,
}

#[derive(Serialize)]
struct Logprobs {
    token_id: u32,
    logprob: Option<f32>,
    top: Vec<(u32, Option<f32>)>,
}

#[derive(Serialize)]
struct UsageReport {
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: usize,
}

/// Seconds, and tokens a second. Loading is not part of prefill or decode.
#[derive(Serialize)]
struct Timings {
    load_seconds: f64,
    prefill_seconds: f64,
    decode_seconds: f64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: Option<f64>,
}

/// Runs the command.
pub(crate) async fn run(args: GenerateArgs) -> Result<(), CliError> {
    let (config, prefill_threads) = args.engine.config(1)?;
    let opened = model::open_files(args.engine.model.clone(), true).await?;
    let text = text(&args, &opened)?;
    let prompt = prompt(&args, text.as_ref())?;
    let sampling = sampling(&args, opened.model.config.vocab_size)?;
    let load_start = Instant::now();
    let (pair, ranks) = start(&args, &opened.model, config, prefill_threads).await?;
    let load_seconds = load_start.elapsed().as_secs_f64();

    let (start, mut first_at) = (Instant::now(), None);
    let id = RequestId("generate".to_owned());
    let on_token = |_: &OutputToken| {
        first_at.get_or_insert_with(Instant::now);
    };
    let generated = pair
        .generate(id, prompt.clone(), sampling, on_token)
        .await
        .map_err(|error| CliError::start(&error))?;
    let (end, first_at) = (Instant::now(), first_at.unwrap_or(start));
    pair.stop().await.map_err(CliError::Start)?;
    if let Some(ranks) = ranks {
        ranks.join().await?;
    }

    let timings = Timings {
        load_seconds,
        prefill_seconds: (first_at - start).as_secs_f64(),
        decode_seconds: (end - first_at).as_secs_f64(),
        prefill_tokens_per_s: prompt.tokens.len() as f64 / (first_at - start).as_secs_f64(),
        decode_tokens_per_s: (generated.tokens.len() > 1)
            .then(|| (generated.tokens.len() - 1) as f64 / (end - first_at).as_secs_f64()),
    };
    let output = text.map(|text| decode(&text, &prompt, &generated)).transpose()?;
    if !args.json {
        let ids =
            || generated.tokens.iter().map(|token| token.token.to_string()).collect::<Vec<_>>().join(",");
        println!("{}", output.unwrap_or_else(ids));
        return Ok(());
    }
    let report = report(opened.name, (&prompt, output), &generated, timings);
    println!("{}", serde_json::to_string(&report).map_err(|error| CliError::start(&error))?);
    Ok(())
}

/// The model's text side. Not needed where the prompt is ids: then a model without a tokenizer gives ids, too.
fn text(args: &GenerateArgs, opened: &OpenedFiles) -> Result<Option<TextModel>, CliError> {
    match TextModel::load(&opened.path) {
        Ok(text) => Ok(Some(text)),
        Err(_) if args.prompt_ids.is_some() => Ok(None),
        Err(error) => Err(CliError::start(&error)),
    }
}

fn sampling(args: &GenerateArgs, vocab_size: usize) -> Result<SamplingParams, CliError> {
    let sampling = SamplingParams {
        temperature: args.temperature,
        seed: args.seed,
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        top_logprobs: args.logprobs,
        ..SamplingParams::default()
    };
    sampling.validate(vocab_size).map_err(|error| CliError::Usage(error.to_string()))?;
    Ok(sampling)
}

/// Both engines, with the ranks of the decode group as threads or as processes.
async fn start(
    args: &GenerateArgs,
    model: &Model,
    config: EngineConfig,
    prefill_threads: usize,
) -> Result<(EnginePair, Option<RankProcesses>), CliError> {
    let (loading, runtime, bar) = (model.clone(), Handle::current(), model::progress("packing"));
    if !args.rank_processes {
        let start = move || EnginePair::start(&loading, &config, prefill_threads, &runtime, &bar);
        return Ok((blocking(start).await?, None));
    }
    let engine_args = args.engine.to_args(config.shape);
    let (decode, ranks) = RankProcesses::start(model, &config, &engine_args).await?;
    let config = EngineConfig { n_threads: prefill_threads, ..config };
    let transport = Arc::new(GrpcTransport::default());
    let prefill = blocking(move || start_prefill(&loading, &config, transport, &runtime, &bar)).await?;
    Ok((EnginePair { prefill, decode }, Some(ranks)))
}

fn prompt(args: &GenerateArgs, text: Option<&TextModel>) -> Result<Prompt, CliError> {
    let tokens = match (&args.prompt_ids, args.prompt.as_ref().zip(text)) {
        (Some(ids), _) => ids.iter().copied().map(TokenId).collect(),
        (None, Some((prompt, text))) => {
            text.encode_prompt(prompt).map_err(|error| CliError::Usage(error.to_string()))?
        }
        (None, None) => Vec::new(),
    };
    if tokens.is_empty() {
        return Err(CliError::Usage("the prompt has no tokens; give --prompt or --prompt-ids".to_owned()));
    }
    if args.resumed >= tokens.len() {
        let (n, all) = (args.resumed, tokens.len());
        return Err(CliError::Usage(format!(
            "--resumed is {n}, of {all} prompt ids; at least one must be prompt"
        )));
    }
    Ok(Prompt { tokens, n_resumed: args.resumed, cache_salt: Vec::new() })
}

/// The output's text.
fn decode(text: &TextModel, prompt: &Prompt, generated: &Generated) -> Result<String, CliError> {
    let failed = |error: TextError| CliError::start(&error);
    let mut stream = TextStream::new(text, &prompt.tokens, StreamOptions::default()).map_err(failed)?;
    let mut output = String::new();
    for token in &generated.tokens {
        output += &stream.push(token.token).map_err(failed)?.text;
    }
    output += &stream.finish().map_err(failed)?.text;
    Ok(output)
}

fn report(
    model: String,
    (prompt, text): (&Prompt, Option<String>),
    generated: &Generated,
    timings: Timings,
) -> Report {
    // JSON has no infinities: an impossible token has no log-probability.
    let finite = |logprob: f32| logprob.is_finite().then_some(logprob);
    let logprobs = generated.tokens.iter().map(|token| {
        token.logprobs.as_ref().map(|entry| Logprobs {
            token_id: entry.sampled.token.0,
            logprob: finite(entry.sampled.logprob),
            top: entry.top.iter().map(|top| (top.token.0, finite(top.logprob))).collect(),
        })
    });
    Report {
        model,
        prompt_ids: prompt.tokens.iter().map(|token| token.0).collect(),
        token_ids: generated.tokens.iter().map(|token| token.token.0).collect(),
        text,
        logprobs: logprobs.collect(),
        finish_reason: match generated.finish {
            FinishReason::Length => "length",
            FinishReason::Eos(_) | FinishReason::StopToken(_) | FinishReason::StopString => "stop",
        },
        usage: UsageReport {
            prompt_tokens: prompt.prompt_len(),
            completion_tokens: generated.tokens.len(),
            cached_tokens: generated.cached_len,
        },
        timings,
    }
}
