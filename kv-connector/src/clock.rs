//! The one clock: below this crate, time is an argument.

use std::{sync::OnceLock, time::Instant};

static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// Nanoseconds since this process first asked: what tiers made by the caller are opened with.
pub fn now_ns() -> u64 {
    let elapsed = ORIGIN.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn ns_from_ms(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

#[expect(clippy::cast_precision_loss, reason = "a report of seconds")]
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
