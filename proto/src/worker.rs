//! The internal services in domain types: what routers, prefill workers and decode ranks say to each other.

mod client;
mod convert;
mod server;
mod types;
#[doc(hidden)]
pub mod wire;

pub use client::{ClientStream, DecodeClient, KvClient, PrefillClient};
pub use server::{
    DecodeHandler, EventStream, KvHandler, MAX_CELL_BYTES, PrefillHandler, decode_server, kv_server,
    prefill_server,
};
pub use types::{
    DecodeEvent, FirstToken, GenerateRequest, GroupInfo, KvAck, KvChunk, KvCommit, KvLayout, KvMessage,
    KvOpen, LayoutError, OutputToken, PoolState, PrefillEvent, PrefillInfo, PullDone, PullMessage,
    PullRequest, RankTarget, Reservation, RunRequest,
};
