//! The worker's gRPC face: requests become submissions, engine events become prefill events.

use futures::StreamExt;
use longreach_engine::{EngineEvent, EngineHandle, Submission, Work, serve::Gate};
use longreach_proto::{
    WorkerError,
    worker::{EventStream, PrefillEvent, PrefillHandler, PrefillInfo, RunRequest},
};
use longreach_worker::Introduction;

/// Answers routers for a prefill worker.
pub(crate) struct Prefill {
    engine: EngineHandle,
    worker_id: String,
    gate: Gate,
    introduction: Introduction,
}

impl Prefill {
    pub(crate) fn new(
        engine: EngineHandle,
        worker_id: String,
        gate: Gate,
        introduction: Introduction,
    ) -> Self {
        Self { engine, worker_id, gate, introduction }
    }
}

impl PrefillHandler for Prefill {
    async fn run(&self, request: RunRequest) -> Result<EventStream<PrefillEvent>, WorkerError> {
        self.gate.check()?;
        let RunRequest { request_id, prompt, sampling, reservation, priority } = request;
        let work = Work::Prefill(reservation);
        let events = self.engine.submit(Submission { request_id, prompt, sampling, priority, work }).await?;
        Ok(events.map(|event| event.and_then(prefill_event)).boxed())
    }

    async fn worker(&self) -> Result<PrefillInfo, WorkerError> {
        // Who asks wants to send work.
        self.gate.check()?;
        let info = self.engine.info();
        self.introduction.asked(info.epoch);
        Ok(PrefillInfo {
            worker_id: self.worker_id.clone(),
            max_seq_len: info.max_seq_len,
            vocab_size: info.vocab_size,
            pool: info.pools().into_iter().next().unwrap_or_default(),
            n_waiting: info.stats.n_waiting,
            n_running: info.stats.n_running + info.stats.n_sending,
            queued_tokens: info.stats.pending_tokens as u64,
            layout: info.layout,
        })
    }
}

fn prefill_event(event: EngineEvent) -> Result<PrefillEvent, WorkerError> {
    match event {
        EngineEvent::FirstToken(first) => Ok(PrefillEvent::FirstToken(first)),
        EngineEvent::HandoffDone { sent_bytes } => Ok(PrefillEvent::HandoffDone { sent_bytes }),
        EngineEvent::Reserved(_) | EngineEvent::Token(_) | EngineEvent::Finish(_) => {
            Err(WorkerError::Internal("a prefill sequence got a decode event".to_owned()))
        }
    }
}
