//! What a pool is built from: the chunks of one step and the tiers that may read them.

use crate::{MAX_TIERS, TierId, TierMask};

/// One chunk of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSpec {
    /// The tiers that hold a replica. Empty means the chunk is a miss from the start.
    pub tiers: TierMask,
    /// How many separately checksummed blocks the payload has; at least 1. Pieces are whole blocks.
    pub blocks: u32,
    /// Payload bytes.
    pub bytes: u64,
    /// The tensor-parallel rank that waits for the chunk; 0 where there is one.
    pub rank: u16,
}

/// What idle slots do when a step runs out of unclaimed chunks.
///
/// Splitting without duplicating is not offered: a piece behind a stalled read then holds up the
/// whole step, which costs more than splitting gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tail {
    /// Nothing: every chunk is read whole and by one tier, unless that read fails.
    Whole,
    /// Duplicate the chunk whose latest read is oldest; the first to deliver wins.
    Duplicate,
    /// Read the last chunks in pieces that become smaller, and duplicate in the smallest pieces what
    /// has been waited for longest.
    #[default]
    SplitAndDuplicate,
}

/// How a pool routes. Build it with [`PoolConfig::new`] and change the fields that matter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Number of tiers, `0..=MAX_TIERS`.
    pub tiers: u8,
    /// The tier that claims from the head of the step; the others claim from the tail.
    pub fastest: TierId,
    /// Reads each tier keeps in flight, by tier number. Their sum is the number of places among which
    /// the last chunks are cut up.
    pub windows: [u16; MAX_TIERS as usize],
    /// What idle slots do at the end of the step.
    pub tail: Tail,
    /// Bytes that duplicates may read, in percent of those that the step has to read.
    pub duplicate_percent: u8,
    /// If that is more: as much as this many of the step's chunks, but no more than half of them or
    /// one. A step of one chunk is read at most twice, any other at most one and a half times.
    pub duplicate_chunks: u32,
    /// If that is more still: as many chunks as this many times the largest window of a tier that is
    /// not the fastest, within the same half. That is what the step ends with: a slower tier has a
    /// window in flight when nothing is left to claim, two if it has just tried twice as many.
    pub duplicate_windows: u8,
}

impl PoolConfig {
    /// Tiers `0..tiers` with tier 0 the fastest, windows of 8, and the tail policy at its default:
    /// split and duplicate within 5 % of the bytes, 8 chunks or two windows of a slower tier, whichever is
    /// most, but half the step.
    #[must_use]
    pub fn new(tiers: u8) -> Self {
        Self {
            tiers,
            fastest: TierId(0),
            windows: [8; MAX_TIERS as usize],
            tail: Tail::default(),
            duplicate_percent: 5,
            duplicate_chunks: 8,
            duplicate_windows: 2,
        }
    }

    /// Reads that all tiers together keep in flight.
    pub(crate) fn places(&self) -> u64 {
        self.windows.iter().take(usize::from(self.tiers)).map(|&window| u64::from(window)).sum()
    }

    /// The most reads that one of the slower tiers keeps in flight.
    fn slower_window(&self) -> u32 {
        let windows = (0..self.tiers).zip(self.windows);
        let slower = windows.filter(|&(tier, _)| tier != self.fastest.0);
        slower.map(|(_, window)| u32::from(window)).max().unwrap_or(0)
    }

    /// The duplicates' byte budget for a step that has to read `bytes` bytes in `chunks` chunks.
    pub(crate) fn duplicate_bytes(&self, chunks: u64, bytes: u64) -> u64 {
        let (chunks, bytes) = (u128::from(chunks.max(1)), u128::from(bytes));
        let share = bytes * u128::from(self.duplicate_percent) / 100;
        let few =
            self.duplicate_chunks.max(u32::from(self.duplicate_windows) * self.slower_window());
        let some = bytes * u128::from(few) / chunks;
        let most = bytes / chunks.min(2);
        u64::try_from(share.max(some.min(most))).unwrap_or(u64::MAX)
    }
}

impl Default for PoolConfig {
    /// One tier.
    fn default() -> Self {
        Self::new(1)
    }
}
