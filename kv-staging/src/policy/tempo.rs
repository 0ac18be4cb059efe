//! Just in time by the state of queue and device.

use super::{Outlook, Policy};

/// Eligible when the time until use falls to the time until ready, with a margin.
///
/// With a margin of zero and an estimator of means this is Tempo; with the default margin and a lower quantile for the
/// time until use (the default of [`SlotProjection`](crate::SlotProjection)) it is Tempo-Q.
#[derive(Clone, Copy, Debug)]
pub struct Tempo {
    /// Added to the time until ready, in percent of it.
    pub margin_percent: u32,
    /// Added to the time until ready.
    pub margin_ns: u64,
}

impl Default for Tempo {
    /// 25 % and 100 ms: with the 30 % quantile this kept nearly all of immediate protection's gain in simulation.
    fn default() -> Self {
        Self { margin_percent: 25, margin_ns: 100_000_000 }
    }
}

impl Policy for Tempo {
    fn name(&self) -> &'static str {
        "tempo"
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        let ready_ns = u128::from(outlook.time_to_ready_ns);
        let lead_ns = ready_ns
            + ready_ns * u128::from(self.margin_percent) / 100
            + u128::from(self.margin_ns);
        outlook.requested || outlook.time_to_use_ns.is_some_and(|ns| u128::from(ns) <= lead_ns)
    }
}
