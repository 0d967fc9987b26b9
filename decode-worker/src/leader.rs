//! The leader's gRPC face: requests become submissions, engine events become decode events.

use futures::StreamExt;
use longreach_engine::{EngineEvent, EngineHandle, Submission, Work, serve::Gate};
use longreach_proto::{
    WorkerError,
    worker::{DecodeEvent, DecodeHandler, EventStream, GenerateRequest, GroupInfo},
};
use longreach_worker::Introduction;
use tokio::sync::watch;

/// Answers routers for a decode group, in all its lives.
pub(crate) struct Leader {
    life: watch::Receiver<Option<EngineHandle>>,
    group_id: String,
    gate: Gate,
    introduction: Introduction,
}

impl Leader {
    pub(crate) fn new(
        life: watch::Receiver<Option<EngineHandle>>,
        group_id: String,
        gate: Gate,
        introduction: Introduction,
    ) -> Self {
        Self { life, group_id, gate, introduction }
    }

    fn engine(&self) -> Result<EngineHandle, WorkerError> {
        self.life.borrow().clone().ok_or(WorkerError::Unavailable("the group is forming"))
    }
}

impl DecodeHandler for Leader {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream<DecodeEvent>, WorkerError> {
        self.gate.check()?;
        let GenerateRequest { request_id, prompt, sampling, priority } = request;
        let submission = Submission { request_id, prompt, sampling, priority, work: Work::Decode };
        let events = self.engine()?.submit(submission).await?;
        Ok(events.map(|event| event.and_then(decode_event)).boxed())
    }

    async fn group(&self) -> Result<GroupInfo, WorkerError> {
        // Who asks wants to send work.
        self.gate.check()?;
        let info = self.engine()?.info();
        self.introduction.asked(info.epoch);
        let pools = info.pools();
        Ok(GroupInfo {
            group_id: self.group_id.clone(),
            epoch: info.epoch,
            n_ranks: info.shape.n_ranks(),
            dcp_size: info.shape.dcp_size(),
            max_seq_len: info.max_seq_len,
            vocab_size: info.vocab_size,
            pools: (0..info.shape.n_ranks())
                .filter_map(|rank| pools.get(info.shape.dcp_rank(rank)).cloned())
                .collect(),
            n_waiting: info.stats.n_waiting,
            n_running: info.stats.n_running + info.stats.n_receiving,
            layout: info.layout,
        })
    }
}

fn decode_event(event: EngineEvent) -> Result<DecodeEvent, WorkerError> {
    match event {
        EngineEvent::Reserved(reservation) => Ok(DecodeEvent::Reserved(reservation)),
        EngineEvent::Token(token) => Ok(DecodeEvent::Token(token)),
        EngineEvent::Finish(reason) => Ok(DecodeEvent::Finish(reason)),
        EngineEvent::FirstToken(_) | EngineEvent::HandoffDone { .. } => {
            Err(WorkerError::Internal("a decode sequence got a prefill event".to_owned()))
        }
    }
}
