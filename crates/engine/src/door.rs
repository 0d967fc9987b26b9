//! A rank's KV service for as long as the process lives: it passes each call on to the door of the current life.

use std::sync::{Arc, PoisonError, RwLock};

use futures::Stream;
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvAck, KvHandler, KvMessage, PullMessage, PullRequest},
};
use tonic::Status;

use crate::inlet::KvInlet;

/// The service. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct KvDoor(Arc<RwLock<Option<KvInlet>>>);

impl KvDoor {
    /// From now on calls go to `inlet`; calls that are on their way stay with the life in which they began.
    pub fn open(&self, inlet: KvInlet) {
        self.set(Some(inlet));
    }

    /// From now on calls are refused: the rank is in no group.
    pub fn close(&self) {
        self.set(None);
    }

    fn set(&self, inlet: Option<KvInlet>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = inlet;
    }

    fn current(&self) -> Result<KvInlet, WorkerError> {
        let inlet = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        inlet.ok_or(WorkerError::Unavailable("the group is forming"))
    }
}

impl KvHandler for KvDoor {
    async fn push(
        &self,
        messages: impl Stream<Item = Result<KvMessage, Status>> + Send + Unpin + 'static,
    ) -> Result<KvAck, WorkerError> {
        self.current()?.push(messages).await
    }

    async fn pull(&self, request: PullRequest) -> Result<EventStream<PullMessage>, WorkerError> {
        self.current()?.pull(request).await
    }
}
