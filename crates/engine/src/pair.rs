//! A prefill engine and a decode group in one process, joined without servers: what `longreach generate` runs, and
//! the shortest whole path for tests. The steps are those of a router's dispatch, without text, choice or retry.

use std::sync::Arc;

use futures::StreamExt;
use longreach_proto::{WorkerError, worker::OutputToken};
use longreach_types::{Epoch, FinishReason, Prompt, RequestId, SamplingParams};
use tokio::runtime::Handle;

use crate::{
    group::{DecodeGroup, start_prefill},
    handle::{EngineEvent, SeqStream, Submission, Work},
    member::RunningEngine,
    setup::{BuildError, EngineConfig, Model},
    transport::LocalTransport,
};

/// Two engines and the KV path between them.
pub struct EnginePair {
    /// Computes prompts.
    pub prefill: RunningEngine,
    /// Decodes.
    pub decode: RunningEngine,
}

/// One finished output.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The tokens, in order.
    pub tokens: Vec<OutputToken>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Prompt tokens found in a prefix cache, of either side.
    pub cached_len: usize,
    /// Whether KV came from the prefill engine.
    pub is_handed_off: bool,
}

impl EnginePair {
    /// Builds both sides. `config.shape` is that of the decode group.
    pub fn start(
        model: &Model,
        config: &EngineConfig,
        prefill_threads: usize,
        runtime: &Handle,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, BuildError> {
        let group = DecodeGroup::load(model, config, progress)?.enlist(Epoch(1));
        let transport = LocalTransport::default();
        let inlets = group.inlets().into_iter().enumerate();
        let endpoints = inlets.map(|(rank, inlet)| {
            let endpoint = format!("rank-{rank}");
            transport.insert(endpoint.clone(), inlet);
            endpoint
        });
        let decode = group.start(endpoints.collect(), runtime)?;
        let config = EngineConfig { n_threads: prefill_threads, ..config.clone() };
        let prefill = start_prefill(model, &config, Arc::new(transport), runtime, progress)?;
        Ok(Self { prefill, decode })
    }

    /// Generates one output. `on_token` sees each token as it comes.
    pub async fn generate(
        &self,
        request_id: RequestId,
        prompt: Prompt,
        sampling: SamplingParams,
        mut on_token: impl FnMut(&OutputToken),
    ) -> Result<Generated, WorkerError> {
        let submission = Submission { request_id, prompt, sampling, priority: 0, work: Work::Decode };
        let mut decode = self.decode.handle.submit(submission.clone()).await?;
        let EngineEvent::Reserved(reservation) = next(&mut decode).await? else {
            return Err(WorkerError::Internal("the first event was not a reservation".to_owned()));
        };
        let mut tokens = Vec::new();
        let mut cached_len = reservation.cached_len;
        let is_handed_off = !reservation.prefilled_here;
        let mut prefill = None;
        if is_handed_off {
            let work = Work::Prefill(reservation);
            let mut stream = self.prefill.handle.submit(Submission { work, ..submission }).await?;
            let EngineEvent::FirstToken(first) = next(&mut stream).await? else {
                return Err(WorkerError::Internal("the first event was not the first token".to_owned()));
            };
            cached_len = cached_len.max(first.cached_len);
            on_token(&first.token);
            tokens.push(first.token);
            if let Some(finish) = first.finish {
                return Ok(Generated { tokens, finish, cached_len, is_handed_off });
            }
            prefill = Some(stream);
        }
        loop {
            let event = match &mut prefill {
                // Either leg's failure ends the request at once; a finished prefill leg has nothing more to say.
                Some(stream) => tokio::select! {
                    event = next(stream) => {
                        event?;
                        prefill = None;
                        continue;
                    }
                    event = next(&mut decode) => event?,
                },
                None => next(&mut decode).await?,
            };
            match event {
                EngineEvent::Token(token) => {
                    on_token(&token);
                    tokens.push(token);
                }
                EngineEvent::Finish(finish) => {
                    return Ok(Generated { tokens, finish, cached_len, is_handed_off });
                }
                event => return Err(WorkerError::Internal(format!("unexpected event {event:?}"))),
            }
        }
    }

    /// Stops both sides and waits for them.
    pub async fn stop(self) -> Result<(), String> {
        let (prefill, decode) = tokio::join!(self.prefill.stop(), self.decode.stop());
        prefill.and(decode)
    }
}

async fn next(stream: &mut SeqStream) -> Result<EngineEvent, WorkerError> {
    stream.next().await.unwrap_or(Err(WorkerError::Unavailable("the engine has stopped")))
}
