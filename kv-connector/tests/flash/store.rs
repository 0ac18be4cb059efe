//! Chunks on a flash tier: they come back, survive a restart, and stay within the cap.

use std::{fs, os::unix::fs::MetadataExt};

use kv_connector::{Engine, EngineError, inspect::Offline};

use crate::common::{CHUNK_BYTES, config, directory, fill, keys, load};

#[test]
fn chunks_come_back_also_after_a_restart() {
    let directory = directory();
    let config = config(&directory.path().join("flash"));
    let keys = keys(0..12);
    let engine = Engine::open(config.clone()).unwrap();
    fill(&engine, &keys);
    assert_eq!(load(&engine, &keys).0.hits(), 12);
    drop(engine);
    let engine = Engine::open(config).unwrap();
    assert_eq!(engine.stats().tiers[0].recovered_chunks, 12);
    assert_eq!(load(&engine, &keys).0.hits(), 12);
}

#[test]
fn the_cap_counts_what_an_earlier_run_left() {
    let directory = directory();
    let path = directory.path().join("flash");
    let config = config(&path);
    let capacity = config.tiers[0].capacity.unwrap().0;
    let all = keys(0..100);
    for some in all.chunks(50) {
        let engine = Engine::open(config.clone()).unwrap();
        fill(&engine, some);
        let tier = &engine.stats().tiers[0];
        assert!(tier.used_bytes <= capacity && tier.capacity_bytes <= capacity, "{tier:?}");
    }
    let engine = Engine::open(config).unwrap();
    assert!(fs::metadata(&path).unwrap().len() <= capacity);
    let (report, _) = load(&engine, &all);
    assert!((40..64).contains(&report.hits()), "{} of 64 MiB of chunks of 1 MiB", report.hits());
    assert_eq!(load(&engine, &keys(90..100)).0.hits(), 10, "the latest are kept");
}

#[test]
fn one_engine_has_a_file_and_only_its_owner_reads_it() {
    let directory = directory();
    let path = directory.path().join("flash");
    let engine = Engine::open(config(&path)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let other = Engine::open(config(&path)).unwrap_err();
    assert!(matches!(other, EngineError::Tier { .. }) && other.to_string().contains('f'));
    drop(engine);
    Engine::open(config(&path)).unwrap();
}

#[test]
fn tools_look_at_it_and_leave_it_as_it_is() {
    let directory = directory();
    let path = directory.path().join("flash");
    let config = config(&path);
    assert_eq!(Offline::open(config.clone()).unwrap().stats().tiers[0].chunks, 0);
    assert!(!path.exists());
    let engine = Engine::open(config.clone()).unwrap();
    fill(&engine, &keys(0..5));
    drop(engine);
    let mut bytes = fs::read(&path).unwrap();
    // Half an entry of the table: an engine would clear it.
    bytes[4096..4100].fill(0xff);
    fs::write(&path, &bytes).unwrap();
    let status = Offline::open(config).unwrap().stats().tiers[0].clone();
    assert_eq!((status.chunks, status.payload_bytes), (4, 4 * CHUNK_BYTES as u64));
    assert_eq!(fs::read(&path).unwrap(), bytes);
}
