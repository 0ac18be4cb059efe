//! What a running engine's tiers keep, by key: asked of their headers, since indices know digests only.

use std::sync::Arc;

use kv_chunk::{Digest, KeyParts};

use super::{Errand, PurgeRefusal, Selector};
use crate::shared::Shared;

/// More are left out of a list.
pub(super) const LISTED_MAX: usize = 1 << 18;

/// A chunk that some tier keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptChunk {
    /// What names it in events.
    pub digest: Digest,
    /// Its key, taken apart.
    pub key: KeyParts,
    /// Bytes of its payload.
    pub payload_bytes: u64,
}

impl Shared {
    /// Those chunks of a selection that are on tiers now: what is staged is not among them.
    pub(crate) fn list(&self, selector: &Selector) -> Result<Vec<KeptChunk>, PurgeRefusal> {
        let _one = self.errand_right(selector)?;
        let errand = Arc::new(Errand::to_list(selector, self.tiers.len()));
        self.run_errand(&errand);
        Ok(errand.take_seen())
    }
}
