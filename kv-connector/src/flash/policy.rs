//! Tempo-Q as the engine runs it: by the chance of use where a schedule tells it, else by a quantile.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use kv_staging::policy::{Outlook, Policy, Tempo, TempoQ};

/// Bytes of a usual claim, by those recorded lately.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsualBytes(
    /// Written and read under the lock of the books alone, so any ordering will do; shared with the policy in there.
    Arc<AtomicU64>,
);

impl UsualBytes {
    const WEIGHT: u64 = 8;

    pub(super) fn recorded(&self, bytes: u64) {
        let old = self.get();
        let new = if old == 0 { bytes } else { old - old / Self::WEIGHT + bytes / Self::WEIGHT };
        self.0.store(new, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// [`TempoQ`] with its price in proportion to a usual claim; claims of which only a time is known are judged by
/// [`Tempo`] with a margin.
#[derive(Debug)]
pub(crate) struct ByChance {
    pub(crate) by_chance: TempoQ,
    pub(crate) by_quantile: Tempo,
    /// Of a usual claim's bytes.
    pub(crate) late_price_percent: u32,
    pub(crate) usual: UsualBytes,
}

impl Policy for ByChance {
    fn name(&self) -> &'static str {
        "tempo_q"
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        if outlook.use_chance_permille.is_none() {
            return self.by_quantile.is_eligible(outlook);
        }
        let price = u128::from(self.usual.get()) * u128::from(self.late_price_percent) / 100;
        let late_price_bytes = u64::try_from(price).unwrap_or(u64::MAX);
        TempoQ { late_price_bytes, ..self.by_chance }.is_eligible(outlook)
    }

    fn lead_ns(&self, time_to_ready_ns: u64, restage_ns: &dyn Fn() -> Option<u64>) -> Option<u64> {
        self.by_chance.lead_ns(time_to_ready_ns, restage_ns)
    }

    /// What is there already is only kept there: that is never too late to begin.
    fn soon_ns(&self, time_to_ready_ns: u64) -> Option<u64> {
        (time_to_ready_ns > 0).then(|| self.by_chance.soon_ns(time_to_ready_ns)).flatten()
    }

    fn takes_turns(&self) -> bool {
        self.by_chance.takes_turns()
    }

    fn commits_ahead(&self) -> bool {
        self.by_chance.commits_ahead()
    }
}
