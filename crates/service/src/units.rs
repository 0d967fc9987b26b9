//! Sizes and times as people write them in configuration. A bare number has no unit and is refused.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

/// A number of bytes, read from and shown as `512 MiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// A text that is no quantity.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{text:?} is no {kind}: write a whole number and one of {units}")]
pub struct UnitError {
    text: String,
    kind: &'static str,
    units: &'static str,
}

const BYTE_UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// In microseconds.
const TIME_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = parse(text, &BYTE_UNITS);
        bytes.map(Self).ok_or_else(|| refusal(text, "size", "B, KiB, MiB, GiB, TiB"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |&(_, scale): &(&str, u64)| self.0.is_multiple_of(scale) && self.0 > 0;
        let (unit, scale) = BYTE_UNITS.into_iter().find(fits).unwrap_or(("B", 1));
        write!(f, "{} {unit}", self.0 / scale)
    }
}

/// Reads a time such as `30s` or `1500 ms`.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let micros = parse(text, &TIME_UNITS);
    micros.map(Duration::from_micros).ok_or_else(|| refusal(text, "time", "us, ms, s, min, h"))
}

fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, scale) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    number.parse::<u64>().ok()?.checked_mul(*scale)
}

fn refusal(text: &str, kind: &'static str, units: &'static str) -> UnitError {
    UnitError { text: text.to_owned(), kind, units }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sizes_read_back(bytes: u64, shift in 0_u32..48) {
            let size = ByteSize(bytes >> shift << shift);
            prop_assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,8}|[0-9]{1,30}[a-zA-Z ]{0,4}") {
            let _ = text.parse::<ByteSize>();
            let _ = parse_duration(&text);
        }
    }

    #[test]
    fn quantities_need_a_number_and_a_unit() {
        assert_eq!("4GiB".parse(), Ok(ByteSize(4 << 30)));
        assert_eq!(ByteSize(1536).to_string(), "1536 B");
        assert_eq!(parse_duration("1500 ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2min"), Ok(Duration::from_secs(120)));
        for bad in
            ["", "5", "s", "-1s", "1.5s", "5 fortnights", "99999999999999999999s", "18446744073709551615h"]
        {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        let says = "7 MB".parse::<ByteSize>().unwrap_err().to_string();
        assert_eq!(says, "\"7 MB\" is no size: write a whole number and one of B, KiB, MiB, GiB, TiB");
    }
}
