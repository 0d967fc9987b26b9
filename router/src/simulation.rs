//! The router's thinking without its faces, for the simulation of the whole cluster: routing, health, discovery and
//! the recovery of outputs, over any [`Dial`] and any store.
//!
//! It adds no behaviour. What it leaves out is text, admission and the wire formats, which have tests of their own.

use std::sync::Arc;

use longreach_proto::worker::OutputToken;
use longreach_service::Lifecycle;
use longreach_types::{FinishReason, RequestId, SamplingParams, TokenId, WorkerId};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::{
    call::CallContext,
    discovery::{self, WorkerSource},
    dispatch::{Choice, ChoiceEvent, ChoiceSpec, Dispatcher, RecoveryConfig},
    error::ServiceError,
    metrics::Metrics,
    random::Random,
    workers::{Dial, Fleet, Pool, WorkerConfig},
};

/// A router without faces.
pub struct SimRouter {
    dispatcher: Arc<Dispatcher>,
}

/// One output to be made.
#[derive(Clone, Debug)]
pub struct OutputSpec {
    /// Ours, for logs.
    pub request_id: RequestId,
    /// What to continue.
    pub prompt: Arc<[TokenId]>,
    /// How.
    pub sampling: SamplingParams,
    /// Higher goes first.
    pub priority: i32,
    /// The client's session.
    pub session: Option<String>,
    /// The model's end-of-sequence tokens.
    pub eos: Arc<[TokenId]>,
}

/// An output in the making. Dropping it ends the work for it.
pub struct Output(Choice);

/// What happens to an output.
#[derive(Clone, Debug)]
pub enum OutputEvent {
    /// A decode group has reserved blocks.
    Accepted,
    /// The next token.
    Token(OutputToken),
    /// It is complete; comes last, once.
    Finish(FinishReason),
}

/// Why an output has no (complete) answer, as a client is told.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct OutputError {
    /// The gRPC code.
    pub code: Code,
    /// The error's name in the published table.
    pub reason: &'static str,
    /// In words.
    pub message: String,
}

impl SimRouter {
    /// A router that reaches workers with `dial` and breaks ties with the numbers of `seed`.
    pub fn new(
        (workers, recovery): (WorkerConfig, RecoveryConfig),
        dial: Arc<dyn Dial>,
        lifecycle: &Lifecycle,
        seed: u64,
    ) -> Self {
        let random = Random::seeded(seed);
        let metrics = longreach_service::Metrics::new("router").register(Metrics::new);
        let means = (dial, Arc::new(Fleet::new(metrics.clone())));
        let decodes = Pool::new(workers, lifecycle.clone(), means.clone(), random.clone());
        let prefills = Pool::new(workers, lifecycle.clone(), means, random.clone());
        Self { dispatcher: Arc::new(Dispatcher { decodes, prefills, recovery, metrics, random }) }
    }

    /// Keeps the router's workers those of `source` until `cancel`.
    pub async fn follow(&self, source: WorkerSource, cancel: CancellationToken) {
        discovery::follow(source, Arc::clone(&self.dispatcher), cancel).await;
    }

    /// Forgets all workers, and with them the tasks that ask them for their load.
    pub fn disconnect(&self) {
        self.dispatcher.decodes.set_members(&[]);
        self.dispatcher.prefills.set_members(&[]);
    }

    /// Begins an output when it is first asked for its next event.
    pub fn output(&self, spec: OutputSpec) -> Output {
        let OutputSpec { request_id, prompt, sampling, priority, session, eos } = spec;
        let call =
            CallContext { client_id: request_id.0.clone(), request_id, deadline: None, trace_parent: None };
        let spec = ChoiceSpec { prompt, cache_salt: Vec::new(), sampling, priority, session, eos };
        Output(Choice::new(Arc::clone(&self.dispatcher), Arc::new(call), spec))
    }

    /// The lives of workers it knows, decode groups first, each in the order in which they came.
    pub fn members(&self) -> [Vec<(WorkerId, u64)>; 2] {
        [self.dispatcher.decodes.lives(), self.dispatcher.prefills.lives()]
    }

    /// Whether at least `n_workers` workers have described themselves and answer.
    pub fn is_ready(&self, n_workers: usize) -> bool {
        self.dispatcher.decodes.n_ready() + self.dispatcher.prefills.n_ready() >= n_workers
    }

    /// Tokens of work that it believes to have with workers: none when no output is in the making.
    pub fn own_tokens(&self) -> u64 {
        self.dispatcher.decodes.own_tokens() + self.dispatcher.prefills.own_tokens()
    }
}

impl Output {
    /// The next event, or `None` after the last.
    pub async fn next(&mut self) -> Result<Option<OutputEvent>, OutputError> {
        Ok(self.0.next().await?.map(|event| match event {
            ChoiceEvent::Accepted { .. } => OutputEvent::Accepted,
            ChoiceEvent::Token { token, .. } => OutputEvent::Token(token),
            ChoiceEvent::Finish(reason) => OutputEvent::Finish(reason),
        }))
    }
}

impl From<ServiceError> for OutputError {
    fn from(error: ServiceError) -> Self {
        let class = error.class();
        Self { code: class.code, reason: class.reason, message: error.to_string() }
    }
}
