//! Removing single chunks while the engine serves.

use kv_chunk::ChunkKey;

use crate::{Engine, shared::Shared};

impl Engine {
    /// Removes chunks from the host cache and all tiers; one answer per key: whether nothing of the chunk is readable any
    /// more. Leased chunks, and those still to be written, stay.
    ///
    /// They are unreadable when this returns; the tiers give up their space soon after. After a crash in between a chunk
    /// may be there again.
    pub fn delete(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let shared = &self.shared;
        if !shared.is_usable() {
            return vec![false; keys.len()];
        }
        keys.iter().map(|key| shared.delete(key)).collect()
    }
}

impl Shared {
    fn delete(&self, key: &ChunkKey) -> bool {
        let digest = key.digest();
        if self.writeback.get(key).is_some() {
            return false;
        }
        let held = self.directory.tiers(digest);
        for tier in &self.tiers {
            if !self.directory.try_evict(digest, tier.id.0) {
                return false;
            }
            if held >> tier.id.0 & 1 == 1 {
                tier.push_removal(digest);
            }
        }
        // After the directory: a load keeps nothing here that no tier holds.
        self.cache.remove(digest);
        true
    }
}
