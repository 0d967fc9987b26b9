//! Conversions between generated messages and domain types. Incoming ones check everything once.

use std::ops::Range;

use longreach_types::{
    Epoch, FinishReason, HandoffId, Prompt, RequestId, SamplingParams, TokenId, TokenLogprob, TokenLogprobs,
};
use tonic::Status;

use super::types::{
    DecodeEvent, FirstToken, GenerateRequest, GroupInfo, KvChunk, KvCommit, KvLayout, KvMessage, KvOpen,
    OutputToken, PoolState, PrefillEvent, PrefillInfo, PullDone, PullMessage, PullRequest, RankTarget,
    Reservation, RunRequest,
};
use crate::generated::worker as pb;

/// Counts cross the wire as 32-bit numbers; everything counted here is bounded far below.
fn count(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn required<T>(value: Option<T>, field: &'static str) -> Result<T, Status> {
    value.ok_or_else(|| Status::invalid_argument(format!("field {field} is missing")))
}

fn fixed<const N: usize>(bytes: &[u8], field: &'static str) -> Result<[u8; N], Status> {
    bytes
        .try_into()
        .map_err(|_| Status::invalid_argument(format!("field {field} has {} bytes, not {N}", bytes.len())))
}

fn range(start: u32, len: u32) -> Range<usize> {
    start as usize..start as usize + len as usize
}

impl From<Prompt> for pb::Prompt {
    fn from(prompt: Prompt) -> Self {
        Self {
            token_ids: prompt.tokens.iter().map(|token| token.0).collect(),
            n_resumed: count(prompt.n_resumed),
            cache_salt: prompt.cache_salt.into(),
        }
    }
}

impl TryFrom<pb::Prompt> for Prompt {
    type Error = Status;

    fn try_from(prompt: pb::Prompt) -> Result<Self, Status> {
        let (n_tokens, n_resumed) = (prompt.token_ids.len(), prompt.n_resumed as usize);
        if n_resumed >= n_tokens {
            return Err(Status::invalid_argument(format!(
                "prompt has {n_tokens} tokens of which {n_resumed} are resumed; at least 1 must be the client's"
            )));
        }
        let tokens = prompt.token_ids.into_iter().map(TokenId).collect();
        Ok(Self { tokens, n_resumed, cache_salt: prompt.cache_salt.into() })
    }
}

impl From<SamplingParams> for pb::Sampling {
    fn from(params: SamplingParams) -> Self {
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params
                .logit_bias
                .into_iter()
                .map(|(token, bias)| pb::LogitBias { token_id: token.0, bias })
                .collect(),
            seed: params.seed,
            max_tokens: count(params.max_tokens),
            min_tokens: count(params.min_tokens),
            stop_token_ids: params.stop_token_ids.into_iter().map(|token| token.0).collect(),
            ignore_eos: params.ignore_eos,
            top_logprobs: params.top_logprobs.map(count),
        }
    }
}

impl From<pb::Sampling> for SamplingParams {
    /// Ranges are checked by [`SamplingParams::validate`], which needs the vocabulary.
    fn from(params: pb::Sampling) -> Self {
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.iter().map(|entry| (TokenId(entry.token_id), entry.bias)).collect(),
            seed: params.seed,
            max_tokens: params.max_tokens as usize,
            min_tokens: params.min_tokens as usize,
            stop_token_ids: params.stop_token_ids.into_iter().map(TokenId).collect(),
            ignore_eos: params.ignore_eos,
            top_logprobs: params.top_logprobs.map(|n| n as usize),
        }
    }
}

impl From<TokenLogprob> for pb::TokenLogprob {
    fn from(entry: TokenLogprob) -> Self {
        Self { token_id: entry.token.0, logprob: entry.logprob }
    }
}

impl From<OutputToken> for pb::OutputToken {
    fn from(token: OutputToken) -> Self {
        let (logprob, top_logprobs) = match token.logprobs {
            Some(logprobs) => {
                (Some(logprobs.sampled.logprob), logprobs.top.into_iter().map(Into::into).collect())
            }
            None => (None, Vec::new()),
        };
        Self { output_idx: count(token.output_idx), token_id: token.token.0, logprob, top_logprobs }
    }
}

impl From<pb::OutputToken> for OutputToken {
    fn from(token: pb::OutputToken) -> Self {
        let entry = |token, logprob| TokenLogprob { token: TokenId(token), logprob };
        Self {
            output_idx: token.output_idx as usize,
            token: TokenId(token.token_id),
            logprobs: token.logprob.map(|logprob| TokenLogprobs {
                sampled: entry(token.token_id, logprob),
                top: token.top_logprobs.iter().map(|top| entry(top.token_id, top.logprob)).collect(),
            }),
        }
    }
}

impl From<FinishReason> for pb::Finish {
    fn from(reason: FinishReason) -> Self {
        let (kind, token_id) = match reason {
            FinishReason::Length => (pb::FinishKind::Length, 0),
            FinishReason::Eos(token) => (pb::FinishKind::Eos, token.0),
            // Workers never see text; a stop string that reached this point would be a stop token to a peer.
            FinishReason::StopString => (pb::FinishKind::StopToken, 0),
            FinishReason::StopToken(token) => (pb::FinishKind::StopToken, token.0),
        };
        Self { kind: kind.into(), token_id }
    }
}

impl TryFrom<pb::Finish> for FinishReason {
    type Error = Status;

    fn try_from(finish: pb::Finish) -> Result<Self, Status> {
        match finish.kind() {
            pb::FinishKind::Length => Ok(Self::Length),
            pb::FinishKind::Eos => Ok(Self::Eos(TokenId(finish.token_id))),
            pb::FinishKind::StopToken => Ok(Self::StopToken(TokenId(finish.token_id))),
            pb::FinishKind::Unspecified => {
                Err(Status::internal(format!("worker sent an unknown finish kind {}", finish.kind)))
            }
        }
    }
}

impl From<KvLayout> for pb::Layout {
    fn from(layout: KvLayout) -> Self {
        Self {
            model_fingerprint: layout.model_fingerprint.to_vec().into(),
            n_layers: count(layout.n_layers),
            n_kv_heads: count(layout.n_kv_heads),
            head_dim: count(layout.head_dim),
            kv_dtype: layout.kv_dtype.to_string(),
            block_size: count(layout.block_size),
            n_shards: count(layout.n_shards),
            wire_version: layout.wire_version,
        }
    }
}

impl TryFrom<pb::Layout> for KvLayout {
    type Error = Status;

    fn try_from(layout: pb::Layout) -> Result<Self, Status> {
        Ok(Self {
            model_fingerprint: fixed(&layout.model_fingerprint, "layout.model_fingerprint")?,
            n_layers: layout.n_layers as usize,
            n_kv_heads: layout.n_kv_heads as usize,
            head_dim: layout.head_dim as usize,
            kv_dtype: layout.kv_dtype.parse().map_err(Status::failed_precondition)?,
            block_size: layout.block_size as usize,
            n_shards: layout.n_shards as usize,
            wire_version: layout.wire_version,
        })
    }
}

impl From<Reservation> for pb::Reserved {
    fn from(reservation: Reservation) -> Self {
        Self {
            handoff_id: reservation.handoff.0.to_be_bytes().to_vec().into(),
            epoch: reservation.epoch.0,
            cached_len: count(reservation.cached_len),
            prefilled_here: reservation.prefilled_here,
            layout: Some(reservation.layout.into()),
            blocks: Some(pb::BlockRange {
                start: count(reservation.blocks.start),
                count: count(reservation.blocks.len()),
            }),
            dcp_size: count(reservation.dcp_size),
            ranks: reservation.ranks.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<pb::Reserved> for Reservation {
    type Error = Status;

    fn try_from(reserved: pb::Reserved) -> Result<Self, Status> {
        let blocks = required(reserved.blocks, "reservation.blocks")?;
        if reserved.dcp_size == 0 {
            return Err(Status::invalid_argument("reservation.dcp_size is 0"));
        }
        Ok(Self {
            handoff: HandoffId(u128::from_be_bytes(fixed(&reserved.handoff_id, "reservation.handoff_id")?)),
            epoch: Epoch(reserved.epoch),
            cached_len: reserved.cached_len as usize,
            prefilled_here: reserved.prefilled_here,
            layout: required(reserved.layout, "reservation.layout")?.try_into()?,
            blocks: range(blocks.start, blocks.count),
            dcp_size: reserved.dcp_size as usize,
            ranks: reserved.ranks.into_iter().map(Into::into).collect(),
        })
    }
}

impl From<RankTarget> for pb::RankTarget {
    fn from(target: RankTarget) -> Self {
        Self {
            rank: count(target.rank),
            dcp_rank: count(target.dcp_rank),
            endpoint: target.endpoint,
            kv_head_start: count(target.kv_heads.start),
            kv_head_count: count(target.kv_heads.len()),
        }
    }
}

impl From<pb::RankTarget> for RankTarget {
    fn from(target: pb::RankTarget) -> Self {
        Self {
            rank: target.rank as usize,
            dcp_rank: target.dcp_rank as usize,
            endpoint: target.endpoint,
            kv_heads: range(target.kv_head_start, target.kv_head_count),
        }
    }
}

impl From<GenerateRequest> for pb::GenerateRequest {
    fn from(request: GenerateRequest) -> Self {
        Self {
            request_id: request.request_id.0,
            prompt: Some(request.prompt.into()),
            sampling: Some(request.sampling.into()),
            priority: request.priority,
        }
    }
}

impl TryFrom<pb::GenerateRequest> for GenerateRequest {
    type Error = Status;

    fn try_from(request: pb::GenerateRequest) -> Result<Self, Status> {
        Ok(Self {
            request_id: RequestId(request.request_id),
            prompt: required(request.prompt, "prompt")?.try_into()?,
            sampling: required(request.sampling, "sampling")?.into(),
            priority: request.priority,
        })
    }
}

impl From<DecodeEvent> for pb::GenerateResponse {
    fn from(event: DecodeEvent) -> Self {
        use pb::generate_response::Event;
        let event = match event {
            DecodeEvent::Reserved(reservation) => Event::Reserved(reservation.into()),
            DecodeEvent::Token(token) => Event::Token(token.into()),
            DecodeEvent::Finish(reason) => Event::Finish(reason.into()),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<pb::GenerateResponse> for DecodeEvent {
    type Error = Status;

    fn try_from(response: pb::GenerateResponse) -> Result<Self, Status> {
        use pb::generate_response::Event;
        Ok(match required(response.event, "event")? {
            Event::Reserved(reserved) => Self::Reserved(reserved.try_into()?),
            Event::Token(token) => Self::Token(token.into()),
            Event::Finish(finish) => Self::Finish(finish.try_into()?),
        })
    }
}

impl From<PoolState> for pb::PoolState {
    fn from(pool: PoolState) -> Self {
        Self {
            total: count(pool.total),
            free: count(pool.free),
            cached: count(pool.cached),
            held: pool.held.into_iter().map(|(reason, n)| (reason, count(n))).collect(),
        }
    }
}

impl From<pb::PoolState> for PoolState {
    fn from(pool: pb::PoolState) -> Self {
        Self {
            total: pool.total as usize,
            free: pool.free as usize,
            cached: pool.cached as usize,
            held: pool.held.into_iter().map(|(reason, n)| (reason, n as usize)).collect(),
        }
    }
}

impl From<GroupInfo> for pb::GetGroupResponse {
    fn from(info: GroupInfo) -> Self {
        Self {
            group_id: info.group_id,
            epoch: info.epoch.0,
            layout: Some(info.layout.into()),
            n_ranks: count(info.n_ranks),
            dcp_size: count(info.dcp_size),
            max_seq_len: count(info.max_seq_len),
            vocab_size: count(info.vocab_size),
            pools: info.pools.into_iter().map(Into::into).collect(),
            n_waiting: count(info.n_waiting),
            n_running: count(info.n_running),
        }
    }
}

impl TryFrom<pb::GetGroupResponse> for GroupInfo {
    type Error = Status;

    fn try_from(info: pb::GetGroupResponse) -> Result<Self, Status> {
        Ok(Self {
            group_id: info.group_id,
            epoch: Epoch(info.epoch),
            layout: required(info.layout, "layout")?.try_into()?,
            n_ranks: info.n_ranks as usize,
            dcp_size: info.dcp_size as usize,
            max_seq_len: info.max_seq_len as usize,
            vocab_size: info.vocab_size as usize,
            pools: info.pools.into_iter().map(Into::into).collect(),
            n_waiting: info.n_waiting as usize,
            n_running: info.n_running as usize,
        })
    }
}

impl From<RunRequest> for pb::RunRequest {
    fn from(request: RunRequest) -> Self {
        Self {
            request_id: request.request_id.0,
            prompt: Some(request.prompt.into()),
            sampling: Some(request.sampling.into()),
            reservation: Some(request.reservation.into()),
            priority: request.priority,
        }
    }
}

impl TryFrom<pb::RunRequest> for RunRequest {
    type Error = Status;

    fn try_from(request: pb::RunRequest) -> Result<Self, Status> {
        Ok(Self {
            request_id: RequestId(request.request_id),
            prompt: required(request.prompt, "prompt")?.try_into()?,
            sampling: required(request.sampling, "sampling")?.into(),
            reservation: required(request.reservation, "reservation")?.try_into()?,
            priority: request.priority,
        })
    }
}

impl From<PrefillEvent> for pb::RunResponse {
    fn from(event: PrefillEvent) -> Self {
        use pb::run_response::Event;
        let event = match event {
            PrefillEvent::FirstToken(first) => Event::FirstToken(pb::FirstToken {
                token: Some(first.token.into()),
                finish: first.finish.map(Into::into),
                cached_len: count(first.cached_len),
            }),
            PrefillEvent::HandoffDone { sent_bytes } => Event::HandoffDone(pb::HandoffDone { sent_bytes }),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<pb::RunResponse> for PrefillEvent {
    type Error = Status;

    fn try_from(response: pb::RunResponse) -> Result<Self, Status> {
        use pb::run_response::Event;
        Ok(match required(response.event, "event")? {
            Event::FirstToken(first) => Self::FirstToken(FirstToken {
                token: required(first.token, "first_token.token")?.into(),
                finish: first.finish.map(TryInto::try_into).transpose()?,
                cached_len: first.cached_len as usize,
            }),
            Event::HandoffDone(done) => Self::HandoffDone { sent_bytes: done.sent_bytes },
        })
    }
}

impl From<PrefillInfo> for pb::GetWorkerResponse {
    fn from(info: PrefillInfo) -> Self {
        Self {
            worker_id: info.worker_id,
            layout: Some(info.layout.into()),
            max_seq_len: count(info.max_seq_len),
            vocab_size: count(info.vocab_size),
            pool: Some(info.pool.into()),
            n_waiting: count(info.n_waiting),
            n_running: count(info.n_running),
            queued_tokens: info.queued_tokens,
        }
    }
}

impl TryFrom<pb::GetWorkerResponse> for PrefillInfo {
    type Error = Status;

    fn try_from(info: pb::GetWorkerResponse) -> Result<Self, Status> {
        Ok(Self {
            worker_id: info.worker_id,
            layout: required(info.layout, "layout")?.try_into()?,
            max_seq_len: info.max_seq_len as usize,
            vocab_size: info.vocab_size as usize,
            pool: required(info.pool, "pool")?.into(),
            n_waiting: info.n_waiting as usize,
            n_running: info.n_running as usize,
            queued_tokens: info.queued_tokens,
        })
    }
}

impl From<KvChunk> for pb::KvChunk {
    fn from(chunk: KvChunk) -> Self {
        Self {
            layer_start: count(chunk.layers.start),
            layer_count: count(chunk.layers.len()),
            block_start: count(chunk.blocks.start),
            block_count: count(chunk.blocks.len()),
            payload: chunk.payload,
            crc32c: chunk.crc32c,
        }
    }
}

impl From<pb::KvChunk> for KvChunk {
    /// Ranges and sizes are checked against what is expected by whoever takes the chunk.
    fn from(chunk: pb::KvChunk) -> Self {
        Self {
            layers: range(chunk.layer_start, chunk.layer_count),
            blocks: range(chunk.block_start, chunk.block_count),
            payload: chunk.payload,
            crc32c: chunk.crc32c,
        }
    }
}

impl From<PullRequest> for pb::PullRequest {
    fn from(request: PullRequest) -> Self {
        Self {
            handoff_id: request.handoff.0.to_be_bytes().to_vec().into(),
            epoch: request.epoch.0,
            rank: count(request.rank),
            layout: Some(request.layout.into()),
            prompt_hash: request.prompt_hash.to_vec().into(),
            blocks: Some(pb::BlockRange {
                start: count(request.blocks.start),
                count: count(request.blocks.len()),
            }),
            head_start: count(request.heads.start),
            head_count: count(request.heads.len()),
        }
    }
}

impl TryFrom<pb::PullRequest> for PullRequest {
    type Error = Status;

    fn try_from(request: pb::PullRequest) -> Result<Self, Status> {
        let blocks = required(request.blocks, "blocks")?;
        Ok(Self {
            handoff: HandoffId(u128::from_be_bytes(fixed(&request.handoff_id, "handoff_id")?)),
            epoch: Epoch(request.epoch),
            rank: request.rank as usize,
            layout: required(request.layout, "layout")?.try_into()?,
            prompt_hash: fixed(&request.prompt_hash, "prompt_hash")?,
            blocks: range(blocks.start, blocks.count),
            heads: range(request.head_start, request.head_count),
        })
    }
}

impl From<PullMessage> for pb::PullResponse {
    fn from(message: PullMessage) -> Self {
        use pb::pull_response::Message;
        let message = match message {
            PullMessage::Chunk(chunk) => Message::Chunk(chunk.into()),
            PullMessage::Done(done) => {
                Message::Done(pb::PullDone { cell_count: count(done.n_cells), digest: done.digest })
            }
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<pb::PullResponse> for PullMessage {
    type Error = Status;

    fn try_from(response: pb::PullResponse) -> Result<Self, Status> {
        use pb::pull_response::Message;
        Ok(match required(response.message, "message")? {
            Message::Chunk(chunk) => Self::Chunk(chunk.into()),
            Message::Done(done) => {
                Self::Done(PullDone { n_cells: done.cell_count as usize, digest: done.digest })
            }
        })
    }
}

impl From<KvMessage> for pb::PushRequest {
    fn from(message: KvMessage) -> Self {
        use pb::push_request::Message;
        let message = match message {
            KvMessage::Open(open) => Message::Open(pb::KvOpen {
                handoff_id: open.handoff.0.to_be_bytes().to_vec().into(),
                epoch: open.epoch.0,
                rank: count(open.rank),
                layout: Some(open.layout.into()),
                prompt_len: count(open.prompt_len),
            }),
            KvMessage::Chunk(chunk) => Message::Chunk(chunk.into()),
            KvMessage::Commit(commit) => Message::Commit(pb::KvCommit {
                cell_count: count(commit.n_cells),
                digest: commit.digest,
                prompt_hash: commit.prompt_hash.to_vec().into(),
                first_token: commit.first_token.map(Into::into),
            }),
            KvMessage::Alive => Message::Alive(pb::KvAlive {}),
        };
        Self { message: Some(message) }
    }
}

impl TryFrom<pb::PushRequest> for KvMessage {
    type Error = Status;

    fn try_from(request: pb::PushRequest) -> Result<Self, Status> {
        use pb::push_request::Message;
        Ok(match required(request.message, "message")? {
            Message::Open(open) => Self::Open(KvOpen {
                handoff: HandoffId(u128::from_be_bytes(fixed(&open.handoff_id, "open.handoff_id")?)),
                epoch: Epoch(open.epoch),
                rank: open.rank as usize,
                layout: required(open.layout, "open.layout")?.try_into()?,
                prompt_len: open.prompt_len as usize,
            }),
            Message::Chunk(chunk) => Self::Chunk(chunk.into()),
            Message::Commit(commit) => Self::Commit(KvCommit {
                n_cells: commit.cell_count as usize,
                digest: commit.digest,
                prompt_hash: fixed(&commit.prompt_hash, "commit.prompt_hash")?,
                first_token: commit.first_token.map(Into::into),
            }),
            Message::Alive(pb::KvAlive {}) => Self::Alive,
        })
    }
}
