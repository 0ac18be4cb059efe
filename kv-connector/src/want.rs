//! What a load asks for and what becomes of it.

use kv_chunk::ChunkKey;
use kv_router::TierMask;
use serde::Serialize;

pub use crate::load::Arrived;
use crate::report::MissReason;

/// One chunk of a load: which, where to, and afterwards what became of it.
///
/// After a miss the content of `dest` is unspecified: pieces of the chunk may have been copied before the last failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct Want<'a> {
    /// Which chunk.
    pub key: &'a ChunkKey,
    /// Where its payload goes: exactly as long as the payload, or the chunk is a miss. Empty if it is handed over.
    pub dest: &'a mut [u8],
    /// Length of the payload, if it is handed over and not copied.
    handed_bytes: Option<usize>,
    /// Storage tiers that may be asked; memory always may.
    pub tiers: TierMask,
    /// The tensor-parallel rank that waits for it; 0 where there is one.
    pub rank: u16,
    /// Set by the load.
    pub outcome: Outcome,
}

impl<'a> Want<'a> {
    /// The chunk from any tier, for rank 0.
    pub fn new(key: &'a ChunkKey, dest: &'a mut [u8]) -> Self {
        let outcome = Outcome::Miss(MissReason::NotLoaded);
        Self { key, dest, handed_bytes: None, tiers: TierMask::all(u8::MAX), rank: 0, outcome }
    }

    /// The same, but its verified bytes are handed over where they are: for [`Engine::load_handing`](crate::Engine).
    pub fn handed(key: &'a ChunkKey, payload_bytes: usize) -> Self {
        Self { handed_bytes: Some(payload_bytes), ..Self::new(key, &mut []) }
    }

    /// Length that the payload must have.
    pub fn payload_bytes(&self) -> usize {
        self.handed_bytes.unwrap_or(self.dest.len())
    }

    pub(crate) fn is_handed(&self) -> bool {
        self.handed_bytes.is_some()
    }
}

/// What became of a wanted chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// `dest` holds the verified payload.
    Hit(Source),
    /// It does not.
    Miss(MissReason),
}

impl Outcome {
    /// Whether `dest` holds the payload.
    pub fn is_hit(self) -> bool {
        matches!(self, Self::Hit(_))
    }
}

/// Where a payload came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Memory, kept from an earlier load or store.
    HostCache,
    /// Memory, still to be written.
    Staged,
    /// This storage tier; of a chunk read in pieces, the tier that delivered the last of them.
    Tier(u8),
}
