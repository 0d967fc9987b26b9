//! What workers and ranks say to each other.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures::stream;
use longreach_collective::{CommConfig, ConnectCancel, TcpConfig, control::ControlConfig, fuzzing};
use longreach_engine::{
    KvInlet,
    inlet::{Deliveries, Delivery, InletIdentity},
};
use longreach_kv::{Commit, CoverageDigest, Incoming};
use longreach_proto::{
    WIRE_VERSION, WorkerError,
    group::{ExpectKv, ExpectedBlocks, FollowerEvent, FollowerMessage, LeaderMessage},
    worker::{
        DecodeEvent, FirstToken, GenerateRequest, GroupInfo, KvAck, KvChunk, KvCommit, KvHandler, KvLayout,
        KvMessage, KvOpen, OutputToken, PoolState, PrefillEvent, PrefillInfo, PullDone, PullMessage,
        PullRequest, RankTarget, Reservation, RunRequest, wire::Wire,
    },
};
use longreach_types::{
    BlockId, Epoch, FinishReason, GroupSecret, HandoffId, KvDtype, Prompt, RequestId, SamplingParams, SeqId,
    SeqStep, StepId, StepPlan, TokenId, TokenLogprob, TokenLogprobs,
};
use tokio::runtime::{Builder, Runtime};

use crate::parts;

const CELL_BYTES: usize = 16;
const N_LAYERS: usize = 2;
const N_BLOCKS: usize = 3;
const HANDOFF: HandoffId = HandoffId(7);

/// A KV stream, message by message, through a rank's door and its account of what has arrived.
pub(super) fn kv_push(bytes: &[u8]) -> bool {
    let messages: Vec<_> = parts::split(bytes).into_iter().map(KvMessage::from_wire).collect();
    let identity = InletIdentity { rank: 1, epoch: Epoch(3), layout: layout(), cell_bytes: CELL_BYTES };
    let (inlet, queue) = KvInlet::new(identity);
    let pushing = async move {
        let verdict = inlet.push(stream::iter(messages)).await;
        // The rank stops when its door is gone.
        drop(inlet);
        verdict
    };
    RUNTIME.with(|runtime| runtime.block_on(async { tokio::join!(pushing, receive(queue)).0 })).is_ok()
}

thread_local! {
    /// Without timers and input: whatever waits, waits for another part of the target.
    static RUNTIME: Runtime =
        Builder::new_current_thread().build().expect("a runtime without drivers needs nothing");
}

/// A rank's part: what [`longreach_engine::receive::Receiver`] does, without the memory.
async fn receive(mut queue: Deliveries) {
    let mut incoming = Incoming::new(HANDOFF, Epoch(3), N_LAYERS, N_BLOCKS);
    let mut sender = None;
    while let Some(delivery) = queue.recv().await {
        let failed = match delivery {
            Delivery::Open { outcome, .. } => {
                sender = Some(outcome);
                false
            }
            Delivery::Chunk(_, chunk) => {
                let cells = chunk.layers.clone().len() * chunk.blocks.clone().len();
                assert_eq!(chunk.payload.len(), cells * CELL_BYTES, "a chunk passed with a wrong length");
                incoming.insert(Epoch(3), chunk.layers, chunk.blocks, &chunk.crc32c).is_err()
            }
            Delivery::Commit(_, commit) => {
                let totals = Commit { n_cells: commit.n_cells, digest: CoverageDigest(commit.digest) };
                incoming.commit(Epoch(3), totals).is_err()
            }
            Delivery::Ended(_) => true,
            // Only a pull brings these.
            Delivery::Alive(_) | Delivery::Pull { .. } | Delivery::PullMore(_) => false,
        };
        let n_cells = incoming.coverage().n_seen();
        if failed || incoming.is_complete() {
            let Some(sender) = sender.take() else { return };
            let verdict =
                if failed { Err(WorkerError::Aborted("refused".to_owned())) } else { Ok(KvAck { n_cells }) };
            let _sender_gone = sender.send(verdict);
        }
    }
}

/// A whole hand-off in two chunks, one of one chunk that comes twice, and one that is cut.
pub(super) fn kv_push_seeds() -> Vec<Vec<u8>> {
    let open = || {
        KvMessage::Open(KvOpen {
            handoff: HANDOFF,
            epoch: Epoch(3),
            rank: 1,
            layout: layout(),
            prompt_len: 90,
        })
    };
    let mut whole = Incoming::new(HANDOFF, Epoch(3), N_LAYERS, N_BLOCKS);
    let (first, second, all) = (chunk(0..1), chunk(1..2), chunk(0..2));
    whole.insert(Epoch(3), 0..2, 0..N_BLOCKS, &all.crc32c).expect("a whole chunk fits");
    let commit = || {
        KvMessage::Commit(KvCommit {
            n_cells: N_LAYERS * N_BLOCKS,
            digest: whole.coverage().digest().0,
            prompt_hash: [9; 16],
            first_token: Some(token()),
        })
    };
    [
        vec![open(), KvMessage::Chunk(first), KvMessage::Alive, KvMessage::Chunk(second), commit()],
        vec![open(), KvMessage::Chunk(all.clone()), KvMessage::Chunk(all), commit()],
    ]
    .into_iter()
    .map(|messages| parts::join(&messages.into_iter().map(Wire::to_wire).collect::<Vec<_>>()))
    .collect()
}

fn chunk(layers: std::ops::Range<usize>) -> KvChunk {
    let n_cells = layers.len() * N_BLOCKS;
    let first = layers.start * N_BLOCKS * CELL_BYTES;
    let payload: Vec<u8> = (0..n_cells * CELL_BYTES).map(|i| (first + i) as u8).collect();
    let crc32c = payload.chunks_exact(CELL_BYTES).map(crc32c::crc32c).collect();
    KvChunk { layers, blocks: 0..N_BLOCKS, payload: Bytes::from(payload), crc32c }
}

/// One message of the internal services: the first byte says which, the rest are its bytes.
pub(super) fn worker(bytes: &[u8]) -> bool {
    let Some((&kind, bytes)) = bytes.split_first() else { return false };
    match kind {
        0 => read::<GenerateRequest>(bytes, |request| drop(request.sampling.validate(300))),
        1 => read::<DecodeEvent>(bytes, |_| ()),
        2 => read::<GroupInfo>(bytes, |_| ()),
        3 => read::<RunRequest>(bytes, |request| drop(request.sampling.validate(300))),
        4 => read::<PrefillEvent>(bytes, |_| ()),
        5 => read::<PrefillInfo>(bytes, |_| ()),
        6 => read::<KvMessage>(bytes, |_| ()),
        7 => read::<PullRequest>(bytes, |_| ()),
        8 => read::<PullMessage>(bytes, |_| ()),
        _ => false,
    }
}

/// What is read must be the same after it was written and read again.
fn read<T: Wire + Clone + std::fmt::Debug>(bytes: &[u8], use_it: fn(&T)) -> bool {
    let Ok(message) = T::from_wire(bytes) else { return false };
    use_it(&message);
    let again = T::from_wire(&message.clone().to_wire()).map_err(|status| status.message().to_owned());
    assert_eq!(again.map(|again| format!("{again:?}")), Ok(format!("{message:?}")));
    true
}

/// One message of each kind and variant.
pub(super) fn worker_seeds() -> Vec<Vec<u8>> {
    let prompt = Prompt {
        tokens: vec![TokenId(5), TokenId(6), TokenId(7)],
        n_resumed: 1,
        cache_salt: b"salt".to_vec(),
    };
    let sampling = SamplingParams {
        temperature: 0.7,
        logit_bias: vec![(TokenId(3), -1.5)],
        max_tokens: 12,
        stop_token_ids: vec![TokenId(2)],
        top_logprobs: Some(2),
        ..SamplingParams::default()
    };
    let request_id = RequestId("r-1".to_owned());
    let generate = GenerateRequest {
        request_id: request_id.clone(),
        prompt: prompt.clone(),
        sampling: sampling.clone(),
        priority: -1,
    };
    let run = RunRequest { request_id, prompt, sampling, reservation: reservation(), priority: 2 };
    let first = FirstToken { token: token(), finish: Some(FinishReason::Length), cached_len: 32 };
    let (group, prefill) = descriptions();
    let tagged = |kind: u8, bytes: Vec<u8>| [vec![kind], bytes].concat();
    let mut seeds = vec![
        tagged(0, generate.to_wire()),
        tagged(2, group.to_wire()),
        tagged(3, run.to_wire()),
        tagged(5, prefill.to_wire()),
    ];
    for event in [
        DecodeEvent::Reserved(reservation()),
        DecodeEvent::Token(token()),
        DecodeEvent::Finish(FinishReason::Eos(TokenId(2))),
    ] {
        seeds.push(tagged(1, event.to_wire()));
    }
    for event in [PrefillEvent::FirstToken(first), PrefillEvent::HandoffDone { sent_bytes: 1 << 40 }] {
        seeds.push(tagged(4, event.to_wire()));
    }
    seeds.push(tagged(6, KvMessage::Chunk(chunk(0..1)).to_wire()));
    seeds.push(tagged(6, KvMessage::Alive.to_wire()));
    let pull = PullRequest {
        handoff: HANDOFF,
        epoch: Epoch(3),
        rank: 1,
        layout: layout(),
        prompt_hash: [9; 16],
        blocks: 0..3,
        heads: 0..1,
    };
    seeds.push(tagged(7, pull.to_wire()));
    for message in [PullMessage::Chunk(chunk(0..1)), PullMessage::Done(PullDone { n_cells: 3, digest: 5 })] {
        seeds.push(tagged(8, message.to_wire()));
    }
    seeds
}

/// What a group and a prefill worker say of themselves.
fn descriptions() -> (GroupInfo, PrefillInfo) {
    let pool = PoolState { total: 9, free: 4, cached: 2, held: [("running".to_owned(), 3)].into() };
    let group = GroupInfo {
        group_id: "g".to_owned(),
        epoch: Epoch(3),
        layout: layout(),
        n_ranks: 2,
        dcp_size: 2,
        max_seq_len: 256,
        vocab_size: 300,
        pools: vec![pool.clone(), PoolState::default()],
        n_waiting: 1,
        n_running: 2,
    };
    let prefill = PrefillInfo {
        worker_id: "p".to_owned(),
        layout: layout(),
        max_seq_len: 256,
        vocab_size: 300,
        pool,
        n_waiting: 1,
        n_running: 2,
        queued_tokens: 77,
    };
    (group, prefill)
}

/// A control message: of the leader after an even byte, of a follower after an odd one.
pub(super) fn group(bytes: &[u8]) -> bool {
    match bytes.split_first() {
        Some((kind, bytes)) if kind % 2 == 0 => LeaderMessage::decode(bytes).is_ok_and(|message| {
            assert_eq!(LeaderMessage::decode(&message.encode()).ok().as_ref(), Some(&message));
            true
        }),
        Some((_, bytes)) => FollowerMessage::decode(bytes).is_ok_and(|message| {
            assert_eq!(FollowerMessage::decode(&message.encode()).ok().as_ref(), Some(&message));
            true
        }),
        None => false,
    }
}

/// One message of each variant.
pub(super) fn group_seeds() -> Vec<Vec<u8>> {
    let seq = SeqStep {
        seq: SeqId(9),
        context_len: 70,
        tokens: vec![TokenId(1), TokenId(0)],
        n_logits: 1,
        tables: vec![vec![BlockId(4), BlockId(0)], vec![]],
    };
    let expect = ExpectKv {
        handoff: HANDOFF,
        prompt_len: 65,
        prompt_hash: [7; 16],
        blocks: vec![ExpectedBlocks { cached: vec![BlockId(8)], missing: Vec::new() }],
    };
    let leader = [
        LeaderMessage::Plan(StepPlan { step: StepId(3), epoch: Epoch(2), seqs: vec![seq] }),
        LeaderMessage::Expect(expect),
        LeaderMessage::Drop(HANDOFF),
        LeaderMessage::Stop,
    ];
    let event = |event| FollowerMessage::Kv { rank: 3, handoff: HANDOFF, event };
    let follower = [
        event(FollowerEvent::Expected),
        event(FollowerEvent::Received),
        event(FollowerEvent::Refused("no".to_owned())),
        FollowerMessage::Leaving { rank: 3 },
    ];
    let leader = leader.iter().map(|message| [vec![0], message.encode()].concat());
    leader.chain(follower.iter().map(|message| [vec![1], message.encode()].concat())).collect()
}

/// A frame's header or, after an odd byte, a greeting.
pub(super) fn collective(bytes: &[u8]) -> bool {
    let Some((kind, bytes)) = bytes.split_first() else { return false };
    if kind % 2 == 0 {
        return bytes.first_chunk().is_some_and(fuzzing::header);
    }
    let config = tcp_config(0);
    bytes.first_chunk().is_some_and(|bytes| fuzzing::greeting(bytes, &config))
}

/// A header, a farewell and a member's greeting.
pub(super) fn collective_seeds() -> Vec<Vec<u8>> {
    let header = fuzzing::own_header(2, 77, 4096);
    let mut farewell = header;
    // Lost, and it was rank 77.
    (farewell[2], farewell[3]) = (0, 1);
    let greeting = fuzzing::own_greeting(&tcp_config(1));
    vec![[&[0][..], &header].concat(), [&[0][..], &farewell].concat(), [&[1][..], &greeting].concat()]
}

fn tcp_config(rank: usize) -> TcpConfig {
    TcpConfig {
        rank,
        addrs: vec![SocketAddr::from(([127, 0, 0, 1], 1)); 3],
        secret: GroupSecret::new([5; 32]),
        epoch: 3,
        connect_timeout: Duration::from_secs(1),
        comm: CommConfig::default(),
        control: ControlConfig::default(),
        cancel: ConnectCancel::default(),
    }
}

fn layout() -> KvLayout {
    KvLayout {
        model_fingerprint: [7; 16],
        n_layers: N_LAYERS,
        n_kv_heads: 1,
        head_dim: 8,
        kv_dtype: KvDtype::F32,
        block_size: 32,
        n_shards: 8,
        wire_version: WIRE_VERSION,
    }
}

fn reservation() -> Reservation {
    let target =
        |rank| RankTarget { rank, dcp_rank: rank, endpoint: "http://127.0.0.1:1".to_owned(), kv_heads: 0..1 };
    Reservation {
        handoff: HANDOFF,
        epoch: Epoch(3),
        cached_len: 32,
        prefilled_here: false,
        layout: layout(),
        blocks: 1..3,
        dcp_size: 2,
        ranks: vec![target(0), target(1)],
    }
}

fn token() -> OutputToken {
    let entry = TokenLogprob { token: TokenId(8), logprob: -0.5 };
    OutputToken {
        output_idx: 4,
        token: TokenId(8),
        logprobs: Some(TokenLogprobs { sampled: entry, top: vec![entry] }),
    }
}
