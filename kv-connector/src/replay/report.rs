//! What one run of a trace measured.

use std::{collections::BTreeMap, time::Duration};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

use crate::{EngineStats, replay::Policy};

/// What one run of a trace measured. Retrieval counts the loads of steps that needed storage, nothing else.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunReport {
    /// How steps were served.
    pub policy: Policy,
    /// Time in loads, from their begin to their last chunk, in seconds.
    pub retrieval_s: f64,
    /// The same, step by step.
    pub step_s: Vec<f64>,
    /// Unique payload delivered from storage.
    pub storage_bytes: u64,
    /// Payload delivered from memory.
    pub memory_bytes: u64,
    /// Unique payload delivered by each tier, in the order of the configuration.
    pub tier_bytes: Vec<u64>,
    /// Bytes that storage delivered a second time.
    pub duplicate_bytes: u64,
    /// Chunks looked up.
    pub lookups: u64,
    /// Chunks served from memory or storage.
    pub hits: u64,
    /// Delivered bytes that were compared with what they must be: all of them.
    pub bytes_verified: u64,
    /// Of those, different.
    pub bytes_wrong: u64,
    /// CPU time of the process during loads, in seconds: reads, checksums, copies.
    pub cpu_s: f64,
    /// Chunks that `store` refused; they were not kept, which is no failure.
    pub refused: u64,
    /// What failed, and how often: a run with any of these shows no speed.
    pub problems: BTreeMap<String, u64>,
    /// Whether the engine was closed and reopened half-way.
    pub restarted: bool,
    /// Time by which forward passes took longer than modelled, as their writes had to drain, in seconds.
    pub drain_s: f64,
    /// Time of the whole run, in seconds.
    pub wall_s: f64,
}

impl RunReport {
    pub(crate) fn new(policy: Policy, tiers: usize) -> Self {
        Self {
            policy,
            retrieval_s: 0.0,
            step_s: Vec::new(),
            storage_bytes: 0,
            memory_bytes: 0,
            tier_bytes: vec![0; tiers],
            duplicate_bytes: 0,
            lookups: 0,
            hits: 0,
            bytes_verified: 0,
            bytes_wrong: 0,
            cpu_s: 0.0,
            refused: 0,
            problems: BTreeMap::new(),
            restarted: false,
            drain_s: 0.0,
            wall_s: 0.0,
        }
    }

    /// Whether every byte was right and nothing failed: only then is there a speed to speak of.
    pub fn is_clean(&self) -> bool {
        self.bytes_wrong == 0 && self.problems.is_empty()
    }

    /// CPU time for a GB (10^9 bytes) delivered, in seconds; 0 if nothing was.
    pub fn cpu_s_per_gb(&self) -> f64 {
        let delivered = self.storage_bytes + self.memory_bytes;
        if delivered == 0 { 0.0 } else { self.cpu_s * 1e9 / delivered as f64 }
    }

    /// How much longer retrieval took than the tiers need, each at its rate alone (in bytes/s), as a fraction.
    pub fn over_bound(&self, alone_bytes_per_s: &[f64]) -> f64 {
        let bound_s = self.storage_bytes as f64 / alone_bytes_per_s.iter().sum::<f64>();
        self.retrieval_s / bound_s - 1.0
    }

    pub(crate) fn problem(&mut self, what: String, times: u64) {
        if times > 0 {
            *self.problems.entry(what).or_default() += times;
        }
    }

    /// Takes over what an engine counted as failed; called once for each engine, when it is closed.
    pub(crate) fn add_failures(&mut self, stats: &EngineStats) {
        for tier in &stats.tiers {
            for (kind, count) in &tier.errors {
                self.problem(format!("tier {}: {kind}", tier.name), *count);
            }
            self.problem(format!("tier {}: corrupt reads", tier.name), tier.corrupt_reads);
            self.problem(
                format!("tier {}: reads past their deadline", tier.name),
                tier.timed_out_reads,
            );
        }
        self.problem("replicas not written".to_owned(), stats.replicas_failed);
        self.problem("staged chunks that no tier kept".to_owned(), stats.lost_writes);
    }
}

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
    fn the_bound_is_all_tiers_at_their_rates_alone() {
        let mut report = RunReport::new(Policy::Kvbraid, 2);
        (report.storage_bytes, report.retrieval_s) = (4_000_000, 1.1);
        assert!((report.over_bound(&[3e6, 1e6]) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn wrong_bytes_and_failures_are_not_clean() {
        let mut report = RunReport::new(Policy::Kvbraid, 2);
        report.problem("nothing".to_owned(), 0);
        assert!(report.is_clean());
        report.problem("tier a: eio".to_owned(), 1);
        assert!(!report.is_clean());
        let mut report = RunReport::new(Policy::Kvbraid, 2);
        report.bytes_wrong = 1;
        assert!(!report.is_clean());
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_time();
        let mut payload = vec![0; 1 << 20];
        while cpu_time() - before < Duration::from_millis(5) {
            crate::replay::fill(kv_chunk::Digest::of(b"work"), &mut payload);
        }
    }
}
