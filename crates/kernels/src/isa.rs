//! Which implementation of the kernels runs.

use std::{fmt, str::FromStr};

/// One implementation of every operation. All give the same bits; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain loops, written to be read: the contract.
    Reference,
    /// The vector kernels over arrays of sixteen, for any processor.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    const ALL: [Self; 4] = [Self::Reference, Self::Portable, Self::Avx2, Self::Avx512];

    /// The fastest implementation this processor can run.
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The implementations this processor can run, slowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this processor has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Reference | Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => crate::simd::Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => crate::simd::Avx512::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// The name used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == text)
            .ok_or_else(|| format!("unknown isa {text:?}: choose reference, portable, avx2 or avx512"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_portable_is_always_available() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().is_err());
        assert!(Isa::available().starts_with(&[Isa::Reference, Isa::Portable]));
    }
}
