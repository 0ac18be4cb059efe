//! Time until ready from what a provider says, and from its user's guesses where it says nothing.

use kv_staging::{Object, ObjectId, StagingNeed, TimeToReady};

use crate::{Extent, FastTier, Residency, total_bytes};

const NS_PER_S: u128 = 1_000_000_000;

/// (queued + missing bytes) / aggregate rate + a fixed cost, where resident bytes are not missing.
///
/// Of a provider that does not tell, every byte counts as absent and only the claim's own bytes as queued, at
/// `fallback_bytes_per_s`.
#[derive(Debug)]
pub struct TierTimeToReady<'a, F> {
    /// The device.
    pub tier: &'a dyn FastTier,
    /// Where an object lies; an unknown one counts as absent.
    pub extents_of: F,
    /// Rate assumed of a provider that does not tell; at least 1 is assumed.
    pub fallback_bytes_per_s: u64,
    /// Cost of any staging, however small.
    pub fixed_ns: u64,
}

impl<F: Fn(ObjectId) -> Vec<Extent>> TierTimeToReady<'_, F> {
    fn missing_bytes(&self, object: &Object) -> u64 {
        let extents = (self.extents_of)(object.id);
        match self.tier.residency(&extents) {
            Ok(Residency::Bytes(resident)) if !extents.is_empty() => {
                total_bytes(&extents).saturating_sub(resident)
            }
            _ => object.bytes,
        }
    }
}

impl<F: Fn(ObjectId) -> Vec<Extent>> TimeToReady for TierTimeToReady<'_, F> {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        if need.cold.is_empty() && need.in_flight_bytes == 0 {
            return 0;
        }
        let load = self.tier.load();
        let missing: u128 =
            need.cold.iter().map(|object| u128::from(self.missing_bytes(object))).sum();
        let ahead = if missing == 0 && need.in_flight_bytes == 0 {
            0
        } else {
            load.queued_bytes.unwrap_or(need.in_flight_bytes)
        };
        let rate = load.bytes_per_s.unwrap_or(self.fallback_bytes_per_s).max(1);
        let moving_ns = (missing + u128::from(ahead)) * NS_PER_S / u128::from(rate);
        u64::try_from(moving_ns).unwrap_or(u64::MAX).saturating_add(self.fixed_ns)
    }
}
