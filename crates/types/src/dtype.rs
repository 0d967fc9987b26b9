//! Number formats a person can choose.

use std::{fmt, str::FromStr};

/// Storage format of keys and values in the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE half precision: 2 bytes, 11 significant bits. The default.
    #[default]
    F16,
    /// bfloat16: 2 bytes, 8 significant bits, the range of f32.
    Bf16,
    /// IEEE single precision: 4 bytes; for exact comparison with references.
    F32,
}

impl KvDtype {
    /// Bytes of one stored number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name used in configuration and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::F16, Self::Bf16, Self::F32]
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| format!("unknown KV dtype {text:?}: choose f16, bf16 or f32"))
    }
}

/// How weights are held in memory after loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightForm {
    /// As the file stores them: quantised weights stay integers with per-block scales.
    #[default]
    AsStored,
    /// Every weight expanded to f32: slow and large, for comparison with f32 references.
    F32,
}

impl fmt::Display for WeightForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsStored => "as-stored",
            Self::F32 => "f32",
        })
    }
}

impl FromStr for WeightForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "as-stored" => Ok(Self::AsStored),
            "f32" => Ok(Self::F32),
            _ => Err(format!("unknown weight form {text:?}: choose as-stored or f32")),
        }
    }
}
