//! A real trace through a real engine: every policy serves it, and every byte is right.

use std::{cell::Cell, path::Path};

use kv_connector::{
    ByteSize, Config, TierConfig,
    replay::{
        CompareOptions, Comparison, Policy, ReplayError, Restart, RunOptions, ScheduleOptions,
        Silent, Trace, TraceLimits, Watch, Workload, compare, run,
    },
};

const CHUNK_BYTES: usize = 8192;

/// A small conversation trace: 50 requests of 10 conversations that grow by two chunks a turn.
fn workload(directory: &Path) -> Workload {
    let path = directory.join("trace.jsonl");
    let line = |request: u64| {
        let (conversation, turn) = (request % 10, request / 10);
        let own = (0..4 + 2 * turn).map(|chunk| 1000 * (conversation + 1) + chunk);
        let ids: Vec<u64> = [0, 1].into_iter().chain(own).collect();
        let tokens = 512 * ids.len();
        let at = 6000 * turn;
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n"
        )
    };
    std::fs::write(&path, (0..50).map(line).collect::<String>()).expect("a fresh directory");
    let trace = Trace::load(&path, TraceLimits::default()).expect("a trace");
    Workload::new(trace, ScheduleOptions::default(), CHUNK_BYTES).expect("a small trace")
}

/// Two tiers; nothing is kept in memory once it is written.
fn memory() -> Config {
    let mut config = Config::new(vec![
        TierConfig::memory("fast", ByteSize::mib(64)),
        TierConfig::memory("slow", ByteSize::mib(64)),
    ]);
    config.engine.chunk_bytes_max = ByteSize(CHUNK_BYTES as u64);
    config.engine.host_cache = ByteSize(0);
    config.engine.cache_stores = false;
    config.engine.staging = ByteSize::mib(4);
    config
}

fn options(policy: Policy) -> RunOptions {
    let mut options = RunOptions::new(policy);
    options.forward.tokens_per_s = f64::INFINITY;
    options
}

#[test]
fn every_policy_serves_the_same_hits_with_every_byte_right() {
    let directory = tempfile::tempdir().unwrap();
    let workload = workload(directory.path());
    // Each turn is one step, as the clock's ticks are as long as the steps.
    assert_eq!(workload.steps(), 5);
    let policies =
        [Policy::Serial, Policy::FastOnly, Policy::Static(vec![0.5, 0.5]), Policy::Kvbraid];
    for policy in policies {
        let report = run(&memory(), &workload, &options(policy), &Silent).unwrap();
        let name = report.policy.name();
        assert!(report.is_clean(), "{name}: {:?}", report.problems);
        assert_eq!(report.refused, 0, "{name}");
        // The two shared chunks, and of each conversation the 4, 6, 8 and 10 of the turn before.
        assert_eq!(report.hits, 4 * 2 + 10 * (4 + 6 + 8 + 10), "{name}");
        assert_eq!(report.lookups, 5 * 2 + 10 * (4 + 6 + 8 + 10 + 12), "{name}");
        assert_eq!(report.bytes_verified, report.hits * CHUNK_BYTES as u64, "{name}");
        assert_eq!(report.bytes_verified, report.storage_bytes + report.memory_bytes, "{name}");
        assert_eq!(report.storage_bytes, report.tier_bytes.iter().sum::<u64>(), "{name}");
    }
}

#[test]
fn memory_tiers_forget_on_restart_and_the_replay_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let workload = workload(directory.path());
    let whole = run(&memory(), &workload, &options(Policy::Kvbraid), &Silent).unwrap();
    let mut options = options(Policy::Kvbraid);
    options.restart = Restart::HalfWay;
    let restarted = run(&memory(), &workload, &options, &Silent).unwrap();
    assert!(restarted.restarted && restarted.is_clean());
    assert!(0 < restarted.hits && restarted.hits < whole.hits);
}

#[test]
fn files_survive_the_restart_and_are_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let workload = workload(directory.path());
    let mut config = memory();
    for tier in &mut config.tiers {
        *tier = TierConfig::nvme(&tier.name, directory.path().join(&tier.name), ByteSize::mib(64));
        tier.segment = Some(ByteSize::mib(4));
    }
    let mut options = CompareOptions::default();
    options.forward.tokens_per_s = f64::INFINITY;
    options.measure = ByteSize::mib(1);
    let comparison = compare(&config, &workload, &options, &Silent).unwrap();
    let problems: Vec<_> = comparison.rows.iter().map(|row| &row.problems).collect();
    assert!(comparison.is_clean(), "{problems:?}");
    assert_eq!(comparison.rows.len(), 4);
    assert_eq!(comparison.grid.len(), 3);
    assert!(comparison.rows[3].restarted);
    assert_eq!(comparison.rows[3].hits, comparison.uninterrupted.hits);
    let left: Vec<_> = config.tiers.iter().map(|tier| tier.path.clone().unwrap()).collect();
    assert!(left.iter().all(|path| path.read_dir().unwrap().next().is_none()));
}

/// Counts steps; stops after some.
struct Counting {
    steps: Cell<usize>,
    stop_after: usize,
}

impl Watch for Counting {
    fn phase(&self, _name: &str) {}

    fn step(&self) -> bool {
        self.steps.set(self.steps.get() + 1);
        self.steps.get() < self.stop_after
    }
}

#[test]
fn progress_counts_to_what_was_announced_and_can_stop_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let workload = workload(directory.path());
    let mut options = CompareOptions::default();
    options.forward.tokens_per_s = f64::INFINITY;
    options.measure = ByteSize::mib(1);
    let counting = Counting { steps: Cell::new(0), stop_after: usize::MAX };
    compare(&memory(), &workload, &options, &counting).unwrap();
    let announced = Comparison::runs(&options) * workload.steps() + 2;
    assert_eq!(counting.steps.get(), announced);
    let stopping = Counting { steps: Cell::new(0), stop_after: 7 };
    let stopped = compare(&memory(), &workload, &options, &stopping);
    assert!(matches!(stopped, Err(ReplayError::Stopped)));
    assert_eq!(stopping.steps.get(), 7);
}
