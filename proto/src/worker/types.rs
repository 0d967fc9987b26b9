//! Domain types of the internal services.

use std::{collections::BTreeMap, fmt, ops::Range, str::FromStr};

use bytes::Bytes;
use longreach_types::{
    Epoch, FinishReason, HandoffId, KvDtype, Prompt, RequestId, SamplingParams, TokenId, TokenLogprobs,
};

/// Asks a decode group for one sequence.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The router's id, for logs.
    pub request_id: RequestId,
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub sampling: SamplingParams,
    /// Higher goes first.
    pub priority: i32,
}

/// One event of a sequence on a decode group.
#[derive(Clone, Debug)]
pub enum DecodeEvent {
    /// Blocks are reserved; comes first, once.
    Reserved(Reservation),
    /// A token was sampled.
    Token(OutputToken),
    /// The output is complete; comes last, once.
    Finish(FinishReason),
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// Index in the output, earlier legs included.
    pub output_idx: usize,
    /// The token.
    pub token: TokenId,
    /// Present when asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Where the KV of a prompt goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Never reused.
    pub handoff: HandoffId,
    /// The group's life.
    pub epoch: Epoch,
    /// Prompt tokens found in the group's prefix cache.
    pub cached_len: usize,
    /// The group computes the rest itself.
    pub prefilled_here: bool,
    /// What the ranks expect of the sender.
    pub layout: KvLayout,
    /// Logical blocks to fill.
    pub blocks: Range<usize>,
    /// D.
    pub dcp_size: usize,
    /// Every rank, in rank order.
    pub ranks: Vec<RankTarget>,
}

/// One rank as a receiver of KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTarget {
    /// Rank in the group.
    pub rank: usize,
    /// Its DCP rank.
    pub dcp_rank: usize,
    /// Address of its KV service.
    pub endpoint: String,
    /// KV heads it stores; may be empty.
    pub kv_heads: Range<usize>,
}

/// Everything two workers must agree on before KV may pass between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Digest of architecture and weights.
    pub model_fingerprint: [u8; 16],
    /// Transformer layers.
    pub n_layers: usize,
    /// KV heads of the whole model.
    pub n_kv_heads: usize,
    /// Size of a key or value head.
    pub head_dim: usize,
    /// Number format of stored KV.
    pub kv_dtype: KvDtype,
    /// B.
    pub block_size: usize,
    /// C.
    pub n_shards: usize,
    /// Version of the wire format.
    pub wire_version: u32,
}

/// A text that does not say a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} does not say a layout: {field} is absent, out of place or out of range")]
pub struct LayoutError {
    /// The text.
    pub text: String,
    /// The first field that is wrong.
    pub field: &'static str,
}

impl KvLayout {
    /// The first field that differs, with this side's value and the other's.
    pub fn first_difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let pairs = self.fields().into_iter().zip(other.fields());
        let mut pairs = pairs.map(|((field, ours), (_, theirs))| (field, ours, theirs));
        pairs.find(|(_, ours, theirs)| ours != theirs)
    }

    fn fields(&self) -> [(&'static str, String); 8] {
        let hex = self.model_fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        [
            ("wire_version", self.wire_version.to_string()),
            ("model_fingerprint", hex),
            ("n_layers", self.n_layers.to_string()),
            ("n_kv_heads", self.n_kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string()),
            ("kv_dtype", self.kv_dtype.to_string()),
            ("block_size", self.block_size.to_string()),
            ("n_shards", self.n_shards.to_string()),
        ]
    }
}

impl fmt::Display for KvLayout {
    /// `wire_version=1,model_fingerprint=00ff…,n_layers=30,…`: the form in which registrations say it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, (field, value)) in self.fields().into_iter().enumerate() {
            write!(f, "{}{field}={value}", if idx > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for KvLayout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let bad = |field| LayoutError { text: text.chars().take(200).collect(), field };
        let mut parts = text.split(',');
        let mut value = |field: &'static str| {
            let part = parts.next().and_then(|part| part.split_once('='));
            part.filter(|(name, _)| *name == field).map(|(_, value)| value).ok_or_else(|| bad(field))
        };
        fn number<N: FromStr>(value: &str) -> Option<N> {
            value.parse().ok()
        }
        let layout = Self {
            wire_version: number(value("wire_version")?).ok_or_else(|| bad("wire_version"))?,
            model_fingerprint: fingerprint(value("model_fingerprint")?)
                .ok_or_else(|| bad("model_fingerprint"))?,
            n_layers: number(value("n_layers")?).ok_or_else(|| bad("n_layers"))?,
            n_kv_heads: number(value("n_kv_heads")?).ok_or_else(|| bad("n_kv_heads"))?,
            head_dim: number(value("head_dim")?).ok_or_else(|| bad("head_dim"))?,
            kv_dtype: value("kv_dtype")?.parse().map_err(|_| bad("kv_dtype"))?,
            block_size: number(value("block_size")?).ok_or_else(|| bad("block_size"))?,
            n_shards: number(value("n_shards")?).ok_or_else(|| bad("n_shards"))?,
        };
        // Each layout has one text, so that texts can be compared in its place.
        if layout.to_string() == text { Ok(layout) } else { Err(bad("the end")) }
    }
}

fn fingerprint(hex: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    if hex.len() != 2 * bytes.len() || !hex.is_ascii() {
        return None;
    }
    for (idx, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * idx..2 * idx + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Blocks of one rank's pool: `free + cached + Σ held = total`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    /// All blocks.
    pub total: usize,
    /// Holding nothing.
    pub free: usize,
    /// Holding KV for later prompts.
    pub cached: usize,
    /// Owned, by reason.
    pub held: BTreeMap<String, usize>,
}

/// A decode group and its load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    /// The group's name.
    pub group_id: String,
    /// Its life.
    pub epoch: Epoch,
    /// What it expects of senders.
    pub layout: KvLayout,
    /// N.
    pub n_ranks: usize,
    /// D.
    pub dcp_size: usize,
    /// The longest sequence it can hold.
    pub max_seq_len: usize,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Each rank's pool.
    pub pools: Vec<PoolState>,
    /// Sequences that wait for blocks.
    pub n_waiting: usize,
    /// Sequences that hold blocks.
    pub n_running: usize,
}

/// Asks a prefill worker for one prompt.
#[derive(Clone, Debug)]
pub struct RunRequest {
    /// The router's id, for logs.
    pub request_id: RequestId,
    /// What to compute.
    pub prompt: Prompt,
    /// How the first token is sampled.
    pub sampling: SamplingParams,
    /// Where the KV goes.
    pub reservation: Reservation,
    /// Higher goes first.
    pub priority: i32,
}

/// One event of a prefill.
#[derive(Clone, Debug)]
pub enum PrefillEvent {
    /// The first token of this leg.
    FirstToken(FirstToken),
    /// Every rank has verified its share.
    HandoffDone {
        /// KV bytes sent, all ranks.
        sent_bytes: u64,
    },
}

/// The first token of a leg.
#[derive(Clone, Debug)]
pub struct FirstToken {
    /// The token.
    pub token: OutputToken,
    /// Set when it ends the output; nothing is transferred then.
    pub finish: Option<FinishReason>,
    /// Prompt tokens found in the worker's prefix cache.
    pub cached_len: usize,
}

/// A prefill worker and its load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillInfo {
    /// The worker's name.
    pub worker_id: String,
    /// What it sends.
    pub layout: KvLayout,
    /// The longest prompt it can hold.
    pub max_seq_len: usize,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Its pool.
    pub pool: PoolState,
    /// Prompts that wait.
    pub n_waiting: usize,
    /// Prompts that hold blocks.
    pub n_running: usize,
    /// Prompt tokens accepted and not yet computed.
    pub queued_tokens: u64,
}

/// One message of a hand-off to one rank.
#[derive(Clone, Debug)]
pub enum KvMessage {
    /// First.
    Open(KvOpen),
    /// KV of a run of blocks.
    Chunk(KvChunk),
    /// Last.
    Commit(KvCommit),
    /// The sender is at work and has nothing new.
    Alive,
}

/// Names the hand-off and what both sides must agree on.
#[derive(Clone, Debug)]
pub struct KvOpen {
    /// As in the reservation.
    pub handoff: HandoffId,
    /// As in the reservation.
    pub epoch: Epoch,
    /// The receiver's rank.
    pub rank: usize,
    /// The sender's layout.
    pub layout: KvLayout,
    /// Tokens of the prompt.
    pub prompt_len: usize,
}

/// Asks a rank for its part of the cached prefix of a hand-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// As in the reservation.
    pub handoff: HandoffId,
    /// As in the reservation.
    pub epoch: Epoch,
    /// The rank that is asked.
    pub rank: usize,
    /// The caller's layout.
    pub layout: KvLayout,
    /// First half of the SHA-256 of the prompt's token ids.
    pub prompt_hash: [u8; 16],
    /// Logical blocks; the rank gives those that it owns.
    pub blocks: Range<usize>,
    /// KV heads of the model, among those that the rank stores.
    pub heads: Range<usize>,
}

/// One message of a pull from one rank.
#[derive(Clone, Debug)]
pub enum PullMessage {
    /// KV of a run of blocks; they count from the start of the rank's share of the request.
    Chunk(KvChunk),
    /// Last.
    Done(PullDone),
}

/// Ends a pull from one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullDone {
    /// Cells (layer × block) that were sent.
    pub n_cells: usize,
    /// Order-independent digest over all cells.
    pub digest: u64,
}

/// One contiguous run of a rank's blocks, of one run of layers.
#[derive(Clone, Debug)]
pub struct KvChunk {
    /// Layers.
    pub layers: Range<usize>,
    /// Blocks, counted from the start of the rank's share of the hand-off or pull.
    pub blocks: Range<usize>,
    /// Layers outermost, then blocks.
    pub payload: Bytes,
    /// CRC-32C of each cell (layer × block), in payload order.
    pub crc32c: Vec<u32>,
}

/// Ends a hand-off on one rank.
#[derive(Clone, Debug)]
pub struct KvCommit {
    /// Cells (layer × block) that were sent to this rank.
    pub n_cells: usize,
    /// Order-independent digest over all cells.
    pub digest: u64,
    /// First half of the SHA-256 of the prompt's token ids.
    pub prompt_hash: [u8; 16],
    /// To rank 0 only.
    pub first_token: Option<OutputToken>,
}

/// What a rank verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvAck {
    /// Cells that are there and verified.
    pub n_cells: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_from_its_own_words_and_no_others() {
        let layout = KvLayout {
            model_fingerprint: std::array::from_fn(|i| i as u8 * 17),
            n_layers: 30,
            n_kv_heads: 3,
            head_dim: 64,
            kv_dtype: KvDtype::F16,
            block_size: 32,
            n_shards: 8,
            wire_version: 1,
        };
        let text = layout.to_string();
        assert_eq!(
            text,
            "wire_version=1,model_fingerprint=00112233445566778899aabbccddeeff,n_layers=30,n_kv_heads=3,\
             head_dim=64,kv_dtype=f16,block_size=32,n_shards=8"
        );
        assert_eq!(text.parse(), Ok(layout.clone()));
        for (wrong, field) in [
            (String::new(), "wire_version"),
            (text.replace("aabb", "xxbb"), "model_fingerprint"),
            (text.replace("f16", "f17"), "kv_dtype"),
            (text.replace("n_shards=8", "n_shards=-8"), "n_shards"),
            (text.replace("n_layers=30", "n_layers=030"), "the end"),
            (format!("{text},more=1"), "the end"),
        ] {
            assert_eq!(wrong.parse::<KvLayout>().unwrap_err().field, field, "{wrong}");
        }
        let other = KvLayout { block_size: 64, ..layout.clone() };
        let both = ("block_size", "32".to_owned(), "64".to_owned());
        assert_eq!(layout.first_difference(&other), Some(both));
    }
}
