//! Memory as a tier keeps the contract of a tier, on either medium.

use std::fs::File;

use kv_cxl::{
    DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig, Medium, PageCacheConfig, PageCacheFlash,
};
use kv_tiers::{
    Arena, ArenaConfig, Tier, TierError,
    conformance::{Harness, Open, run, virtual_clock},
};

const MEDIUM_BYTES: u64 = 32 << 20;
const PAYLOAD_BYTES_MAX: u64 = (2 << 20) + 5;

/// In memory where the system has such a place: what is flushed need not outlive the test.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")))
        .unwrap()
}

fn check(
    place_align_bytes: u64,
    read_threads: usize,
    medium: impl Fn(&std::path::Path) -> Box<dyn Medium>,
) {
    let directory = directory();
    let path = directory.path().join("memory");
    let mut open = |open| -> Result<Box<dyn Tier>, TierError> {
        if open == Open::Fresh {
            let _ = std::fs::remove_file(&path);
            File::create(&path).unwrap().set_len(MEDIUM_BYTES).unwrap();
        }
        let mut config = DaxTierConfig::new("memory");
        config.payload_bytes_max = PAYLOAD_BYTES_MAX;
        config.queue_ops_max = 6;
        config.place_align_bytes = place_align_bytes;
        // Less than a chunk: ops are done a part at a time.
        config.poll_bytes_max = 300_000;
        config.read_threads = read_threads;
        Ok(Box::new(DaxTier::open(config, medium(&path))?))
    };
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let mut clock = virtual_clock();
    let report = run(&mut Harness::new(&mut open, arena, &mut clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
    let skipped: Vec<&str> = report.skipped.iter().map(|(rule, _)| *rule).collect();
    let expected: &[&str] = if read_threads == 0 { &["wake_fd_wakes"] } else { &[] };
    assert_eq!(skipped, expected);
}

#[test]
fn mapped_memory_keeps_the_contract_of_a_tier() {
    for read_threads in [0, 3] {
        check(4096, read_threads, |path| {
            Box::new(DeviceDax::open(&DeviceDaxConfig::new(path)).unwrap().medium())
        });
    }
}

#[test]
fn a_file_in_the_page_cache_keeps_the_contract_of_a_tier() {
    for read_threads in [0, 3] {
        check(64 << 10, read_threads, |path| {
            Box::new(PageCacheFlash::open(PageCacheConfig::new(path, 0)).unwrap().medium())
        });
    }
}
