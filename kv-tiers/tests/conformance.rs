//! Every driver and wrapper keeps the contract of a tier.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "rules that are skipped are shown")]

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_tiers::{
    Arena, ArenaConfig, CrashImage, Crashing, Drift, FaultPlan, Faulty, FlushPolicy, Latency,
    MemoryConfig, MemoryTier, NvmeConfig, NvmeTier, Stalls, ThrottleConfig, Throttled, Tier,
    TierError,
    conformance::{self, Clock, Harness, Open, OpenTier},
};

const CAPACITY_BYTES: u64 = 32 << 20;
/// Below a slot's room, so that a payload too large can be made.
const PAYLOAD_BYTES_MAX: u64 = (2 << 20) + 5;

fn arena() -> Arc<Arena> {
    Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap()
}

fn config() -> MemoryConfig {
    let mut config = MemoryConfig::new("host", CAPACITY_BYTES);
    config.payload_bytes_max = PAYLOAD_BYTES_MAX;
    config.queue_ops_max = 6;
    config
}

fn memory() -> Box<dyn Tier> {
    Box::new(MemoryTier::new(config()))
}

fn check(open: &mut OpenTier<'_>, clock: &mut Clock<'_>, skipped: &[&str]) {
    let report = conformance::run(&mut Harness::new(open, arena(), clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
    println!("{report}");
    let names: Vec<&str> = report.skipped.iter().map(|(rule, _)| *rule).collect();
    assert_eq!(names, skipped);
}

const VOLATILE: [&str; 3] =
    ["wake_fd_wakes", "a_restart_finds_every_chunk", "what_a_restart_found_counts_and_leaves"];

fn check_virtual(mut make: impl FnMut(Open) -> Result<Box<dyn Tier>, TierError>, skipped: &[&str]) {
    check(&mut make, &mut conformance::virtual_clock(), skipped);
}

#[test]
fn memory_keeps_the_contract() {
    check_virtual(|_| Ok(memory()), &VOLATILE);
}

#[test]
fn throttled_keeps_the_contract() {
    let mut throttle = ThrottleConfig::new(500_000_000);
    throttle.burst_bytes = 100_000;
    throttle.latency = Latency::Lognormal { median_ns: 200_000, sigma: 0.9 };
    throttle.stalls = Some(Stalls { probability: 0.05, stall_ns: 30_000_000 });
    throttle.drift = Some(Drift { fraction: 0.8, period_ns: 40_000_000 });
    check_virtual(|_| Ok(Box::new(Throttled::new(memory(), throttle))), &VOLATILE);
}

#[test]
fn faulty_without_faults_keeps_the_contract() {
    check_virtual(|_| Ok(Box::new(Faulty::new(memory(), FaultPlan::NONE))), &VOLATILE);
}

#[test]
fn crashing_keeps_the_contract() {
    for flush in [FlushPolicy::Always, FlushPolicy::Never] {
        let mut image = CrashImage::new(4096);
        let open = |open| -> Result<Box<dyn Tier>, TierError> {
            if open == Open::Fresh {
                image = CrashImage::new(4096);
            }
            Ok(Box::new(Crashing::open(image.clone(), config(), flush)))
        };
        check_virtual(open, &["wake_fd_wakes"]);
    }
}

#[test]
fn wrappers_around_wrappers_keep_the_contract() {
    check_virtual(
        |_| {
            let inner = Faulty::new(memory(), FaultPlan::NONE);
            let paced = Throttled::new(Box::new(inner), ThrottleConfig::new(1_000_000_000));
            Ok(Box::new(Faulty::new(Box::new(paced), FaultPlan::NONE)))
        },
        &VOLATILE,
    );
}

#[test]
fn wrappers_around_a_real_disk_keep_the_contract() {
    let make = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut directory = make();
    let mut throttle = ThrottleConfig::new(400_000_000);
    throttle.latency = Latency::Fixed { ns: 300_000 };
    let mut open = |open| -> Result<Box<dyn Tier>, TierError> {
        if open == Open::Fresh {
            directory = make();
        }
        let mut config = NvmeConfig::new("nvme", directory.path(), CAPACITY_BYTES);
        config.segment_bytes = Some(4 << 20);
        config.payload_bytes_max = PAYLOAD_BYTES_MAX;
        config.queue_ops_max = 6;
        let disk = NvmeTier::open(config, &[], 0)?;
        let paced = Throttled::new(Box::new(disk), throttle);
        Ok(Box::new(Faulty::new(Box::new(paced), FaultPlan::NONE)))
    };
    let start = Instant::now();
    let now_ns = || u64::try_from(start.elapsed().as_nanos()).unwrap();
    let mut clock = |until_ns: Option<u64>| {
        let wait_ns = until_ns.map_or(50_000, |until_ns| until_ns.saturating_sub(now_ns()));
        thread::sleep(Duration::from_nanos(wait_ns.min(50_000)));
        now_ns()
    };
    check(&mut open, &mut clock, &[]);
}
