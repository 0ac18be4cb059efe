//! A shared directory that is opened to be looked at stays as it is, whoever works in it.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;
mod shared_support;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use kv_tiers::{
    Finding, FindingKind, OpenAs, RejectReason, SharedConfig, SharedTier, Tier, TierError,
};
use nvme_support::{KIB, digest, on_disk};
use shared_support::{Node, config, make_later, path_of};

fn looker(directory: &Path) -> SharedConfig {
    let mut config = config(directory);
    config.open_as = OpenAs::Looker;
    config
}

/// Every file, its bytes, and when it was changed.
fn contents(directory: &Path) -> BTreeMap<PathBuf, (i64, i64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            let metadata = fs::metadata(&path).unwrap();
            let bytes = fs::read(&path).unwrap();
            found.insert(path, (metadata.mtime(), metadata.mtime_nsec(), bytes));
        }
    }
    found
}

fn filled(directory: &Path, chunks: u32) {
    let mut node = Node::open(config(directory));
    (0..chunks).for_each(|number| node.write(number, 64 * KIB));
}

fn edit(path: &Path) -> fs::File {
    fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Torn, cut, another chunk's, of a later version, temporaries, and what is not ours.
fn disordered(directory: &Path) {
    edit(&path_of(directory, 0)).write_all_at(&[1], 40).unwrap();
    edit(&path_of(directory, 1)).set_len(9_000).unwrap();
    fs::copy(path_of(directory, 9), path_of(directory, 2)).unwrap();
    make_later(&path_of(directory, 3));
    let path = path_of(directory, 4);
    let fan = path.parent().unwrap();
    fs::write(fan.join(format!(".{}.{:016x}-1.tmp", digest(4), 77)), [3; 5_000]).unwrap();
    fs::write(fan.join("notes.txt"), "somebody's").unwrap();
    fs::write(directory.join(".marker.0000000000000001.tmp"), "").unwrap();
    fs::create_dir(directory.join("else")).unwrap();
}

fn count(tier: &SharedTier, kind: FindingKind) -> usize {
    tier.findings().iter().filter(|it| it.kind == kind).count()
}

#[test]
fn looking_changes_nothing_and_tells_what_is_there() {
    let directory = on_disk();
    filled(directory.path(), 10);
    disordered(directory.path());
    let before = contents(directory.path());
    let mut node = Node::open(looker(directory.path()));
    let tier = &node.tier;
    assert_eq!(count(tier, FindingKind::Damaged), 3, "{:?}", tier.findings());
    assert_eq!(count(tier, FindingKind::Leftover), 2, "{:?}", tier.findings());
    assert_eq!(count(tier, FindingKind::LeftAlone), 2, "{:?}", tier.findings());
    assert_eq!((tier.stats().chunks, tier.detail().newer_chunks), (6, 1));
    assert!(!tier.detail().leader);
    assert_eq!(node.read(0), None);
    assert_eq!(node.read(7).unwrap(), nvme_support::payload(7, 1, 64 * KIB));
    // As long as a leader needs to notice that there is none.
    for _ in 0..60 {
        node.poll();
        node.sleep();
    }
    let rejected = node.try_submit_write(50, KIB).unwrap_err();
    assert_eq!(rejected.reason, RejectReason::Closed);
    drop(node);
    assert!(contents(directory.path()) == before, "a byte changed");
}

#[test]
fn mending_removes_what_is_no_whole_chunk_and_nothing_else() {
    let directory = on_disk();
    filled(directory.path(), 10);
    disordered(directory.path());
    edit(&directory.path().join("KVBLEASE")).write_all_at(&[9], 20).unwrap();
    let before = contents(directory.path());
    let mut mender = looker(directory.path());
    mender.open_as = OpenAs::Mender;
    let node = Node::open(mender);
    assert_eq!(node.tier.detail().torn_removed, 4);
    assert_eq!(count(&node.tier, FindingKind::Damaged), 0, "{:?}", node.tier.findings());
    drop(node);
    let after = contents(directory.path());
    let gone: Vec<_> = before.keys().filter(|path| !after.contains_key(*path)).cloned().collect();
    let mut bad: Vec<_> = (0..3).map(|number| path_of(directory.path(), number)).collect();
    bad.push(directory.path().join("KVBLEASE"));
    bad.sort();
    assert_eq!(gone, bad);
    assert!(after.iter().all(|(path, file)| before[path] == *file), "a byte changed");
}

#[test]
fn a_removal_is_pending_until_the_file_is_gone_and_spares_what_was_written_since() {
    let directory = on_disk();
    filled(directory.path(), 4);
    let mut node = Node::open(looker(directory.path()));
    let used = node.tier.stats().used_bytes;
    // Another node has dropped this one and written it anew.
    fs::remove_file(path_of(directory.path(), 2)).unwrap();
    let mut other = Node::open(config(directory.path()));
    other.version = 2;
    other.write(2, 64 * KIB);
    assert!(node.tier.remove(digest(1), 0) && node.tier.remove(digest(2), 0));
    assert_eq!(node.tier.stats().removals_pending, 2);
    node.until("removals", |node| node.tier.stats().removals_pending == 0);
    assert!(!path_of(directory.path(), 1).exists() && path_of(directory.path(), 2).exists());
    assert_eq!(node.tier.stats().used_bytes, used - 68 * KIB);
    assert!(!node.holds(1) && other.locate(1).is_none() && other.locate(2).is_some());
}

#[test]
fn it_looks_beside_nodes_that_work_and_takes_no_lease() {
    let directory = on_disk();
    let mut node = Node::open(config(directory.path()));
    (0..20).for_each(|number| node.write(number, 16 * KIB));
    assert!(node.is_leader());
    for _ in 0..3 {
        let looker = Node::open(looker(directory.path()));
        assert_eq!((looker.tier.stats().chunks, looker.is_leader()), (20, false));
        // The leader may just be writing its lease.
        let unfinished = |it: &Finding| it.kind == FindingKind::Leftover;
        assert!(looker.tier.findings().iter().all(unfinished), "{:?}", looker.tier.findings());
    }
    node.until("beats", |node| node.is_leader());
    node.write(20, 16 * KIB);
    assert!((0..=20).all(|number| node.read(number).is_some()));
}

#[test]
fn a_later_versions_directory_is_named_and_not_looked_into() {
    let directory = on_disk();
    filled(directory.path(), 3);
    edit(&directory.path().join("KVBSHARE")).write_all_at(&[2], 8).unwrap();
    let before = contents(directory.path());
    let node = Node::open(looker(directory.path()));
    assert_eq!((node.tier.stats().chunks, count(&node.tier, FindingKind::LeftAlone)), (0, 1));
    assert!(node.tier.findings()[0].why.contains("version 2"), "{:?}", node.tier.findings());
    drop(node);
    assert!(contents(directory.path()) == before, "a byte changed");
    assert!(matches!(Node::try_open(config(directory.path())), Err(TierError::Newer { .. })));
}

#[test]
fn a_directory_that_is_not_there_is_an_error_and_is_not_made() {
    let directory = on_disk();
    let missing = directory.path().join("store");
    assert!(matches!(
        Node::try_open(looker(&missing)),
        Err(TierError::Io { errno: libc::ENOENT, .. })
    ));
    assert!(!missing.exists());
}
