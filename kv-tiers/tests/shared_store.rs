//! Several nodes on one directory: who writes, what is found, and what damage does.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;
mod shared_support;

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Barrier,
    thread,
    time::Duration,
};

use kv_chunk::HEADER_BYTES;
use kv_tiers::{ErrorKind, Modes, Piece, PublishBy, SharedDetail, Tier, TierError};
use nvme_support::{MIB, digest, key, on_disk, on_tmpfs, payload};
use shared_support::{Node, config, files, make_later, path_of};

const CHUNKS: u32 = 1000;
const BYTES: u64 = 8192;

/// Stores all chunks, many at a time; how many of them it published.
fn store_all(node: &mut Node) -> u32 {
    let mut published = 0;
    let mut open = Vec::new();
    for number in 0..CHUNKS {
        open.push(node.submit_write(number, BYTES));
        while open.len() >= 12 || (number + 1 == CHUNKS && !open.is_empty()) {
            node.poll();
            open.retain(|id| match node.write_result(*id) {
                None => true,
                Some(Ok(())) => {
                    published += 1;
                    false
                }
                Some(Err(TierError::AlreadyHeld { .. })) => false,
                Some(Err(error)) => panic!("{error}"),
            });
            node.sleep();
        }
    }
    published
}

fn store_at_once(publish: PublishBy) {
    let directory = on_tmpfs();
    let begin = Barrier::new(2);
    let store = |version| {
        let mut config = config(directory.path());
        config.publish = Some(publish);
        config.capacity_bytes = 256 * MIB;
        let mut node = Node::open(config);
        node.version = version;
        begin.wait();
        let published = store_all(&mut node);
        (published, node.tier.detail())
    };
    let (one, other) = thread::scope(|scope| {
        let other = scope.spawn(|| store(2));
        (store(1), other.join().unwrap())
    });
    assert_eq!(one.0 + other.0, CHUNKS, "each chunk is published once");
    assert_eq!(files(directory.path(), ".kvc").len(), CHUNKS as usize);
    assert_eq!(files(directory.path(), ".tmp").len(), 0);
    let file_bytes = HEADER_BYTES as u64 + BYTES;
    let written = |detail: SharedDetail, published: u32| {
        detail.written_bytes - (u64::from(published) + detail.lost_races) * file_bytes
    };
    assert_eq!(written(one.1, one.0) + written(other.1, other.0), 0, "nothing beyond the races");

    let mut third = Node::open(config(directory.path()));
    assert_eq!(store_all(&mut third), 0);
    assert_eq!(third.tier.detail().written_bytes, 0, "what is there is not written");
    for number in 0..CHUNKS {
        let bytes = third.read(number).unwrap();
        assert!((1..3).any(|version| bytes == payload(number, version, BYTES)), "chunk {number}");
    }
}

#[test]
fn two_nodes_storing_equal_chunks_at_once_write_each_once_by_link() {
    store_at_once(PublishBy::Link);
}

#[test]
fn two_nodes_storing_equal_chunks_at_once_write_each_once_by_rename_without_replacing() {
    store_at_once(PublishBy::RenameNoReplace);
}

#[test]
fn a_chunk_of_another_node_is_found_and_read() {
    let directory = on_disk();
    let mut writer = Node::open(config(directory.path()));
    let mut reader = Node::open(config(directory.path()));
    writer.write(1, 2 * MIB + 5);
    assert!(!reader.holds(1), "nothing is listed");
    let held = reader.locate(1).unwrap();
    assert_eq!(held, writer.tier.contains(digest(1)).unwrap());
    assert_eq!(reader.read(1).unwrap(), payload(1, 1, 2 * MIB + 5));
}

#[test]
fn absence_is_remembered_for_its_time_only() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.absent_ttl_ns = 300_000_000;
    let mut reader = Node::open(settings);
    let mut writer = Node::open(config(directory.path()));
    for _ in 0..3 {
        assert!(reader.locate(1).is_none());
    }
    assert_eq!(reader.tier.detail().looked_for, 1);
    writer.write(1, BYTES);
    reader.until("the chunk is found in the end", |node| node.locate(1).is_some());
    // Its own write is known at once, whatever was remembered.
    assert!(reader.locate(2).is_none());
    reader.write(2, BYTES);
    assert!(reader.locate(2).is_some());
}

/// Node `reader` knows the chunk; `harm` harms its file: it is a miss, the file goes, and it can be written again.
fn harmed(harm: fn(&Path)) {
    let directory = on_tmpfs();
    let mut writer = Node::open(config(directory.path()));
    let mut reader = Node::open(config(directory.path()));
    writer.write(1, BYTES);
    assert!(reader.locate(1).is_some());
    let path = path_of(directory.path(), 1);
    harm(&path);
    match reader.try_read(1) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
        Ok((slot, done)) => {
            let verified = Piece::verify(slot, done, &key(1), &(0..u32::MAX));
            assert!(verified.is_err(), "harmed bytes were taken for good ones");
            let now_ns = reader.now_ns();
            assert!(reader.tier.remove(digest(1), now_ns));
        }
    }
    assert!(!reader.holds(1));
    reader.until("the file is removed", |_| !path.exists());
    // Neither has the writer any use of what it thinks is there; then it writes it again.
    assert!(writer.read(1).is_none());
    writer.version = 2;
    writer.write(1, BYTES);
    reader.until("it is found again", |node| node.locate(1).is_some());
    assert_eq!(reader.read(1).unwrap(), payload(1, 2, BYTES));
}

#[test]
fn a_truncated_file_is_a_miss_and_written_again() {
    harmed(|path| OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap());
}

#[test]
fn an_empty_file_is_a_miss_and_written_again() {
    harmed(|path| OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap());
}

#[test]
fn a_file_that_is_too_long_is_a_miss_and_written_again() {
    harmed(|path| OpenOptions::new().write(true).open(path).unwrap().set_len(20_000).unwrap());
}

#[test]
fn a_poisoned_header_is_a_miss_and_written_again() {
    harmed(|path| {
        OpenOptions::new().write(true).open(path).unwrap().write_all_at(b"x", 9).unwrap();
    });
}

#[test]
fn a_poisoned_payload_is_a_miss_and_written_again() {
    harmed(|path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"poison", 6000).unwrap();
    });
}

#[test]
fn another_chunks_file_under_the_name_is_a_miss_and_written_again() {
    harmed(|path| {
        let other = on_tmpfs();
        let mut node = Node::open(config(other.path()));
        node.write(2, BYTES);
        fs::copy(path_of(other.path(), 2), path).unwrap();
    });
}

#[test]
fn a_torn_file_in_the_way_of_a_write_is_replaced() {
    let directory = on_tmpfs();
    let mut node = Node::open(config(directory.path()));
    let path = path_of(directory.path(), 1);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, b"torn").unwrap();
    assert!(node.locate(1).is_none());
    node.write(1, BYTES);
    assert_eq!(node.read(1).unwrap(), payload(1, 1, BYTES));
    assert_eq!(node.tier.detail().torn_removed, 1);
}

#[test]
fn a_removal_spares_what_was_written_since() {
    let directory = on_tmpfs();
    let mut old = Node::open(config(directory.path()));
    let mut new = Node::open(config(directory.path()));
    old.write(1, BYTES);
    fs::remove_file(path_of(directory.path(), 1)).unwrap();
    new.version = 2;
    new.write(1, BYTES);
    let now_ns = old.now_ns();
    assert!(old.tier.remove(digest(1), now_ns));
    old.until("the removal has ended", |node| node.locate(1).is_some());
    assert_eq!(new.read(1).unwrap(), payload(1, 2, BYTES));
    assert_eq!(old.read(1).unwrap(), payload(1, 2, BYTES));
}

#[test]
fn a_later_versions_chunk_is_a_miss_and_left_alone() {
    let directory = on_tmpfs();
    let mut node = Node::open(config(directory.path()));
    node.write(1, BYTES);
    let path = path_of(directory.path(), 1);
    make_later(&path);
    let bytes = fs::read(&path).unwrap();
    let after_version = |node: &mut Node| match node.try_read(1) {
        Err(error) => error.kind() == ErrorKind::NotFound,
        Ok(_) => false,
    };
    assert!(after_version(&mut node));
    assert!(node.try_write(1, BYTES).is_err());
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn permissions_are_as_configured_whatever_the_umask() {
    let outer = on_tmpfs();
    let private = outer.path().join("a/private");
    let mut node = Node::open(config(&private));
    node.write(1, BYTES);
    let file = path_of(&private, 1);
    assert_eq!((mode(&private), mode(file.parent().unwrap()), mode(&file)), (0o700, 0o700, 0o600));
    assert_eq!(mode(&private.join("KVBSHARE")), 0o600);
    assert_eq!(mode(&private.join("KVBLEASE")), 0o600);

    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let group = outer.path().join("group");
    let mut settings = config(&group);
    settings.modes = Modes { directory: 0o2777, file: 0o666, umask: 0o007 };
    let mut node = Node::open(settings);
    node.write(1, BYTES);
    nix::sys::stat::umask(before);
    let file = path_of(&group, 1);
    assert_eq!((mode(&group), mode(file.parent().unwrap()), mode(&file)), (0o2770, 0o2770, 0o660));

    let mut settings = config(&private);
    settings.modes = Modes { directory: 0o500, file: 0o600, umask: 0 };
    assert_eq!(Node::try_open(settings).err().unwrap().kind(), ErrorKind::Config);
}

#[test]
fn a_directory_of_a_later_version_is_left_alone_and_reported() {
    let directory = on_tmpfs();
    drop(Node::open(config(directory.path())));
    let marker = directory.path().join("KVBSHARE");
    let mut bytes = fs::read(&marker).unwrap();
    bytes[8] = 2;
    fs::write(&marker, &bytes).unwrap();
    fs::remove_file(directory.path().join("KVBLEASE")).unwrap();
    match Node::try_open(config(directory.path())).err().unwrap() {
        TierError::Newer { path, found: 2, known: 1 } => assert_eq!(path, marker),
        error => panic!("{error}"),
    }
    let names: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["KVBSHARE"]);
    assert_eq!(fs::read(&marker).unwrap(), bytes);
    fs::write(&marker, b"something else").unwrap();
    assert_eq!(Node::try_open(config(directory.path())).err().unwrap().kind(), ErrorKind::Config);
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_with_its_place() {
    let outer = on_tmpfs();
    let path = outer.path().join("file");
    fs::write(&path, b"").unwrap();
    let error = Node::try_open(config(&path.join("below"))).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("below"), "{error}");
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/shared-v1")
}

/// Three chunks, and one removed; by a node of a fixed number, since that is in the marker and in the lease.
fn golden_store(directory: &Path) {
    let mut settings = config(directory);
    settings.node = 0x4b56_4272_6169_6400;
    settings.lease_ttl = Duration::from_secs(600);
    let mut node = Node::open(settings);
    node.until("it is counted", |node| node.tier.detail().counted > 0);
    (0..4).for_each(|number| node.write(number, 5000 + u64::from(number)));
    node.tier.remove(digest(1), 0);
    node.until("it is removed", |_| !path_of(directory, 1).exists());
    node.until("it is taken away", |node| node.tier.stats().used_bytes == 3 * 12288);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// `KV_TIERS_WRITE_GOLDEN=1` makes the files anew, for a new version of the format in a new directory.
#[test]
fn a_directory_of_version_1_opens_and_is_still_written_the_same() {
    if std::env::var_os("KV_TIERS_WRITE_GOLDEN").is_some() && !golden().exists() {
        golden_store(&golden());
        fs::remove_dir(path_of(&golden(), 1).parent().unwrap()).unwrap();
    }
    let old = on_tmpfs();
    copy(&golden(), old.path());
    let mut node = Node::open(config(old.path()));
    assert!(node.is_leader(), "the lease was given back");
    assert_eq!(node.tier.stats().used_bytes, 3 * 12288);
    for number in [0, 2, 3] {
        assert!(node.locate(number).is_some());
        let bytes = node.read(number).unwrap();
        assert_eq!(bytes, payload(number, 1, 5000 + u64::from(number)));
    }
    assert!(node.locate(1).is_none());

    let fresh = on_tmpfs();
    golden_store(fresh.path());
    let expected = files(&golden(), "");
    assert_eq!(expected.len(), 5, "{expected:?}");
    for path in expected {
        let written = fresh.path().join(path.strip_prefix(golden()).unwrap());
        let same = fs::read(&written).unwrap() == fs::read(&path).unwrap();
        assert!(same, "the writer makes another {} than version 1", path.display());
    }
}

#[test]
fn opening_lists_nothing_and_costs_no_time_per_chunk() {
    let directory = on_tmpfs();
    let mut node = Node::open(config(directory.path()));
    node.write(1, BYTES);
    let second = Node::open(config(directory.path()));
    assert_eq!(second.tier.stats().chunks, 0);
    assert!(!second.is_leader() && node.is_leader());
}
