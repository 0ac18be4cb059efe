//! A hash of digests, which are hashes: one multiplication a word.

use std::hash::{BuildHasher, Hasher};

/// Makes hashers that agree, with a random number of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seed(u64);

impl Default for Seed {
    fn default() -> Self {
        Self(fastrand::u64(..))
    }
}

impl BuildHasher for Seed {
    type Hasher = DigestHasher;

    fn build_hasher(&self) -> DigestHasher {
        DigestHasher(self.0)
    }
}

#[derive(Debug)]
pub(super) struct DigestHasher(u64);

impl DigestHasher {
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = u64::try_from((product ^ (product >> 64)) & u128::from(u64::MAX)).unwrap_or(0);
    }
}

impl Hasher for DigestHasher {
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut whole = [0; 8];
            whole[..word.len()].copy_from_slice(word);
            self.mix(u64::from_le_bytes(whole));
        }
    }

    /// The length of a digest says nothing.
    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}
