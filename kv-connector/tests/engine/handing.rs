//! Verified bytes handed over where they landed.

use std::time::Duration;

use kv_chunk::block_crc;
use kv_connector::{Arrived, ByteSize, Config, Engine, MissReason, Outcome, Want};
use kv_tiers::{ThrottleConfig, Throttled};

use crate::common::*;

/// Five blocks, the last of them short: the tail of a step reads it in pieces.
const LARGE_BYTES: usize = (4 << 20) + 4321;

fn large(tiers: &[&str]) -> Config {
    let tiers: Vec<_> = tiers.iter().map(|name| (*name, ByteSize::gib(1))).collect();
    let mut config = config(&tiers, ByteSize(0));
    config.engine.chunk_bytes_max = ByteSize::mib(5);
    config.engine.staging = ByteSize::mib(64);
    config
}

/// Puts a piece where it belongs.
fn place(arrived: &Arrived, payload: &mut [u8]) {
    let at = arrived.payload_offset();
    payload[at..at + arrived.bytes().len()].copy_from_slice(arrived.bytes());
}

#[test]
fn pieces_from_both_tiers_make_up_the_payloads_and_match_their_checksums() {
    let mut config = large(&["fast", "slow"]);
    config.engine.cache_stores = false;
    let paced = |index, mb: u64| {
        let throttle = ThrottleConfig::new(mb * 1_000_000);
        Box::new(Throttled::new(memory_tier(&config, index), throttle)) as Box<dyn kv_tiers::Tier>
    };
    let tiers = vec![paced(0, 200), paced(1, 100)];
    let arenas = arenas(&config);
    let engine = Engine::with_tiers(config, arenas, tiers).unwrap();
    let keys = keys(0..6);
    fill_sized(&engine, &keys, LARGE_BYTES);
    let lease = engine.lookup(&keys);
    let mut wants: Vec<Want<'_>> = keys.iter().map(|key| Want::handed(key, LARGE_BYTES)).collect();
    let mut payloads = vec![vec![0; LARGE_BYTES]; keys.len()];
    let mut in_pieces = 0;
    let report = engine.load_handing(&lease, &mut wants, |places, arrived| {
        assert_eq!(places.len(), 1);
        in_pieces += usize::from(arrived.bytes().len() < LARGE_BYTES);
        let first = u32::try_from(arrived.payload_offset() >> 20).unwrap();
        for (block, bytes) in (first..).zip(arrived.bytes().chunks(1 << 20)) {
            assert_eq!(arrived.header().block_crc(block), Some(block_crc(bytes)));
        }
        place(&arrived, &mut payloads[places[0]]);
    });
    assert_eq!(report.storage_hits(), 6);
    assert!(wants.iter().all(|want| want.outcome.is_hit()));
    assert!(in_pieces > 0, "the step was too short to be worth splitting");
    for (key, payload) in keys.iter().zip(&payloads) {
        assert_eq!(*payload, payload_of(key, LARGE_BYTES));
    }
}

#[test]
fn staged_and_cached_chunks_are_handed_over_as_well() {
    let mut config = config(&[("fast", ByteSize::gib(1))], ByteSize::mib(16));
    config.engine.write_max_age_ms = 3_600_000;
    let engine = Engine::open(config).unwrap();
    engine.forward_ended();
    let staged = key(1);
    let _ = engine.store(&staged, &payload_of(&staged, CHUNK_BYTES));
    let take = || {
        let mut payload = vec![0; CHUNK_BYTES];
        let mut wants = [Want::handed(&staged, CHUNK_BYTES)];
        let lease = engine.lookup(std::slice::from_ref(&staged));
        engine.load_handing(&lease, &mut wants, |_, arrived| place(&arrived, &mut payload));
        assert_eq!(payload, payload_of(&staged, CHUNK_BYTES));
        wants[0].outcome
    };
    assert_eq!(take(), Outcome::Hit(kv_connector::Source::Staged));
    assert!(engine.flush(SOON).drained);
    assert!(matches!(take(), Outcome::Hit(kv_connector::Source::Tier(0))));
    // A chunk that was handed over whole is also kept.
    assert_eq!(take(), Outcome::Hit(kv_connector::Source::HostCache));
}

#[test]
fn one_chunk_is_copied_to_one_want_and_handed_to_two_others_and_read_once() {
    let engine = Engine::open(config(&[("fast", ByteSize::gib(1))], ByteSize(0))).unwrap();
    fill(&engine, &[key(1)]);
    let key = key(1);
    let mut copy = vec![0; CHUNK_BYTES];
    let mut wants = [
        Want::handed(&key, CHUNK_BYTES),
        Want::new(&key, &mut copy),
        Want::handed(&key, CHUNK_BYTES),
        Want::handed(&key, CHUNK_BYTES + 1),
    ];
    let mut handed = Vec::new();
    let lease = engine.lookup(std::slice::from_ref(&key));
    let report = engine.load_handing(&lease, &mut wants, |places, arrived| {
        assert_eq!(arrived.bytes(), payload_of(&key, CHUNK_BYTES));
        handed.push(places.to_vec());
    });
    assert_eq!(report.storage_bytes, CHUNK_BYTES as u64);
    assert_eq!(handed, [[0, 2]]);
    let hits = wants.each_ref().map(|want| want.outcome.is_hit());
    assert_eq!(hits, [true, true, true, false]);
    assert_eq!(wants[3].outcome, Outcome::Miss(MissReason::WrongLength));
    assert_eq!(copy, payload_of(&key, CHUNK_BYTES));
}

#[test]
fn a_payload_of_another_length_is_a_miss_and_nothing_is_handed_over() {
    let engine = Engine::open(config(&[("fast", ByteSize::gib(1))], ByteSize(0))).unwrap();
    fill(&engine, &[key(1)]);
    let key = key(1);
    for bytes in [0, CHUNK_BYTES - 1, CHUNK_BYTES + 1, usize::MAX] {
        let mut wants = [Want::handed(&key, bytes)];
        let lease = engine.lookup(std::slice::from_ref(&key));
        engine.load_handing(&lease, &mut wants, |_, _| panic!("handed over"));
        assert_eq!(wants[0].outcome, Outcome::Miss(MissReason::WrongLength), "{bytes}");
    }
}

#[test]
fn whoever_keeps_all_that_was_handed_over_ends_at_the_deadline_and_the_engine_goes_on() {
    let mut config = config(&[("fast", ByteSize::gib(1))], ByteSize(0));
    config.engine.step_deadline_ms = 300;
    config.tiers[0].window = Some(2);
    let engine = Engine::open(config).unwrap();
    let keys = keys(0..16);
    fill(&engine, &keys);
    let lease = engine.lookup(&keys);
    let mut wants: Vec<Want<'_>> = keys.iter().map(|key| Want::handed(key, CHUNK_BYTES)).collect();
    let mut kept = Vec::new();
    let report = engine.load_handing(&lease, &mut wants, |_, arrived| kept.push(arrived));
    assert!(report.hits() > 0 && report.hits() < 16, "{} hits", report.hits());
    let missed = wants.iter().filter(|want| !want.outcome.is_hit());
    for want in missed {
        assert_eq!(want.outcome, Outcome::Miss(MissReason::StepDeadline));
    }
    drop(kept);
    std::thread::sleep(Duration::from_millis(50));
    let (report, _) = load(&engine, &keys);
    assert_eq!(report.hits(), 16);
}
