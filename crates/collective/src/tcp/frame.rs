//! The header of a frame: 24 bytes, little endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | magic |
//! | 2 | operation, or 0 for a farewell |
//! | 3 | farewell: why |
//! | 4..8 | communicator: 0 is the whole group |
//! | 8..16 | sequence number; farewell: the rank that is to blame |
//! | 16..24 | bytes that follow; farewell: the operation that timed out |

use std::time::Duration;

use crate::error::{Call, CommError, Op};

pub(super) const HEADER_BYTES: usize = 24;

const MAGIC: u16 = 0x4c52;

const WHY_OTHER: u8 = 0;
const WHY_LOST: u8 = 1;
const WHY_ABORTED: u8 = 2;
const WHY_TIMEOUT: u8 = 3;

/// What the header of a received frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// The peer's part in a collective.
    Data(Call),
    /// The peer ended the epoch.
    Farewell(CommError),
}

pub(super) fn encode(call: Call) -> [u8; HEADER_BYTES] {
    pack(call.op as u8, 0, call.group, call.seq, call.n_bytes)
}

/// The last frame of a rank that ended the epoch for `cause`.
pub(super) fn encode_farewell(cause: &CommError) -> [u8; HEADER_BYTES] {
    let (why, rank, op) = match cause {
        CommError::PeerLost { rank } => (WHY_LOST, *rank, 0),
        CommError::Aborted => (WHY_ABORTED, 0, 0),
        CommError::Timeout { op, missing, .. } => (WHY_TIMEOUT, *missing, *op as u8),
        _ => (WHY_OTHER, 0, 0),
    };
    pack(0, why, 0, rank as u64, u64::from(op))
}

/// Reads a header that `peer` sent. `waited` is the bound of this rank.
pub(super) fn decode(bytes: &[u8; HEADER_BYTES], peer: usize, waited: Duration) -> Result<Header, CommError> {
    let malformed = |field, value| Err(CommError::Malformed { peer, field, value });
    let magic = u16::from_le_bytes([bytes[0], bytes[1]]);
    if magic != MAGIC {
        return malformed("magic", u64::from(magic));
    }
    let (code, why) = (bytes[2], bytes[3]);
    let group = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    let (seq, n_bytes) = (word(bytes, 8), word(bytes, 16));
    if code != 0 {
        let Some(op) = Op::from_code(code) else { return malformed("operation", u64::from(code)) };
        return Ok(Header::Data(Call { op, group, seq, n_bytes }));
    }
    Ok(Header::Farewell(match why {
        WHY_LOST => CommError::PeerLost { rank: seq as usize },
        WHY_ABORTED => CommError::Aborted,
        WHY_TIMEOUT => match u8::try_from(n_bytes).ok().and_then(Op::from_code) {
            Some(op) => CommError::Timeout { op, waited, missing: seq as usize },
            None => return malformed("operation that timed out", n_bytes),
        },
        WHY_OTHER => CommError::PeerFailed { rank: peer },
        why => return malformed("farewell", u64::from(why)),
    }))
}

fn pack(op: u8, why: u8, group: u32, seq: u64, n_bytes: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[2] = op;
    bytes[3] = why;
    bytes[4..8].copy_from_slice(&group.to_le_bytes());
    bytes[8..16].copy_from_slice(&seq.to_le_bytes());
    bytes[16..].copy_from_slice(&n_bytes.to_le_bytes());
    bytes
}

fn word(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_keep_their_fields(code in 1_u8..=6, group: u32, seq: u64, n_bytes: u64) {
            let call = Call { op: Op::from_code(code).unwrap(), group, seq, n_bytes };
            prop_assert_eq!(decode(&encode(call), 0, Duration::ZERO), Ok(Header::Data(call)));
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes: [u8; HEADER_BYTES], magic: bool) {
            let mut bytes = bytes;
            if magic {
                bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
            }
            if let Ok(Header::Data(call)) = decode(&bytes, 3, Duration::ZERO) {
                bytes[3] = 0;
                prop_assert_eq!(encode(call), bytes);
            }
        }
    }

    #[test]
    fn farewells_carry_the_cause() {
        let waited = Duration::from_secs(3);
        let said = |cause: CommError| decode(&encode_farewell(&cause), 5, waited).unwrap();
        for cause in [
            CommError::PeerLost { rank: 2 },
            CommError::Aborted,
            CommError::Timeout { op: Op::AllToAll, waited, missing: 7 },
        ] {
            assert_eq!(said(cause.clone()), Header::Farewell(cause));
        }
        let own = CommError::SplitDisagrees { rank: 5, peer: 1 };
        assert_eq!(said(own), Header::Farewell(CommError::PeerFailed { rank: 5 }));
    }
}
