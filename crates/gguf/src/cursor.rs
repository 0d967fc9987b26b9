//! A reader over a byte slice that cannot run past its end or be talked into a reservation.

use std::fmt::Display;

use crate::error::Fault;

/// Position in a slice; every read names the field it is for.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, pos: 0 }
    }

    /// Bytes read so far.
    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    /// What was read since `start`, an earlier [`Cursor::pos`].
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.pos]
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, field: &dyn Display) -> Result<&'a [u8], Fault> {
        let rest = &self.bytes[self.pos..];
        match usize::try_from(len).ok().and_then(|len| rest.get(..len)) {
            Some(taken) => {
                self.pos += taken.len();
                Ok(taken)
            }
            None => Err(Fault::Truncated { field: field.to_string(), want: len, have: rest.len() as u64 }),
        }
    }

    pub(crate) fn u32(&mut self, field: &dyn Display) -> Result<u32, Fault> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &dyn Display) -> Result<u64, Fault> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A length-prefixed string, as bytes: the format promises UTF-8, vocabularies do not keep to it.
    pub(crate) fn string(&mut self, field: &dyn Display) -> Result<&'a [u8], Fault> {
        let len = self.u64(field)?;
        self.take(len, field)
    }

    /// A number of things that take at least `min_bytes` each, refused when they cannot all be there.
    pub(crate) fn count(&mut self, min_bytes: u64, field: &dyn Display) -> Result<u64, Fault> {
        let count = self.u64(field)?;
        self.check_room(count, min_bytes, field)?;
        Ok(count)
    }

    pub(crate) fn check_room(&self, count: u64, min_bytes: u64, field: &dyn Display) -> Result<(), Fault> {
        let have = (self.bytes.len() - self.pos) as u64;
        let want = count.saturating_mul(min_bytes);
        if want > have {
            return Err(Fault::Truncated { field: format!("{field} of {count}"), want, have });
        }
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &dyn Display) -> Result<[u8; N], Fault> {
        let taken = self.take(N as u64, field)?;
        Ok(taken.try_into().expect("take returns as many bytes as it was asked for"))
    }
}
