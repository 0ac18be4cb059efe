//! A store that is opened to be looked at stays as it is.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use std::{collections::BTreeMap, fs, os::unix::fs::FileExt, path::Path};

use kv_tiers::{FindingKind, NvmeConfig, Tier, Unguarded};
use nvme_support::{Driver, KIB, MIB, digest, on_disk, segments};

fn small(directory: &Path) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, 14 * MIB);
    config.segment_bytes = Some(4 * (MIB + 4 * KIB) + 4 * KIB);
    config
}

fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        // The lock names its holder.
        (name != "LOCK").then(|| (name, fs::read(entry.path()).unwrap()))
    };
    entries.filter_map(read).collect()
}

#[test]
fn looking_changes_no_byte_and_finds_what_a_start_would_mend() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..12).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let files = segments(directory.path());
    let edit = |path: &Path| fs::OpenOptions::new().write(true).open(path).unwrap();
    edit(&files[0]).write_all_at(&[1], 40).unwrap();
    // A slot's header, past its magic.
    edit(&files[1]).write_all_at(&[1], 4096 + 40).unwrap();
    fs::write(directory.path().join("seg-0000000000000009.kvb.tmp"), [0; 5000]).unwrap();
    fs::write(directory.path().join("notes.txt"), "somebody's").unwrap();
    let before = contents(directory.path());
    let mut config = small(directory.path());
    // Half of what is there: a store that serves would shrink to it.
    (config.capacity_bytes, config.look_only) = (5 * MIB, true);
    let driver = Driver::open(config);
    let kinds: Vec<_> = driver.tier.findings().iter().map(|it| it.kind).collect();
    let count = |kind| kinds.iter().filter(|it| **it == kind).count();
    assert_eq!(count(FindingKind::LeftAlone), 1, "{kinds:?}");
    assert_eq!(count(FindingKind::Leftover), 1, "{kinds:?}");
    assert_eq!(count(FindingKind::Damaged), 1, "{kinds:?}");
    assert_eq!((driver.tier.detail().torn_slots, driver.tier.stats().chunks), (1, 7));
    assert!(driver.tier.stats().used_bytes > 12 * MIB, "{:?}", driver.tier.stats());
    drop(driver);
    assert!(contents(directory.path()) == before, "a byte changed");
}

#[test]
fn a_removal_is_pending_until_the_next_open_cannot_find_the_chunk() {
    let directory = on_disk();
    let mut driver = Driver::open(small(directory.path()));
    (0..4).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let mut config = small(directory.path());
    config.look_only = true;
    let mut driver = Driver::open(config.clone());
    assert!(driver.tier.remove(digest(1), 0) && driver.tier.remove(digest(2), 0));
    assert_eq!(driver.tier.stats().removals_pending, 2);
    while driver.tier.stats().removals_pending > 0 {
        driver.tier.poll(0, &Unguarded, &mut Vec::new());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // As a kill would: nothing of it is run any more.
    let copy = on_disk();
    for (name, bytes) in contents(directory.path()) {
        fs::write(copy.path().join(name), bytes).unwrap();
    }
    config.directory = copy.path().to_owned();
    assert_eq!(Driver::open(config).held(0..4), [0, 3]);
}
