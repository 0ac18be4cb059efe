//! The shared tier keeps the contract of a tier, whichever way it publishes.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "rules that are skipped are shown")]

mod nvme_support;

use std::{
    thread,
    time::{Duration, Instant},
};

use kv_tiers::{
    Arena, ArenaConfig, PublishBy, SharedConfig, SharedTier, Tier,
    conformance::{self, Harness, Open},
};
use nvme_support::{MIB, on_disk, on_tmpfs};
use tempfile::TempDir;

fn check(make: fn() -> TempDir, publish: Option<PublishBy>) {
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let mut directory = make();
    let mut node = 0;
    let mut open = |open| {
        if open == Open::Fresh {
            directory = make();
        }
        node += 1;
        let mut config = SharedConfig::new("shared", directory.path(), 32 * MIB, node);
        config.payload_bytes_max = 2 * MIB + 5;
        config.queue_ops_max = 6;
        config.publish = publish;
        let tier: Box<dyn Tier> = Box::new(SharedTier::open(config, 0)?);
        assert_eq!(tier.stats().fallbacks, Vec::<String>::new());
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
fn on_disk_as_probed() {
    check(on_disk, None);
}

#[test]
fn on_tmpfs_as_probed() {
    check(on_tmpfs, None);
}

#[test]
fn on_tmpfs_by_rename_without_replacing() {
    check(on_tmpfs, Some(PublishBy::RenameNoReplace));
}

#[test]
fn on_tmpfs_by_plain_rename() {
    check(on_tmpfs, Some(PublishBy::Rename));
}
