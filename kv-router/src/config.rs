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
    /// Duplicate the oldest outstanding read; the first to deliver wins.
    Duplicate,
    /// Read the last chunks in pieces, and duplicate the oldest outstanding piece or chunk.
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
    /// Reads each tier keeps in flight, by tier number. They say where the tail begins: when at
    /// most twice their sum of chunks is unclaimed.
    pub windows: [u16; MAX_TIERS as usize],
    /// What idle slots do at the end of the step.
    pub tail: Tail,
    /// Bytes that duplicates may read, in percent of the step's bytes.
    pub duplicate_percent: u8,
    /// Duplicates may always read as much as this many chunks of average size, however small the
    /// step: the larger of the two budgets counts.
    pub duplicate_chunks: u32,
}

impl PoolConfig {
    /// Tiers `0..tiers` with tier 0 the fastest, windows of 8, and the tail policy at its default:
    /// split and duplicate within 5 % of the bytes or 8 chunks.
    #[must_use]
    pub fn new(tiers: u8) -> Self {
        Self {
            tiers,
            fastest: TierId(0),
            windows: [8; MAX_TIERS as usize],
            tail: Tail::default(),
            duplicate_percent: 5,
            duplicate_chunks: 8,
        }
    }

    /// Unclaimed chunks at which the tail begins.
    pub(crate) fn tail_chunks(&self) -> u32 {
        self.windows.iter().take(usize::from(self.tiers)).map(|&w| 2 * u32::from(w)).sum()
    }

    /// The duplicates' byte budget for a step of `chunks` chunks and `bytes` bytes.
    pub(crate) fn duplicate_bytes(&self, chunks: u64, bytes: u64) -> u64 {
        let share = u128::from(bytes) * u128::from(self.duplicate_percent) / 100;
        let floor =
            u128::from(bytes) * u128::from(self.duplicate_chunks) / u128::from(chunks.max(1));
        u64::try_from(share.max(floor)).unwrap_or(u64::MAX)
    }
}

impl Default for PoolConfig {
    /// One tier.
    fn default() -> Self {
        Self::new(1)
    }
}
