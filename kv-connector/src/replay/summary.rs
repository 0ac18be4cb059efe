//! The few statistics that are made of a run.

use std::time::Duration;

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

/// The smallest sample that at least `fraction` of all samples do not exceed (nearest rank); 0 without samples.
pub fn percentile(samples: &[f64], fraction: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (fraction.clamp(0.0, 1.0) * sorted.len() as f64).ceil();
    #[expect(clippy::cast_possible_truncation, reason = "a rank is at most the number of samples")]
    let rank = rank as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// CPU time of this process so far, all threads, user and system.
pub(crate) fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    let microseconds = (usage.user_time() + usage.system_time()).num_microseconds();
    Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let samples = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&samples, 0.5), 2.0);
        assert_eq!(percentile(&samples, 0.51), 3.0);
        assert_eq!(percentile(&samples, 0.99), 4.0);
        assert_eq!(percentile(&samples, 0.0), 1.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_time();
        let digest = kv_chunk::Digest::of(b"work");
        let mut payload = vec![0; 1 << 20];
        while cpu_time() - before < Duration::from_millis(5) {
            crate::replay::fill(digest, &mut payload);
        }
    }
}
