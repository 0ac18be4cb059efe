//! When to stop asking a tier that keeps failing, and when to try it again.

use crate::Failure;

/// When a [`Breaker`] opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BreakerConfig {
    /// Failures in a row that open it; at least 1.
    pub failures: u32,
    /// How long it stays open before one operation may probe the tier.
    pub open_ns: u64,
    /// Each failed probe doubles the time it stays open, up to this.
    pub max_open_ns: u64,
}

impl Default for BreakerConfig {
    /// 5 failures; 1 s, doubling to 60 s.
    fn default() -> Self {
        Self { failures: 5, open_ns: 1_000_000_000, max_open_ns: 60_000_000_000 }
    }
}

/// What a breaker says about a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// The tier works.
    Closed,
    /// The tier is not asked.
    Open,
    /// One operation may ask, or is asking, whether the tier works again.
    HalfOpen,
}

/// Closed while the tier works; open after failures in a row; half open when it is time to probe.
///
/// Single owner: the tier's thread. Times are nanoseconds of any one monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Breaker {
    config: BreakerConfig,
    in_a_row: u32,
    /// While open: since when, and for how long.
    open: Option<(u64, u64)>,
    /// When the probe in flight was let through.
    probe_ns: Option<u64>,
    opened: u64,
}

impl Breaker {
    /// A closed breaker.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, in_a_row: 0, open: None, probe_ns: None, opened: 0 }
    }

    /// Whether an operation may start now. Half open it says yes once, for the probe; it says yes
    /// again if no answer came in as long as the breaker had been open.
    pub fn allow(&mut self, now_ns: u64) -> bool {
        let Some((since_ns, for_ns)) = self.open else { return true };
        let since_ns = self.probe_ns.unwrap_or(since_ns);
        let due = now_ns >= since_ns.saturating_add(for_ns);
        if due {
            self.probe_ns = Some(now_ns);
        }
        due
    }

    /// The state, without letting anything through.
    #[must_use]
    pub fn state(&self, now_ns: u64) -> BreakerState {
        match self.open {
            None => BreakerState::Closed,
            Some(_) if self.probe_ns.is_some() => BreakerState::HalfOpen,
            Some((since_ns, for_ns)) if now_ns >= since_ns.saturating_add(for_ns) => {
                BreakerState::HalfOpen
            }
            Some(_) => BreakerState::Open,
        }
    }

    /// An operation succeeded: closes the breaker.
    pub fn on_success(&mut self) {
        self.in_a_row = 0;
        self.open = None;
        self.probe_ns = None;
    }

    /// An operation failed. Returns whether the breaker opened now, from closed. Failures that do
    /// not speak against the tier ([`Failure::counts_against_tier`]) change nothing, except that a
    /// probe answered by one leaves room for the next probe at once.
    pub fn on_failure(&mut self, failure: Failure, now_ns: u64) -> bool {
        if !failure.counts_against_tier() {
            if let (Some((_, for_ns)), Some(_)) = (self.open, self.probe_ns.take()) {
                self.open = Some((now_ns.saturating_sub(for_ns), for_ns));
            }
            return false;
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        match (self.open, self.probe_ns.take()) {
            (Some((_, for_ns)), Some(_)) => {
                let longer = for_ns.saturating_mul(2).min(self.config.max_open_ns).max(for_ns);
                self.open = Some((now_ns, longer));
                false
            }
            // A straggler that started before the breaker opened.
            (Some(_), None) => false,
            (None, _) if self.in_a_row >= self.config.failures.max(1) => {
                self.open = Some((now_ns, self.config.open_ns));
                self.opened += 1;
                true
            }
            (None, _) => false,
        }
    }

    /// How often it opened.
    #[must_use]
    pub fn times_opened(&self) -> u64 {
        self.opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn opened_at(now_ns: u64) -> Breaker {
        let mut breaker = Breaker::new(BreakerConfig::default());
        for _ in 0..4 {
            assert!(!breaker.on_failure(Failure::Io, now_ns));
        }
        assert!(breaker.on_failure(Failure::TimedOut, now_ns));
        breaker
    }

    #[test]
    fn opens_after_failures_in_a_row() {
        let mut breaker = opened_at(0);
        assert_eq!(breaker.state(0), BreakerState::Open);
        assert!(!breaker.allow(S - 1));
        assert!(!breaker.on_failure(Failure::Io, 5), "it reports opening once");
        assert_eq!(breaker.times_opened(), 1);
    }

    #[test]
    fn a_success_resets_the_count() {
        let mut breaker = Breaker::new(BreakerConfig::default());
        for _ in 0..20 {
            for _ in 0..4 {
                assert!(!breaker.on_failure(Failure::Io, 0));
            }
            breaker.on_success();
        }
        assert!(breaker.allow(0));
    }

    #[test]
    fn full_disks_and_bad_chunks_do_not_count() {
        let mut breaker = Breaker::new(BreakerConfig::default());
        for failure in [Failure::NoSpace, Failure::Corrupt, Failure::NotFound] {
            for _ in 0..100 {
                assert!(!breaker.on_failure(failure, 0));
            }
        }
        assert_eq!(breaker.state(0), BreakerState::Closed);
    }

    #[test]
    fn half_open_lets_one_probe_through_and_closes_on_its_success() {
        let mut breaker = opened_at(0);
        assert_eq!(breaker.state(S), BreakerState::HalfOpen);
        assert!(breaker.allow(S));
        assert!(!breaker.allow(S), "one probe at a time");
        breaker.on_success();
        assert_eq!(breaker.state(S), BreakerState::Closed);
        assert!(breaker.allow(S) && breaker.allow(S));
    }

    #[test]
    fn a_failed_probe_doubles_the_pause_up_to_the_maximum() {
        let mut breaker = opened_at(0);
        let mut now = 0;
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(!breaker.allow(now + pause * S - 1), "pause {pause}");
            now += pause * S;
            assert!(breaker.allow(now), "pause {pause}");
            assert!(!breaker.on_failure(Failure::Io, now));
        }
    }

    #[test]
    fn a_lost_or_neutral_probe_is_followed_by_another() {
        let mut breaker = opened_at(0);
        assert!(breaker.allow(S));
        assert!(breaker.allow(2 * S), "the first probe never answered");
        assert!(!breaker.on_failure(Failure::NotFound, 2 * S + 1));
        assert!(breaker.allow(2 * S + 1), "the answer said nothing about the tier");
    }
}
