//! Input that no careful caller gives: errors that name the field, or plain misses; never a panic.

use std::{fs, os::unix::fs::symlink, panic, path::Path};

use kv_chunk::{ChunkKey, KeyError};
use kv_connector::{
    ByteSize, Config, Engine, EngineError, MissReason, Outcome, Source, StoreRefusal, Stored, Want,
};
use nix::{sys::stat::Mode, unistd::mkfifo};
use proptest::prelude::*;

use crate::common::*;

const VALID: &str = r#"
[engine]
chunk_bytes_max = "4 MiB"
host_cache = "64 MiB"
read_deadline_ms = 30000

[[tier]]
name = "fast"
kind = "nvme"
path = "/var/cache/kv/fast"
capacity = "100 GiB"
segment = "1 GiB"
window = 8

[[tier]]
name = "slow"
kind = "memory"
capacity = 1073741824

[tier.throttle]
bytes_per_s = "1 GB"
"#;

#[test]
fn the_text_that_the_garbage_is_made_of_is_valid() {
    Config::from_toml(VALID).unwrap();
}

fn check_error(error: &EngineError) {
    match error {
        EngineError::Config { field, problem, fix } => {
            assert!(!field.is_empty() && !problem.is_empty() && !fix.is_empty(), "{error}");
        }
        other => panic!("{other}"),
    }
}

proptest! {
    #[test]
    fn garbage_for_a_configuration_is_an_error_with_a_field(text in any::<String>()) {
        if let Err(error) = Config::from_toml(&text) {
            check_error(&error);
        }
        if let Err(error) = Config::from_json(&text) {
            check_error(&error);
        }
    }

    #[test]
    fn a_configuration_with_a_slip_is_valid_or_an_error_with_a_field(
        at in 0..VALID.len(),
        length in 0..12_usize,
        slip in "[-a-z0-9\"=\\[\\]. \n]{0,6}",
    ) {
        let mut text = VALID.to_owned();
        text.replace_range(at..(at + length).min(VALID.len()), &slip);
        if let Err(error) = Config::from_toml(&text) {
            check_error(&error);
        }
    }
}

#[test]
fn a_tier_whose_directory_cannot_be_is_an_error_at_open() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, b"not a directory").unwrap();
    let (dangling, below) = (root.path().join("dangling"), file.join("below"));
    symlink(root.path().join("nowhere/at/all"), &dangling).unwrap();
    for path in [file.as_path(), &below, &dangling, Path::new("/proc/kvbraid-cannot-be-here")] {
        let mut config = file_config(root.path(), 1, ByteSize::mib(64));
        config.tiers[0].path = Some(path.to_owned());
        match Engine::open(config) {
            Err(EngineError::Tier { name, .. }) => assert_eq!(name, "t0"),
            other => panic!("{}: {other:?}", path.display()),
        }
    }
}

#[test]
fn foreign_and_garbage_files_in_a_directory_neither_stop_the_engine_nor_are_served() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("t0");
    let config = || file_config(root.path(), 1, ByteSize::mib(64));
    let engine = Engine::open(config()).unwrap();
    fill_tiers(&engine, &keys(0..5));
    drop(engine);
    put_garbage(&directory);
    let engine = Engine::open(config()).unwrap();
    assert!(all_hit(&load(&engine, &keys(0..5)).1), "our own chunks are gone");
    fill_tiers(&engine, &keys(5..10));
    assert!(all_hit(&load(&engine, &keys(0..10)).1));
    let tier = &engine.stats().tiers[0];
    assert!(tier.used_bytes >= disk_bytes(&directory), "foreign files do not count");
    assert!(tier.used_bytes <= tier.capacity_bytes);
    drop(engine);
    assert_eq!(fs::read(directory.join("notes.txt")).unwrap(), b"somebody's");
}

fn put_garbage(directory: &Path) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut noise = vec![0; 1 << 20];
    random.fill(&mut noise);
    let segment = |number: u64| directory.join(format!("seg-{number:016x}.kvb"));
    fs::write(directory.join("notes.txt"), b"somebody's").unwrap();
    fs::write(segment(0x7000), b"").unwrap();
    fs::write(segment(0x7001), &noise).unwrap();
    fs::write(segment(0x7002), &noise[..100]).unwrap();
    fs::write(directory.join("seg-zz.kvb"), &noise).unwrap();
    fs::write(directory.join("seg-0000000000000001.kvb.tmp"), &noise).unwrap();
    fs::create_dir(segment(0x7003)).unwrap();
    symlink("/etc/passwd", segment(0x7004)).unwrap();
    mkfifo(&segment(0x7005), Mode::S_IRWXU).unwrap();
    let mine = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let first =
        mine.filter(|path| path.is_file() && path.extension().is_some_and(|it| it == "kvb"));
    let first = first.min().unwrap();
    let whole = fs::read(first).unwrap();
    // A copy of one of ours, and its first half, under other numbers.
    fs::write(segment(0x7006), &whole).unwrap();
    fs::write(segment(0x7007), &whole[..whole.len() / 2]).unwrap();
}

#[test]
fn keys_that_are_too_long_or_too_short_are_errors() {
    let new = |hash: &[u8], salt: &[u8]| ChunkKey::new(&namespace(), 0, 0, hash, salt);
    assert!(matches!(new(&[1; 7], b""), Err(KeyError::HashLength { bytes: 7 })));
    assert!(matches!(new(&[1; 65], b""), Err(KeyError::HashLength { bytes: 65 })));
    assert!(matches!(new(&[1; 64], &[2; 4096]), Err(KeyError::TooLong { .. })));
    let longest = (0..4096).rev().find_map(|length| new(&[1; 64], &vec![2; length]).ok()).unwrap();
    let Rig { engine, .. } = rig(config(2));
    fill_tiers(&engine, std::slice::from_ref(&longest));
    assert!(all_hit(&load(&engine, &[longest]).1));
}

#[test]
fn an_empty_payload_is_a_chunk_like_any_other() {
    let root = tempfile::tempdir().unwrap();
    for engine in [
        rig(config(2)).engine,
        Engine::open(file_config(root.path(), 2, ByteSize::mib(64))).unwrap(),
    ] {
        let key = key(1);
        assert_eq!(engine.store(&key, b""), Stored::Staged);
        let outcome = |engine: &Engine| {
            let lease = engine.lookup(std::slice::from_ref(&key));
            assert_eq!(lease.prefix_hits(), 1);
            let mut wants = [Want::new(&key, &mut [])];
            engine.load(&lease, &mut wants);
            wants[0].outcome
        };
        assert!(outcome(&engine).is_hit());
        assert!(engine.flush(PATIENCE).drained);
        assert!(matches!(outcome(&engine), Outcome::Hit(Source::Tier(_))));
    }
}

#[test]
fn a_payload_larger_than_a_chunk_is_refused_and_counted() {
    let Rig { engine, .. } = rig(config(1));
    let most = 5 << 19;
    let refused = Stored::Refused(StoreRefusal::TooLarge);
    assert_eq!(engine.store(&key(1), &vec![1; most + 1]), refused);
    assert_eq!(engine.store(&key(1), &vec![1; 1 << 26]), refused);
    assert_eq!(engine.stats().refused[&StoreRefusal::TooLarge], 2);
    assert_eq!(engine.lookup(&[key(1)]).prefix_hits(), 0);
    assert_eq!(engine.store(&key(2), &vec![1; most]), Stored::Staged);
}

#[test]
fn a_destination_of_another_length_is_a_miss_from_memory_and_from_storage() {
    let Rig { engine, .. } = rig(config(2));
    let known = keys(0..12);
    known.iter().for_each(|key| store(&engine, key));
    for _ in 0..2 {
        for other in [-1_i64, 1, i64::MIN, 1 << 20, 1 << 26] {
            wrong_lengths(&engine, &known, other);
        }
        assert!(all_hit(&load(&engine, &known).1), "the chunks suffered");
        assert!(engine.flush(PATIENCE).drained);
    }
    assert_nothing_is_held(&engine);
}

fn wrong_lengths(engine: &Engine, keys: &[ChunkKey], other: i64) {
    let length = |key: &ChunkKey| {
        let length = i64::try_from(bytes_of(key)).unwrap();
        usize::try_from(length.saturating_add(other)).unwrap_or(0)
    };
    let lease = engine.lookup(keys);
    let mut buffers: Vec<_> = keys.iter().map(|key| vec![0x5a; length(key)]).collect();
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    assert_eq!(report.misses(), report.wanted, "{other}: {report:?}");
    let reasons = wants.iter().map(|want| want.outcome);
    // A read that is planned by a wrong length can end as a failed check: a miss all the same.
    let expected = [MissReason::WrongLength, MissReason::Corrupt].map(Outcome::Miss);
    assert!(reasons.clone().all(|outcome| expected.contains(&outcome)), "{other}: {report:?}");
}

#[test]
fn asking_for_another_length_does_not_cost_the_stored_chunk() {
    let Rig { engine, .. } = rig(config(2));
    let known = keys(0..12);
    fill_tiers(&engine, &known);
    for other in [-1_i64, 1, i64::MIN, 1 << 20] {
        wrong_lengths(&engine, &known, other);
    }
    let stats = engine.stats();
    assert!(stats.tiers.iter().all(|tier| tier.chunks == 12), "{stats:#?}");
    assert!(stats.tiers.iter().all(|tier| tier.corrupt_reads == 0), "{stats:#?}");
}

#[test]
fn an_empty_step_is_a_step() {
    let Rig { engine, .. } = rig(config(2));
    let lease = engine.lookup(&[]);
    assert!(lease.hits().is_empty() && lease.prefix_hits() == 0);
    let report = engine.load(&lease, &mut []);
    assert_eq!((report.wanted, report.hits(), report.misses()), (0, 0, 0));
    let report = engine.load(&engine.lookup(&keys(0..3)), &mut []);
    assert_eq!(report.wanted, 0);
    assert_nothing_is_held(&engine);
}

#[test]
fn a_key_wanted_many_times_in_one_step_is_delivered_every_time() {
    for flush in [false, true] {
        let Rig { engine, .. } = rig(config(2));
        let known = keys(0..3);
        known.iter().for_each(|key| store(&engine, key));
        assert!(!flush || engine.flush(PATIENCE).drained);
        let wanted = keys([0, 1, 0, 2, 0, 1, 0]);
        let (report, outcomes) = load(&engine, &wanted);
        assert!(all_hit(&outcomes), "{outcomes:?}");
        assert_eq!(report.wanted, 7);
        // One that is not there does not spoil the others.
        let (report, _) = load(&engine, &keys([0, 9, 0, 9]));
        assert_eq!((report.hits(), report.misses()), (2, 2));
        assert_nothing_is_held(&engine);
    }
}

#[test]
fn tiers_that_do_not_exist_are_misses() {
    let Rig { engine, .. } = rig(config(2));
    fill_tiers(&engine, &keys(0..3));
    for tier in [2, 7] {
        let (_, outcomes) = load_from(&engine, &keys(0..3), only(tier));
        let masked = Outcome::Miss(MissReason::TierMasked);
        assert!(outcomes.iter().all(|outcome| *outcome == masked), "{outcomes:?}");
    }
}

#[test]
fn a_closed_engine_answers_everything() {
    let Rig { engine, .. } = rig(config(2));
    fill_tiers(&engine, &keys(0..3));
    let lease = engine.lookup(&keys(0..3));
    assert!(engine.close(PATIENCE).drained);
    let closed = Outcome::Miss(MissReason::Closed);
    assert!(load(&engine, &keys(0..3)).1.iter().all(|outcome| *outcome == closed));
    assert_eq!(engine.lookup(&keys(0..3)).prefix_hits(), 0);
    let refused = Stored::Refused(StoreRefusal::Closed);
    assert_eq!(engine.store(&key(9), &payload(&key(9))), refused);
    engine.forward_began();
    engine.forward_ended();
    assert!(engine.flush(PATIENCE).drained);
    assert_eq!(engine.stats().tiers.len(), 2);
    assert_eq!(engine.close(PATIENCE).leaked_threads, 0);
    drop(lease);
}

#[test]
fn a_lease_outlives_its_engine_and_serves_no_other() {
    let (first, second) = (rig(config(1)).engine, rig(config(1)).engine);
    fill_tiers(&first, &keys(0..3));
    let lease = first.lookup(&keys(0..3));
    let known = keys(0..3);
    let mut buffers: Vec<_> = known.iter().map(|key| vec![0; bytes_of(key)]).collect();
    let mut wants: Vec<_> =
        known.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = second.load(&lease, &mut wants);
    assert_eq!(report.misses(), 3);
    drop(first);
    let dropped = panic::catch_unwind(panic::AssertUnwindSafe(|| drop(lease)));
    assert!(dropped.is_ok());
}
