//! Worker doubles.
//!
//! What a double would say on an undisturbed run depends on the prompt, the sampling parameters and the index of the
//! token alone, as with real workers; a plan says where the run is disturbed.

use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, stream};
use longreach_proto::{
    WIRE_VERSION, WorkerError,
    worker::{
        DecodeEvent, DecodeHandler, EventStream, FirstToken, GenerateRequest, GroupInfo, KvLayout,
        OutputToken, PoolState, PrefillEvent, PrefillHandler, PrefillInfo, RankTarget, Reservation,
        RunRequest, decode_server, prefill_server,
    },
};
use longreach_types::{
    Epoch, FinishReason, HandoffId, KvDtype, Prompt, SamplingParams, TokenId, TokenLogprob, TokenLogprobs,
};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};
use tonic::transport::{Server, server::TcpIncoming};

use super::model::EOS;

/// Rows of the workers' vocabulary: padded, as those of models are, beyond what the tokenizer has.
const VOCAB_SIZE: usize = 264;

/// What a worker does with one call.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The output, which ends with the end token; `None` for letters that depend on prompt and seed, without end.
    pub(crate) output: Option<Vec<u32>>,
    /// The group computes the prompt itself.
    pub(crate) prefilled_here: bool,
    /// Prompt tokens found in the cache.
    pub(crate) cached_len: usize,
    /// Refuses at once.
    pub(crate) refuse: Option<fn() -> WorkerError>,
    /// Fails after this many tokens of this call.
    pub(crate) fail_after: Option<(usize, fn() -> WorkerError)>,
    /// Says nothing more after this many tokens of this call.
    pub(crate) hang_after: Option<usize>,
    /// Ends the stream without a finish after this many tokens of this call.
    pub(crate) cut_after: Option<usize>,
    /// Pause before that end.
    pub(crate) cut_pause: Duration,
    /// A prefill worker that hands everything over and is then lost before it can say so.
    pub(crate) lost_at_handoff: bool,
    /// Stops its whole process, so to speak, after this many tokens of this call: connections stay open and nobody
    /// answers.
    pub(crate) freeze_after: Option<usize>,
    /// Leaves out the token with this index.
    pub(crate) skip_idx: Option<usize>,
    /// Pause before each token.
    pub(crate) pace: Duration,
    /// Pause before blocks are reserved.
    pub(crate) queue: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            output: None,
            prefilled_here: true,
            cached_len: 0,
            refuse: None,
            fail_after: None,
            hang_after: None,
            cut_after: None,
            cut_pause: Duration::ZERO,
            lost_at_handoff: false,
            freeze_after: None,
            skip_idx: None,
            pace: Duration::ZERO,
            queue: Duration::ZERO,
        }
    }
}

impl Plan {
    /// Says `text`, then ends.
    pub(crate) fn saying(text: &str) -> Self {
        Self { output: Some(text.bytes().map(u32::from).collect()), ..Self::default() }
    }

    /// Leaves the prompt to a prefill worker.
    pub(crate) fn split(self) -> Self {
        Self { prefilled_here: false, ..self }
    }

    /// The token with index `idx`.
    fn token(&self, prompt: &[TokenId], sampling: &SamplingParams, idx: usize) -> TokenId {
        TokenId(match &self.output {
            Some(output) => output.get(idx).copied().unwrap_or(EOS),
            None => {
                let seed = if sampling.temperature > 0.0 { sampling.seed } else { 0 };
                let mut mixed = seed ^ (prompt.len() as u64) << 32 ^ (idx as u64).wrapping_mul(0x9e37_79b9);
                mixed = mixed.wrapping_mul(0x94d0_49bb_1331_11eb);
                u32::from(b'a') + ((mixed >> 40) % 26) as u32
            }
        })
    }

    fn output_token(&self, prompt: &[TokenId], sampling: &SamplingParams, idx: usize) -> OutputToken {
        let token = self.token(prompt, sampling, idx);
        let logprobs = sampling.top_logprobs.map(|n| TokenLogprobs {
            sampled: TokenLogprob { token, logprob: -0.5 },
            top: (0..n as u32)
                .map(|i| match i {
                    0 => TokenLogprob { token, logprob: -0.5 },
                    // Masked tokens are impossible: JSON has no number for that.
                    i => TokenLogprob { token: TokenId(i), logprob: f32::NEG_INFINITY },
                })
                .collect(),
        });
        OutputToken { output_idx: idx, token, logprobs }
    }
}

/// Why a token ends its output, if it does.
fn finish_of(token: &OutputToken, sampling: &SamplingParams) -> Option<FinishReason> {
    let id = token.token;
    if sampling.stop_token_ids.contains(&id) {
        Some(FinishReason::StopToken(id))
    } else if id.0 == EOS && !sampling.ignore_eos {
        Some(FinishReason::Eos(id))
    } else {
        (token.output_idx + 1 >= sampling.max_tokens).then_some(FinishReason::Length)
    }
}

/// Which hand-offs are complete: stands for the KV that real workers send each other.
#[derive(Debug, Default)]
pub(crate) struct Handoffs {
    done: watch::Sender<HashSet<u128>>,
}

impl Handoffs {
    fn complete(&self, handoff: HandoffId) {
        self.done.send_modify(|done| {
            done.insert(handoff.0);
        });
    }

    async fn wait(&self, handoff: HandoffId) {
        let mut done = self.done.subscribe();
        done.wait_for(|done| done.contains(&handoff.0)).await.unwrap();
    }
}

type Planner<R> = Box<dyn Fn(usize, &R) -> Plan + Send + Sync>;

/// What a double remembers.
struct Shared<R> {
    plan: Planner<R>,
    handoffs: Arc<Handoffs>,
    calls: Mutex<Vec<R>>,
    n_open: Arc<AtomicUsize>,
    n_said: Arc<AtomicUsize>,
    n_descriptions: AtomicUsize,
    max_seq_len: usize,
    kv_dtype: Mutex<KvDtype>,
}

/// Counts an open stream for as long as it lives.
struct OpenStream(Arc<AtomicUsize>);

impl OpenStream {
    fn new(n_open: &Arc<AtomicUsize>) -> Self {
        n_open.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(n_open))
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A double and the runtime it runs on, so that it can die with all its connections.
pub(crate) struct Fake<R> {
    shared: Arc<Shared<R>>,
    addr: SocketAddr,
    runtime: Mutex<Option<Runtime>>,
}

/// A decode group.
pub(crate) type FakeDecode = Fake<GenerateRequest>;
/// A prefill worker.
pub(crate) type FakePrefill = Fake<RunRequest>;

impl<R: Clone + Send + 'static> Fake<R> {
    fn new(shared: Arc<Shared<R>>, addr: SocketAddr, runtime: Runtime) -> Self {
        Self { shared, addr, runtime: Mutex::new(Some(runtime)) }
    }

    /// Where it listens.
    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Streams that are open.
    pub(crate) fn n_open(&self) -> usize {
        self.shared.n_open.load(Ordering::SeqCst)
    }

    /// Tokens that were taken from it.
    pub(crate) fn n_said(&self) -> usize {
        self.shared.n_said.load(Ordering::SeqCst)
    }

    /// The calls it got.
    pub(crate) fn calls(&self) -> Vec<R> {
        self.shared.calls.lock().unwrap().clone()
    }

    /// How often it was asked about itself.
    pub(crate) fn n_descriptions(&self) -> usize {
        self.shared.n_descriptions.load(Ordering::SeqCst)
    }

    /// From now on it stores KV in `kv_dtype`.
    pub(crate) fn set_kv_dtype(&self, kv_dtype: KvDtype) {
        *self.shared.kv_dtype.lock().unwrap() = kv_dtype;
    }

    /// Ends it, and every connection of it.
    pub(crate) fn kill(&self) {
        if let Some(runtime) = self.runtime.lock().unwrap().take() {
            runtime.shutdown_background();
        }
    }

    /// Waits until it was asked about itself.
    pub(crate) async fn wait_described(&self) {
        let described = async || self.shared.n_descriptions.load(Ordering::SeqCst) > 0;
        super::eventually("the worker is asked about itself", described).await;
    }
}

impl<R> Drop for Fake<R> {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.lock().unwrap().take() {
            runtime.shutdown_background();
        }
    }
}

fn shared<R>(
    handoffs: Arc<Handoffs>,
    max_seq_len: usize,
    plan: impl Fn(usize, &R) -> Plan + Send + Sync + 'static,
) -> Arc<Shared<R>> {
    Arc::new(Shared {
        plan: Box::new(plan),
        handoffs,
        calls: Mutex::default(),
        n_open: Arc::default(),
        n_said: Arc::default(),
        n_descriptions: AtomicUsize::new(0),
        max_seq_len,
        kv_dtype: Mutex::new(KvDtype::F32),
    })
}

impl<R> Shared<R> {
    fn layout(&self) -> KvLayout {
        layout(*self.kv_dtype.lock().unwrap())
    }
}

impl<R: Clone> Shared<R> {
    fn accept(&self, call: &R) -> Plan {
        let mut calls = self.calls.lock().unwrap();
        calls.push(call.clone());
        (self.plan)(calls.len() - 1, call)
    }
}

fn listen() -> (std::net::TcpListener, SocketAddr, Runtime) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let addr = listener.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    (listener, addr, runtime)
}

impl FakeDecode {
    /// A group that hands nothing over, planned by call number and call.
    pub(crate) async fn start(
        plan: impl Fn(usize, &GenerateRequest) -> Plan + Send + Sync + 'static,
    ) -> Self {
        Self::start_with(Arc::default(), plan).await
    }

    /// A group that takes hand-offs.
    pub(crate) async fn start_with(
        handoffs: Arc<Handoffs>,
        plan: impl Fn(usize, &GenerateRequest) -> Plan + Send + Sync + 'static,
    ) -> Self {
        Self::start_sized(handoffs, 256, plan).await
    }

    /// A group that holds sequences of `max_seq_len` tokens.
    pub(crate) async fn start_sized(
        handoffs: Arc<Handoffs>,
        max_seq_len: usize,
        plan: impl Fn(usize, &GenerateRequest) -> Plan + Send + Sync + 'static,
    ) -> Self {
        let shared = shared(handoffs, max_seq_len, plan);
        let (listener, addr, runtime) = listen();
        let service = decode_server(Arc::new(DecodeDouble(Arc::clone(&shared))));
        runtime.spawn(async move {
            let incoming =
                TcpIncoming::from(TcpListener::from_std(listener).unwrap()).with_nodelay(Some(true));
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self::new(shared, addr, runtime)
    }
}

impl FakePrefill {
    /// A worker planned by call number and call.
    pub(crate) async fn start(
        handoffs: Arc<Handoffs>,
        plan: impl Fn(usize, &RunRequest) -> Plan + Send + Sync + 'static,
    ) -> Self {
        let shared = shared(handoffs, 256, plan);
        let (listener, addr, runtime) = listen();
        let service = prefill_server(Arc::new(PrefillDouble(Arc::clone(&shared))));
        runtime.spawn(async move {
            let incoming =
                TcpIncoming::from(TcpListener::from_std(listener).unwrap()).with_nodelay(Some(true));
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self::new(shared, addr, runtime)
    }
}

/// How a double that stores `kv_dtype` holds KV.
pub(crate) fn layout(kv_dtype: KvDtype) -> KvLayout {
    KvLayout {
        model_fingerprint: [7; 16],
        n_layers: 2,
        n_kv_heads: 1,
        head_dim: 8,
        kv_dtype,
        block_size: 16,
        n_shards: 8,
        wire_version: WIRE_VERSION,
    }
}

struct DecodeDouble(Arc<Shared<GenerateRequest>>);

impl DecodeHandler for DecodeDouble {
    async fn generate(&self, request: GenerateRequest) -> Result<EventStream<DecodeEvent>, WorkerError> {
        let plan = self.0.accept(&request);
        if let Some(refuse) = plan.refuse {
            return Err(refuse());
        }
        let open = OpenStream::new(&self.0.n_open);
        let script = DecodeScript::new(plan, request, &self.0);
        let n_said = Arc::clone(&self.0.n_said);
        Ok(stream::unfold((script, open, n_said), |(mut script, open, n_said)| async move {
            let event = script.next().await?;
            n_said.fetch_add(1, Ordering::SeqCst);
            Some((event, (script, open, n_said)))
        })
        .boxed())
    }

    async fn group(&self) -> Result<GroupInfo, WorkerError> {
        self.0.n_descriptions.fetch_add(1, Ordering::SeqCst);
        Ok(GroupInfo {
            group_id: "g".to_owned(),
            epoch: Epoch(1),
            layout: self.0.layout(),
            n_ranks: 2,
            dcp_size: 2,
            max_seq_len: self.0.max_seq_len,
            vocab_size: VOCAB_SIZE,
            pools: vec![PoolState { total: 64, free: 64, ..PoolState::default() }; 2],
            n_waiting: 0,
            n_running: 0,
        })
    }
}

/// What a group says, in order.
struct DecodeScript {
    plan: Plan,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    handoffs: Arc<Handoffs>,
    handoff: HandoffId,
    layout: KvLayout,
    is_reserved: bool,
    next_idx: usize,
    n_said: usize,
    finish: Option<FinishReason>,
    is_over: bool,
}

impl DecodeScript {
    fn new(plan: Plan, request: GenerateRequest, shared: &Shared<GenerateRequest>) -> Self {
        static HANDOFF: AtomicU64 = AtomicU64::new(1);
        let GenerateRequest { prompt, sampling, .. } = request;
        let next_idx = prompt.n_resumed + usize::from(!plan.prefilled_here);
        Self {
            plan,
            prompt: client_prompt(&prompt),
            sampling,
            handoffs: Arc::clone(&shared.handoffs),
            layout: shared.layout(),
            handoff: HandoffId(HANDOFF.fetch_add(1, Ordering::SeqCst).into()),
            is_reserved: false,
            next_idx,
            n_said: 0,
            finish: None,
            is_over: false,
        }
    }

    async fn next(&mut self) -> Option<Result<DecodeEvent, WorkerError>> {
        if !std::mem::replace(&mut self.is_reserved, true) {
            tokio::time::sleep(self.plan.queue).await;
            return Some(Ok(DecodeEvent::Reserved(self.reservation())));
        }
        if self.is_over {
            return None;
        }
        if let Some(reason) = self.finish {
            self.is_over = true;
            return Some(Ok(DecodeEvent::Finish(reason)));
        }
        if self.n_said == 0 && !self.plan.prefilled_here {
            self.handoffs.wait(self.handoff).await;
        }
        if let Some((_, fail)) = self.plan.fail_after.filter(|(n, _)| *n == self.n_said) {
            self.is_over = true;
            return Some(Err(fail()));
        }
        if self.plan.cut_after == Some(self.n_said) {
            tokio::time::sleep(self.plan.cut_pause).await;
            return None;
        }
        if self.plan.hang_after == Some(self.n_said) {
            std::future::pending::<()>().await;
        }
        while self.plan.freeze_after == Some(self.n_said) {
            // The only thread of its runtime.
            std::thread::park();
        }
        if !self.plan.pace.is_zero() {
            tokio::time::sleep(self.plan.pace).await;
        }
        if self.plan.skip_idx == Some(self.next_idx) {
            self.next_idx += 1;
        }
        let token = self.plan.output_token(&self.prompt, &self.sampling, self.next_idx);
        self.next_idx += 1;
        self.n_said += 1;
        self.finish = finish_of(&token, &self.sampling);
        Some(Ok(DecodeEvent::Token(token)))
    }

    fn reservation(&self) -> Reservation {
        let rank = |rank| RankTarget {
            rank,
            dcp_rank: rank,
            endpoint: "http://127.0.0.1:1".to_owned(),
            kv_heads: 0..1,
        };
        Reservation {
            handoff: self.handoff,
            epoch: Epoch(1),
            cached_len: self.plan.cached_len,
            prefilled_here: self.plan.prefilled_here,
            layout: self.layout.clone(),
            blocks: 0..self.prompt.len().div_ceil(16),
            dcp_size: 2,
            ranks: vec![rank(0), rank(1)],
        }
    }
}

/// The part of a prompt that the client gave.
fn client_prompt(prompt: &Prompt) -> Vec<TokenId> {
    prompt.tokens[..prompt.prompt_len()].to_vec()
}

struct PrefillDouble(Arc<Shared<RunRequest>>);

impl PrefillHandler for PrefillDouble {
    async fn run(&self, request: RunRequest) -> Result<EventStream<PrefillEvent>, WorkerError> {
        let plan = self.0.accept(&request);
        if let Some(refuse) = plan.refuse {
            return Err(refuse());
        }
        let open = OpenStream::new(&self.0.n_open);
        let (handoffs, handoff) = (Arc::clone(&self.0.handoffs), request.reservation.handoff);
        let idx = request.prompt.n_resumed;
        let token = plan.output_token(&client_prompt(&request.prompt), &request.sampling, idx);
        let finish = finish_of(&token, &request.sampling);
        let cached_len = plan.cached_len;
        Ok(stream::unfold((0, open), move |(step, open)| {
            let (plan, token, handoffs) = (plan.clone(), token.clone(), Arc::clone(&handoffs));
            async move {
                if let Some((_, fail)) = plan.fail_after.filter(|(n, _)| *n == step) {
                    return Some((Err(fail()), (usize::MAX, open)));
                }
                if plan.cut_after == Some(step) {
                    return None;
                }
                if plan.hang_after == Some(step) {
                    std::future::pending::<()>().await;
                }
                let event = match step {
                    0 => {
                        tokio::time::sleep(plan.pace).await;
                        PrefillEvent::FirstToken(FirstToken { token, finish, cached_len })
                    }
                    1 if finish.is_none() => {
                        handoffs.complete(handoff);
                        if plan.lost_at_handoff {
                            tokio::time::sleep(Duration::from_millis(50)).await;
                            return Some((Err(WorkerError::Unavailable("lost")), (usize::MAX, open)));
                        }
                        PrefillEvent::HandoffDone { sent_bytes: 1 }
                    }
                    _ => return None,
                };
                Some((Ok(event), (step + 1, open)))
            }
        })
        .boxed())
    }

    async fn worker(&self) -> Result<PrefillInfo, WorkerError> {
        self.0.n_descriptions.fetch_add(1, Ordering::SeqCst);
        Ok(PrefillInfo {
            worker_id: "p".to_owned(),
            layout: self.0.layout(),
            max_seq_len: self.0.max_seq_len,
            vocab_size: VOCAB_SIZE,
            pool: PoolState { total: 64, free: 64, ..PoolState::default() },
            n_waiting: 0,
            n_running: 0,
            queued_tokens: 0,
        })
    }
}
