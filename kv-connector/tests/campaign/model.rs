//! Chunks of a run: their keys, sizes and content, and what is known of them.

use std::collections::BTreeSet;

use kv_chunk::{ChunkKey, KeySpace};
use kv_connector::replay::fill;

use crate::testing::namespace;

pub(crate) const TENANT: &[u8] = b"tenant";

/// What follows from the seed about chunks.
#[derive(Debug)]
pub(crate) struct Chunks {
    space: KeySpace,
    sizes: Vec<usize>,
    pub(crate) count: u64,
    /// Ever offered: only these may be served.
    pub(crate) offered: BTreeSet<u64>,
    /// Purged and not offered since: these must not be served.
    pub(crate) purged: BTreeSet<u64>,
}

impl Chunks {
    pub(crate) fn new(seed: u64, sizes: Vec<usize>, count: u64) -> Self {
        let space = KeySpace::new(&namespace(&format!("model {seed}"))).unwrap();
        Self { space, sizes, count, offered: BTreeSet::new(), purged: BTreeSet::new() }
    }

    pub(crate) fn is_tenants(chunk: u64) -> bool {
        chunk.is_multiple_of(4)
    }

    pub(crate) fn key(&self, chunk: u64) -> ChunkKey {
        let salt = if Self::is_tenants(chunk) { TENANT } else { b"" };
        self.space.key(0, 0, &chunk.to_le_bytes(), salt).unwrap()
    }

    pub(crate) fn bytes_of(&self, chunk: u64) -> usize {
        self.sizes[usize::try_from(chunk).unwrap() % self.sizes.len()]
    }

    pub(crate) fn payload(&self, chunk: u64) -> Vec<u8> {
        let mut payload = vec![0; self.bytes_of(chunk)];
        fill(self.key(chunk).digest(), &mut payload);
        payload
    }
}
