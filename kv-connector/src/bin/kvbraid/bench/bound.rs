//! The yardstick: what the devices, each alone, would together have moved.

/// A device that alone served whole chunks, under the same limits and beside the same other readers as in the steps
/// that are judged, for somewhat longer than those take.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Alone {
    /// When how much payload had been delivered, from the first chunk to the last. A throttle lets a whole slice pass
    /// at once: a device is ahead of its limit at one time and level with it at another.
    pub(super) arrivals: Vec<Arrival>,
    /// What others read from it meanwhile, in bytes/s.
    pub(super) others_bytes_per_s: f64,
    /// Its limit at the end.
    pub(super) end_bytes_per_s: u64,
}

/// So much payload after so long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Arrival {
    pub(super) seconds: f64,
    /// Since the begin.
    pub(super) bytes: u64,
}

impl Alone {
    fn last(&self) -> Arrival {
        self.arrivals.last().copied().unwrap_or(Arrival { seconds: 0.0, bytes: 0 })
    }

    /// How long the run was.
    pub(super) fn seconds(&self) -> f64 {
        self.last().seconds
    }

    /// What it delivered to us, in MB/s.
    pub(super) fn mbps(&self) -> f64 {
        self.last().bytes as f64 / self.last().seconds / 1e6
    }

    /// Payload delivered by `seconds` after the begin; behind the end of the run it goes on at the last limit.
    pub(super) fn by(&self, seconds: f64) -> f64 {
        let after = self.arrivals.partition_point(|arrival| arrival.seconds <= seconds);
        let before =
            after.checked_sub(1).map_or(Arrival { seconds: 0.0, bytes: 0 }, |it| self.arrivals[it]);
        let rate = match self.arrivals.get(after) {
            Some(next) => (next.bytes - before.bytes) as f64 / (next.seconds - before.seconds),
            None => self.end_bytes_per_s as f64 - self.others_bytes_per_s,
        };
        before.bytes as f64 + (seconds - before.seconds) * rate
    }
}

/// The time in which the devices together would have moved `bytes`, while others read from each at the given rate.
pub(super) fn bound_s(bytes: u64, alone: &[Alone], others_bytes_per_s: &[f64]) -> f64 {
    let moved = |seconds: f64| {
        let each = |(it, others): (&Alone, &f64)| {
            it.by(seconds) + (it.others_bytes_per_s - others) * seconds
        };
        alone.iter().zip(others_bytes_per_s).map(each).sum::<f64>()
    };
    // Halved until it is exact: the sum only grows.
    let (mut least, mut most) = (0.0, 3600.0);
    for _ in 0..60 {
        let middle = f64::midpoint(least, most);
        if moved(middle) < bytes as f64 { least = middle } else { most = middle }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn alone(mb: u64, others: u64, seconds: f64, end_mbps: u64) -> Alone {
        let arrivals = vec![Arrival { seconds, bytes: mb * MB }];
        let others_bytes_per_s = (others * MB) as f64 / seconds;
        Alone { arrivals, others_bytes_per_s, end_bytes_per_s: end_mbps * MB }
    }

    #[track_caller]
    fn near(found: f64, due: f64) {
        assert!((found - due).abs() < 1e-9, "{found} is not {due}");
    }

    #[test]
    fn devices_that_ended_together_bound_what_they_moved_together() {
        let both = [alone(1500, 0, 5.0, 300), alone(500, 0, 5.0, 100)];
        near(bound_s(2000 * MB, &both, &[0.0, 0.0]), 5.0);
        near(bound_s(2400 * MB, &both, &[0.0, 0.0]), 6.0);
    }

    #[test]
    fn a_slice_that_passed_at_once_is_in_the_bound_when_it_did() {
        // 300 MB/s in slices of 0.1 s: 30 MB at the begin of each.
        let arrival = |slice: u32| Arrival {
            seconds: f64::from(slice) * 0.1 + 0.001,
            bytes: u64::from(slice + 1) * 30 * MB,
        };
        let one = Alone {
            arrivals: (0..20).map(arrival).collect(),
            others_bytes_per_s: 0.0,
            end_bytes_per_s: 300 * MB,
        };
        near(bound_s(330 * MB, std::slice::from_ref(&one), &[0.0]), 1.001);
        near(bound_s(360 * MB, std::slice::from_ref(&one), &[0.0]), 1.101);
        near(bound_s(630 * MB, std::slice::from_ref(&one), &[0.0]), 2.001);
    }

    #[test]
    fn what_a_device_took_to_begin_is_in_the_bound_once() {
        // 0.1 s late at the begin, then at its limit.
        let late = [alone(1500, 0, 5.1, 300), alone(500, 0, 5.1, 100)];
        near(bound_s(2000 * MB, &late, &[0.0, 0.0]), 5.1);
    }

    #[test]
    fn a_run_under_changing_limits_goes_on_at_the_last() {
        // 300 MB/s for 1.5 s, 60 for 1.5 s, then 200.
        let both = [alone(940, 0, 5.0, 200), alone(500, 0, 5.0, 100)];
        near(bound_s(1440 * MB, &both, &[0.0, 0.0]), 5.0);
        near(bound_s(1740 * MB, &both, &[0.0, 0.0]), 6.0);
    }

    #[test]
    fn what_others_read_is_not_ours() {
        let both = [alone(1500, 0, 5.0, 300), alone(350, 150, 5.0, 100)];
        near(bound_s(1850 * MB, &both, &[0.0, 30e6]), 5.0);
        // Others that got less left more for us.
        near(bound_s(2000 * MB, &both, &[0.0, 0.0]), 5.0);
    }
}
