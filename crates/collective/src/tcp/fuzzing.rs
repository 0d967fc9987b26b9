//! The parsers of this module without their connections, for fuzzing.

use std::time::Duration;

use super::{frame, greeting, handshake};

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = frame::HEADER_BYTES;

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = greeting::GREETING_BYTES;

/// Reads the header of a frame; what is read and written again must be what came.
pub fn header(bytes: &[u8; HEADER_BYTES]) -> bool {
    match frame::decode(bytes, 1, Duration::ZERO) {
        Ok(frame::Header::Data(call)) => {
            let mut canonical = *bytes;
            // Says something in a farewell only.
            canonical[3] = 0;
            assert_eq!(frame::encode(call), canonical, "a header lost something");
            true
        }
        Ok(frame::Header::Farewell(cause)) => {
            let read = frame::decode(&frame::encode_farewell(&cause), 1, Duration::ZERO);
            assert_eq!(read, Ok(frame::Header::Farewell(cause)), "a farewell lost its cause");
            true
        }
        Err(_) => false,
    }
}

/// Reads a greeting and says whether its sender may be a member of a group like that of `like`.
pub fn greeting(bytes: &[u8; GREETING_BYTES], like: &super::TcpConfig) -> bool {
    handshake::is_member(bytes, like)
}

/// The greeting with which `config`'s rank dials another.
pub fn own_greeting(config: &super::TcpConfig) -> [u8; GREETING_BYTES] {
    handshake::member(config)
}

/// The header of an all-gather's frame.
pub fn own_header(group: u32, seq: u64, n_bytes: u64) -> [u8; HEADER_BYTES] {
    frame::encode(crate::Call { op: crate::Op::AllGather, group, seq, n_bytes })
}
