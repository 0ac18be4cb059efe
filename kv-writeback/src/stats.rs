//! What a [`Writeback`](crate::Writeback) counts.

use crate::Refused;

/// Counters since the start, and gauges.
///
/// `replicas_wanted` is at any time the sum of `replicas_written`, `replicas_already_held`, `replicas_failed`,
/// `replicas_given_up`, `replicas_withdrawn` and what the tiers still have to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WritebackStats {
    /// Chunks accepted.
    pub staged: u64,
    /// Chunks offered while they were staged already.
    pub already_staged: u64,
    /// Chunks refused, by reason.
    pub refused: Vec<(Refused, u64)>,
    /// Replicas that accepted chunks were to get.
    pub replicas_wanted: u64,
    /// Replicas written.
    pub replicas_written: u64,
    /// Replicas that the tier turned out to hold already.
    pub replicas_already_held: u64,
    /// Replicas whose write failed.
    pub replicas_failed: u64,
    /// Replicas given up under back-pressure, each of a chunk that has another home.
    pub replicas_given_up: u64,
    /// Replicas not written because their tier went away, took no more writes, or dropped them.
    pub replicas_withdrawn: u64,
    /// Chunks that left staging without a single replica.
    pub lost_writes: u64,
    /// Calls of `finish` for a write that nobody was waiting for.
    pub finishes_ignored: u64,
    /// Chunks staged now.
    pub pending: usize,
    /// Most chunks staged at a time.
    pub pending_max: usize,
    /// When the oldest chunk now staged was offered.
    pub oldest_staged_ns: Option<u64>,
    /// Per tier, what it has to write now.
    pub tiers: Vec<TierBacklog>,
}

/// What one tier has to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierBacklog {
    /// Chunks that wait.
    pub queued: usize,
    /// Chunks handed out and not finished.
    pub writing: usize,
    /// Whether the tier takes writes.
    pub accepts: bool,
}

impl WritebackStats {
    /// Chunks refused for `reason`.
    pub fn refused_for(&self, reason: Refused) -> u64 {
        self.refused.iter().find(|(known, _)| *known == reason).map_or(0, |(_, count)| *count)
    }

    pub(crate) fn count_refused(&mut self, reason: Refused) {
        match self.refused.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => self.refused.push((reason, 1)),
        }
    }
}
