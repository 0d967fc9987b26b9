//! The tensor directory: names, types, shapes and places, checked against each other and the file.

use std::fmt;

use crate::{
    cursor::Cursor,
    error::{Fault, Problem},
};

/// Longest tensor name that the format allows.
const MAX_NAME_BYTES: u64 = 64;

/// Type number, name, values in a block, bytes of a block: every type that ggml has assigned and not removed.
const TYPES: [(u32, &str, u64, u64); 33] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
];

/// A number format of ggml. Not all of them can be computed with here; all of them can be named.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(u8);

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Its number format.
    pub ty: GgmlType,
    /// Lengths, outermost first: `[rows, columns]` for a matrix whose rows are contiguous. (In the file the
    /// order is the other way round.)
    pub shape: Vec<usize>,
    /// Which file of the set holds it.
    pub shard: usize,
    /// First byte, from the start of that file.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

/// A directory entry before its place is known to be inside the file.
pub(crate) struct RawTensor {
    name: String,
    ty: GgmlType,
    dims: Vec<u64>,
    bytes: u64,
    offset: u64,
}

impl GgmlType {
    /// The type of a number in a file.
    pub fn from_number(number: u32) -> Option<Self> {
        let index = TYPES.iter().position(|ty| ty.0 == number)?;
        u8::try_from(index).ok().map(Self)
    }

    fn row(self) -> (u32, &'static str, u64, u64) {
        TYPES[usize::from(self.0)]
    }

    /// The type's number in a file.
    pub fn number(self) -> u32 {
        self.row().0
    }

    /// The type of ggml's name for it.
    pub fn from_name(name: &str) -> Option<Self> {
        TYPES.iter().find(|ty| ty.1 == name).and_then(|ty| Self::from_number(ty.0))
    }

    /// ggml's name of the type.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Values in a block.
    pub fn block_len(self) -> u64 {
        self.row().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl RawTensor {
    /// What every directory entry begins with, as for metadata entries.
    pub(crate) const MIN_BYTES: u64 = 8;

    /// Reads the directory entry number `index`.
    pub(crate) fn read(cursor: &mut Cursor<'_>, index: u64, alignment: u64) -> Result<Self, Fault> {
        let name = read_name(cursor, &format_args!("name of tensor {index}"), MAX_NAME_BYTES)?;
        let problem = |problem| Fault::field(format!("tensor {name:?}"), problem);
        let dims = read_dims(cursor, &name)?;
        let number = cursor.u32(&format_args!("type of tensor {name:?}"))?;
        let ty = GgmlType::from_number(number).ok_or_else(|| problem(Problem::UnknownTensorType(number)))?;
        let offset = cursor.u64(&format_args!("offset of tensor {name:?}"))?;
        if !dims[0].is_multiple_of(ty.block_len()) {
            return Err(problem(Problem::PartialBlock { len: dims[0], ty }));
        }
        let bytes = tensor_bytes(&dims, ty).ok_or_else(|| problem(Problem::TooLarge(dims.clone())))?;
        if !offset.is_multiple_of(alignment) {
            return Err(problem(Problem::Unaligned { offset, alignment }));
        }
        Ok(Self { name, ty, dims, bytes, offset })
    }

    /// Places the tensor in a file of `file_len` bytes whose data part begins at `data_start`.
    pub(crate) fn place(self, data_start: u64, file_len: u64) -> Result<TensorInfo, Fault> {
        let have = file_len.saturating_sub(data_start);
        let inside = self.offset.checked_add(self.bytes).is_some_and(|end| end <= have);
        if !inside {
            let problem = Problem::PastEnd { offset: self.offset, bytes: self.bytes, have };
            return Err(Fault::field(format!("tensor {:?}", self.name), problem));
        }
        // Inside the file, so every number fits the address space that the file is mapped into.
        Ok(TensorInfo {
            name: self.name,
            ty: self.ty,
            shape: self.dims.iter().rev().map(|&dim| dim as usize).collect(),
            shard: 0,
            start: (data_start + self.offset) as usize,
            len: self.bytes as usize,
        })
    }
}

/// Refuses two tensors of one name or with bytes in common.
pub(crate) fn check_disjoint(tensors: &[TensorInfo]) -> Result<(), Fault> {
    let mut by_name: Vec<&TensorInfo> = tensors.iter().collect();
    by_name.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = by_name.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Fault::field(format!("tensor {:?}", pair[0].name), Problem::Duplicate));
    }
    let mut by_place: Vec<&TensorInfo> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| (tensor.shard, tensor.start));
    let overlap = by_place
        .windows(2)
        .find(|pair| pair[0].shard == pair[1].shard && pair[0].start + pair[0].len > pair[1].start);
    match overlap {
        Some(pair) => {
            Err(Fault::field(format!("tensor {:?}", pair[1].name), Problem::Overlap(pair[0].name.clone())))
        }
        None => Ok(()),
    }
}

/// A key or tensor name: 1 to `max_bytes` bytes of UTF-8 without NUL.
pub(crate) fn read_name(
    cursor: &mut Cursor<'_>,
    field: &dyn fmt::Display,
    max_bytes: u64,
) -> Result<String, Fault> {
    let bytes = cursor.string(field)?;
    let problem = |problem| Fault::field(field.to_string(), problem);
    if bytes.is_empty() {
        return Err(problem(Problem::EmptyName));
    }
    if bytes.len() as u64 > max_bytes {
        return Err(problem(Problem::NameTooLong { len: bytes.len() as u64, max: max_bytes }));
    }
    if bytes.contains(&0) {
        return Err(problem(Problem::NulInName));
    }
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| problem(Problem::NotUtf8))
}

fn read_dims(cursor: &mut Cursor<'_>, name: &str) -> Result<Vec<u64>, Fault> {
    let n_dims = cursor.u32(&format_args!("dimension count of tensor {name:?}"))?;
    let problem = |problem| Fault::field(format!("tensor {name:?}"), problem);
    if !(1..=4).contains(&n_dims) {
        return Err(problem(Problem::DimCount(n_dims)));
    }
    let mut dims = Vec::new();
    for i in 0..n_dims as usize {
        match cursor.u64(&format_args!("dimension {i} of tensor {name:?}"))? {
            0 => return Err(problem(Problem::ZeroDim(i))),
            dim => dims.push(dim),
        }
    }
    Ok(dims)
}

fn tensor_bytes(dims: &[u64], ty: GgmlType) -> Option<u64> {
    let values = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))?;
    (values / ty.block_len()).checked_mul(ty.block_bytes())
}
