//! How fast one device may be, from the begin of a step on.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use super::cgroup::Cgroup;
use crate::failure::Failure;

/// Rates in bytes/s: one from the begin, others from given times on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Schedule {
    pub(super) first: u64,
    /// Seconds after the begin, ascending, and the rate from then on.
    pub(super) changes: Vec<(f64, u64)>,
}

impl Schedule {
    pub(super) fn constant(bytes_per_s: u64) -> Self {
        Self { first: bytes_per_s, changes: Vec::new() }
    }

    /// The rate after all changes.
    pub(super) fn last(&self) -> u64 {
        self.changes.last().map_or(self.first, |(_, rate)| *rate)
    }

    /// Bytes that pass in the first `seconds`.
    pub(super) fn bytes_in(&self, seconds: f64) -> f64 {
        let mut bytes = 0.0;
        let (mut from, mut rate) = (0.0, self.first as f64);
        for &(at, next) in &self.changes {
            let until = at.min(seconds);
            if until > from {
                bytes += (until - from) * rate;
                from = until;
            }
            rate = next as f64;
        }
        bytes + (seconds - from).max(0.0) * rate
    }

    /// Sets the limits of `device` at their times. The first signal is the begin of the step, hanging up its end.
    pub(super) fn follow(
        &self,
        cgroup: &Cgroup,
        device: &str,
        signals: &Receiver<Instant>,
    ) -> Result<(), Failure> {
        let Ok(began) = signals.recv() else { return Ok(()) };
        for &(at, rate) in &self.changes {
            let due = began + Duration::from_secs_f64(at);
            match signals.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => cgroup.limit(device, Some(rate))?,
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        Ok(())
    }
}

/// When devices that follow these schedules have together moved `bytes`.
pub(super) fn seconds_for(bytes: f64, schedules: &[Schedule]) -> f64 {
    let moved = |seconds: f64| schedules.iter().map(|it| it.bytes_in(seconds)).sum::<f64>();
    let mut times: Vec<f64> =
        schedules.iter().flat_map(|it| it.changes.iter().map(|(at, _)| *at)).collect();
    times.sort_unstable_by(f64::total_cmp);
    let last = times.iter().rposition(|&at| moved(at) < bytes);
    let from = last.map_or(0.0, |last| times[last]);
    // Up to the next change, or for ever, all rates are constant.
    let next = last.map_or(times.first(), |last| times.get(last + 1)).copied();
    let until = next.unwrap_or(from + 1.0);
    let rate = (moved(until) - moved(from)) / (until - from);
    from + (bytes - moved(from)) / rate
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn changing() -> Schedule {
        Schedule { first: 300 * MB, changes: vec![(1.0, 60 * MB), (3.0, 200 * MB)] }
    }

    #[track_caller]
    fn near(found: f64, due: f64) {
        assert!((found - due).abs() < 1e-6 * due.abs().max(1.0), "{found} is not {due}");
    }

    #[test]
    fn rates_are_integrated_from_change_to_change() {
        let mb = |seconds| changing().bytes_in(seconds) / 1e6;
        near(mb(0.0), 0.0);
        near(mb(0.5), 150.0);
        near(mb(1.0), 300.0);
        near(mb(2.0), 360.0);
        near(mb(3.0), 420.0);
        near(mb(5.0), 820.0);
        assert_eq!((changing().last(), Schedule::constant(7).last()), (200 * MB, 7));
    }

    #[test]
    fn the_time_for_some_bytes_is_where_the_integrals_add_up_to_them() {
        let slow = Schedule::constant(100 * MB);
        let both = [changing(), slow.clone()];
        for mb in [100.0, 400.0, 500.0, 720.0, 900.0, 2000.0] {
            let seconds = seconds_for(mb * 1e6, &both);
            let moved: f64 = both.iter().map(|it| it.bytes_in(seconds)).sum();
            near(moved / 1e6, mb);
        }
        near(seconds_for(2e9, &[Schedule::constant(300 * MB), slow]), 5.0);
    }
}
