//! The index files of the NVMe tier: what they say is there at the next start, and what is wrong with them costs reads
//! of headers at most.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use kv_tiers::{NvmeConfig, Tier};
use nvme_support::{
    Driver, KIB, MIB, copy_as_killed, digest, du, index_files, on_disk, remove_index_files,
    segments,
};

/// Eight slots of 12 KiB in each of four segments.
fn small(directory: &Path) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, MIB);
    config.segment_bytes = Some(8 * 12 * KIB + 4 * KIB);
    config
}

const BYTES: u64 = 8 * KIB;

fn held(driver: &Driver) -> Vec<(kv_chunk::Digest, kv_tiers::Held)> {
    let mut held = Vec::new();
    driver.tier.list(&mut |digest, chunk| held.push((digest, chunk)));
    held.sort_by_key(|(digest, _)| *digest);
    held
}

fn suffixed(directory: &Path, suffix: &str) -> PathBuf {
    let files = index_files(directory);
    let mut files = files.into_iter().filter(|path| path.to_string_lossy().ends_with(suffix));
    files.next().unwrap()
}

/// A closed store of twenty chunks.
fn closed() -> tempfile::TempDir {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..20).for_each(|number| driver.write(number, BYTES));
    directory
}

/// Opens it; all twenty chunks must be there. Whether headers were read.
fn scans(directory: &Path) -> bool {
    let mut driver = Driver::open(small(directory));
    assert_eq!(driver.held(0..30), (0..20).collect::<Vec<_>>());
    (0..20).for_each(|number| driver.check(number, BYTES));
    driver.tier.detail().scanned_slots > 0
}

#[test]
fn after_a_close_no_header_is_read() {
    let directory = closed();
    assert_eq!(index_files(directory.path()).len(), 2);
    assert!(!scans(directory.path()));
    assert!(!scans(directory.path()), "after a start from the files as well");
}

#[test]
fn after_a_kill_no_header_is_read_but_of_writes_in_flight() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..20).for_each(|number| driver.write(number, BYTES));
    assert!(!scans(copy_as_killed(directory.path()).path()));
}

#[test]
fn the_order_of_eviction_comes_back() {
    for killed in [false, true] {
        let directory = on_disk();
        let mut driver = Driver::open(small(directory.path()));
        let mut number = 0;
        while driver.evicted.is_empty() {
            driver.write(number, BYTES);
            number += 1;
        }
        // A use is known after an orderly close only.
        if !killed {
            driver.check(1, BYTES);
            driver.check(3, BYTES);
        }
        let copy = killed.then(|| copy_as_killed(directory.path()));
        drop(driver);
        let mut driver = Driver::open(small(copy.as_ref().unwrap_or(&directory).path()));
        (100..104).for_each(|number| driver.write(number, BYTES));
        let expected = if killed { [1, 2, 3, 4] } else { [2, 4, 5, 6] };
        assert_eq!(driver.evicted, expected.map(digest), "killed: {killed}");
    }
}

#[test]
fn lost_index_files_cost_reads_of_headers_and_nothing_else() {
    for suffix in [".snap", ".log", ""] {
        let directory = closed();
        match suffix {
            "" => remove_index_files(directory.path()),
            suffix => fs::remove_file(suffixed(directory.path(), suffix)).unwrap(),
        }
        assert!(scans(directory.path()), "{suffix} is missed");
        assert!(!scans(directory.path()), "and made anew");
        assert_eq!(index_files(directory.path()).len(), 2, "nothing old is left");
    }
}

#[test]
fn every_damaged_byte_of_the_index_files_is_seen() {
    let source = closed();
    let mut random = fastrand::Rng::with_seed(7);
    for suffix in [".snap", ".log"] {
        let length = fs::metadata(suffixed(source.path(), suffix)).unwrap().len();
        // The journal is a header; of the snapshot some bytes.
        let bytes: Vec<u64> = match suffix {
            ".log" => (0..length).step_by(5).collect(),
            _ => (0..40).map(|_| random.u64(0..length)).chain([0, 8, 12, 63, 64, 68]).collect(),
        };
        for at in bytes {
            let copy = copy_as_killed(source.path());
            let file = suffixed(copy.path(), suffix);
            let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            let mut driver = Driver::open(small(copy.path()));
            assert_eq!(driver.held(0..30), (0..20).collect::<Vec<_>>(), "{suffix}, byte {at}");
            // A version of 17 is a later one: it is left alone.
            let scanned = driver.tier.detail().scanned_slots;
            // The mark at the end tells of no slots.
            let is_end = suffix == ".snap" && at >= length - 64;
            assert!(scanned > 0 || is_end, "{suffix}, byte {at} is not seen");
            driver.check(7, BYTES);
        }
    }
}

#[test]
fn a_journal_cut_anywhere_brings_what_it_still_says_and_no_wrong_bytes() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    // Rewrites slots many times: an old journal tells of chunks that are gone.
    (0..150).for_each(|number| driver.write(number, BYTES));
    let source = copy_as_killed(directory.path());
    let length = fs::metadata(suffixed(source.path(), ".log")).unwrap().len();
    assert!(length > 150 * 64);
    for cut in (0..24).map(|step| length - step * (length / 24)).chain([length - 1, length - 63]) {
        let copy = copy_as_killed(source.path());
        let file = OpenOptions::new().write(true).open(suffixed(copy.path(), ".log")).unwrap();
        file.set_len(cut).unwrap();
        let mut driver = Driver::open(small(copy.path()));
        let mut right = 0;
        for number in driver.held(0..150) {
            let (slot, result) = driver.read_unverified(number, 0..9);
            let key = nvme_support::key(number);
            match kv_tiers::Piece::verify(slot, result.unwrap(), &key, &(0..9)) {
                Ok(piece) => {
                    assert!(piece.bytes() == nvme_support::payload(number, 1, BYTES));
                    right += 1;
                }
                // As the engine does with what is not what it should be.
                Err(_) => assert!(driver.tier.remove(digest(number), 0)),
            }
        }
        assert!(cut < length - 64 || right > 30, "{right} of the last state");
        (200..300).for_each(|number| driver.write(number, BYTES));
        for number in driver.held(200..300) {
            driver.check(number, BYTES);
        }
        assert!(du(copy.path()) <= MIB);
    }
}

#[test]
fn a_removed_chunk_does_not_come_back_though_its_header_is_still_there() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..8).for_each(|number| driver.write(number, BYTES));
    driver.tier.hold_writes(true);
    assert!(driver.tier.remove(digest(2), 0));
    driver.poll(&kv_tiers::Unguarded);
    let copy = copy_as_killed(directory.path());
    let without = copy_as_killed(directory.path());
    remove_index_files(without.path());
    assert!(Driver::open(small(without.path())).holds(2), "its header is not wiped yet");
    let mut driver = Driver::open(small(copy.path()));
    assert_eq!(driver.held(0..8), [0, 1, 3, 4, 5, 6, 7]);
    driver.settle();
    let copy = copy_as_killed(copy.path());
    remove_index_files(copy.path());
    assert!(!Driver::open(small(copy.path())).holds(2), "it is wiped now");
}

#[test]
fn a_kill_at_any_time_brings_back_the_same_index() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    let mut random = fastrand::Rng::with_seed(3);
    let mut generations = std::collections::HashSet::new();
    // The journal of a store of this size is followed by the next after 1024 records.
    for round in 0..2_500 {
        match random.u32(0..10) {
            0 => drop(driver.tier.remove(digest(random.u32(0..150)), 0)),
            1 => drop(driver.submit_write(random.u32(0..150), 20 * KIB)),
            2..7 => drop(driver.submit_write(random.u32(0..150), BYTES)),
            _ => drop(driver.submit_read(random.u32(0..150), 0..9)),
        }
        driver.poll(&kv_tiers::Unguarded);
        driver.read.clear();
        if round % 125 == 0 {
            driver.settle();
            let copy = copy_as_killed(directory.path());
            generations.extend(index_files(copy.path()));
            let again = Driver::open(small(copy.path()));
            assert_eq!(held(&again), held(&driver), "round {round}");
            assert!(du(directory.path()) <= MIB);
        }
    }
    assert!(driver.tier.stats().evictions > 500);
    let names = index_files(directory.path());
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("0000001.")), "{names:?}");
}

#[test]
fn a_later_version_of_an_index_file_is_left_alone_and_counted() {
    for suffix in [".snap", ".log"] {
        let directory = closed();
        let newer = suffixed(directory.path(), suffix);
        let file = OpenOptions::new().read(true).write(true).open(&newer).unwrap();
        file.write_all_at(&[2], 8).unwrap();
        let before = fs::read(&newer).unwrap();
        {
            let mut driver = Driver::open(small(directory.path()));
            assert_eq!(driver.tier.detail().left_alone_files, 1);
            assert_eq!(driver.held(0..30), (0..20).collect::<Vec<_>>());
            (0..20).for_each(|number| driver.check(number, BYTES));
            (40..80).for_each(|number| driver.write(number, BYTES));
        }
        assert_eq!(fs::read(&newer).unwrap(), before);
        let driver = Driver::open(small(directory.path()));
        assert_eq!(driver.tier.detail().scanned_slots, 0, "our own files are used again");
        assert_eq!(fs::read(&newer).unwrap(), before);
    }
}

#[test]
fn segments_that_the_index_files_do_not_know_are_read() {
    let directory = closed();
    let older = copy_as_killed(directory.path());
    let mut driver = Driver::open(small(directory.path()));
    (20..28).for_each(|number| driver.write(number, BYTES));
    drop(driver);
    // The segments of today with the index files of yesterday, as after a partial restore.
    let mixed = copy_as_killed(older.path());
    for path in segments(directory.path()) {
        fs::copy(&path, mixed.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut driver = Driver::open(small(mixed.path()));
    assert_eq!(driver.tier.detail().scanned_slots, 8, "those of the fourth segment");
    let held = driver.held(0..28);
    assert!((0..20).all(|number| held.contains(&number)), "{held:?}");
    assert!(held.contains(&27), "{held:?}");
    held.into_iter().for_each(|number| driver.check(number, BYTES));
}

#[test]
fn index_files_of_another_store_are_not_believed() {
    let (one, other) = (closed(), on_disk());
    let mut driver = Driver::open(small(other.path()));
    (100..110).for_each(|number| driver.write(number, BYTES));
    drop(driver);
    remove_index_files(one.path());
    for path in index_files(other.path()) {
        fs::copy(&path, one.path().join(path.file_name().unwrap())).unwrap();
    }
    assert!(scans(one.path()));
}

#[test]
fn a_journal_that_cannot_be_written_costs_the_index_files_and_no_chunk() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    // The next journal cannot be made.
    let blocked = directory.path().join("index-0000000000000002.log");
    fs::create_dir(&blocked).unwrap();
    (0..400).for_each(|number| driver.write(number, BYTES));
    assert!(driver.tier.stats().fallbacks.is_empty());
    let held = driver.held(0..400);
    assert!(held.len() > 20);
    let copy = on_disk();
    for path in segments(directory.path()) {
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    assert_eq!(Driver::open(small(copy.path())).held(0..400), held);
    fs::remove_dir(&blocked).unwrap();
    (400..900).for_each(|number| driver.write(number, BYTES));
    let held = driver.held(0..900);
    let copy = copy_as_killed(directory.path());
    let again = Driver::open(small(copy.path()));
    assert_eq!(again.held(0..900), held);
    assert_eq!(again.tier.detail().scanned_slots, 0, "they are kept again");
}

/// What a kill leaves: a snapshot of eight chunks, and a journal of a removal, an eviction-free write and a new segment.
fn golden_store(directory: &Path) {
    let store = on_disk();
    let config = || {
        let mut config = NvmeConfig::new("nvme", store.path(), MIB);
        config.segment_bytes = Some(4 * 8 * KIB + 4 * KIB);
        config
    };
    let mut driver = Driver::open(config());
    (0..3).for_each(|number| driver.write(number, 4 * KIB));
    driver.check(1, 4 * KIB);
    drop(driver);
    let mut driver = Driver::open(config());
    assert!(driver.tier.remove(digest(0), 0));
    driver.settle();
    (3..6).for_each(|number| driver.write(number, 4 * KIB));
    let killed = copy_as_killed(store.path());
    fs::create_dir_all(directory).unwrap();
    for entry in fs::read_dir(killed.path()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "LOCK" {
            fs::copy(entry.path(), directory.join(entry.file_name())).unwrap();
        }
    }
}

/// Bytes of an index file without what differs from store to store: its number, and the checksums of that.
fn comparable(path: &Path) -> Vec<u8> {
    let mut bytes = fs::read(path).unwrap();
    bytes[12..16].fill(0);
    bytes[24..40].fill(0);
    if path.extension().is_some_and(|end| end == "log") {
        bytes[40..44].fill(0);
        bytes.chunks_mut(64).skip(1).for_each(|record| record[..4].fill(0));
    }
    bytes
}

/// `KV_TIERS_WRITE_GOLDEN=1` makes the files anew, for a new version of the format in a new directory.
#[test]
fn index_files_of_version_1_are_read_and_still_written_the_same() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nvme-index-v1");
    if std::env::var_os("KV_TIERS_WRITE_GOLDEN").is_some() && !golden.exists() {
        golden_store(&golden);
    }
    let copy = copy_as_killed(&golden);
    let mut config = NvmeConfig::new("nvme", copy.path(), MIB);
    config.segment_bytes = Some(4 * 8 * KIB + 4 * KIB);
    let mut driver = Driver::open(config);
    assert_eq!(driver.tier.detail().scanned_slots, 0);
    assert_eq!(driver.held(0..10), [1, 2, 3, 4, 5]);
    (1..6).for_each(|number| driver.check(number, 4 * KIB));
    drop(driver);

    let fresh = on_disk();
    golden_store(fresh.path());
    for path in index_files(&golden) {
        let written = comparable(&fresh.path().join(path.file_name().unwrap()));
        assert!(
            written == comparable(&path),
            "{path:?}: the writer makes other bytes than version 1"
        );
    }
}
