//! The one clock: below this crate, time is an argument.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// Time that [`jump_clock`] added: written by tests only, read with every time. Relaxed: nothing is published with it.
static JUMPED_NS: AtomicU64 = AtomicU64::new(0);

/// For tests: as if so much time had passed at once, as after a suspension of the machine.
#[doc(hidden)]
pub fn jump_clock(by_ns: u64) {
    JUMPED_NS.fetch_add(by_ns, Ordering::Relaxed);
}

/// Nanoseconds since this process first asked: what tiers made by the caller are opened with.
pub fn now_ns() -> u64 {
    let elapsed = ORIGIN.get_or_init(Instant::now).elapsed();
    ns_of(elapsed).saturating_add(JUMPED_NS.load(Ordering::Relaxed))
}

/// As long as can be said, if it is longer.
pub(crate) fn ns_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn ns_from_ms(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

#[expect(clippy::cast_precision_loss, reason = "a report of seconds")]
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
