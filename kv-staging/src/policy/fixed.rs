//! Just in time by a nominal rate, blind to the device's state.

use super::{Outlook, Policy};

/// Eligible when the time until use falls to bytes over a nominal rate plus a fixed lead.
#[derive(Clone, Copy, Debug)]
pub struct Static {
    /// Nominal staging rate; at least 1 is assumed.
    pub bytes_per_s: u64,
    /// Added to every claim.
    pub lead_ns: u64,
}

impl Policy for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        let staging_ns =
            u128::from(outlook.bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.max(1));
        let lead_ns = staging_ns + u128::from(self.lead_ns);
        outlook.requested || outlook.time_to_use_ns.is_some_and(|ns| u128::from(ns) <= lead_ns)
    }
}
