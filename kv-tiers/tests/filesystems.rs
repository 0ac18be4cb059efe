//! Each driver in each way of doing I/O, judged by the conformance suite on one file system.
//!
//! `KVBRAID_TEST_DIR` names a directory on it; without, it is that of the target directory. A way that this file system
//! or machine does not offer is skipped with what the tier said.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "what is skipped is shown")]

use std::{
    env,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_tiers::{
    Arena, ArenaConfig, IoMode, NvmeConfig, NvmeTier, PublishBy, SharedConfig, SharedTier, Tier,
    TierError,
    conformance::{self, Harness, Open},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn directory() -> TempDir {
    match env::var_os("KVBRAID_TEST_DIR") {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")),
    }
    .unwrap()
}

type OpenIn<'a> = &'a dyn Fn(
    &std::path::Path,
    &[Arc<Arena>],
) -> Result<(Box<dyn Tier>, Option<String>), TierError>;

/// Runs the suite unless the tier works in another way than asked for.
fn check(what: &str, open_in: OpenIn<'_>) {
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let arenas = [Arc::clone(&arena)];
    let mut place = directory();
    if let (_, Some(why)) = open_in(place.path(), &arenas).unwrap() {
        println!("SKIP {what}: {why}");
        return;
    }
    let mut open = |open| {
        if open == Open::Fresh {
            place = directory();
        }
        let (tier, why) = open_in(place.path(), &arenas)?;
        assert_eq!(why, None);
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

fn nvme(what: &str, ring: bool, direct: bool, registered: bool) {
    check(what, &|path, arenas| {
        let mut config = NvmeConfig::new("nvme", path, 32 * MIB);
        config.segment_bytes = Some(4 * MIB);
        config.payload_bytes_max = 2 * MIB + 5;
        config.queue_ops_max = 6;
        let mut allow = IoMode::default();
        (allow.ring, allow.direct) = (ring, direct);
        (allow.registered_buffers, allow.registered_files) = (registered, registered);
        config.allow = allow;
        let tier = NvmeTier::open(config, arenas, 0)?;
        let stats = tier.stats();
        let why = (stats.io_mode != allow).then(|| stats.fallbacks.join("; "));
        Ok((Box::new(tier), why))
    });
}

fn shared(what: &str, publish: PublishBy) {
    check(what, &|path, _| {
        let node = fastrand::u64(1..);
        let mut config = SharedConfig::new("shared", path, 32 * MIB, node);
        config.payload_bytes_max = 2 * MIB + 5;
        config.queue_ops_max = 6;
        // What works here is asked of an empty directory beside.
        let probe = directory();
        let mut there = config.clone();
        there.directory = probe.path().into();
        let probed = SharedTier::open(there, 0)?;
        let refused = probed.stats().fallbacks;
        let name = format!("{publish:?}");
        let why =
            refused.iter().find(|line| line.contains(&format!("by {name} does not"))).cloned();
        config.publish = Some(publish);
        Ok((Box::new(SharedTier::open(config, 0)?), why))
    });
}

#[test]
fn nvme_io_uring_o_direct_registered() {
    nvme("nvme io_uring+o_direct+registered", true, true, true);
}

#[test]
fn nvme_io_uring_o_direct() {
    nvme("nvme io_uring+o_direct", true, true, false);
}

#[test]
fn nvme_io_uring_buffered() {
    nvme("nvme io_uring", true, false, false);
}

#[test]
fn nvme_threads_o_direct() {
    nvme("nvme threads+o_direct", false, true, false);
}

#[test]
fn nvme_threads_buffered() {
    nvme("nvme threads", false, false, false);
}

#[test]
fn shared_link() {
    shared("shared link", PublishBy::Link);
}

#[test]
fn shared_rename_noreplace() {
    shared("shared renameat2(NOREPLACE)", PublishBy::RenameNoReplace);
}

#[test]
fn shared_rename() {
    shared("shared rename", PublishBy::Rename);
}
