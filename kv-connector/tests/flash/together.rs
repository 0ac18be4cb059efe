//! Claims that meet: on the same chunks, with evictions, with damage, and many of them at once.

use std::{fs, time::Duration};

use kv_chunk::ChunkKey;
use kv_connector::{ByteSize, Engine, FlashPolicy, Stored};

use crate::{
    claims::{claims, opened, until},
    common::{CHUNK_BYTES, SOON, config, directory, fill, keys, load, locked_bytes, payload_of},
};

const HOUR: Duration = Duration::from_secs(3600);
const NOW: Option<Duration> = Some(Duration::ZERO);

#[test]
fn a_chunk_that_two_claim_is_reserved_and_staged_once_and_kept_until_the_last_lets_go() {
    let (directory, engine, keys) = opened(|_| {});
    let one = engine.claim("one", &keys[..4], NOW);
    until(&engine, |status| status.states["ready"] == 1);
    let two = engine.claim("two", &keys[2..6], NOW);
    assert_eq!((one.bytes, two.chunks), (two.bytes, 4));
    let status = until(&engine, |status| status.states["ready"] == 2);
    assert_eq!((status.staged_chunks, status.reserved_bytes), (6, one.bytes / 4 * 6));
    assert_eq!(status.protected_bytes, status.reserved_bytes);
    engine.cancel("one");
    let status = until(&engine, |status| status.protected_bytes == one.bytes);
    assert_eq!((status.reserved_bytes, status.states["ready"]), (one.bytes, 1));
    if status.protection == "hard" {
        assert_eq!(locked_bytes(directory.path()), one.bytes);
    }
    load(&engine, &keys[2..6]);
    until(&engine, |status| status.protected_bytes == 0 && status.released == 2);
    assert_eq!((locked_bytes(directory.path()), engine.stats().chunks_leased), (0, 0));
}

#[test]
fn what_is_staged_is_not_evicted_and_what_only_waits_may_be() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("staged", &keys[..4], NOW);
    engine.claim("waits", &keys[4..8], Some(HOUR));
    until(&engine, |status| status.states["ready"] == 1);
    // More than the tier holds.
    fill(&engine, &crate::common::keys(100..170));
    let (report, outcomes) = load(&engine, &keys[..8]);
    assert_eq!(report.hits(), 4);
    assert!(outcomes[..4].iter().all(|it| it.is_hit()));
    // Nothing of the other claim is there to stage: it fails and holds nothing.
    engine.claim("late", &keys[4..8], NOW);
    let status = until(&engine, |status| status.released >= 1 && status.protected_bytes == 0);
    assert_eq!((status.protected_chunks, status.reserved_bytes), (4, 0));
}

#[test]
fn a_claim_whose_chunks_left_before_it_is_staged_fails_and_holds_nothing() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("r", &keys[..4], Some(HOUR));
    fill(&engine, &crate::common::keys(100..170));
    engine.revise("r", NOW);
    let status = until(&engine, |status| status.failed == 1 && status.released == 1);
    assert_eq!((status.ready, status.reserved_bytes, status.protected_bytes), (0, 0, 0));
    assert_eq!(load(&engine, &keys[..4]).0.hits(), 0);
    assert_eq!(engine.stats().chunks_leased, 0);
}

#[test]
fn what_rotted_on_the_flash_is_a_miss_also_under_a_ready_claim() {
    let directory = directory();
    let path = directory.path().join("flash");
    let keys = keys(0..4);
    let engine = Engine::open(config(&path)).unwrap();
    fill(&engine, &keys);
    drop(engine);
    let mut bytes = fs::read(&path).unwrap();
    let payload = &payload_of(&keys[1])[..64];
    let at = bytes.windows(64).position(|it| it == payload).unwrap();
    bytes[at + CHUNK_BYTES / 2] ^= 1;
    fs::write(&path, bytes).unwrap();
    let engine = Engine::open(config(&path)).unwrap();
    engine.claim("r", &keys, NOW);
    until(&engine, |status| status.states["ready"] == 1);
    let (report, outcomes) = load(&engine, &keys);
    assert_eq!((report.hits(), outcomes[1].is_hit()), (3, false));
    until(&engine, |status| status.released == 1 && status.protected_bytes == 0);
    assert_eq!(load(&engine, &keys[1..2]).0.hits(), 0, "it is gone for good");
}

#[test]
fn claims_name_no_more_chunks_than_there_is_memory_for() {
    let (_directory, engine, first) = opened(|section| section.claims_max = 1);
    let keys = keys(1000..1300);
    for some in keys.chunks(10) {
        for key in some {
            assert_eq!(engine.store(key, &[7; 100]), Stored::Staged);
        }
        assert!(engine.flush(SOON).drained);
    }
    // 256 for each claim that there may be, and a chunk named twice is one.
    assert!(engine.claim("r", &keys, Some(HOUR)).refused);
    let twice: Vec<ChunkKey> = keys[..250].iter().chain(&keys[..250]).cloned().collect();
    let claimed = engine.claim("r", &twice, Some(HOUR));
    assert_eq!((claimed.chunks, claimed.refused), (250, false));
    // The next one takes its place.
    assert_eq!(engine.claim("r", &keys[..256], Some(HOUR)).chunks, 256);
    assert!(engine.claim("other", &first[..1], Some(HOUR)).refused);
    assert!(engine.cancel("r"));
    assert_eq!(engine.claim("other", &first[..1], Some(HOUR)).chunks, 1);
}

#[test]
fn a_hundred_thousand_claims_are_recorded_or_refused_and_loads_go_on() {
    let (_directory, engine, keys) = opened(|section| section.policy = FlashPolicy::TempoQ);
    let mut refused = 0;
    for n in 0..100_000_u32 {
        let key = &keys[n as usize % 8..][..1];
        refused += u64::from(engine.claim(&n.to_string(), key, Some(HOUR)).refused);
    }
    let status = claims(&engine);
    assert_eq!((status.recorded, refused), (16_384, 100_000 - 16_384));
    assert_eq!((status.refused, status.reserved_bytes), (refused, 0));
    assert_eq!(load(&engine, &keys[8..]).0.hits(), 8);
    engine.claim("0", &keys[8..], NOW);
    until(&engine, |status| status.states["ready"] == 1);
    // One read of these ends all the others.
    assert_eq!(load(&engine, &keys).0.hits(), 16);
    let status = until(&engine, |status| status.protected_bytes == 0 && status.released > 16_384);
    assert_eq!(status.states.values().sum::<u64>(), 0);
    assert!(!engine.claim("again", &keys[..1], NOW).refused);
}

#[test]
fn a_budget_of_less_than_a_chunk_is_refused_by_name() {
    let directory = directory();
    let mut config = config(&directory.path().join("flash"));
    let mut section = kv_connector::FlashSection::default();
    section.protected_bytes = Some(ByteSize::mib(1));
    config.tiers[0].flash = Some(section.clone());
    let error = Engine::open(config.clone()).unwrap_err().to_string();
    assert!(error.starts_with("tier[0].flash.protected_bytes"), "{error}");
    assert!(error.contains("no chunk") && error.contains("write at least"), "{error}");
    section.policy = FlashPolicy::Demand;
    config.tiers[0].flash = Some(section);
    let engine = Engine::open(config).unwrap();
    let keys = keys(0..2);
    fill(&engine, &keys);
    engine.claim("r", &keys, NOW);
    assert_eq!(load(&engine, &keys).0.hits(), 2);
    assert_eq!(claims(&engine).demand, 1);
}
