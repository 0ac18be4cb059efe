//! Byte counts as people write them: `268435456` or `"256 MiB"`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, de};

/// A number of bytes; in configuration files an integer or a string with a unit (`B`, `KiB`, `MiB`, `GiB`, `TiB`,
/// `kB`, `MB`, `GB`, `TB`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

impl ByteSize {
    /// `count` x 1024.
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` x 1024 x 1024.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// `count` x 1024 x 1024 x 1024.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = (&text[..split], text[split..].trim());
        let hint =
            || format!("`{text}` is no size: write whole bytes or a unit, such as \"256 MiB\"");
        let count: u64 = number.parse().map_err(|_| hint())?;
        let unit = if unit.is_empty() { "B" } else { unit };
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(hint)?;
        count.checked_mul(*factor).map(Self).ok_or_else(|| format!("`{text}` exceeds 16 EiB"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, factor) = UNITS[..5]
            .iter()
            .rfind(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor))
            .unwrap_or(&UNITS[0]);
        write!(f, "{} {name}", self.0 / factor)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a size such as \"256 MiB\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size is not negative"))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units_and_written_back() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4 KiB", 4096),
            ("256MiB", 256 << 20),
            ("3 GB", 3_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!(ByteSize::mib(256).to_string(), "256 MiB");
        assert_eq!(ByteSize(1_000).to_string(), "1000 B");
    }

    #[test]
    fn what_is_no_size_is_refused_with_a_hint() {
        for text in ["", "MiB", "1.5 GiB", "-1", "4 mib", "99999999999999999999", "16777216 TiB"] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains("256 MiB") || error.contains("16 EiB"), "{text}: {error}");
        }
    }
}
