//! What differs between the two roles of workers, as routing sees them.

use std::{future::Future, sync::Arc};

use longreach_proto::worker::{GroupInfo, KvLayout, PrefillInfo};
use tonic::Status;

use super::dial::{DecodeCalls, Dial, DialError, PrefillCalls};

/// A kind of worker.
pub(crate) trait Role: Send + Sync + 'static {
    /// For logs and messages.
    const NAME: &'static str;
    /// Calls a worker.
    type Client: Clone + Send + Sync;
    /// What a worker says of itself.
    type Info: Send + Sync;

    /// The means to call the worker at `endpoint`.
    fn dial(dial: &dyn Dial, endpoint: &str) -> Result<Self::Client, DialError>;
    /// Asks a worker about itself.
    fn describe(client: &Self::Client) -> impl Future<Output = Result<Self::Info, Status>> + Send;
    /// The figures that routing needs.
    fn load(info: &Self::Info) -> Load;
    /// How the worker holds KV.
    fn layout(info: &Self::Info) -> &KvLayout;
}

/// A worker's load and bounds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    /// Tokens of work accepted and not done.
    pub(crate) tokens: u64,
    /// Over how many ranks a request's tokens are spread.
    pub(crate) n_shares: u64,
    /// The longest sequence.
    pub(crate) max_seq_len: usize,
    /// Token ids are below this.
    pub(crate) vocab_size: usize,
}

/// A decode group, spoken to through its leader.
pub(crate) enum Decode {}

/// A prefill worker.
pub(crate) enum Prefill {}

impl Role for Decode {
    const NAME: &'static str = "decode";
    type Client = Arc<dyn DecodeCalls>;
    type Info = GroupInfo;

    fn dial(dial: &dyn Dial, endpoint: &str) -> Result<Self::Client, DialError> {
        dial.decode(endpoint)
    }

    async fn describe(client: &Self::Client) -> Result<GroupInfo, Status> {
        client.group().await
    }

    fn layout(info: &GroupInfo) -> &KvLayout {
        &info.layout
    }

    /// KV held or reserved on the fullest rank, as if every rank held as much.
    fn load(info: &GroupInfo) -> Load {
        let held = |pool: &longreach_proto::worker::PoolState| pool.held.values().sum::<usize>();
        let fullest = info.pools.iter().map(held).max().unwrap_or(0);
        Load {
            tokens: (fullest * info.layout.block_size * info.dcp_size) as u64,
            n_shares: info.dcp_size as u64,
            max_seq_len: info.max_seq_len,
            vocab_size: info.vocab_size,
        }
    }
}

impl Role for Prefill {
    const NAME: &'static str = "prefill";
    type Client = Arc<dyn PrefillCalls>;
    type Info = PrefillInfo;

    fn dial(dial: &dyn Dial, endpoint: &str) -> Result<Self::Client, DialError> {
        dial.prefill(endpoint)
    }

    async fn describe(client: &Self::Client) -> Result<PrefillInfo, Status> {
        client.worker().await
    }

    fn layout(info: &PrefillInfo) -> &KvLayout {
        &info.layout
    }

    fn load(info: &PrefillInfo) -> Load {
        Load {
            tokens: info.queued_tokens,
            n_shares: 1,
            max_seq_len: info.max_seq_len,
            vocab_size: info.vocab_size,
        }
    }
}
