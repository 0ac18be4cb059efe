//! A run of equally placed chunks of one rank, claimed from its two ends.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Ordering};
use crate::{TierId, TierMask};

/// The chunks of one rank that the same tiers hold, in step order.
///
/// Each entry is handed out once, ever: what comes back later goes through [`OpenSet`]s, so no
/// cursor can pass over a chunk that is returned behind it.
///
/// [`OpenSet`]: crate::open_set::OpenSet
pub(crate) struct Lane {
    pub(crate) tiers: TierMask,
    pub(crate) rank: usize,
    /// The tier that claims from the head; all others claim from the tail.
    head: Option<TierId>,
    chunks: Box<[u32]>,
    /// Low half: entries taken from the head. High half: one past the last entry not taken from
    /// the tail. Written by every claimant. `Relaxed`: it only hands out indices into `chunks`,
    /// which never changes; the chunk's own word orders everything else.
    ends: CachePadded<AtomicU64>,
}

impl Lane {
    /// `chunks` in step order. The head belongs to `fastest`, or to the lowest-numbered holder
    /// where the fastest tier holds none of them.
    pub(crate) fn new(tiers: TierMask, rank: usize, fastest: TierId, chunks: Box<[u32]>) -> Self {
        let head = if tiers.contains(fastest) { Some(fastest) } else { tiers.first() };
        let ends = CachePadded::new(AtomicU64::new((chunks.len() as u64) << 32));
        Self { tiers, rank, head, chunks, ends }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let (head, tail) = split(self.ends.load(Ordering::Relaxed));
        head >= tail
    }

    /// The next chunk from `tier`'s end.
    pub(crate) fn take(&self, tier: TierId) -> Option<u32> {
        let mut old = self.ends.load(Ordering::Relaxed);
        loop {
            let (head, tail) = split(old);
            if head >= tail {
                return None;
            }
            let (new, at) =
                if self.head == Some(tier) { (old + 1, head) } else { (old - (1 << 32), tail - 1) };
            match self.ends.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return usize::try_from(at).ok().and_then(|i| self.chunks.get(i)).copied(),
                Err(seen) => old = seen,
            }
        }
    }
}

fn split(ends: u64) -> (u64, u64) {
    (ends & u64::from(u32::MAX), ends >> 32)
}
