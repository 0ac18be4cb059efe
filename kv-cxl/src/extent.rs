//! Byte ranges of an arena.

use std::fmt;

use crate::{Caps, FastTierError};

/// A byte range of a provider's arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

impl Extent {
    /// First byte behind it, or `None` if no 64-bit arena holds it.
    pub const fn end(self) -> Option<u64> {
        self.offset.checked_add(self.bytes)
    }

    /// Whether the two have a byte in common.
    pub fn overlaps(self, other: Self) -> bool {
        let end = |extent: Self| extent.end().unwrap_or(u64::MAX);
        self.offset < end(other) && other.offset < end(self)
    }

    /// Fails unless it is not empty, lies in the arena, and consists of whole granules: what every provider checks first.
    pub fn check(self, caps: &Caps) -> Result<(), FastTierError> {
        let capacity_bytes = caps.capacity_bytes;
        if self.bytes == 0 || self.end().is_none_or(|end| end > capacity_bytes) {
            return Err(FastTierError::OutOfArena { extent: self, capacity_bytes });
        }
        let granule_bytes = caps.stage_granule_bytes;
        if !self.offset.is_multiple_of(granule_bytes) || !self.bytes.is_multiple_of(granule_bytes) {
            return Err(FastTierError::Misaligned { extent: self, granule_bytes });
        }
        Ok(())
    }

    /// The smallest extent of whole granules around it. `granule_bytes` is a power of two.
    pub const fn widen(self, granule_bytes: u64) -> Self {
        let mask = granule_bytes - 1;
        let offset = self.offset & !mask;
        let bytes = (self.offset - offset).saturating_add(self.bytes);
        Self { offset, bytes: bytes.saturating_add(mask) & !mask }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.offset, self.bytes)
    }
}

/// Sorts `extents` and merges those that touch or overlap: the same bytes in the fewest ranges.
pub fn coalesce(extents: &mut Vec<Extent>) {
    extents.retain(|extent| extent.bytes > 0);
    extents.sort_unstable();
    extents.dedup_by(|next, kept| {
        let kept_end = kept.end().unwrap_or(u64::MAX);
        if next.offset > kept_end {
            return false;
        }
        kept.bytes = kept_end.max(next.end().unwrap_or(u64::MAX)) - kept.offset;
        true
    });
}

/// The same bytes in the fewest ranges.
pub(crate) fn distinct(extents: &[Extent]) -> Vec<Extent> {
    let mut distinct = extents.to_vec();
    coalesce(&mut distinct);
    distinct
}

/// Bytes of all `extents`; what two of them share counts twice.
pub fn total_bytes(extents: &[Extent]) -> u64 {
    extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.bytes))
}
