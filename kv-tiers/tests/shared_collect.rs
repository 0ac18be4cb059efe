//! The cap of a shared directory: leaders that die, two leaders, temporaries, clocks, and mounts that hang.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;
mod shared_support;

use std::{
    fs::{self, File, FileTimes, OpenOptions},
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, SystemTime},
};

use kv_tiers::{ErrorKind, Located, Tier, TierError};
use nix::{sys::stat::Mode, unistd::mkfifo};
use nvme_support::{MIB, digest, on_tmpfs, payload};
use shared_support::{Node, chunk_bytes, config, files, path_of};

const BYTES: u64 = MIB - 4096;

fn set_mtime(path: &Path, time: SystemTime) {
    let file = File::open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(time).set_accessed(time)).unwrap();
}

/// Reads all chunks below `numbers`: right bytes or a miss; how many were there.
fn read_all(node: &mut Node, numbers: u32) -> u32 {
    let mut there = 0;
    for number in 0..numbers {
        if node.locate(number).is_some()
            && let Some(bytes) = node.read(number)
        {
            assert!(bytes == payload(number, 1, BYTES), "chunk {number} has other bytes");
            there += 1;
        }
    }
    there
}

#[test]
fn the_cap_counts_what_every_node_wrote() {
    let directory = on_tmpfs();
    let small = || {
        let mut config = config(directory.path());
        config.capacity_bytes = 16 * MIB;
        config.count_every = Duration::from_millis(20);
        config
    };
    let mut leader = Node::open(small());
    let mut follower = Node::open(small());
    assert!(leader.is_leader() && !follower.is_leader());
    for number in 0..12 {
        follower.write(number, BYTES);
    }
    leader.until("the leader counts what the other wrote", |node| {
        node.tier.stats().used_bytes >= 12 * MIB
    });
    for number in 12..40 {
        leader.write(number, BYTES);
        assert!(leader.tier.stats().used_bytes <= 16 * MIB);
        assert!(chunk_bytes(directory.path()) <= 16 * MIB);
    }
    assert!(leader.evicted.contains(&digest(0)), "what others wrote goes first, being the oldest");
    let there = read_all(&mut leader, 40);
    assert!((8..=16).contains(&there), "{there} chunks are there");
    // The follower learns of a full directory by no room, and gets some when the leader has made it.
    let mut number = 100;
    let mut refused = 0;
    follower.until("the follower writes again", |node| {
        number += 1;
        match node.try_write(number, BYTES) {
            Ok(()) => true,
            Err(TierError::NoSpace { .. }) => {
                refused += 1;
                leader.poll();
                false
            }
            Err(error) => panic!("{error}"),
        }
    });
    assert!(refused < 2000);
}

#[test]
fn a_dead_leader_is_replaced_and_a_living_one_is_not() {
    let directory = on_tmpfs();
    // Long beside what a busy machine keeps a thread waiting.
    let config = |directory| {
        let mut config = config(directory);
        config.lease_ttl = Duration::from_millis(600);
        config
    };
    let mut node = Node::open(config(directory.path()));
    let lease = directory.path().join("KVBLEASE");
    node.write(1, BYTES);
    assert!(node.is_leader());
    let mut next = Node::open(config(directory.path()));
    // For longer than a dead one would be waited for.
    let end = next.now_ns() + 1_500_000_000;
    while next.now_ns() < end {
        next.poll();
        next.sleep();
    }
    assert!(!next.is_leader(), "it lives");
    // What a killed leader leaves: its last words.
    let last_words = fs::read(&lease).unwrap();
    drop(node);
    drop(next);
    fs::write(&lease, last_words).unwrap();
    let mut heir = Node::open(config(directory.path()));
    assert!(!heir.is_leader(), "who is dead is not known yet");
    heir.until("it takes over", |node| node.is_leader());
    heir.until("it counts", |node| node.tier.detail().counted > 0);
    assert_eq!(heir.tier.stats().used_bytes, MIB);
    // One that leaves in order is followed at once.
    drop(heir);
    assert!(Node::open(config(directory.path())).is_leader());
}

#[test]
fn two_leaders_at_once_do_no_harm() {
    let directory = on_tmpfs();
    let small = || {
        let mut config = config(directory.path());
        config.capacity_bytes = 12 * MIB;
        // Long enough that the first does not learn of the second during the test.
        config.lease_ttl = Duration::from_secs(600);
        config
    };
    let mut one = Node::open(small());
    fs::remove_file(directory.path().join("KVBLEASE")).unwrap();
    let mut other = Node::open(small());
    assert!(one.is_leader() && other.is_leader());
    for number in 0..30 {
        one.write(number, BYTES);
        other.write(1000 + number, BYTES);
        match other.try_write(number, BYTES) {
            Ok(()) | Err(TierError::AlreadyHeld { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    read_all(&mut one, 30);
    assert!(read_all(&mut other, 30) > 0);
    assert!(chunk_bytes(directory.path()) <= 24 * MIB, "each keeps the cap for what it knows");
    assert_eq!(files(directory.path(), ".tmp").len(), 0);
}

#[test]
fn a_chunk_in_use_by_another_node_is_not_dropped() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.capacity_bytes = 12 * MIB;
    settings.lease_ttl = Duration::from_secs(600);
    let mut leader = Node::open(settings.clone());
    for number in 0..11 {
        leader.write(number, BYTES);
    }
    settings.node += 1_000_000;
    let mut reader = Node::open(settings);
    // Its first read of a chunk touches it: the oldest is now the youngest.
    assert!(reader.locate(0).is_some());
    std::thread::sleep(Duration::from_millis(20));
    assert!(reader.read(0).is_some());
    for number in 20..24 {
        leader.write(number, BYTES);
    }
    assert!(!leader.evicted.is_empty() && !leader.evicted.contains(&digest(0)));
    assert!(reader.read(0).is_some());
}

#[test]
fn stale_temporaries_go_and_young_ones_stay() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.count_every = Duration::from_millis(20);
    settings.stale_after = Duration::from_millis(400);
    let mut node = Node::open(settings);
    node.write(1, BYTES);
    let fan = path_of(directory.path(), 1).parent().unwrap().to_owned();
    let dead = fan.join(".00112233445566778899aabbccddeeff.0000000000000063-1.tmp");
    let foreign = fan.join("somebody.else");
    fs::write(&dead, b"half").unwrap();
    fs::write(&foreign, b"not ours").unwrap();
    // However old it says it is: only how long it has been seen counts.
    set_mtime(&dead, SystemTime::UNIX_EPOCH);
    let counted = node.tier.detail().counted;
    node.until("it is seen", |node| node.tier.detail().counted >= counted + 2);
    assert!(dead.exists(), "it is young");
    node.until("it is removed", |node| node.tier.detail().stale_removed == 1);
    assert!(!dead.exists() && foreign.exists() && node.read(1).is_some());
}

#[test]
fn clocks_that_jump_lose_nothing() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.capacity_bytes = 12 * MIB;
    let mut node = Node::open(settings);
    let (past, future) =
        (SystemTime::UNIX_EPOCH, SystemTime::now() + Duration::from_secs(400 * 86_400));
    for number in 0..6 {
        node.write(number, BYTES);
        let time = if number % 2 == 0 { past } else { future };
        set_mtime(&path_of(directory.path(), number), time);
        set_mtime(&directory.path().join("KVBLEASE"), time);
    }
    for _ in 0..40 {
        node.poll();
        node.sleep();
    }
    assert!(node.is_leader());
    for number in 0..6 {
        assert_eq!(node.read(number).unwrap(), payload(number, 1, BYTES));
    }
    // The cap holds, and those that look old go before those that look young.
    for number in 10..20 {
        node.write(number, BYTES);
        assert!(chunk_bytes(directory.path()) <= 12 * MIB);
    }
    assert!((0..6).filter(|number| number % 2 == 1).any(|number| node.holds(number)));
    assert!(!node.holds(0));
}

/// Opening a FIFO hangs until somebody opens its other end: a mount that does not answer, for some files.
fn hang(directory: &Path, number: u32) -> std::path::PathBuf {
    let path = path_of(directory, number);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    path
}

fn let_go(path: &Path) -> OwnedFd {
    OpenOptions::new().read(true).write(true).open(path).unwrap().into()
}

#[test]
fn look_ups_that_hang_are_misses_and_cost_reads_nothing() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.lookup_threads = 2;
    settings.lookup_timeout_ns = 50_000_000;
    let mut node = Node::open(settings);
    node.write(1, BYTES);
    node.until("the counting at the start has ended", |node| node.tier.detail().counted > 0);
    let fifos: Vec<_> = (100..102).map(|number| hang(directory.path(), number)).collect();
    for number in 100..102 {
        let now_ns = node.now_ns();
        assert_eq!(node.tier.locate(digest(number), now_ns), Located::Asked);
        node.poll();
    }
    // All threads of look-ups hang: whatever is asked is "absent" as soon as that is known.
    assert!(node.locate(200).is_none());
    assert!(node.locate(100).is_none());
    assert_eq!(node.read(1).unwrap(), payload(1, 1, BYTES));
    node.write(2, BYTES);
    let ends: Vec<_> = fifos.iter().map(|path| let_go(path)).collect();
    node.until("it works again", |node| {
        let now_ns = node.now_ns();
        node.tier.locate(digest(201), now_ns) == Located::Asked
    });
    drop(ends);
}

#[test]
fn a_mount_that_hangs_fails_what_waits_and_recovers() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.threads = 2;
    settings.op_timeout_ns = 100_000_000;
    let mut node = Node::open(settings);
    node.write(1, BYTES);
    let fifos: Vec<_> = (100..102).map(|number| hang(directory.path(), number)).collect();
    let stuck: Vec<_> = (100..102).map(|number| node.submit_read(number)).collect();
    node.poll();
    let errno = |error: TierError| match error {
        TierError::Io { errno, .. } => errno,
        error => panic!("{error}"),
    };
    assert_eq!(errno(node.try_read(1).unwrap_err()), libc::ETIMEDOUT);
    assert_eq!(errno(node.try_write(2, BYTES).unwrap_err()), libc::ETIMEDOUT);
    assert_eq!(node.tier.in_flight(), 2, "what the threads use stays with them");
    let ends: Vec<_> = fifos.iter().map(|path| let_go(path)).collect();
    for id in stuck {
        let mut result = None;
        node.until("the calls return", |node| {
            result = result.take().or_else(|| node.read_result(id));
            result.is_some()
        });
        assert_eq!(result.unwrap().unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert!(node.read(1).is_some());
    node.write(2, BYTES);
    drop(ends);
}

#[test]
fn dropping_a_tier_on_a_mount_that_hangs_ends_and_leaks_what_hangs() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.drop_wait = Duration::from_millis(50);
    let mut node = Node::open(settings);
    let fifo = hang(directory.path(), 100);
    node.submit_read(100);
    node.poll();
    let arena = std::sync::Arc::clone(&node.arena);
    drop(node);
    assert_eq!(arena.free_slots(), 15, "the slot is the hung call's");
    let end = let_go(&fifo);
    for _ in 0..1000 {
        if arena.free_slots() == 16 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(arena.free_slots(), 16, "it comes back when the call does");
    drop(end);
}

#[test]
fn below_the_floor_nothing_is_written() {
    let directory = on_tmpfs();
    let mut settings = config(directory.path());
    settings.min_free_bytes = u64::MAX;
    let mut node = Node::open(settings);
    assert_eq!(node.try_write(1, BYTES).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(chunk_bytes(directory.path()), 0);
}
