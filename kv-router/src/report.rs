//! What a step did, tier by tier, and the time it could have taken at best.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::{Claim, Failure, MAX_TIERS, MissReason, StepPool, TierMask};

/// What one tier did for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TierReport {
    /// Reads of whole chunks of which something counted.
    pub chunks: u64,
    /// Reads of pieces of which something counted.
    pub pieces: u64,
    /// Payload bytes that it was the first to deliver. Summed over the tiers this is the step's delivered payload, plus
    /// what was discarded because its `write_id` did not match.
    pub bytes: u64,
    /// Duplicates that it claimed, and did not put back.
    pub duplicates: u64,
    /// Payload bytes of those.
    pub duplicate_bytes: u64,
    /// Reads that completed too late to count.
    pub late: u64,
    /// Payload bytes that it read and that did not count.
    pub late_bytes: u64,
    /// Pieces that did not fit the others of their chunk, each of which had it read whole.
    pub mixed: u64,
    failures: [u64; Failure::ALL.len()],
}

impl TierReport {
    /// Reads that failed in this way, those that no longer mattered included.
    #[must_use]
    pub fn failures(&self, kind: Failure) -> u64 {
        self.failures.get(kind.index()).copied().unwrap_or(0)
    }

    /// Reads that failed in any way.
    #[must_use]
    pub fn all_failures(&self) -> u64 {
        self.failures.iter().sum()
    }
}

/// What a step did. Taken while it runs it is a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StepReport {
    /// By tier number.
    pub tiers: [TierReport; MAX_TIERS as usize],
    /// Chunks in the step.
    pub chunks: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Chunks delivered.
    pub delivered: u64,
    /// Their payload bytes.
    pub delivered_bytes: u64,
    misses: [u64; MissReason::ALL.len()],
}

impl StepReport {
    /// Chunks missed for this reason.
    #[must_use]
    pub fn missed(&self, reason: MissReason) -> u64 {
        self.misses.get(reason.index()).copied().unwrap_or(0)
    }

    /// Chunks missed for any reason.
    #[must_use]
    pub fn all_missed(&self) -> u64 {
        self.misses.iter().sum()
    }

    /// Bytes that duplicates were claimed for, on all tiers.
    #[must_use]
    pub fn duplicate_bytes(&self) -> u64 {
        self.tiers.iter().fold(0, |sum, tier| sum.saturating_add(tier.duplicate_bytes))
    }
}

impl StepPool {
    /// What was done so far. Visits every chunk.
    #[must_use]
    pub fn report(&self) -> StepReport {
        let mut report = StepReport::default();
        for (tier, counters) in report.tiers.iter_mut().zip(&self.counters) {
            *tier = counters.get();
        }
        for (slot, chunk) in self.slots.iter().zip(&self.chunks) {
            report.chunks += 1;
            report.bytes = report.bytes.saturating_add(chunk.bytes);
            let word = slot.load();
            if word.is_delivered() {
                report.delivered += 1;
                report.delivered_bytes = report.delivered_bytes.saturating_add(chunk.bytes);
            } else if let Some(count) =
                word.miss_reason().and_then(|reason| report.misses.get_mut(reason.index()))
            {
                *count += 1;
            }
        }
        report
    }

    /// The bound of this step at the given rates; see [`bound_ns`].
    #[must_use]
    pub fn bound_ns(&self, bytes_per_s: &[u64]) -> Option<u64> {
        bound_ns(self.chunks.iter().map(|chunk| (chunk.tiers, chunk.bytes)), bytes_per_s)
    }
}

/// The aggregate bound in nanoseconds: no schedule can deliver these chunks sooner if tier `t`
/// moves at most `bytes_per_s[t]`, and one that could cut chunks at will would reach it.
///
/// Each chunk is given as the tiers that hold it, and its bytes; chunks that no tier holds do not
/// count. For every set of tiers, the chunks that only its members hold cannot be moved faster
/// than the members together; the bound is the longest of these times. `None` if bytes lie only on
/// tiers without a rate.
#[must_use]
pub fn bound_ns(
    chunks: impl IntoIterator<Item = (TierMask, u64)>,
    bytes_per_s: &[u64],
) -> Option<u64> {
    let mut bytes_by_holders = [0_u128; 256];
    for (tiers, bytes) in chunks {
        if let Some(sum) = bytes_by_holders.get_mut(usize::from(tiers.bits())) {
            *sum += u128::from(bytes);
        }
    }
    let mut bound = 0;
    for set in (1..=u8::MAX).map(TierMask::from_bits) {
        let inside = (1..=u8::MAX).map(TierMask::from_bits).filter(|t| t.minus(set).is_empty());
        let bytes: u128 =
            inside.filter_map(|tiers| bytes_by_holders.get(usize::from(tiers.bits()))).sum();
        if bytes == 0 {
            continue;
        }
        let rate = set.iter().filter_map(|tier| bytes_per_s.get(tier.index()));
        let rate: u128 = rate.map(|&rate| u128::from(rate)).sum();
        bound = bound.max((bytes * 1_000_000_000).checked_div(rate)?);
    }
    u64::try_from(bound).ok()
}

/// One tier's counters in a pool. Written by the tier's thread, as a rule; `Relaxed`, because they
/// decide nothing. Not modelled by loom, which would explore their every interleaving.
#[derive(Default)]
pub(crate) struct TierCounters {
    chunks: AtomicU64,
    pieces: AtomicU64,
    bytes: AtomicU64,
    duplicates: AtomicU64,
    duplicate_bytes: AtomicU64,
    late: AtomicU64,
    late_bytes: AtomicU64,
    mixed: AtomicU64,
    failures: [AtomicU64; Failure::ALL.len()],
}

impl TierCounters {
    pub(crate) fn delivered(&self, claim: &Claim, new_bytes: u64) {
        let reads = if claim.is_piece() { &self.pieces } else { &self.chunks };
        reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(new_bytes, Ordering::Relaxed);
        if new_bytes != claim.bytes {
            // Less than nothing if the claim is another pool's.
            let late_bytes = claim.bytes.saturating_sub(new_bytes);
            self.late_bytes.fetch_add(late_bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn duplicated(&self, bytes: u64) {
        self.duplicates.fetch_add(1, Ordering::Relaxed);
        self.duplicate_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn put_back(&self, claim: &Claim) {
        if claim.duplicate {
            self.duplicates.fetch_sub(1, Ordering::Relaxed);
            self.duplicate_bytes.fetch_sub(claim.bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn late(&self, claim: &Claim) {
        self.late.fetch_add(1, Ordering::Relaxed);
        self.late_bytes.fetch_add(claim.bytes, Ordering::Relaxed);
    }

    pub(crate) fn mixed(&self) {
        self.mixed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self, kind: Failure) {
        if let Some(count) = self.failures.get(kind.index()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn get(&self) -> TierReport {
        TierReport {
            chunks: self.chunks.load(Ordering::Relaxed),
            pieces: self.pieces.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            duplicates: self.duplicates.load(Ordering::Relaxed),
            duplicate_bytes: self.duplicate_bytes.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            late_bytes: self.late_bytes.load(Ordering::Relaxed),
            mixed: self.mixed.load(Ordering::Relaxed),
            failures: core::array::from_fn(|i| {
                self.failures.get(i).map_or(0, |count| count.load(Ordering::Relaxed))
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TierId;

    const MB: u64 = 1_000_000;

    #[test]
    fn full_replicas_move_at_the_sum_of_the_rates() {
        let chunks = [(TierMask::all(2), 400 * MB)];
        assert_eq!(bound_ns(chunks, &[300 * MB, 100 * MB]), Some(1_000_000_000));
    }

    #[test]
    fn exclusive_chunks_bind_their_tier() {
        let slow = TierMask::only(TierId(1));
        let chunks = [(TierMask::all(2), 100 * MB), (slow, 300 * MB), (TierMask::EMPTY, MB)];
        assert_eq!(bound_ns(chunks, &[300 * MB, 100 * MB]), Some(3_000_000_000));
        assert_eq!(bound_ns(chunks, &[300 * MB]), None);
        assert_eq!(bound_ns([], &[]), Some(0));
    }
}
