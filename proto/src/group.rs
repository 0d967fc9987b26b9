//! Control messages inside a decode group, as domain types with a byte form.

use longreach_types::{BlockId, Epoch, HandoffId, SeqId, SeqStep, StepId, StepPlan, TokenId};
use prost::Message;

use crate::generated::worker as pb;

/// From the leader to every other rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderMessage {
    /// Run one step.
    Plan(StepPlan),
    /// Be ready to receive KV.
    Expect(ExpectKv),
    /// Refuse whatever comes for this hand-off from now on.
    Drop(HandoffId),
    /// Leave the group.
    Stop,
}

/// From a rank to the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowerMessage {
    /// About a hand-off.
    Kv {
        /// Who.
        rank: usize,
        /// Which hand-off.
        handoff: HandoffId,
        /// What happened.
        event: FollowerEvent,
    },
    /// The rank's process drains: the leader is to end the epoch in good order.
    Leaving {
        /// Who.
        rank: usize,
    },
}

/// What happened to a hand-off on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowerEvent {
    /// The rank is ready to receive it.
    Expected,
    /// The rank has verified its whole share.
    Received,
    /// The rank refused it.
    Refused(String),
}

/// Which blocks a hand-off may fill, and which may be pulled for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectKv {
    /// The hand-off.
    pub handoff: HandoffId,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// First half of the SHA-256 of the prompt's token ids.
    pub prompt_hash: [u8; 16],
    /// By DCP rank.
    pub blocks: Vec<ExpectedBlocks>,
}

/// The blocks of a hand-off on one DCP rank, by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpectedBlocks {
    /// Blocks of the cached prefix: they hold KV, which may be pulled.
    pub cached: Vec<BlockId>,
    /// The blocks after them, to be filled.
    pub missing: Vec<BlockId>,
}

/// Bytes on a control link that are no message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not protobuf of the expected type.
    #[error("control message is malformed")]
    Malformed(#[from] prost::DecodeError),
    /// A required field is absent or has the wrong size.
    #[error("control message lacks a valid {0}")]
    Field(&'static str),
}

fn handoff_bytes(handoff: HandoffId) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(&handoff.0.to_be_bytes())
}

fn fixed<const N: usize>(bytes: &[u8], field: &'static str) -> Result<[u8; N], DecodeError> {
    bytes.try_into().map_err(|_| DecodeError::Field(field))
}

fn handoff(bytes: &[u8]) -> Result<HandoffId, DecodeError> {
    Ok(HandoffId(u128::from_be_bytes(fixed(bytes, "handoff_id")?)))
}

fn block_ids(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

impl LeaderMessage {
    /// The bytes that go on the link.
    pub fn encode(&self) -> Vec<u8> {
        use pb::leader_message::Message as M;
        let message = match self {
            Self::Plan(plan) => M::Plan(plan_to_wire(plan)),
            Self::Expect(expect) => M::Expect(pb::ExpectKv {
                handoff_id: handoff_bytes(expect.handoff),
                prompt_len: expect.prompt_len as u32,
                prompt_hash: bytes::Bytes::copy_from_slice(&expect.prompt_hash),
                blocks: expect
                    .blocks
                    .iter()
                    .map(|part| pb::ExpectedBlocks {
                        block_ids: block_ids(&part.missing),
                        cached_block_ids: block_ids(&part.cached),
                    })
                    .collect(),
            }),
            Self::Drop(handoff) => M::Drop(pb::DropKv { handoff_id: handoff_bytes(*handoff) }),
            Self::Stop => M::Stop(pb::Stop {}),
        };
        pb::LeaderMessage { message: Some(message) }.encode_to_vec()
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        use pb::leader_message::Message as M;
        let message = pb::LeaderMessage::decode(bytes)?.message.ok_or(DecodeError::Field("message"))?;
        Ok(match message {
            M::Plan(plan) => Self::Plan(plan_from_wire(plan)),
            M::Expect(expect) => Self::Expect(ExpectKv {
                handoff: handoff(&expect.handoff_id)?,
                prompt_len: expect.prompt_len as usize,
                prompt_hash: fixed(&expect.prompt_hash, "prompt_hash")?,
                blocks: expect
                    .blocks
                    .into_iter()
                    .map(|part| ExpectedBlocks {
                        cached: part.cached_block_ids.into_iter().map(BlockId).collect(),
                        missing: part.block_ids.into_iter().map(BlockId).collect(),
                    })
                    .collect(),
            }),
            M::Drop(drop) => Self::Drop(handoff(&drop.handoff_id)?),
            M::Stop(pb::Stop {}) => Self::Stop,
        })
    }
}

fn plan_to_wire(plan: &StepPlan) -> pb::StepPlan {
    let seq = |seq: &SeqStep| pb::SeqStep {
        seq: seq.seq.0,
        context_len: seq.context_len as u32,
        token_ids: seq.tokens.iter().map(|token| token.0).collect(),
        n_logits: seq.n_logits as u32,
        tables: seq.tables.iter().map(|table| pb::BlockTable { block_ids: block_ids(table) }).collect(),
    };
    pb::StepPlan { step: plan.step.0, epoch: plan.epoch.0, seqs: plan.seqs.iter().map(seq).collect() }
}

fn plan_from_wire(plan: pb::StepPlan) -> StepPlan {
    let seq = |seq: pb::SeqStep| SeqStep {
        seq: SeqId(seq.seq),
        context_len: seq.context_len as usize,
        tokens: seq.token_ids.into_iter().map(TokenId).collect(),
        n_logits: seq.n_logits as usize,
        tables: seq
            .tables
            .into_iter()
            .map(|table| table.block_ids.into_iter().map(BlockId).collect())
            .collect(),
    };
    StepPlan {
        step: StepId(plan.step),
        epoch: Epoch(plan.epoch),
        seqs: plan.seqs.into_iter().map(seq).collect(),
    }
}

impl FollowerMessage {
    /// The bytes that go on the link.
    pub fn encode(&self) -> Vec<u8> {
        use pb::follower_message::Message as M;
        let message = match self {
            Self::Leaving { rank } => M::Leaving(pb::Leaving { rank: *rank as u32 }),
            Self::Kv { rank, handoff, event } => {
                let (handoff_id, rank) = (handoff_bytes(*handoff), *rank as u32);
                match event {
                    FollowerEvent::Expected => M::Expected(pb::KvExpected { handoff_id, rank }),
                    FollowerEvent::Received => M::Received(pb::KvReceived { handoff_id, rank }),
                    FollowerEvent::Refused(reason) => {
                        M::Refused(pb::KvRefused { handoff_id, rank, reason: reason.clone() })
                    }
                }
            }
        };
        pb::FollowerMessage { message: Some(message) }.encode_to_vec()
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        use pb::follower_message::Message as M;
        let message = pb::FollowerMessage::decode(bytes)?.message.ok_or(DecodeError::Field("message"))?;
        let (rank, handoff_id, event) = match message {
            M::Expected(m) => (m.rank, m.handoff_id, FollowerEvent::Expected),
            M::Received(m) => (m.rank, m.handoff_id, FollowerEvent::Received),
            M::Refused(m) => (m.rank, m.handoff_id, FollowerEvent::Refused(m.reason)),
            M::Leaving(m) => return Ok(Self::Leaving { rank: m.rank as usize }),
        };
        Ok(Self::Kv { rank: rank as usize, handoff: handoff(&handoff_id)?, event })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_link() {
        let seq = SeqStep {
            seq: SeqId(9),
            context_len: 70,
            tokens: vec![TokenId(1), TokenId(0)],
            n_logits: 1,
            tables: vec![vec![BlockId(4), BlockId(0)], vec![]],
        };
        let expect = ExpectKv {
            handoff: HandoffId(u128::MAX - 3),
            prompt_len: 65,
            prompt_hash: [7; 16],
            blocks: vec![
                ExpectedBlocks { cached: vec![BlockId(3), BlockId(0)], missing: vec![BlockId(8)] },
                ExpectedBlocks { cached: vec![BlockId(1)], missing: vec![] },
            ],
        };
        for message in [
            LeaderMessage::Plan(StepPlan { step: StepId(3), epoch: Epoch(2), seqs: vec![seq] }),
            LeaderMessage::Expect(expect),
            LeaderMessage::Drop(HandoffId(5)),
            LeaderMessage::Stop,
        ] {
            assert_eq!(LeaderMessage::decode(&message.encode()).unwrap(), message);
        }
        let events = [FollowerEvent::Expected, FollowerEvent::Received, FollowerEvent::Refused("x".into())];
        let about_kv = |event| FollowerMessage::Kv { rank: 3, handoff: HandoffId(1), event };
        for message in events.map(about_kv).into_iter().chain([FollowerMessage::Leaving { rank: 2 }]) {
            assert_eq!(FollowerMessage::decode(&message.encode()).unwrap(), message);
        }
        assert!(LeaderMessage::decode(&[0xff]).is_err() && FollowerMessage::decode(&[]).is_err());
    }
}
