//! The yardstick: what the devices, each alone, would together have moved.

/// A device that alone served whole chunks, under the same limits and beside the same other readers as in the steps
/// that are judged, for about as long as those take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Alone {
    /// Payload that it delivered.
    pub(super) bytes: u64,
    /// What others read from it meanwhile.
    pub(super) others: u64,
    pub(super) seconds: f64,
    /// Its limit at the end.
    pub(super) end_bytes_per_s: u64,
}

impl Alone {
    /// What it delivered to us, in MB/s.
    pub(super) fn mbps(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e6
    }

    /// Payload delivered by `seconds` after the begin, had others read at the given rate. The run ended near that
    /// time: the difference is passed at the last limit.
    fn by(&self, seconds: f64, others_bytes_per_s: f64) -> f64 {
        let all = (self.bytes + self.others) as f64;
        let end = self.end_bytes_per_s as f64;
        all + (seconds - self.seconds) * end - others_bytes_per_s * seconds
    }
}

/// The time in which the devices together would have moved `bytes`, while others read from each at the given rate.
pub(super) fn bound_s(bytes: u64, alone: &[Alone], others_bytes_per_s: &[f64]) -> f64 {
    let moved = |seconds: f64| {
        alone
            .iter()
            .zip(others_bytes_per_s)
            .map(|(it, others)| it.by(seconds, *others))
            .sum::<f64>()
    };
    // A straight line.
    let (at_0, slope) = (moved(0.0), moved(1.0) - moved(0.0));
    (bytes as f64 - at_0) / slope
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn alone(mb: u64, others: u64, seconds: f64, end_mbps: u64) -> Alone {
        Alone { bytes: mb * MB, others: others * MB, seconds, end_bytes_per_s: end_mbps * MB }
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
