//! The secret of one life of a decode group.

use std::{fmt, str::FromStr};

/// What the ranks of one life of a decode group know, and nobody else: they prove it to each other when they connect.
///
/// It cannot be printed by accident; [`Self::to_hex`] is for where it must be stored. Equality takes a time that
/// depends on the bytes, so it is not for comparing what a stranger sent.
#[derive(Clone, PartialEq, Eq)]
pub struct GroupSecret([u8; 32]);

/// A text that is no secret: not 64 digits from 0 to 9 and a to f.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretFormError;

impl GroupSecret {
    /// A secret of these bytes, which must come from a source that nobody can predict.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, as key of a proof.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// 64 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FromStr for GroupSecret {
    type Err = SecretFormError;

    fn from_str(text: &str) -> Result<Self, SecretFormError> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(SecretFormError),
        };
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(SecretFormError) };
        let bytes: Result<Vec<u8>, _> =
            pairs.iter().map(|&[high, low]| Ok(digit(high)? << 4 | digit(low)?)).collect();
        bytes?.try_into().map(Self).map_err(|_| SecretFormError)
    }
}

impl fmt::Debug for GroupSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupSecret(..)")
    }
}

impl fmt::Display for SecretFormError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret is 64 digits from 0 to 9 and a to f")
    }
}

impl std::error::Error for SecretFormError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_survives_its_text_and_is_not_printed() {
        let secret = GroupSecret::new(std::array::from_fn(|i| (i * 9) as u8));
        let text = secret.to_hex();
        assert_eq!(text.parse(), Ok(secret.clone()));
        assert_eq!(format!("{secret:?}"), "GroupSecret(..)");
        let faulty = [
            &text[1..],
            &text[2..],
            "",
            &text.to_uppercase(),
            &text.replace('f', "é"),
            &(text.clone() + "00"),
        ];
        for faulty in faulty {
            assert_eq!(faulty.parse::<GroupSecret>(), Err(SecretFormError), "{faulty}");
        }
    }
}
