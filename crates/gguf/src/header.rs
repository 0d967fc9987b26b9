//! The header of one file: magic, version, metadata, tensor directory.

use std::path::Path;

use crate::{
    cursor::Cursor,
    error::{Fault, GgufError, Problem},
    map::is_lfs_pointer,
    metadata::Metadata,
    tensor::{RawTensor, TensorInfo, check_disjoint, read_name},
    value::Value,
};

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Longest key that the format allows.
const MAX_KEY_BYTES: u64 = 65_535;
/// What every metadata entry begins with: the length of its key. A tighter bound would blame the count where the
/// key or the value is at fault.
const MIN_ENTRY_BYTES: u64 = 8;

/// Everything a file says about itself, checked against the file's length.
#[derive(Debug)]
pub struct Header {
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors in directory order; `shard` is 0.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header of the file contents `bytes`; `path` is for messages only.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, GgufError> {
        Self::parse_parts(path, bytes).map_err(|fault| GgufError::new(path, fault))
    }

    fn parse_parts(path: &Path, bytes: &[u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(bytes);
        read_start(&mut cursor, bytes)?;
        let n_tensors = cursor.count(RawTensor::MIN_BYTES, &"tensor count")?;
        let n_entries = cursor.count(MIN_ENTRY_BYTES, &"metadata count")?;
        let mut metadata = Metadata::new(path);
        for i in 0..n_entries {
            let key = read_name(&mut cursor, &format_args!("key {i}"), MAX_KEY_BYTES)?;
            let value = Value::read(&mut cursor, &key)?;
            if !metadata.insert(&key, value) {
                return Err(Fault::field(key, Problem::Duplicate));
            }
        }
        let alignment = alignment(&metadata)?;
        let mut raw = Vec::new();
        for i in 0..n_tensors {
            raw.push(RawTensor::read(&mut cursor, i, alignment)?);
        }
        let data_start = (cursor.pos() as u64).next_multiple_of(alignment);
        let place = |tensor: RawTensor| tensor.place(data_start, bytes.len() as u64);
        let tensors = raw.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        check_disjoint(&tensors)?;
        Ok(Self { metadata, tensors })
    }
}

fn read_start(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<(), Fault> {
    if is_lfs_pointer(bytes) {
        return Err(Fault::LfsPointer);
    }
    let magic = cursor.take(4, &"magic")?;
    if magic != MAGIC {
        return Err(Fault::Magic(magic.escape_ascii().to_string()));
    }
    let version = cursor.u32(&"version")?;
    match version {
        2 | 3 => Ok(()),
        // Version numbers are small: only the wrong byte order puts them into the high half.
        _ if version != 0 && version & 0xffff == 0 => Err(Fault::BigEndian),
        _ => Err(Fault::Version(version)),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, Fault> {
    let problem = match metadata.get(ALIGNMENT_KEY) {
        None => return Ok(DEFAULT_ALIGNMENT),
        Some(&Value::Unsigned(value)) if value.is_power_of_two() && value <= u64::from(u32::MAX) => {
            return Ok(value);
        }
        Some(Value::Unsigned(value)) => Problem::range(value, "a power of two below 2^32"),
        Some(value) => Problem::wrong_type("an unsigned integer", value.kind()),
    };
    Err(Fault::field(ALIGNMENT_KEY, problem))
}
