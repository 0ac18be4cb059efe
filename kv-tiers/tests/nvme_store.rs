//! The NVMe tier: what is written comes back, also after a restart, within the cap, oldest out first.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use kv_tiers::{ErrorKind, EvictionGuard, NvmeConfig, Tier, TierError};
use nvme_support::{Driver, KIB, MIB, digest, du, on_disk, on_tmpfs, segments};
use tempfile::TempDir;

fn both(check: impl Fn(&TempDir)) {
    check(&on_disk());
    check(&on_tmpfs());
}

/// Four slots of a 1 MiB record in each of two segments.
fn small(directory: &TempDir) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory.path(), 9 * MIB);
    config.segment_bytes = Some(4 * (MIB + 4 * KIB) + 4 * KIB);
    config
}

#[test]
fn chunks_come_back_whole_and_in_pieces_and_after_a_restart() {
    both(|directory| {
        let config = || NvmeConfig::new("nvme", directory.path(), 256 * MIB);
        let sizes = [0, 1, 4095, 4096, MIB, MIB + 1, 4 * MIB];
        let mut driver = Driver::open(config());
        for (number, bytes) in (0..).zip(sizes) {
            driver.write(number, bytes);
            driver.check(number, bytes);
        }
        drop(driver);
        let mut driver = Driver::open(config());
        assert_eq!(driver.tier.stats().recovered_chunks, 7);
        for (number, bytes) in (0..).zip(sizes) {
            driver.check(number, bytes);
        }
        let piece = driver.try_read(6, 2..3).unwrap();
        assert!(piece == nvme_support::payload(6, 1, 4 * MIB)[2 << 20..3 << 20]);
    });
}

#[test]
fn the_oldest_chunk_leaves_first_and_a_read_makes_it_young() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        assert!(driver.evicted.is_empty());
        driver.check(0, MIB);
        driver.check(2, MIB);
        driver.write(8, MIB);
        driver.write(9, MIB);
        assert_eq!(driver.evicted, [digest(1), digest(3)]);
        for number in [0, 2, 4, 5, 6, 7, 8, 9] {
            driver.check(number, MIB);
        }
        assert_eq!(driver.tier.stats().evictions, 2);
    });
}

#[test]
fn the_cap_holds_under_twenty_times_its_writes_of_mixed_sizes() {
    both(|directory| {
        let mut config = NvmeConfig::new("nvme", directory.path(), 16 * MIB);
        config.segment_bytes = Some(2 * MIB);
        let mut driver = Driver::open(config.clone());
        let mut written = 0;
        let mut random = fastrand::Rng::with_seed(1);
        let mut number = 0;
        let mut last = Vec::new();
        while written < 20 * 16 * MIB {
            let bytes = [100, 5000, 100 * KIB, MIB, 3 * MIB][random.usize(0..5)];
            driver.write(number, bytes);
            last.push((number, bytes));
            number += 1;
            written += bytes;
            let used = driver.tier.stats().used_bytes;
            assert!(used <= 16 * MIB, "{used} bytes said to be used");
            let du = du(directory.path());
            assert!(du <= used, "du says {du}, the tier {used}");
            if number % 200 == 0 {
                drop(driver);
                driver = Driver::open(config.clone());
                assert!(driver.tier.stats().used_bytes <= 16 * MIB);
            }
        }
        let (number, bytes) = last.pop().unwrap();
        driver.check(number, bytes);
        let mut held = 0;
        for (number, bytes) in last {
            if driver.holds(number) {
                driver.check(number, bytes);
                held += 1;
            }
        }
        assert!(held > 0);
    });
}

#[test]
fn a_lowered_cap_holds_at_once() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        drop(driver);
        let mut config = small(directory);
        config.capacity_bytes = 5 * MIB;
        let mut driver = Driver::open(config);
        assert!(du(directory.path()) <= 5 * MIB);
        assert_eq!(driver.held(0..8), [4, 5, 6, 7], "the older segment goes");
        (4..8).for_each(|number| driver.check(number, MIB));
        driver.write(9, MIB);
        assert!(du(directory.path()) <= 5 * MIB);
    });
}

#[test]
fn files_of_others_count_and_stay() {
    both(|directory| {
        let alien = directory.path().join("notes.bin");
        std::fs::write(&alien, vec![7; 5 << 20]).unwrap();
        let mut driver = Driver::open(small(directory));
        assert_eq!(driver.tier.detail().left_alone_files, 1);
        for number in 0..20 {
            driver.write(number, MIB);
            assert!(du(directory.path()) <= 9 * MIB);
        }
        assert!(driver.held(0..20).len() < 4);
        assert_eq!(std::fs::read(&alien).unwrap(), vec![7; 5 << 20]);
    });
}

#[test]
fn nothing_is_given_up_for_a_record_that_cannot_fit() {
    let directory = on_disk();
    std::fs::write(directory.path().join("notes.bin"), vec![7; 5 << 20]).unwrap();
    let mut driver = Driver::open(small(&directory));
    (0..3).for_each(|number| driver.write(number, MIB));
    let error = driver.try_write(9, 4 * MIB).unwrap_err();
    assert!(matches!(error, TierError::NoSpace { .. }), "{error}");
    assert_eq!(driver.held(0..3).len(), 3);
    assert!(driver.evicted.is_empty());
}

struct Refuses<F: Fn(u32) -> bool>(F);

impl<F: Fn(u32) -> bool> EvictionGuard for Refuses<F> {
    fn try_evict(&self, victim: kv_chunk::Digest) -> bool {
        !(0..100).any(|number| digest(number) == victim && (self.0)(number))
    }
}

#[test]
fn what_the_guard_refuses_stays() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        let guard = Refuses(|number| number < 6);
        driver.submit_write(8, MIB);
        driver.settle_with(&guard);
        assert_eq!(driver.evicted, [digest(6)]);

        driver.submit_write(9, MIB);
        driver.settle_with(&Refuses(|_| true));
        let (.., result) = driver.written.pop().unwrap();
        assert!(matches!(result, Err(TierError::NoSpace { .. })), "{result:?}");
        assert_eq!(driver.evicted, [digest(6)]);
        for number in [0, 1, 2, 3, 4, 5, 7, 8] {
            driver.check(number, MIB);
        }
    });
}

#[test]
fn a_size_without_room_takes_the_coldest_segment() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        (0..4).for_each(|number| driver.check(number, MIB));
        driver.write(20, 2 * MIB);
        assert_eq!(driver.held(0..8), [0, 1, 2, 3], "the segment of 4 to 7 is colder");
        driver.check(20, 2 * MIB);
        (0..4).for_each(|number| driver.check(number, MIB));

        // Refused: of the segment that is left nothing may go, and 20 is read.
        driver.submit_write(21, 3 * MIB);
        driver.settle_with(&Refuses(|_| true));
        assert_eq!(driver.written.pop().unwrap().2.unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(driver.held(0..8), [0, 1, 2, 3]);
    });
}

#[test]
fn cold_segments_of_another_size_go_before_chunks_in_use() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        (100..120).for_each(|number| driver.write(number, 2 * MIB));
        assert_eq!(driver.held(0..8), [0; 0], "nobody used the small ones any more");
        assert_eq!(driver.held(100..120).len(), 4);
    });
}

#[test]
fn a_chunk_being_read_is_neither_proposed_nor_overwritten() {
    both(|directory| {
        let mut driver = Driver::open(small(directory));
        (0..8).for_each(|number| driver.write(number, MIB));
        let reads: Vec<_> = (0..4).map(|number| driver.submit_read(number, 0..9)).collect();
        (20..26).for_each(|number| {
            driver.submit_write(number, MIB);
        });
        driver.settle_with(&Refuses(|number| number < 4));
        for (number, id) in (0..).zip(reads) {
            let (slot, result) = driver.read.remove(&id).unwrap();
            let piece =
                kv_tiers::Piece::verify(slot, result.unwrap(), &nvme_support::key(number), &(0..9));
            assert!(piece.unwrap().bytes() == nvme_support::payload(number, 1, MIB));
        }
    });
}

#[test]
fn a_second_opener_is_told_who_has_the_directory() {
    let directory = on_disk();
    let first = Driver::open(small(&directory));
    let Err(error) = Driver::try_open(small(&directory)) else { panic!("opened twice") };
    assert!(matches!(error, TierError::Locked { pid, .. } if pid == std::process::id()), "{error}");
    let words = [directory.path().display().to_string(), format!("pid {}", std::process::id())];
    assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    drop(first);
    Driver::open(small(&directory));
}

#[test]
fn directory_and_files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let parent = on_disk();
    let directory = parent.path().join("a/b");
    let mut driver = Driver::open(NvmeConfig::new("nvme", &directory, 64 * MIB));
    driver.write(0, MIB);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&directory) & 0o777, 0o700);
    let files = segments(&directory);
    assert_eq!(files.len(), 1);
    for path in files.iter().chain([&directory.join("LOCK")]) {
        assert_eq!(mode(path) & 0o777, 0o600, "{path:?}");
    }
}

#[test]
fn bad_configurations_are_refused_by_field() {
    let directory = on_disk();
    let check = |change: fn(&mut NvmeConfig), expected: &str| {
        let mut config = NvmeConfig::new("nvme", directory.path(), 64 * MIB);
        change(&mut config);
        let error = Driver::try_open(config).err().unwrap();
        assert!(matches!(error, TierError::Config { field, .. } if field == expected), "{error}");
    };
    check(|config| config.capacity_bytes = 0, "capacity_bytes");
    check(|config| config.segment_bytes = Some(0), "segment_bytes");
    check(|config| config.segment_bytes = Some(4096), "segment_bytes");
    check(|config| config.queue_ops_max = 0, "queue_ops_max");
    check(|config| config.ring_entries = 0, "ring_entries");
    check(|config| config.threads = 0, "threads");
    check(|config| config.request_bytes_max = Some(512), "request_bytes_max");
    check(|config| config.payload_bytes_max = u64::MAX, "payload_bytes_max");
}
