//! No room: on the medium, in staging, in the arena.

use kv_connector::{ByteSize, Engine, Source, StoreRefusal, Stored};
use kv_tiers::{FaultKind, FaultPlan, When};

use crate::common::*;

#[test]
fn a_full_medium_stops_writes_there_only_and_reads_from_it_go_on() {
    let Rig { engine, faults } = rig(config(2));
    let (old, new) = (keys(0..6), keys(6..20));
    fill_tiers(&engine, &old);
    let full = FaultPlan::NONE.with(FaultKind::WriteFindsNoSpace, When::Every(1));
    faults[0].set_plan(full);
    fill_tiers(&engine, &new);
    assert!(all_hit(&load_from(&engine, &old, only(0)).1), "reads stopped, too");
    assert!(all_hit(&load_from(&engine, &new, only(1)).1), "the other tier missed some");
    assert!(none_hit(&load_from(&engine, &new, only(0)).1));
    let stats = engine.stats();
    assert_eq!((stats.tiers[0].chunks, stats.tiers[1].chunks), (6, 20));
    assert_eq!((stats.lost_writes, stats.tiers[0].breaker.as_str()), (0, "closed"));
    faults[0].set_plan(FaultPlan::NONE);
    let mut next = 20;
    let resumed = wait_for(|| {
        fill_tiers(&engine, &keys(next..next + 1));
        next += 1;
        all_hit(&load_from(&engine, &keys(next - 1..next), only(0)).1)
    });
    assert!(resumed, "writes never resumed: {:#?}", engine.stats());
}

#[test]
fn a_failed_write_leaves_nothing_to_be_found() {
    for kind in [FaultKind::WriteFails, FaultKind::WriteTears, FaultKind::WriteFindsNoSpace] {
        let Rig { engine, faults } = rig(config(1));
        faults[0].set_plan(FaultPlan::NONE.with(kind, When::Every(1)));
        let known = keys(0..5);
        known.iter().for_each(|key| store(&engine, key));
        assert!(engine.flush(PATIENCE).drained);
        assert_eq!(engine.lookup(&known).prefix_hits(), 0);
        assert!(none_hit(&load(&engine, &known).1));
        let stats = engine.stats();
        assert_eq!((stats.lost_writes, stats.chunks_held), (5, 0), "{kind:?}: {stats:#?}");
        faults[0].set_plan(FaultPlan::NONE);
        let kept = wait_for(|| {
            known.iter().for_each(|key| store(&engine, key));
            assert!(engine.flush(PATIENCE).drained);
            all_hit(&load(&engine, &known).1)
        });
        assert!(kept, "{kind:?} for ever: {:#?}", engine.stats());
    }
}

#[test]
fn a_full_staging_area_refuses_and_recovers() {
    let mut config = config(1);
    config.engine.staging = ByteSize(3 * ((5 << 19) + 4096));
    config.engine.write_max_age_ms = 3_600_000;
    let Rig { engine, .. } = rig(config);
    // A forward pass that has ended: nothing is written yet.
    engine.forward_began();
    engine.forward_ended();
    let stored: Vec<Stored> =
        keys(0..10).iter().map(|key| engine.store(key, &payload(key))).collect();
    let refused = Stored::Refused(StoreRefusal::StagingFull);
    assert_eq!(stored.iter().filter(|it| **it == Stored::Staged).count(), 3);
    assert_eq!(stored.iter().filter(|it| **it == refused).count(), 7);
    assert!(all_hit(&load(&engine, &keys(0..3)).1) && none_hit(&load(&engine, &keys(3..10)).1));
    assert!(engine.flush(PATIENCE).drained);
    fill_tiers(&engine, &keys(3..6));
    assert!(all_hit(&load(&engine, &keys(0..6)).1));
}

#[test]
fn leases_that_hold_all_of_staging_refuse_stores_and_nothing_waits() {
    let mut config = config(1);
    config.engine.staging = ByteSize(2 * ((5 << 19) + 4096));
    config.engine.write_max_age_ms = 3_600_000;
    let Rig { engine, .. } = rig(config);
    engine.forward_began();
    engine.forward_ended();
    let held = keys(0..2);
    held.iter().for_each(|key| assert_eq!(engine.store(key, &payload(key)), Stored::Staged));
    let lease = engine.lookup(&held);
    assert!(engine.flush(PATIENCE).drained);
    let key = key(5);
    assert!(matches!(engine.store(&key, &payload(&key)), Stored::Refused(_)));
    assert!(all_hit(&load(&engine, &held).1));
    drop(lease);
    assert_eq!(engine.store(&key, &payload(&key)), Stored::Staged);
}

#[test]
fn a_step_of_ten_thousand_chunks_passes_through_eight_slots() {
    let mut config = config(2);
    config.engine.chunk_bytes_max = ByteSize::kib(4);
    config.engine.read_buffer = Some(ByteSize::kib(8 * 8));
    config.engine.staging = ByteSize::mib(8);
    let Rig { engine, .. } = rig(config);
    let known: Vec<_> = keys(0..10_000);
    let payload = |key: &kv_chunk::ChunkKey| {
        let mut payload = vec![0; 4_096];
        kv_connector::replay::fill(key.digest(), &mut payload);
        payload
    };
    for key in &known {
        let payload = payload(key);
        assert!(wait_for(|| engine.store(key, &payload) == Stored::Staged));
    }
    assert!(engine.flush(PATIENCE).drained);
    let lease = engine.lookup(&known);
    let mut buffers = vec![vec![0; 4_096]; known.len()];
    let mut wants: Vec<_> = known
        .iter()
        .zip(&mut buffers)
        .map(|(key, dest)| kv_connector::Want::new(key, dest))
        .collect();
    let report = engine.load(&lease, &mut wants);
    assert_honest(&report, &wants);
    assert_eq!(report.hits(), 10_000, "{report:?}");
    drop(lease);
    assert_nothing_is_held(&engine);
}

#[test]
fn the_cap_of_a_tier_of_files_holds_through_a_flood() {
    let root = tempfile::tempdir().unwrap();
    let capacity = ByteSize::mib(24);
    let engine = Engine::open(file_config(root.path(), 2, capacity)).unwrap();
    for first in (0..80).step_by(8) {
        fill_tiers(&engine, &keys(first..first + 8));
        for tier in &engine.stats().tiers {
            assert!(tier.used_bytes <= capacity.0, "{tier:#?}");
            let on_disk = disk_bytes(&root.path().join(&tier.name));
            assert!(on_disk <= capacity.0, "{on_disk} bytes of {capacity}");
        }
    }
    let stats = engine.stats();
    assert!(stats.tiers.iter().all(|tier| tier.evictions > 0), "{stats:#?}");
    let (report, _) = load(&engine, &keys(0..80));
    assert!(report.hits() > 0);
    let from_files = |outcome: &kv_connector::Outcome| {
        matches!(outcome, kv_connector::Outcome::Hit(Source::Tier(_)))
    };
    assert!(load(&engine, &keys(78..80)).1.iter().all(from_files), "the newest were dropped");
}
