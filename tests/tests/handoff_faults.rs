//! Whatever happens to a hand-off on its way, the output is right or fails, and both sides are as before.

#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream, stream::BoxStream};
use longreach_engine::{
    DecodeGroup, EngineConfig, EnginePair, KvTransport, LocalTransport, Model, start_prefill,
};
use longreach_model::files::ModelFiles;
use longreach_proto::{
    WorkerError,
    worker::{EventStream, KvAck, KvChunk, KvMessage, PullMessage, PullRequest},
};
use longreach_tests::{
    cluster::{PATIENCE, seed, tiny_engine},
    tiny::{Error, Rng, golden_dir},
};
use longreach_types::{Epoch, KvDtype, Prompt, RequestId, SamplingParams, TokenId};
use tokio::runtime::Handle;

/// Cases of each run.
const N_CASES: u64 = 160;

/// What happens to the stream to one rank. Numbers are messages: the opening is number 0.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Said twice.
    Doubled(usize),
    /// After the one that follows it.
    Late(usize),
    /// Never.
    Lost(usize),
    /// With a flipped bit.
    Flipped(usize),
    /// With a flipped bit and a checksum that fits, beside the true one.
    Conflict(usize),
    /// The last one that is sent.
    CutAfter(usize),
    /// The last one for a long time; nothing says that more will come.
    StallAfter(usize),
    /// From another life of the group.
    StaleEpoch,
    /// From a worker that holds KV otherwise.
    OtherLayout,
    /// For another prompt.
    OtherPrompt,
}

impl Fault {
    fn draw(rng: &mut Rng) -> Option<Self> {
        let nth = rng.below(12);
        Some(match rng.below(12) {
            0 => Self::Doubled(1 + nth),
            1 => Self::Late(1 + nth),
            2 => Self::Lost(1 + nth),
            3 => Self::Flipped(1 + nth),
            4 => Self::Conflict(1 + nth),
            5 => Self::CutAfter(nth),
            6 => Self::StallAfter(nth),
            7 => Self::StaleEpoch,
            8 => Self::OtherLayout,
            9 => Self::OtherPrompt,
            _ => return None,
        })
    }

    /// The messages in place of message `number`. `held` keeps one back.
    fn apply(self, number: usize, message: KvMessage, held: &mut Option<KvMessage>) -> Vec<KvMessage> {
        let before = held.take();
        let mut now = match (self, message) {
            (Self::Doubled(n), message) if n == number => vec![message.clone(), message],
            (Self::Late(n), chunk @ KvMessage::Chunk(_)) if n == number => {
                *held = Some(chunk);
                Vec::new()
            }
            (Self::Lost(n), KvMessage::Chunk(_)) if n == number => Vec::new(),
            (Self::Flipped(n), KvMessage::Chunk(chunk)) if n == number => {
                vec![KvMessage::Chunk(KvChunk { payload: flipped(&chunk.payload), ..chunk })]
            }
            (Self::Conflict(n), KvMessage::Chunk(chunk)) if n == number => {
                let payload = flipped(&chunk.payload);
                let cell_bytes = payload.len() / chunk.crc32c.len();
                let crc32c = payload.chunks(cell_bytes).map(crc32c::crc32c).collect();
                vec![KvMessage::Chunk(KvChunk { payload, crc32c, ..chunk.clone() }), KvMessage::Chunk(chunk)]
            }
            (Self::StaleEpoch, KvMessage::Open(mut open)) => {
                open.epoch = Epoch(open.epoch.0 + 1);
                vec![KvMessage::Open(open)]
            }
            (Self::OtherLayout, KvMessage::Open(mut open)) => {
                open.layout.kv_dtype = KvDtype::Bf16;
                vec![KvMessage::Open(open)]
            }
            (Self::OtherPrompt, KvMessage::Commit(mut commit)) => {
                commit.prompt_hash[0] ^= 1;
                vec![KvMessage::Commit(commit)]
            }
            (_, message) => vec![message],
        };
        // What was kept back comes after the next chunk, and before a commit that would miss it.
        let at = if matches!(now.first(), Some(KvMessage::Commit(_))) { 0 } else { now.len() };
        if let Some(before) = before {
            now.insert(at, before);
        }
        now
    }

    fn disturb(self, messages: BoxStream<'static, KvMessage>) -> BoxStream<'static, KvMessage> {
        let messages = messages.enumerate();
        match self {
            Self::CutAfter(n) => messages.take(n + 1).map(|(_, message)| message).boxed(),
            Self::StallAfter(n) => {
                messages.take(n + 1).map(|(_, message)| message).chain(stream::pending()).boxed()
            }
            fault => {
                let apply = move |held: &mut Option<KvMessage>, (number, message)| {
                    std::future::ready(Some(stream::iter(fault.apply(number, message, held))))
                };
                messages.scan(None, apply).flatten().boxed()
            }
        }
    }

    /// Whether the rank must not mind.
    fn is_harmless(self) -> bool {
        matches!(self, Self::Doubled(_) | Self::Late(_))
    }
}

fn flipped(bytes: &Bytes) -> Bytes {
    let mut bytes = bytes.to_vec();
    if let Some(last) = bytes.last_mut() {
        *last ^= 0x10;
    }
    bytes.into()
}

/// The way to the ranks, with the faults of the case at hand by rank.
#[derive(Clone, Default)]
struct FaultyTransport {
    inner: LocalTransport,
    faults: Arc<Mutex<Vec<Option<Fault>>>>,
}

impl KvTransport for FaultyTransport {
    fn push(
        &self,
        endpoint: String,
        messages: BoxStream<'static, KvMessage>,
    ) -> BoxFuture<'static, Result<KvAck, WorkerError>> {
        let rank: usize = endpoint.parse().unwrap();
        let fault = self.faults.lock().unwrap().get(rank).copied().flatten();
        let messages = match fault {
            Some(fault) => fault.disturb(messages),
            None => messages,
        };
        self.inner.push(endpoint, messages).boxed()
    }

    fn pull(&self, endpoint: String, request: PullRequest) -> EventStream<PullMessage> {
        self.inner.pull(endpoint, request)
    }
}

fn start(model: &Model, config: &EngineConfig) -> Result<(EnginePair, FaultyTransport), Error> {
    let (transport, runtime) = (FaultyTransport::default(), Handle::current());
    let life = DecodeGroup::load(model, config, &|_, _| {})?.enlist(Epoch(1));
    let inlets = life.inlets();
    let endpoints: Vec<_> = (0..inlets.len()).map(|rank| rank.to_string()).collect();
    endpoints.iter().zip(inlets).for_each(|(name, inlet)| transport.inner.insert(name.clone(), inlet));
    let decode = life.start(endpoints, &runtime)?;
    let prefill = start_prefill(model, config, Arc::new(transport.clone()), &runtime, &|_, _| {})?;
    Ok((EnginePair { prefill, decode }, transport))
}

async fn generate(pair: &EnginePair, prompt_len: u32) -> Result<Vec<u32>, WorkerError> {
    let tokens = (0..prompt_len).map(|i| TokenId((11 * i + prompt_len) % 250)).collect();
    let prompt = Prompt { tokens, n_resumed: 0, cache_salt: Vec::new() };
    let sampling = SamplingParams { max_tokens: 6, ignore_eos: true, ..SamplingParams::default() };
    let output = pair.generate(RequestId("case".into()), prompt, sampling, |_| {}).await?;
    Ok(output.tokens.iter().map(|token| token.token.0).collect())
}

/// Both sides at rest, every block accounted for, and nothing cached.
async fn settle(pair: &EnginePair) -> Result<(), Error> {
    for engine in [&pair.prefill.handle, &pair.decode.handle] {
        let at_rest = tokio::time::timeout(PATIENCE, engine.wait_for(|info| info.is_idle())).await;
        assert!(matches!(at_rest, Ok(true)), "an engine does not come to rest: {:?}", engine.info());
        engine.flush_cache().await?;
        let is_free = engine.wait_for(|info| info.pools().iter().all(|pool| pool.free == pool.total));
        assert!(tokio::time::timeout(PATIENCE, is_free).await?, "{:?}", engine.info());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_is_right_or_fails_and_no_block_is_lost() -> Result<(), Error> {
    let model = Model::open(ModelFiles::open(&golden_dir("llama"))?)?;
    let mut config = tiny_engine(2, 2);
    config.sched.max_chunk_len = 16;
    config.handoff_timeout = Duration::from_millis(400);
    let (pair, transport) = start(&model, &config)?;
    let mut rng = Rng::new(seed());
    let (mut n_right, mut n_failed, mut n_left) = (0, 0, 0);
    for case in 0..N_CASES {
        let prompt_len = 5 + rng.below(110) as u32;
        let wanted = generate(&pair, prompt_len).await?;
        settle(&pair).await?;
        let faults: Vec<_> = (0..2).map(|_| Fault::draw(&mut rng)).collect();
        *transport.faults.lock().unwrap() = faults.clone();
        let leaves = rng.below(4) == 0;
        let patience = if leaves { Duration::from_micros(rng.below(20_000) as u64) } else { PATIENCE };
        let got = tokio::time::timeout(patience, generate(&pair, prompt_len)).await;
        let what = format!("case {case}, {prompt_len} tokens, {faults:?}: {got:?}");
        match got {
            Ok(Ok(tokens)) => {
                assert_eq!(tokens, wanted, "{what}");
                n_right += 1;
            }
            Ok(Err(_)) => {
                let harmless = faults.iter().flatten().all(|fault| fault.is_harmless());
                assert!(!harmless, "{what}");
                n_failed += 1;
            }
            Err(_) => {
                assert!(leaves, "{what}");
                n_left += 1;
            }
        }
        settle(&pair).await?;
        transport.faults.lock().unwrap().clear();
    }
    // A run in which nothing happens proves nothing.
    assert!(n_right > 0 && n_failed > 0 && n_left > 0, "{n_right} right, {n_failed} failed, {n_left} left");
    Ok(pair.stop().await?)
}
