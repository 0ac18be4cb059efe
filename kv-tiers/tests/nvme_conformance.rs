//! The NVMe tier keeps the contract of a tier, whichever way it does I/O.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "rules that are skipped are shown")]

mod nvme_support;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_tiers::{
    Arena, ArenaConfig, IoMode, NvmeConfig, NvmeTier, Tier,
    conformance::{self, Harness, Open},
};
use nvme_support::{MIB, on_disk, on_tmpfs};
use tempfile::TempDir;

fn check(make: fn() -> TempDir, allow: IoMode) {
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let arenas = [Arc::clone(&arena)];
    let mut directory = make();
    let mut open = |open| {
        if open == Open::Fresh {
            directory = make();
        }
        let mut config = NvmeConfig::new("nvme", directory.path(), 32 * MIB);
        config.segment_bytes = Some(4 * MIB);
        config.payload_bytes_max = 2 * MIB + 5;
        config.queue_ops_max = 6;
        config.allow = allow;
        let tier = NvmeTier::open(config, &arenas, 0)?;
        assert_eq!(tier.stats().io_mode, allow);
        let tier: Box<dyn Tier> = Box::new(tier);
        Ok(tier)
    };
    let start = Instant::now();
    let mut clock = |_| {
        thread::sleep(Duration::from_micros(50));
        u64::try_from(start.elapsed().as_nanos()).unwrap()
    };
    let report = conformance::run(&mut Harness::new(&mut open, arena, &mut clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
    println!("{report}");
    assert_eq!(report.skipped, []);
}

#[test]
fn with_everything_on_disk() {
    check(on_disk, IoMode::ALL);
}

#[test]
fn with_everything_on_tmpfs() {
    check(on_tmpfs, IoMode::ALL);
}

#[test]
fn with_nothing_registered_and_buffered() {
    let mut allow = IoMode::default();
    allow.ring = true;
    check(on_disk, allow);
}

#[test]
fn with_threads() {
    let mut allow = IoMode::default();
    allow.direct = true;
    check(on_disk, allow);
}

#[test]
fn with_threads_on_tmpfs() {
    check(on_tmpfs, IoMode::default());
}
