//! The 128-bit index key of a chunk and the identity of one write of it.

use std::fmt;

use xxhash_rust::xxh3::xxh3_128;

/// XXH3-128 of a chunk's canonical key bytes, stored little-endian: the key of every index.
///
/// Two keys with one digest are possible, so a reader also compares the canonical key stored in the chunk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    /// The digest of canonical key bytes.
    pub fn of(canonical: &[u8]) -> Self {
        Self(xxh3_128(canonical).to_le_bytes())
    }

    /// A digest from its stored bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The stored bytes.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Identity of one staging of a chunk, equal in all replicas written from it.
///
/// Only pieces with equal `WriteId` may be combined: a recomputed chunk can differ from the copy another tier kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(u128);

impl WriteId {
    /// An identity from caller-supplied randomness; it must not repeat within a store.
    pub const fn new(value: u128) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Display for WriteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for WriteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteId({self})")
    }
}
