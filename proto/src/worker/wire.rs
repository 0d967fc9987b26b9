//! Bytes of single messages, for fuzzing.
//!
//! Services never see bytes: tonic reads the generated type and hands it over. Here are the same two steps as one
//! function, since the generated types do not leave this crate.

use prost::Message;
use tonic::Status;

use super::types::{
    DecodeEvent, GenerateRequest, GroupInfo, KvMessage, PrefillEvent, PrefillInfo, PullMessage, PullRequest,
    RunRequest,
};
use crate::generated::worker as pb;

/// A type that crosses the wire as one message.
pub trait Wire: Sized {
    /// Its bytes.
    fn to_wire(self) -> Vec<u8>;
    /// Reads and checks bytes, as its service does.
    fn from_wire(bytes: &[u8]) -> Result<Self, Status>;
}

macro_rules! wire {
    ($($domain:ident as $message:ident),* $(,)?) => {
        $(impl Wire for $domain {
            fn to_wire(self) -> Vec<u8> {
                pb::$message::from(self).encode_to_vec()
            }

            fn from_wire(bytes: &[u8]) -> Result<Self, Status> {
                let message = pb::$message::decode(bytes);
                message.map_err(|error| Status::internal(error.to_string()))?.try_into()
            }
        })*
    };
}

wire!(
    GenerateRequest as GenerateRequest,
    DecodeEvent as GenerateResponse,
    GroupInfo as GetGroupResponse,
    RunRequest as RunRequest,
    PrefillEvent as RunResponse,
    PrefillInfo as GetWorkerResponse,
    KvMessage as PushRequest,
    PullRequest as PullRequest,
    PullMessage as PullResponse,
);
