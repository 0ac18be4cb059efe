//! What other hands and other versions do to the files of an NVMe tier.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use kv_tiers::{ErrorKind, IoMode, NvmeConfig, Tier, TierError};
use nvme_support::{Driver, KIB, MIB, digest, du, on_disk, on_tmpfs, segments};

/// Four slots of a 1 MiB record in each of two segments.
fn small(directory: &Path) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, 9 * MIB);
    config.segment_bytes = Some(4 * (MIB + 4 * KIB) + 4 * KIB);
    config
}

fn edit(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_file_cut_behind_our_back_loses_its_chunks_and_never_brings_wrong_bytes() {
    for allow in [IoMode::ALL, IoMode::default()] {
        for make in [on_disk, on_tmpfs] {
            let directory = make();
            let mut config = small(directory.path());
            config.allow = allow;
            let mut driver = Driver::open(config.clone());
            (0..4).for_each(|number| driver.write(number, MIB));
            // In the middle of the third record, and of a block.
            let cut_at = 4096 + 2 * (MIB + 4096) + 700_001;
            edit(&segments(directory.path())[0]).set_len(cut_at).unwrap();
            (0..2).for_each(|number| driver.check(number, MIB));
            for number in 2..4 {
                let error = driver.try_read(number, 0..9).unwrap_err();
                assert!(matches!(error, TierError::Short { .. }), "{error}");
                assert!(!driver.holds(number));
                let (lost, error) = driver.lost.pop().unwrap();
                assert_eq!((lost, error.kind()), (digest(number), ErrorKind::Short));
            }
            (2..8).for_each(|number| driver.write(number, MIB));
            (2..8)
                .filter(|&number| driver.holds(number))
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|number| driver.check(number, MIB));
            drop(driver);
            // Its length is wrong now: at the next start it goes.
            let mut driver = Driver::open(config);
            for number in driver.held(0..8) {
                driver.check(number, MIB);
            }
            assert!(du(directory.path()) <= 9 * MIB);
        }
    }
}

#[test]
fn a_deleted_file_is_a_miss_at_the_next_start() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..8).for_each(|number| driver.write(number, MIB));
    fs::remove_file(&segments(directory.path())[0]).unwrap();
    (0..8).for_each(|number| driver.check(number, MIB));
    drop(driver);
    let mut driver = Driver::open(small(directory.path()));
    assert_eq!(driver.held(0..8), [4, 5, 6, 7]);
    (8..16).for_each(|number| driver.write(number, MIB));
}

#[test]
fn a_later_segment_version_is_left_alone_and_counts() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..8).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let newer = segments(directory.path()).pop().unwrap();
    edit(&newer).write_all_at(&[9], 8).unwrap();
    let before = fs::read(&newer).unwrap();
    // Room for one segment more: it may not take the name of the one that is left alone.
    let mut config = small(directory.path());
    config.capacity_bytes = 14 * MIB;
    let mut driver = Driver::open(config);
    assert_eq!(driver.tier.detail().left_alone_files, 1);
    assert_eq!(driver.held(0..8), [0, 1, 2, 3]);
    for number in 10..20 {
        driver.write(number, MIB);
        assert!(du(directory.path()) <= 14 * MIB);
    }
    driver.write(30, 2 * MIB);
    assert!(fs::read(&newer).unwrap() == before, "it was touched");
}

#[test]
fn a_chunk_of_a_later_version_is_a_miss_and_its_slot_is_left_alone() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..4).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let path = &segments(directory.path())[0];
    let first_slot = 4096;
    // The version, then the checksum with its own field zeroed.
    let mut header = [0; 4096];
    edit(path).read_exact_at(&mut header, first_slot).unwrap();
    header[8] = 9;
    header[12..16].fill(0);
    let checksum = kv_chunk::block_crc(&header);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    edit(path).write_all_at(&header, first_slot).unwrap();
    nvme_support::remove_index_files(directory.path());
    let mut driver = Driver::open(small(directory.path()));
    assert_eq!(driver.held(0..4), [1, 2, 3]);
    assert_eq!(driver.tier.detail().newer_chunks, 1);
    (10..30).for_each(|number| driver.write(number, MIB));
    let mut found = [0; 4096];
    edit(path).read_exact_at(&mut found, first_slot).unwrap();
    assert_eq!(found, header);
}

#[test]
fn damaged_segments_and_stale_temporaries_are_removed() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..8).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let damaged = segments(directory.path()).remove(0);
    edit(&damaged).write_all_at(&[1], 40).unwrap();
    let stale = directory.path().join("seg-0000000000000009.kvb.tmp");
    fs::write(&stale, [0; 5000]).unwrap();
    let mut driver = Driver::open(small(directory.path()));
    assert!(!damaged.exists() && !stale.exists());
    assert_eq!(driver.tier.detail().dropped_segments, 1);
    assert_eq!(driver.held(0..8), [4, 5, 6, 7]);
    (4..8).for_each(|number| driver.check(number, MIB));
}

#[test]
fn a_segment_of_another_store_or_under_another_name_is_left_alone() {
    let (one, other) = (on_disk(), on_disk());
    for directory in [&one, &other] {
        let mut driver = Driver::open(small(directory.path()));
        driver.write(0, MIB);
    }
    let source = segments(other.path()).remove(0);
    fs::copy(&source, one.path().join("seg-0000000000000007.kvb")).unwrap();
    let own = segments(one.path()).remove(0);
    fs::copy(&own, one.path().join("seg-0000000000000008.kvb")).unwrap();
    let mut config = small(one.path());
    config.capacity_bytes = 64 * MIB;
    let mut driver = Driver::open(config);
    assert_eq!(driver.tier.detail().left_alone_files, 2);
    assert_eq!(driver.tier.detail().segments, 1);
    driver.check(0, MIB);
}

#[test]
fn a_crooked_payload_is_seen_by_the_reader_and_can_be_removed() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    driver.write(0, MIB);
    drop(driver);
    edit(&segments(directory.path())[0]).write_all_at(&[0x5a; 16], 4096 + 4096 + 70_000).unwrap();
    let mut driver = Driver::open(small(directory.path()));
    let id = driver.submit_read(0, 0..9);
    driver.settle();
    let (slot, result) = driver.read.remove(&id).unwrap();
    let key = nvme_support::key(0);
    kv_tiers::Piece::verify(slot, result.unwrap(), &key, &(0..9)).unwrap_err();
    assert!(driver.tier.remove(digest(0), 0));
    driver.settle();
    driver.write(0, MIB);
    driver.check(0, MIB);
}

#[test]
fn a_removed_chunk_stays_away_after_a_restart() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..4).for_each(|number| driver.write(number, MIB));
    assert!(driver.tier.remove(digest(2), 0));
    driver.settle();
    drop(driver);
    let driver = Driver::open(small(directory.path()));
    assert_eq!(driver.held(0..4), [0, 1, 3]);
}

/// Set in a child process: the directory it shall use.
const CHILD: &str = "KV_TIERS_NVME_CHILD";

#[test]
fn what_a_killed_process_left_is_whole_or_not_there() {
    if let Some(directory) = std::env::var_os(CHILD) {
        let mut driver = Driver::open(small(Path::new(&directory)));
        for number in 0.. {
            driver.submit_write(number, MIB);
            driver.poll(&kv_tiers::Unguarded);
        }
    }
    let directory = on_disk();
    for _ in 0..5 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "what_a_killed_process_left_is_whole_or_not_there"])
            .env(CHILD, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(400));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut driver = Driver::open(small(directory.path()));
        let mut held = Vec::new();
        driver.tier.list(&mut |digest, _| held.push(digest));
        let numbers = (0..100_000).filter(|&number| held.contains(&digest(number)));
        let numbers: Vec<u32> = numbers.take(held.len()).collect();
        assert_eq!(numbers.len(), held.len(), "a chunk that nobody wrote");
        numbers.into_iter().for_each(|number| driver.check(number, MIB));
        assert!(du(directory.path()) <= 9 * MIB);
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nvme-v1")
}

/// Three chunks in one segment, and a wiped slot.
fn golden_store(directory: &Path) {
    let mut config = NvmeConfig::new("nvme", directory, MIB);
    config.segment_bytes = Some(5 * 12 * KIB);
    let mut driver = Driver::open(config);
    (0..4).for_each(|number| driver.write(number, 5000 + u64::from(number)));
    driver.tier.remove(digest(1), 0);
    driver.settle();
}

/// `KV_TIERS_WRITE_GOLDEN=1` makes the files anew, for a new version of the format in a new directory.
#[test]
fn a_store_of_version_1_opens_and_is_still_written_the_same() {
    if std::env::var_os("KV_TIERS_WRITE_GOLDEN").is_some() && !golden().exists() {
        golden_store(&golden());
        fs::remove_file(golden().join("LOCK")).unwrap();
    }
    let files = segments(&golden());
    assert_eq!(files.len(), 1);
    let copy = on_disk();
    let name = files[0].file_name().unwrap();
    fs::copy(&files[0], copy.path().join(name)).unwrap();
    let mut driver = Driver::open(NvmeConfig::new("nvme", copy.path(), MIB));
    assert_eq!(driver.held(0..4), [0, 2, 3]);
    for number in [0, 2, 3] {
        driver.check(number, 5000 + u64::from(number));
    }
    drop(driver);

    let fresh = on_disk();
    golden_store(fresh.path());
    let written = fs::read(fresh.path().join(name)).unwrap();
    let mut expected = fs::read(&files[0]).unwrap();
    // Each store has its own number, which is in the checksum of the header.
    expected[12..16].copy_from_slice(&written[12..16]);
    expected[24..40].copy_from_slice(&written[24..40]);
    assert!(written == expected, "the writer makes other bytes than version 1");
}
