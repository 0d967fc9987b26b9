//! How tokens become bytes.
//!
//! For almost every generating model the text of a token is a fixed string of bytes, whatever stands around
//! it, apart from spaces at the very start. Then decoding is concatenation, which streams by nature. The
//! decoder section of a tokenizer file is recognised as such a [`DecodeRule`] here; what is not recognised
//! goes through the tokenizer library with a window of context.
//!
//! One deliberate difference from the library: it replaces a whole run of byte tokens if any byte in it is
//! invalid, also the valid characters, which cannot be known before the run ends. Here invalid bytes become
//! U+FFFD as in a lossy decode of all bytes.

use serde_json::Value;

/// How the tokens of a vocabulary become text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DecodeRule {
    /// The text is the concatenated bytes of the tokens, with this done at its start.
    Bytes(PieceRule, Lead),
    /// Only the library knows.
    Window,
}

/// How the spelling of one token becomes its bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PieceRule {
    /// The alphabet of GPT-2: each byte is spelled as one printable character.
    ByteLevel,
    /// SentencePiece: strings are replaced, then `<0xNN>` is a byte.
    SentencePiece {
        /// Pairs of a string and its replacement, in order.
        replace: Vec<(String, String)>,
        /// Whether `<0xNN>` is a byte.
        byte_fallback: bool,
    },
}

/// What happens to spaces at the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lead {
    /// They stay.
    Keep,
    /// Up to this many are dropped.
    DropSpaces(usize),
    /// All of the first token are dropped.
    DropInFirstToken,
}

impl DecodeRule {
    /// The rule of GGUF's SentencePiece vocabularies.
    pub(crate) fn sentence_piece(lead: Lead) -> Self {
        let replace = vec![("▁".to_owned(), " ".to_owned())];
        Self::Bytes(PieceRule::SentencePiece { replace, byte_fallback: true }, lead)
    }

    /// Reads the decoder section of a tokenizer file.
    pub(crate) fn from_json(decoder: Option<&Value>) -> Self {
        decoder.and_then(Self::recognise).unwrap_or(Self::Window)
    }

    fn recognise(decoder: &Value) -> Option<Self> {
        let steps = match decoder.get("type")?.as_str()? {
            "Sequence" => decoder.get("decoders")?.as_array()?.as_slice(),
            _ => std::slice::from_ref(decoder),
        };
        let mut replace = Vec::new();
        let (mut byte_fallback, mut fused, mut lead) = (false, false, Lead::Keep);
        for step in steps {
            match step.get("type")?.as_str()? {
                "ByteLevel" if steps.len() == 1 => return Some(Self::Bytes(PieceRule::ByteLevel, lead)),
                "Replace" if !byte_fallback && !fused => {
                    let pattern = step.get("pattern")?.get("String")?.as_str()?;
                    replace.push((pattern.to_owned(), step.get("content")?.as_str()?.to_owned()));
                }
                "ByteFallback" if !fused => byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && lead == Lead::Keep => {
                    let spaces = step.get("content")?.as_str()? == " " && step.get("stop")?.as_u64()? == 0;
                    let start = usize::try_from(step.get("start")?.as_u64()?).ok()?;
                    lead = spaces.then_some(Lead::DropSpaces(start))?;
                }
                "Metaspace" if steps.len() == 1 => {
                    replace.push((step.get("replacement")?.as_str()?.to_owned(), " ".to_owned()));
                    let scheme = step.get("prepend_scheme").and_then(Value::as_str);
                    lead = if scheme == Some("never") { Lead::Keep } else { Lead::DropInFirstToken };
                }
                _ => return None,
            }
        }
        Some(Self::Bytes(PieceRule::SentencePiece { replace, byte_fallback }, lead))
    }
}

impl PieceRule {
    /// The bytes that the token spelled `piece` stands for.
    pub(crate) fn bytes(&self, piece: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the alphabet was added by hand and stands for itself.
            Self::ByteLevel => {
                let bytes: Option<Vec<u8>> = piece.chars().map(byte_of_char).collect();
                bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
            }
            Self::SentencePiece { replace, byte_fallback } => {
                let mut text = piece.to_owned();
                for (from, to) in replace {
                    text = text.replace(from, to);
                }
                match byte_of_escape(&text).filter(|_| *byte_fallback) {
                    Some(byte) => vec![byte],
                    None => text.into_bytes(),
                }
            }
        }
    }
}

/// `<0xNN>` as the byte that it names.
pub(crate) fn byte_of_escape(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hex.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The byte that a character of GPT-2's alphabet spells. Printable Latin-1 spells itself; the other bytes, in
/// order, are spelled by the characters from U+0100 on.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if code < 0x100 {
        return printable(code).then_some(code as u8);
    }
    let nth = usize::try_from(code - 0x100).ok()?;
    (0..=0xff).filter(|&byte| !printable(byte)).nth(nth).map(|byte| byte as u8)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(|c| byte_of_char(char::from_u32(c)?)).collect();
        assert_eq!(bytes.len(), 256);
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), 256);
        assert_eq!(PieceRule::ByteLevel.bytes("Ġdéjà"), b" d\xe9j\xe0");
        assert_eq!(PieceRule::ByteLevel.bytes("<日>"), "<日>".as_bytes());
    }

    #[test]
    fn known_decoders_are_byte_rules_and_others_are_not() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(DecodeRule::from_json(Some(&llama)), DecodeRule::sentence_piece(Lead::DropSpaces(1)));
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true});
        assert_eq!(
            DecodeRule::from_json(Some(&byte_level)),
            DecodeRule::Bytes(PieceRule::ByteLevel, Lead::Keep)
        );
        let strip_each_token = json!({"type": "Sequence", "decoders": [
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]});
        for other in [strip_each_token, json!({"type": "WordPiece", "prefix": "##"}), json!({})] {
            assert_eq!(DecodeRule::from_json(Some(&other)), DecodeRule::Window);
        }
        assert_eq!(DecodeRule::from_json(None), DecodeRule::Window);
    }

    #[test]
    fn a_byte_escape_has_two_digits() {
        assert_eq!(byte_of_escape("<0xE6>"), Some(0xe6));
        for other in ["<0xE>", "<0x0E6>", "<0x+1>", "0xE6", "<0xE6> ", "<0x日>"] {
            assert_eq!(byte_of_escape(other), None, "{other}");
        }
    }
}
