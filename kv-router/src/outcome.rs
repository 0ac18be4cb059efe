//! What passes between a pool and the threads that read for it: claims and what became of them.

use crate::TierId;
use crate::slot::Token;

/// The right and the duty to read one chunk, or some blocks of it, from one tier.
///
/// Every claim is answered once, through [`complete`](crate::StepPool::complete),
/// [`fail`](crate::StepPool::fail), [`put_back`](crate::StepPool::put_back) or
/// [`reread_whole`](crate::StepPool::reread_whole) of the pool that issued it; a claim that is
/// dropped leaves its chunk outstanding until the step is cancelled. It cannot be cloned, so one
/// claim cannot deliver twice.
#[must_use = "a claim that is never answered keeps its step from finishing"]
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    /// Index of the chunk in the slice that the pool was built from.
    pub chunk: u32,
    /// The tier to read from.
    pub tier: TierId,
    /// First block to read.
    pub first_block: u32,
    /// How many blocks to read.
    pub blocks: u32,
    /// Payload bytes of those blocks: the chunk's bytes in proportion to its blocks, exact for a
    /// whole chunk and in the sum over its pieces.
    pub bytes: u64,
    /// Another read of the same blocks was outstanding when this one was claimed.
    pub duplicate: bool,
    /// How often the chunk was started over (see [`reread_whole`](crate::StepPool::reread_whole)).
    /// Blocks of different attempts must not be combined.
    pub attempt: u8,
    pub(crate) piece: bool,
    pub(crate) token: Token,
}

impl Claim {
    /// Whether this is less than the chunk. Other tiers may read other pieces, or the same blocks in
    /// another piece: only reads with equal `write_id` may be combined.
    #[must_use]
    pub fn is_piece(&self) -> bool {
        self.piece
    }
}

/// What a completed read was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Delivery {
    /// The first good copy of these blocks, or of some of them: its bytes count. A read of a whole
    /// chunk completes it, whatever pieces came before.
    First {
        /// Payload bytes that no read delivered before. Over all reads of the chunk's last attempt
        /// they add up to its bytes.
        new_bytes: u64,
        /// All blocks of the chunk are now delivered.
        chunk_done: bool,
        /// All chunks of the step are now resolved. Reported exactly once a step, to one caller.
        step_done: bool,
    },
    /// Too late: the blocks were delivered by another read, the claim had expired, or the chunk
    /// was resolved otherwise. The caller drops the bytes.
    Late,
}

/// What a failed read leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The blocks can be claimed again by the chunk's remaining tiers: idle ones should look.
    Returned,
    /// Another read of the same blocks is still outstanding.
    Covered,
    /// No tier is left: the chunk is a miss.
    Missed {
        /// All chunks of the step are now resolved. Reported exactly once a step, to one caller.
        step_done: bool,
    },
    /// The claim no longer mattered.
    Ignored,
}

/// What [`mask_tier`](crate::StepPool::mask_tier) or [`cancel`](crate::StepPool::cancel) resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Withdrawn {
    /// Chunks that became misses by this call.
    pub missed: u32,
    /// All chunks of the step are now resolved. Reported exactly once a step, to one caller.
    pub step_done: bool,
}

/// Why a read did not deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// The device reported an error, or fewer bytes than asked for.
    Io,
    /// The read's deadline passed.
    TimedOut,
    /// The bytes are not what the key says: checksum, key, length or version.
    Corrupt,
    /// The tier no longer holds the chunk.
    NotFound,
    /// No room on the tier. Only writes meet it; for a read it is like any other failure.
    NoSpace,
    /// The tier is gone or refuses work.
    Unavailable,
}

impl Failure {
    /// Every kind, in the order of the report's counters.
    pub const ALL: [Self; 6] =
        [Self::Io, Self::TimedOut, Self::Corrupt, Self::NotFound, Self::NoSpace, Self::Unavailable];

    /// Whether this speaks against the tier and not only against one chunk: the
    /// [`Breaker`](crate::Breaker) counts it.
    #[must_use]
    pub const fn counts_against_tier(self) -> bool {
        matches!(self, Self::Io | Self::TimedOut | Self::Unavailable)
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// Why a chunk of the step was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissReason {
    /// No tier held it when the step began.
    NoReplica,
    /// The last tier that held it was masked for the whole step.
    TierMasked,
    /// The step was cancelled first.
    Cancelled,
    /// The last tier that held it failed in this way.
    Failed(Failure),
}

impl MissReason {
    /// Every reason, in the order of the report's counters.
    pub const ALL: [Self; 9] = [
        Self::NoReplica,
        Self::TierMasked,
        Self::Cancelled,
        Self::Failed(Failure::Io),
        Self::Failed(Failure::TimedOut),
        Self::Failed(Failure::Corrupt),
        Self::Failed(Failure::NotFound),
        Self::Failed(Failure::NoSpace),
        Self::Failed(Failure::Unavailable),
    ];

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::NoReplica => 0,
            Self::TierMasked => 1,
            Self::Cancelled => 2,
            Self::Failed(failure) => 3 + failure.index(),
        }
    }
}

/// Where one chunk of a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkStatus {
    /// All or some of it is unclaimed.
    Waiting,
    /// All of it is claimed or delivered, not all of it delivered.
    Reading,
    /// All of it is delivered.
    Delivered,
    /// It will not be delivered.
    Missed(MissReason),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_agree_with_the_lists() {
        for (i, failure) in Failure::ALL.into_iter().enumerate() {
            assert_eq!(failure.index(), i);
        }
        for (i, reason) in MissReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), i);
        }
    }
}
