//! One safetensors file: an eight-byte length, a JSON header of that length, tensor data without gaps.
//!
//! Read here and not by the `safetensors` crate, whose errors name neither the tensor nor the sizes, and which
//! takes the last of two equal names. The rules are the format's own: tensors lie back to back, in any order, from
//! the first byte of the data to the last.

use std::{collections::BTreeMap, fmt};

use longreach_gguf::is_lfs_pointer;
use longreach_kernels::StoredType;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

use super::{StoredTensor, error::SafetensorsFault, unique::take_unique};

/// Longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;
const METADATA: &str = "__metadata__";

/// The header: tensors by name. Its metadata is checked and dropped.
struct Header(BTreeMap<String, Entry>);

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Header, A::Error> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), BTreeMap::<_, BTreeMap<String, String>>::new());
        while let Some(key) = access.next_key::<String>()? {
            if key == METADATA {
                take_unique(&mut metadata, key, &mut access)?;
            } else {
                take_unique(&mut tensors, key, &mut access)?;
            }
        }
        Ok(Header(tensors))
    }
}

/// Reads the directory of the file contents `bytes`; tensors are marked as being in file number `file`.
pub(super) fn parse(bytes: &[u8], file: usize) -> Result<BTreeMap<String, StoredTensor>, SafetensorsFault> {
    let header = header_bytes(bytes)?;
    let data_start = LENGTH_BYTES + header.len();
    let entries: Header = serde_json::from_slice(header).map_err(SafetensorsFault::Header)?;
    let mut tensors = BTreeMap::new();
    let mut places = Vec::new();
    for (name, entry) in entries.0 {
        let Entry { dtype, shape, data_offsets: (start, end) } = entry;
        let ty = stored_type(&name, dtype)?;
        if extent(&shape, ty).is_none_or(|extent| start.checked_add(extent) != Some(end)) {
            let dtype = ty.name();
            return Err(SafetensorsFault::Extent { tensor: name, start, end, shape, dtype });
        }
        places.push((start, end, name.clone()));
        tensors.insert(name, (ty, shape, start, end));
    }
    check_places(places, (bytes.len() - data_start) as u64)?;
    // All places are inside the file now, so every number fits the address space.
    let store = |(ty, shape, start, end): (_, Vec<u64>, u64, u64)| StoredTensor {
        ty,
        shape: shape.into_iter().map(|dim| dim as usize).collect(),
        file,
        start: data_start + start as usize,
        len: (end - start) as usize,
    };
    Ok(tensors.into_iter().map(|(name, tensor)| (name, store(tensor))).collect())
}

fn header_bytes(bytes: &[u8]) -> Result<&[u8], SafetensorsFault> {
    if is_lfs_pointer(bytes) {
        return Err(SafetensorsFault::LfsPointer);
    }
    let truncated = |field, want, have: usize| SafetensorsFault::Truncated { field, want, have: have as u64 };
    let (length, rest) = bytes
        .split_first_chunk::<LENGTH_BYTES>()
        .ok_or_else(|| truncated("header length", LENGTH_BYTES as u64, bytes.len()))?;
    let len = u64::from_le_bytes(*length);
    if len > MAX_HEADER_BYTES {
        return Err(SafetensorsFault::HeaderLength { len, max: MAX_HEADER_BYTES });
    }
    rest.get(..len as usize).ok_or_else(|| truncated("header", len, rest.len()))
}

fn stored_type(tensor: &str, dtype: String) -> Result<StoredType, SafetensorsFault> {
    match dtype.as_str() {
        "F32" => Ok(StoredType::F32),
        "F16" => Ok(StoredType::F16),
        "BF16" => Ok(StoredType::BF16),
        _ => Err(SafetensorsFault::Dtype { tensor: tensor.to_owned(), dtype }),
    }
}

/// Bytes of a tensor, if 64 bits hold the number.
fn extent(shape: &[u64], ty: StoredType) -> Option<u64> {
    shape.iter().try_fold(ty.block_bytes() as u64, |product, &dim| product.checked_mul(dim))
}

/// Tensors must cover the data exactly.
fn check_places(mut places: Vec<(u64, u64, String)>, have: u64) -> Result<(), SafetensorsFault> {
    places.sort();
    let mut want = 0;
    for (start, end, tensor) in places {
        if start != want {
            return Err(SafetensorsFault::Place { tensor, start, want });
        }
        want = end;
    }
    if want == have { Ok(()) } else { Err(SafetensorsFault::DataLength { have, want }) }
}
