//! What differs between the two roles of workers, as routing sees them.

use std::future::Future;

use longreach_proto::worker::{DecodeClient, GroupInfo, PrefillClient, PrefillInfo};
use tonic::{Status, transport::Channel};

/// A kind of worker.
pub(crate) trait Role: Send + Sync + 'static {
    /// For logs and messages.
    const NAME: &'static str;
    /// Calls a worker.
    type Client: Clone + Send + Sync;
    /// What a worker says of itself.
    type Info: Send + Sync;

    /// A client over `channel`.
    fn client(channel: Channel) -> Self::Client;
    /// Asks a worker about itself.
    fn describe(client: &Self::Client) -> impl Future<Output = Result<Self::Info, Status>> + Send;
    /// The figures that routing needs.
    fn load(info: &Self::Info) -> Load;
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
    type Client = DecodeClient;
    type Info = GroupInfo;

    fn client(channel: Channel) -> DecodeClient {
        DecodeClient::new(channel)
    }

    async fn describe(client: &DecodeClient) -> Result<GroupInfo, Status> {
        client.group().await
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
    type Client = PrefillClient;
    type Info = PrefillInfo;

    fn client(channel: Channel) -> PrefillClient {
        PrefillClient::new(channel)
    }

    async fn describe(client: &PrefillClient) -> Result<PrefillInfo, Status> {
        client.worker().await
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
