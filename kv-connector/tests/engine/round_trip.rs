//! Store, look up, load: from staging, from the host cache, from one tier, from both.

use std::time::Duration;

use crate::common::*;
use kv_connector::{
    ByteSize, Engine, MissReason, Outcome, Source, Stored, TierId, TierMask, Want, now_ns,
};
use kv_tiers::{ThrottleConfig, Throttled};

fn two_tiers() -> [(&'static str, ByteSize); 2] {
    [("fast", ByteSize::gib(1)), ("slow", ByteSize::gib(1))]
}

#[test]
fn what_was_stored_is_readable_at_once_and_again_after_it_was_written() {
    let mut config = config(&two_tiers(), ByteSize(0));
    config.engine.write_max_age_ms = 3_600_000;
    let engine = Engine::open(config).unwrap();
    let keys = keys(0..4);
    // A forward pass that ended: young chunks stay staged.
    engine.forward_ended();
    for key in &keys {
        assert_eq!(engine.store(key, &payload_of(key, CHUNK_BYTES)), Stored::Staged);
        assert_eq!(engine.store(key, &payload_of(key, CHUNK_BYTES)), Stored::AlreadyHeld);
    }
    assert_eq!(engine.lookup(&keys).prefix_hits(), 4);
    let (report, outcomes) = load(&engine, &keys);
    assert_eq!(outcomes, [Outcome::Hit(Source::Staged); 4]);
    assert_eq!((report.hits_staged, report.memory_bytes), (4, 4 * CHUNK_BYTES as u64));
    assert!(engine.flush(SOON).drained);
    let (report, _) = load(&engine, &keys);
    assert_eq!((report.storage_hits(), report.storage_bytes), (4, 4 * CHUNK_BYTES as u64));
    assert_eq!(engine.store(&keys[0], &payload_of(&keys[0], CHUNK_BYTES)), Stored::AlreadyHeld);
}

#[test]
fn a_forward_pass_lets_young_chunks_be_written() {
    let mut config = config(&two_tiers(), ByteSize(0));
    config.engine.write_max_age_ms = 3_600_000;
    let engine = Engine::open(config).unwrap();
    engine.forward_ended();
    let _ = engine.store(&key(1), &payload_of(&key(1), CHUNK_BYTES));
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(engine.stats().pending_writes, 1);
    engine.forward_began();
    while engine.stats().pending_writes > 0 {
        std::thread::yield_now();
    }
    assert_eq!(engine.stats().replicas_written, 2);
}

#[test]
fn a_loaded_chunk_is_served_from_the_host_cache_next_time() {
    let engine = Engine::open(config(&two_tiers(), ByteSize::mib(16))).unwrap();
    let keys = keys(0..8);
    fill(&engine, &keys);
    let (first, _) = load(&engine, &keys);
    assert_eq!(first.storage_hits(), 8);
    let (second, outcomes) = load(&engine, &keys);
    assert_eq!(outcomes, [Outcome::Hit(Source::HostCache); 8]);
    assert_eq!((second.storage_bytes, second.hits_host_cache), (0, 8));
}

#[test]
fn stored_chunks_stay_in_the_host_cache_if_configured() {
    let mut config = config(&two_tiers(), ByteSize::mib(16));
    config.engine.cache_stores = true;
    let engine = Engine::open(config).unwrap();
    fill(&engine, &keys(0..4));
    let (report, _) = load(&engine, &keys(0..4));
    assert_eq!(report.hits_host_cache, 4);
}

#[test]
fn both_tiers_share_a_step_and_the_bytes_add_up() {
    let config = config(&two_tiers(), ByteSize(0));
    let arenas = arenas(&config);
    let paced = |index, mb: u64| {
        let throttle = ThrottleConfig::new(mb * 1_000_000);
        Box::new(Throttled::new(memory_tier(&config, index), throttle)) as Box<dyn kv_tiers::Tier>
    };
    let tiers = vec![paced(0, 400), paced(1, 100)];
    let engine = Engine::with_tiers(config, arenas, tiers).unwrap();
    let (keys, bytes) = (keys(0..40), 1 << 18);
    fill_sized(&engine, &keys, bytes);
    let (report, outcomes) = load_sized(&engine, &keys, TierMask::all(2), bytes);
    assert_eq!(report.storage_hits(), 40);
    for tier in [0, 1] {
        assert!(outcomes.contains(&Outcome::Hit(Source::Tier(tier))), "tier {tier} read nothing");
        assert!(report.tiers[usize::from(tier)].busy_s > 0.0);
    }
    let split: u64 = report.tiers.iter().map(|tier| tier.payload_bytes).sum();
    assert_eq!((report.storage_bytes, split), (40 * bytes as u64, 40 * bytes as u64));
    assert!(report.tiers[0].payload_bytes > report.tiers[1].payload_bytes, "{report:?}");
}

#[test]
fn a_want_is_read_from_the_tiers_it_allows_only() {
    let engine = Engine::open(config(&two_tiers(), ByteSize(0))).unwrap();
    let keys = keys(0..12);
    fill(&engine, &keys);
    for tier in [0, 1] {
        let (report, outcomes) = load_from(&engine, &keys, TierMask::only(TierId(tier)));
        assert_eq!(outcomes, [Outcome::Hit(Source::Tier(tier)); 12]);
        assert_eq!(report.tiers[usize::from(1 - tier)].payload_bytes, 0);
    }
    let (_, outcomes) = load_from(&engine, &keys[..1], TierMask::EMPTY);
    assert_eq!(outcomes, [Outcome::Miss(MissReason::TierMasked)]);
}

#[test]
fn a_step_may_be_larger_than_the_memory_it_lands_in() {
    let mut config = config(&two_tiers(), ByteSize::mib(2));
    config.engine.read_buffer = Some(ByteSize::kib(8704));
    let engine = Engine::open(config).unwrap();
    assert!(engine.stats().read_memory.free_slots < 16);
    let keys = keys(0..100);
    fill(&engine, &keys);
    let (report, _) = load(&engine, &keys);
    assert_eq!(report.storage_hits(), 100);
    assert!(report.seconds < 30.0, "a wait for memory: {report:?}");
}

#[test]
fn one_chunk_wanted_twice_is_read_once_and_copied_twice() {
    let engine = Engine::open(config(&two_tiers()[..1], ByteSize(0))).unwrap();
    fill(&engine, &keys(0..2));
    let wanted = [key(0), key(1), key(0), key(0)];
    let (report, outcomes) = load(&engine, &wanted);
    assert_eq!(outcomes, [Outcome::Hit(Source::Tier(0)); 4]);
    assert_eq!(report.storage_bytes, 2 * CHUNK_BYTES as u64);
    assert_eq!(engine.stats().tiers[0].payload_bytes, 2 * CHUNK_BYTES as u64);
}

#[test]
fn a_destination_of_another_length_is_a_miss_beside_hits() {
    let engine = Engine::open(config(&two_tiers(), ByteSize::mib(16))).unwrap();
    fill(&engine, &keys(0..3));
    // From storage, then from the host cache.
    for _ in 0..2 {
        let keys = [key(0), key(0), key(1), key(2)];
        let lengths = [CHUNK_BYTES, 100, CHUNK_BYTES + 1, 1 << 20];
        let lease = engine.lookup(&keys);
        let mut buffers: Vec<Vec<u8>> = lengths.map(|length| vec![0; length]).into();
        let pairs = keys.iter().zip(&mut buffers);
        let mut wants: Vec<Want<'_>> = pairs.map(|(key, dest)| Want::new(key, dest)).collect();
        let report = engine.load(&lease, &mut wants);
        assert_eq!(report.misses[&MissReason::WrongLength], 3);
        assert!(wants[0].outcome.is_hit());
        assert_eq!(buffers[0], payload_of(&key(0), CHUNK_BYTES));
    }
}

#[test]
fn payloads_of_every_shape_come_back() {
    let mut config = config(&two_tiers(), ByteSize::mib(32));
    config.engine.chunk_bytes_max = ByteSize::mib(4);
    let engine = Engine::open(config).unwrap();
    for (n, bytes) in
        [0, 1, 4095, 4096, 1 << 20, (1 << 20) + 1, (3 << 20) + 1, (4 << 20) - 5, 4 << 20]
            .into_iter()
            .enumerate()
    {
        let key = key(n as u64);
        fill_sized(&engine, std::slice::from_ref(&key), bytes);
        for expected in [(1, 0), (0, 1)] {
            let all = TierMask::all(2);
            let (report, _) = load_sized(&engine, std::slice::from_ref(&key), all, bytes);
            let hits = (report.storage_hits(), report.hits_host_cache);
            assert_eq!(hits, expected, "{bytes} bytes, in pieces or not");
        }
    }
    let refused = engine.store(&key(99), &vec![0; (4 << 20) + 1]);
    assert_eq!(refused, Stored::Refused(kv_connector::StoreRefusal::TooLarge));
}

#[test]
fn chunks_that_nobody_stored_are_misses() {
    let engine = Engine::open(config(&two_tiers(), ByteSize::mib(8))).unwrap();
    fill(&engine, &keys(0..2));
    let lease = engine.lookup(&keys(0..4));
    assert_eq!((lease.hits(), lease.prefix_hits()), (&[true, true, false, false][..], 2));
    drop(lease);
    let (report, outcomes) = load(&engine, &keys(0..4));
    assert_eq!(report.hits(), 2);
    assert_eq!(outcomes[2..], [Outcome::Miss(MissReason::NotHeld); 2]);
    assert!(now_ns() > 0);
}

#[test]
fn statistics_agree_with_each_other() {
    let engine = Engine::open(config(&two_tiers(), ByteSize::mib(8))).unwrap();
    fill(&engine, &keys(0..6));
    let _ = load(&engine, &keys(0..9));
    let _ = load(&engine, &keys(3..6));
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.wanted, stats.lookups), (2, 12, 2));
    assert_eq!(stats.hits + stats.misses, stats.wanted);
    assert_eq!((stats.misses, stats.lookup_hits, stats.stored), (3, 9, 6));
    let by_tier: u64 = stats.tiers.iter().map(|tier| tier.hits).sum();
    assert_eq!(stats.hits, stats.hits_host_cache + stats.hits_staged + by_tier);
    assert_eq!((stats.replicas_written, stats.chunks_held, stats.chunks_leased), (12, 6, 0));
    for tier in &stats.tiers {
        assert_eq!((tier.chunks, tier.breaker.as_str()), (6, "closed"));
        assert!(tier.used_bytes >= 6 * CHUNK_BYTES as u64 && tier.used_bytes < tier.capacity_bytes);
        assert_eq!(tier.write_bytes, 6 * CHUNK_BYTES as u64);
    }
    assert_eq!(
        stats.read_memory.free_slots + stats.host_cache.chunks,
        stats.read_memory.bytes / stats.read_memory.slot_bytes
    );
}
