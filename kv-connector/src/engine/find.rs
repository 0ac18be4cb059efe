//! What is there, asked by callers that may not wait.

use kv_chunk::ChunkKey;

use super::Engine;
use crate::{Seek, sync::lock_plain};

impl Engine {
    /// Which chunks are readable now: from memory, without a lease, and without asking anybody. Counted as a look-up.
    pub fn contains(&self, keys: &[ChunkKey]) -> Vec<bool> {
        if !self.shared.is_usable() {
            return vec![false; keys.len()];
        }
        let readable = self.shared.readable();
        let hits: Vec<bool> = keys.iter().map(|key| self.shared.holds(key, readable)).collect();
        lock_plain(&self.shared.totals).count_lookup(&hits);
        hits
    }

    /// Has the tiers that other nodes write into look for those of `keys` that are not known here, and returns. None if
    /// all are known, or no tier can know more. When it is done, [`contains`](Self::contains) knows what was found.
    pub fn seek(&self, keys: &[ChunkKey]) -> Option<Seek> {
        if self.shared.is_usable() { self.shared.ask(keys) } else { None }
    }
}
