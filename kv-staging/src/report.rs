//! What staging did, and what it cost.

/// Counters since the controller was made. Publish them with the load they were taken under: most of what staging
/// saves depends on the length of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Claims recorded.
    pub recorded: u64,
    /// Claims committed.
    pub committed: u64,
    /// Claims of which every object became ready.
    pub ready: u64,
    /// Claims whose retrieval was requested after they were ready.
    pub early: u64,
    /// How long those had been ready, in sum.
    pub early_ns: u128,
    /// Claims whose retrieval was requested before they were ready.
    pub late: u64,
    /// Claims that were eligible and did not fit the budget at least once.
    pub blocked: u64,
    /// Retrievals without protection.
    pub demand: u64,
    /// Claims of which an object could not be staged.
    pub failed: u64,
    /// Claims cancelled.
    pub cancelled: u64,
    /// Claims that hold nothing any more.
    pub released: u64,
    /// C: protected bytes over time.
    pub protected_byte_ns: u128,
    /// Most bytes protected at once.
    pub peak_bytes: u64,
}

impl Report {
    /// C per released claim, in GiB seconds; 0 before any.
    pub fn c_per_claim_gib_s(&self) -> f64 {
        const GIB_S: f64 = (1_u64 << 30) as f64 * 1e9;
        if self.released == 0 {
            0.0
        } else {
            self.protected_byte_ns as f64 / GIB_S / self.released as f64
        }
    }
}
