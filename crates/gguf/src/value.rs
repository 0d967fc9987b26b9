//! Metadata values.
//!
//! Integers are widened on reading: writers disagree about the width of a key (a context length is found as
//! u16, u32 and u64), and a reader that insists on one silently falls back to a default. Arrays stay encoded,
//! because a vocabulary of 150,000 strings costs its bytes once that way, not a vector each.

use std::fmt::Display;

use crate::{
    cursor::Cursor,
    error::{Fault, Problem},
};

/// Arrays in arrays that are followed; no known file has any.
const MAX_DEPTH: usize = 4;

/// Type of a stored value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the format's own and say all there is to say")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A floating-point number of either width.
    Float(f64),
    /// A truth value; any byte but 0 is true.
    Bool(bool),
    /// A string, of any bytes.
    String(Vec<u8>),
    /// An array.
    Array(Array),
}

/// An array of values, still encoded but known to be well-formed.
#[derive(Clone, PartialEq)]
pub struct Array {
    elem: ValueType,
    len: usize,
    encoded: Box<[u8]>,
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}; {}]", self.elem.name(), self.len)
    }
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// The name used in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of one value; for strings and arrays, of the shortest one.
    fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

impl Value {
    /// Reads the type and the value of `field`.
    pub(crate) fn read(cursor: &mut Cursor<'_>, field: &dyn Display) -> Result<Self, Fault> {
        let ty = read_type(cursor, field)?;
        Self::read_as(cursor, ty, field)
    }

    fn read_as(cursor: &mut Cursor<'_>, ty: ValueType, field: &dyn Display) -> Result<Self, Fault> {
        Ok(match ty {
            ValueType::U8 => Self::Unsigned(u8::from_le_bytes(cursor.array(field)?).into()),
            ValueType::U16 => Self::Unsigned(u16::from_le_bytes(cursor.array(field)?).into()),
            ValueType::U32 => Self::Unsigned(cursor.u32(field)?.into()),
            ValueType::U64 => Self::Unsigned(cursor.u64(field)?),
            ValueType::I8 => Self::Signed(i8::from_le_bytes(cursor.array(field)?).into()),
            ValueType::I16 => Self::Signed(i16::from_le_bytes(cursor.array(field)?).into()),
            ValueType::I32 => Self::Signed(i32::from_le_bytes(cursor.array(field)?).into()),
            ValueType::I64 => Self::Signed(i64::from_le_bytes(cursor.array(field)?)),
            ValueType::F32 => Self::Float(f32::from_le_bytes(cursor.array(field)?).into()),
            ValueType::F64 => Self::Float(f64::from_le_bytes(cursor.array(field)?)),
            ValueType::Bool => Self::Bool(cursor.array::<1>(field)? != [0]),
            ValueType::String => Self::String(cursor.string(field)?.to_vec()),
            ValueType::Array => Self::Array(Array::read(cursor, field)?),
        })
    }

    /// What the value is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "unsigned integer",
            Self::Signed(_) => "signed integer",
            Self::Float(_) => "floating-point number",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(_) => "array",
        }
    }
}

impl Array {
    fn read(cursor: &mut Cursor<'_>, field: &dyn Display) -> Result<Self, Fault> {
        let (elem, len) = read_array_start(cursor, field)?;
        let start = cursor.pos();
        skip_elements(cursor, elem, len, 1, field)?;
        let encoded = cursor.since(start);
        // Every element takes a byte at the least, so the count is below a slice's length.
        Ok(Self { elem, len: len as usize, encoded: encoded.into() })
    }

    /// Type of the elements.
    pub fn elem(&self) -> ValueType {
        self.elem
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, when they are strings.
    pub fn strings(&self) -> Option<Vec<&[u8]>> {
        if self.elem != ValueType::String {
            return None;
        }
        let mut cursor = Cursor::new(&self.encoded);
        Some((0..self.len).map_while(|_| cursor.string(&"array").ok()).collect())
    }

    /// The elements, when they are integers that 64 signed bits hold.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.scalars(|value| match value {
            Value::Unsigned(value) => i64::try_from(value).ok(),
            Value::Signed(value) => Some(value),
            _ => None,
        })
    }

    /// The elements, when they are numbers.
    pub fn floats(&self) -> Option<Vec<f64>> {
        self.scalars(|value| match value {
            Value::Unsigned(value) => Some(value as f64),
            Value::Signed(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        })
    }

    fn scalars<T>(&self, convert: impl Fn(Value) -> Option<T>) -> Option<Vec<T>> {
        if matches!(self.elem, ValueType::String | ValueType::Array) {
            return None;
        }
        let mut cursor = Cursor::new(&self.encoded);
        let next = |_| Value::read_as(&mut cursor, self.elem, &"array").ok().and_then(&convert);
        (0..self.len).map(next).collect()
    }
}

fn read_type(cursor: &mut Cursor<'_>, field: &dyn Display) -> Result<ValueType, Fault> {
    let number = cursor.u32(field)?;
    ValueType::from_number(number)
        .ok_or_else(|| Fault::field(field.to_string(), Problem::UnknownValueType(number)))
}

fn read_array_start(cursor: &mut Cursor<'_>, field: &dyn Display) -> Result<(ValueType, u64), Fault> {
    let elem = read_type(cursor, field)?;
    let len = cursor.count(elem.min_bytes(), &format_args!("{field}: array"))?;
    Ok((elem, len))
}

fn skip_elements(
    cursor: &mut Cursor<'_>,
    elem: ValueType,
    len: u64,
    depth: usize,
    field: &dyn Display,
) -> Result<(), Fault> {
    match elem {
        ValueType::String => (0..len).try_for_each(|_| cursor.string(field).map(drop)),
        ValueType::Array if depth >= MAX_DEPTH => {
            Err(Fault::field(field.to_string(), Problem::TooDeep(MAX_DEPTH)))
        }
        ValueType::Array => (0..len).try_for_each(|_| {
            let (elem, len) = read_array_start(cursor, field)?;
            skip_elements(cursor, elem, len, depth + 1, field)
        }),
        _ => cursor.take(len * elem.min_bytes(), field).map(drop),
    }
}
