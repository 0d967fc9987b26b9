//! A prefix that is pulled from the decode ranks is the prefix that would have been computed, bit for bit; and a pull
//! that fails, at whatever point, changes no output and loses no block.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot build its fixture has failed")]

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use longreach_engine::{EngineConfig, EngineEvent, Generated, Model, SeqStream, Submission, Work};
use longreach_model::config::ModelConfig;
use longreach_proto::{
    WorkerError,
    worker::{KvHandler, PullMessage, PullRequest, Reservation},
};
use longreach_tests::{
    cluster::PATIENCE,
    pulling::{FATAL, Fault, Pulling, prompt},
    tiny::{RANDOM, TinyModel},
};
use longreach_types::{Epoch, GroupShape, KvDtype, RequestId, SamplingParams};

/// Tokens of an output.
const OUTPUT_LEN: usize = 11;

fn open(model: &TinyModel) -> Model {
    let config = ModelConfig::from_files(&model.files).unwrap();
    // All engines of a test are given the same one.
    Model { files: Arc::clone(&model.files), config, fingerprint: [7; 16] }
}

fn config(shape: (usize, usize), kv_dtype: KvDtype) -> EngineConfig {
    let shape = GroupShape::new(shape.0, shape.1).unwrap();
    let mut config =
        EngineConfig { shape, kv_dtype, block_size: 4, kv_bytes: 8 << 20, ..EngineConfig::default() };
    // No pull of these tests is given up for being slow, unless it stands still.
    config.sched.reuse.min_pull_patience = Duration::from_secs(600);
    config
}

fn sampling() -> SamplingParams {
    SamplingParams {
        temperature: 0.7,
        seed: 99,
        max_tokens: OUTPUT_LEN,
        ignore_eos: true,
        top_logprobs: Some(3),
        ..SamplingParams::default()
    }
}

/// The prompt of the next turn: all so far, and `n_new` tokens of the user.
fn next_turn(model: &TinyModel, before: &[u32], answer: &Generated, n_new: usize) -> Vec<u32> {
    let answer = answer.tokens.iter().map(|token| token.token.0);
    before.iter().copied().chain(answer).chain(model.tokens(before.len() as u64, n_new)).collect()
}

/// Answers without any reuse, by one rank.
struct Reference(Pulling);

impl Reference {
    fn start(model: &Model, kv_dtype: KvDtype) -> Self {
        Self(Pulling::start(model, config((1, 1), kv_dtype)).unwrap())
    }

    async fn generate(&self, tokens: &[u32]) -> Generated {
        for engine in self.0.engines() {
            engine.flush_cache().await.unwrap();
        }
        let generated = self.0.generate(tokens, &sampling()).await.unwrap();
        assert_eq!(generated.cached_len, 0);
        generated
    }
}

/// A conversation of four turns, in which the prefill engine knows nothing, less, and more than the group.
async fn converse(model: &TinyModel, pulling: &Pulling, reference: &Reference, what: &str) {
    let info = || pulling.pair.prefill.handle.info();
    let kv_token_bytes = {
        let layout = info().layout;
        layout.n_layers * layout.n_kv_heads * 2 * layout.head_dim * layout.kv_dtype.bytes()
    };
    let mut tokens = model.tokens(5, 22);
    let mut expected = (0, 0);
    for turn in 0..4 {
        match turn {
            1 => pulling.flush_prefill().await.unwrap(),
            3 => pulling.pair.decode.handle.flush_cache().await.unwrap(),
            _ => {}
        }
        let got = pulling.generate(&tokens, &sampling()).await.unwrap();
        let want = reference.generate(&tokens).await;
        assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{what}, turn {turn}");
        // What the group holds of turn 1 is all but the last token of turn 0; in turn 2 the prefill engine has the
        // prompt of turn 1, part of it pulled.
        let pulled = match turn {
            1 => (22 + OUTPUT_LEN - 1) / 4 * 4,
            2 => (tokens.len() - 6 - 1) / 4 * 4 - (tokens.len() - 6 - OUTPUT_LEN) / 4 * 4,
            _ => 0,
        };
        expected = (expected.0 + u64::from(pulled > 0), expected.1 + pulled);
        // The engine publishes what it did after it has said so.
        let has_told = |pulls, bytes| {
            let prefill = &pulling.pair.prefill.handle;
            prefill.wait_for(move |info| (info.stats.totals.pulls, info.pulled_bytes) == (pulls, bytes))
        };
        let bytes = (expected.1 * kv_token_bytes) as u64;
        let told = tokio::time::timeout(Duration::from_secs(60), has_told(expected.0, bytes)).await;
        assert!(told.is_ok(), "{what}, turn {turn}: {:?}, {expected:?} and {bytes} bytes", info());
        assert_eq!(info().stats.totals.pulled_tokens, expected.1 as u64);
        tokens = next_turn(model, &tokens, &got, 6);
    }
    assert_eq!(info().stats.totals.pull_fallbacks, 0, "{what}");
    pulling.assert_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pulled_prefix_is_the_computed_one_in_any_group() {
    let models = [
        (TinyModel::golden("llama").unwrap(), KvDtype::F16),
        // Three KV heads: with four head groups some are stored twice, and are pulled once.
        (TinyModel::random(&RANDOM[0]).unwrap(), KvDtype::F32),
        // PFX-11: a window of 37 positions.
        (TinyModel::random(&RANDOM[5]).unwrap(), KvDtype::F16),
        (TinyModel::random(&RANDOM[6]).unwrap(), KvDtype::Bf16),
        // Fewer heads than ranks: some store nothing.
        (TinyModel::random(&RANDOM[7]).unwrap(), KvDtype::F32),
    ];
    for (tiny, kv_dtype) in &models {
        let model = open(tiny);
        let reference = Reference::start(&model, *kv_dtype);
        for shape in [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1), (8, 4)] {
            let pulling = Pulling::start(&model, config(shape, *kv_dtype)).unwrap();
            converse(tiny, &pulling, &reference, &format!("{} in {shape:?}", tiny.name)).await;
            pulling.pair.stop().await.unwrap();
        }
        reference.0.pair.stop().await.unwrap();
    }
}

/// A long prefix is many chunks of each layer, more than the window of a rank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prefix_comes_in_many_chunks() {
    let tiny = TinyModel::random(&RANDOM[2]).unwrap();
    let model = open(&tiny);
    for shape in [(1, 1), (2, 2)] {
        let mut config = config(shape, KvDtype::F32);
        config.kv_bytes = 32 << 20;
        let pulling = Pulling::start(&model, config).unwrap();
        let tokens = tiny.tokens(1, 903);
        let want = pulling.generate(&tokens, &sampling()).await.unwrap();
        pulling.flush_prefill().await.unwrap();
        pulling.tap.arm(None);
        let got = pulling.generate(&tokens, &sampling()).await.unwrap();
        assert_eq!(got.tokens, want.tokens);
        // 225 blocks of 2 layers, 7 KiB each, in half MiBs.
        assert!(pulling.tap.n_messages() > 7, "{}", pulling.tap.n_messages());
        pulling.assert_whole().await;
        let totals = pulling.pair.prefill.handle.info().stats.totals;
        assert_eq!((totals.pulls, totals.pulled_tokens, totals.pull_fallbacks), (1, 900, 0));
        pulling.pair.stop().await.unwrap();
    }
}

/// A pair whose group has a prefix that its prefill engine lacks, and the prompt that shows it.
struct Primed {
    pulling: Pulling,
    tokens: Vec<u32>,
    want: Generated,
    /// Messages of a pull that succeeds.
    n_messages: usize,
}

impl Primed {
    async fn start(shape: (usize, usize)) -> Self {
        let tiny = TinyModel::golden("llama").unwrap();
        let pulling = Pulling::start(&open(&tiny), config(shape, KvDtype::F16)).unwrap();
        let tokens = tiny.tokens(3, 47);
        let want = pulling.generate(&tokens, &sampling()).await.unwrap();
        pulling.flush_prefill().await.unwrap();
        pulling.tap.arm(None);
        let pulled = pulling.generate(&tokens, &sampling()).await.unwrap();
        assert_eq!(pulled.tokens, want.tokens);
        let n_messages = pulling.tap.n_messages();
        assert!(n_messages >= 4, "{n_messages}");
        Self { pulling, tokens, want, n_messages }
    }

    /// Lets the prefill engine forget, and the next pull meet `fault`.
    async fn arm(&self, fault: (usize, Fault)) {
        self.pulling.assert_whole().await;
        self.pulling.flush_prefill().await.unwrap();
        self.pulling.tap.arm(Some(fault));
    }

    async fn generate(&self) -> Generated {
        self.pulling.generate(&self.tokens, &sampling()).await.unwrap()
    }

    /// Reserves, and hands the reservation to the prefill engine.
    async fn begin(&self) -> (SeqStream, SeqStream) {
        let (decode, reservation) = self.reserve().await;
        (decode, self.prefill(reservation).await.unwrap())
    }

    async fn reserve(&self) -> (SeqStream, Reservation) {
        let mut decode = self.pulling.pair.decode.handle.submit(self.submission(Work::Decode)).await.unwrap();
        match decode.next().await {
            Some(Ok(EngineEvent::Reserved(reservation))) => (decode, reservation),
            other => panic!("{other:?}"),
        }
    }

    async fn prefill(&self, reservation: Reservation) -> Result<SeqStream, WorkerError> {
        self.pulling.pair.prefill.handle.submit(self.submission(Work::Prefill(reservation))).await
    }

    fn submission(&self, work: Work) -> Submission {
        let request_id = RequestId("by hand".to_owned());
        Submission { request_id, prompt: prompt(&self.tokens), sampling: sampling(), priority: 0, work }
    }

    fn n_fallbacks(&self) -> u64 {
        self.pulling.pair.prefill.handle.info().stats.totals.pull_fallbacks
    }
}

/// The last event of a prefill. A first token may come before it: a pull that ends with its group is computed, which
/// may be done before the hand-off is known to have ended, too.
async fn end_of(prefill: &mut SeqStream) -> Option<Result<EngineEvent, WorkerError>> {
    loop {
        match prefill.next().await {
            Some(Ok(EngineEvent::FirstToken(_))) => {}
            other => return other,
        }
    }
}

/// KVX-20: what a broken pull left in the blocks is never read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_that_breaks_anywhere_is_computed_instead() {
    for shape in [(1, 1), (4, 2)] {
        let primed = Primed::start(shape).await;
        let mut n_broken = 0;
        for at in 0..primed.n_messages {
            for fault in FATAL {
                primed.arm((at, fault)).await;
                let got = primed.generate().await;
                assert_eq!(got.tokens, primed.want.tokens, "{shape:?}, {fault:?} at {at}");
                n_broken += 1;
                primed.pulling.assert_whole().await;
                assert_eq!(primed.n_fallbacks(), n_broken, "{shape:?}, {fault:?} at {at}");
            }
            primed.arm((at, Fault::Repeat)).await;
            assert_eq!(primed.generate().await.tokens, primed.want.tokens);
            primed.pulling.assert_whole().await;
            assert_eq!(primed.n_fallbacks(), n_broken, "a repeat is harmless");
        }
        primed.pulling.pair.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_at_any_message_gives_everything_back_on_both_sides() {
    let primed = Primed::start((2, 2)).await;
    for at in 0..primed.n_messages {
        for leg in 0..3 {
            primed.arm((at, Fault::Stall)).await;
            let (decode, mut prefill) = primed.begin().await;
            primed.pulling.tap.struck().await;
            let pulls = primed.pulling.pair.prefill.handle.wait_for(|info| info.stats.n_pulling == 1);
            assert!(tokio::time::timeout(PATIENCE, pulls).await.unwrap(), "at {at}");
            match leg {
                0 => drop((decode, prefill)),
                1 => drop((prefill, decode)),
                _ => {
                    // The group gives the request up; its ranks tell the prefill engine.
                    drop(decode);
                    let end = end_of(&mut prefill).await;
                    assert!(matches!(end, Some(Err(WorkerError::Aborted(_)))), "{end:?}");
                }
            }
            primed.pulling.assert_whole().await;
        }
    }
    primed.pulling.flush_prefill().await.unwrap();
    primed.pulling.tap.arm(None);
    assert_eq!(primed.generate().await.tokens, primed.want.tokens);
    primed.pulling.pair.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_that_stands_still_is_given_up_for_computing() {
    let tiny = TinyModel::golden("llama").unwrap();
    let mut config = config((2, 1), KvDtype::F32);
    config.sched.reuse.min_pull_patience = Duration::from_millis(50);
    config.sched.reuse.prefill_tokens_per_s = 10_000.0;
    let pulling = Pulling::start(&open(&tiny), config).unwrap();
    let tokens = tiny.tokens(4, 40);
    let want = pulling.generate(&tokens, &sampling()).await.unwrap();
    pulling.flush_prefill().await.unwrap();
    pulling.tap.arm(Some((2, Fault::Stall)));
    let got = pulling.generate(&tokens, &sampling()).await.unwrap();
    assert_eq!(got.tokens, want.tokens);
    pulling.assert_whole().await;
    let totals = pulling.pair.prefill.handle.info().stats.totals;
    assert_eq!((totals.pulls, totals.pull_fallbacks), (0, 1));
    pulling.pair.stop().await.unwrap();
}

/// The group ends in the middle of a pull and another life of it takes its place: what is left of the old one gets
/// nothing from the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_epoch_that_ends_during_a_pull_ends_it() {
    let tiny = TinyModel::golden("llama").unwrap();
    let model = open(&tiny);
    let mut primed = Primed::start((2, 2)).await;
    primed.arm((2, Fault::Stall)).await;
    let (decode, reservation) = primed.reserve().await;
    let mut prefill = primed.prefill(reservation.clone()).await.unwrap();
    primed.pulling.tap.struck().await;

    let mut config = config((2, 2), KvDtype::F16);
    config.sched.local_prefill_max = 0;
    let (next, _) = Pulling::group(&model, &config, Epoch(2), &primed.pulling.tap).unwrap();
    let old = std::mem::replace(&mut primed.pulling.pair.decode, next);
    old.stop().await.unwrap();
    let end = end_of(&mut prefill).await;
    assert!(matches!(end, Some(Err(WorkerError::Aborted(_) | WorkerError::Unavailable(_)))), "{end:?}");
    drop((decode, prefill));
    primed.pulling.assert_whole().await;

    // The old reservation comes to the ranks of the new epoch, which refuse it by number.
    let mut late = primed.prefill(reservation).await.unwrap();
    let end = end_of(&mut late).await;
    let Some(Err(WorkerError::Aborted(message))) = end else { panic!("{end:?}") };
    assert!(message.contains("epoch 1 is stale, the group is at 2"), "{message}");
    drop(late);
    primed.pulling.assert_whole().await;

    // The new life starts with nothing, and is pulled from once it has something.
    assert_eq!(primed.generate().await.tokens, primed.want.tokens);
    primed.pulling.flush_prefill().await.unwrap();
    let n_before = primed.pulling.pair.prefill.handle.info().stats.totals.pulls;
    assert_eq!(primed.generate().await.tokens, primed.want.tokens);
    primed.pulling.assert_whole().await;
    assert_eq!(primed.pulling.pair.prefill.handle.info().stats.totals.pulls, n_before + 1);
    primed.pulling.pair.stop().await.unwrap();
}

/// A rank gives a hand-off's own prefix to who knows its prompt, and nothing else to anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_door_gives_only_what_the_hand_off_owns() {
    let primed = Primed::start((2, 2)).await;
    let (decode, reservation) = primed.reserve().await;
    let n_cached = reservation.blocks.start;
    let right = PullRequest {
        handoff: reservation.handoff,
        epoch: reservation.epoch,
        rank: 1,
        layout: reservation.layout.clone(),
        prompt_hash: longreach_engine::prompt_hash(&prompt(&primed.tokens)),
        blocks: 0..n_cached,
        heads: reservation.ranks[1].kv_heads.clone(),
    };
    let inlet = &primed.pulling.inlets[1];
    let last = async |request: PullRequest| match inlet.pull(request).await {
        Ok(messages) => messages.collect::<Vec<_>>().await.pop().expect("a last message"),
        Err(error) => Err(error),
    };
    let other = |change: fn(&mut PullRequest)| {
        let mut request = right.clone();
        change(&mut request);
        request
    };
    for (what, request) in [
        ("blocks that are still to be filled", other(|request| request.blocks.end += 2)),
        ("blocks far beyond", other(|request| request.blocks = 1 << 32..1 << 33)),
        ("heads that it does not store", other(|request| request.heads.end += 1)),
        ("another prompt's", other(|request| request.prompt_hash[0] ^= 1)),
        ("another rank's", other(|request| request.rank = 0)),
    ] {
        let refused = last(request).await;
        assert!(matches!(refused, Err(WorkerError::Invalid(_))), "{what}: {refused:?}");
    }
    for (what, request) in [
        ("another epoch's", other(|request| request.epoch = Epoch(9))),
        ("a stranger's", other(|request| request.handoff.0 ^= 1)),
    ] {
        let refused = last(request).await;
        assert!(matches!(refused, Err(WorkerError::Aborted(_))), "{what}: {refused:?}");
    }
    let layout = last(other(|request| request.layout.block_size += 1)).await;
    assert!(matches!(layout, Err(WorkerError::LayoutMismatch { .. })), "{layout:?}");

    // A second pull ends the first.
    let mut first = inlet.pull(right.clone()).await.unwrap();
    assert!(matches!(first.next().await, Some(Ok(PullMessage::Chunk(_)))));
    let Ok(PullMessage::Done(done)) = last(right.clone()).await else { panic!("it is all there") };
    assert_eq!(done.n_cells, reservation.layout.n_layers * (n_cached / 2));

    // None of this has harmed the hand-off.
    let mut prefill = primed.prefill(reservation).await.unwrap();
    while let Some(event) = prefill.next().await {
        event.unwrap();
    }
    let (mut n_tokens, mut decode) = (0, decode);
    while let Some(event) = decode.next().await {
        n_tokens += usize::from(matches!(event.unwrap(), EngineEvent::Token(_)));
    }
    assert_eq!(n_tokens, OUTPUT_LEN - 1);
    // With it, what may be pulled of it has ended.
    let refused = last(right).await;
    assert!(matches!(refused, Err(WorkerError::Aborted(_))), "{refused:?}");
    primed.pulling.assert_whole().await;
    primed.pulling.pair.stop().await.unwrap();
}
