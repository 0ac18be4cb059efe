//! Just in time, where lateness and protection each have their price.

use super::{Outlook, Policy};

/// More likely than not.
const LIKELY_PERMILLE: u32 = 500;

/// Weighs what waiting costs against what waiting for costs.
///
/// Committed now, a claim is protected so much longer; committed later, its request is late by as much, if its use falls
/// within the time until ready, and so is each that is staged after it and is used within the time that all up to it
/// take. So it is eligible when
///
/// ```text
/// (chance(time until use <= lead) + the same of those behind it, each behind the ones before) x late_price_bytes  >=  bytes
/// ```
///
/// That is a lower quantile of the time until use ([`DecodeProjection`](crate::DecodeProjection) knows the chance), the
/// lower the smaller the claim and the busier the device: one with little to stage waits, one that is behind does not. What is
/// about to be used is not begun: a read on demand is as quick and protects nothing. Claims are staged in the order
/// of their use, and a claim is committed no sooner than the device is free for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TempoQ {
    /// Protecting so many bytes for a second is as bad as one request that is late by a second.
    pub late_price_bytes: u64,
    /// The lead is the time until ready and so many percent of it.
    pub margin_percent: u32,
    /// And this.
    pub margin_ns: u64,
    /// What others hold is held on if its use falls within so many percent of the time that it would take to bring
    /// it in again: staged once more, it would be protected as long, and could be late.
    pub hold_percent: u32,
    /// What is more likely than not used within so many percent of its time until ready is left to a read on demand.
    pub soon_percent: u32,
}

impl Default for TempoQ {
    /// Chosen in simulation (`cargo xtask bench staging --model`) for prefixes of about 5 GiB: take a price of some seven times
    /// the bytes of a usual claim.
    fn default() -> Self {
        Self {
            late_price_bytes: 35 << 30,
            margin_percent: 0,
            margin_ns: 0,
            hold_percent: 200,
            soon_percent: 25,
        }
    }
}

impl Policy for TempoQ {
    fn name(&self) -> &'static str {
        "tempo_q"
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        let Some(chance) = outlook.use_chance_permille else { return outlook.requested };
        let is_soon = outlook.soon_chance_permille.is_some_and(|it| it >= LIKELY_PERMILLE);
        let late_permille = u128::from(chance) + u128::from(outlook.late_behind_permille);
        let is_worth_it =
            late_permille * u128::from(self.late_price_bytes) >= u128::from(outlook.bytes) * 1000;
        outlook.requested || (is_worth_it && !is_soon)
    }

    fn lead_ns(&self, time_to_ready_ns: u64, restage_ns: &dyn Fn() -> Option<u64>) -> Option<u64> {
        let hold_ns = restage_ns().map_or(0, |ns| percent_of(ns, self.hold_percent));
        let margin_ns =
            percent_of(time_to_ready_ns, self.margin_percent).saturating_add(self.margin_ns);
        Some(time_to_ready_ns.saturating_add(margin_ns).max(hold_ns))
    }

    fn soon_ns(&self, time_to_ready_ns: u64) -> Option<u64> {
        Some(percent_of(time_to_ready_ns, self.soon_percent))
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn commits_ahead(&self) -> bool {
        false
    }
}

fn percent_of(ns: u64, percent: u32) -> u64 {
    u64::try_from(u128::from(ns) * u128::from(percent) / 100).unwrap_or(u64::MAX)
}
