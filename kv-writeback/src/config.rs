//! Limits, and the refusals that they cause.

use thiserror::Error;

/// Most tiers that a mask names.
pub(crate) const TIERS_MAX: u8 = 8;

/// Limits of a [`Writeback`](crate::Writeback).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WritebackConfig {
    /// Number of tiers, 1 to 8; bit `n` of a mask is tier `n`.
    pub tiers: u8,
    /// From this age on a staged chunk is written whatever runs beside it.
    pub max_age_ns: u64,
    /// Chunks that may be staged at a time: each holds one slot of the arena until its last replica is finished.
    pub staged_chunks_max: usize,
    /// Chunks that one tier may have to write, handed out or not.
    pub queue_chunks_max: usize,
}

impl WritebackConfig {
    /// For `tiers` tiers: at most `staged_chunks_max` chunks, all of which may queue for one tier, each for 2 s.
    pub const fn new(tiers: u8, staged_chunks_max: usize) -> Self {
        Self {
            tiers,
            max_age_ns: 2_000_000_000,
            staged_chunks_max,
            queue_chunks_max: staged_chunks_max,
        }
    }

    pub(crate) fn check(&self) -> Result<(), WritebackError> {
        let error = |field, problem, fix| Err(WritebackError::Config { field, problem, fix });
        if self.tiers == 0 || self.tiers > TIERS_MAX {
            return error("tiers", "is 0 or more than 8", "give the number of tiers, 1 to 8");
        }
        if self.staged_chunks_max == 0 {
            return error("staged_chunks_max", "is 0", "give the slots that staging may hold");
        }
        if self.queue_chunks_max == 0 {
            return error("queue_chunks_max", "is 0", "give the chunks that may wait for a tier");
        }
        Ok(())
    }
}

/// Why a [`Writeback`](crate::Writeback) cannot be made.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WritebackError {
    /// A limit that nothing can work under.
    #[error("{field} {problem}; {fix}")]
    Config {
        /// Which.
        field: &'static str,
        /// What is wrong with it.
        problem: &'static str,
        /// What to do.
        fix: &'static str,
    },
}

/// Why a chunk was not staged. Nothing of it is kept; the caller goes on without it.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Refused {
    /// As many chunks are staged as may be, and none has a copy on another tier to fall back on.
    #[error("staging is full")]
    StagingFull,
    /// Every wanted tier has as many chunks to write as it may, none of which has another home.
    #[error("the write queue of every wanted tier is full")]
    QueueFull,
    /// The arena has no free slot: reads or earlier records hold them all.
    #[error("the arena has no free slot")]
    NoSlot,
    /// Header and payload do not fit a slot.
    #[error("the chunk is larger than a slot")]
    TooLarge,
    /// No wanted tier takes writes.
    #[error("no wanted tier takes writes")]
    NoTier,
}
