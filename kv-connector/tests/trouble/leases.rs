//! What a look-up promised, and what is released afterwards.

use std::thread;

use kv_connector::{ByteSize, Want};
use kv_tiers::{FaultKind, FaultPlan, When};

use crate::common::*;

/// Room for some twenty of the chunks used here.
fn tight(tiers: u8) -> kv_connector::Config {
    let mut config = config(tiers);
    for tier in &mut config.tiers {
        tier.capacity = Some(ByteSize::mib(24));
    }
    config
}

#[test]
fn what_a_look_up_found_can_be_loaded_after_a_flood_of_stores() {
    let Rig { engine, .. } = rig(tight(2));
    let known = keys(0..8);
    fill_tiers(&engine, &known);
    let lease = engine.lookup(&known);
    assert_eq!(lease.prefix_hits(), 8);
    fill_tiers(&engine, &keys(100..180));
    assert_eq!(lease.prefix_hits(), 8, "a lease's answer stays");
    let mut buffers: Vec<_> = known.iter().map(|key| vec![0; bytes_of(key)]).collect();
    let mut wants: Vec<_> =
        known.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    assert_honest(&report, &wants);
    assert_eq!(report.hits(), 8, "{report:?}");
    drop(lease);
    fill_tiers(&engine, &keys(200..280));
    assert_eq!(engine.lookup(&known).prefix_hits(), 0, "released chunks make room");
    assert_nothing_is_held(&engine);
}

#[test]
fn a_chunk_leased_twice_is_protected_until_the_second_release() {
    let Rig { engine, .. } = rig(tight(1));
    let known = keys(0..2);
    fill_tiers(&engine, &known);
    let (first, second) = (engine.lookup(&known), engine.lookup(&known));
    assert_eq!(engine.stats().chunks_leased, 2);
    drop(first);
    fill_tiers(&engine, &keys(100..160));
    assert!(all_hit(&load(&engine, &known).1));
    drop(second);
    assert_eq!(engine.stats().chunks_leased, 0);
}

#[test]
fn a_tier_full_of_leased_chunks_takes_no_more_and_loses_none() {
    let Rig { engine, .. } = rig(tight(1));
    let mut leases = Vec::new();
    for chunk in 0..60 {
        store(&engine, &key(chunk));
        engine.flush(PATIENCE);
        leases.push(engine.lookup(&keys([chunk])));
    }
    for (chunk, lease) in (0..).zip(&leases) {
        let hit = load(&engine, &keys([chunk])).1[0].is_hit();
        assert_eq!(hit, lease.prefix_hits() == 1, "chunk {chunk}");
    }
    let stats = engine.stats();
    assert!(stats.tiers[0].used_bytes <= stats.tiers[0].capacity_bytes);
    leases.clear();
    let room = wait_for(|| {
        store(&engine, &key(1_000));
        engine.flush(PATIENCE);
        all_hit(&load(&engine, &keys([1_000])).1)
    });
    assert!(room, "{:#?}", engine.stats());
    assert_nothing_is_held(&engine);
}

#[test]
fn a_hit_of_a_look_up_is_a_hit_of_the_load_whatever_is_stored_meanwhile() {
    let Rig { engine, .. } = rig(tight(2));
    fill_tiers(&engine, &keys(0..10));
    thread::scope(|scope| {
        let flood = scope.spawn(|| {
            for round in 0..40 {
                fill_tiers(&engine, &keys(round * 3..round * 3 + 3));
            }
        });
        let mut random = fastrand::Rng::with_seed(1);
        while !flood.is_finished() {
            let wanted = keys((0..10).map(|_| random.u64(0..120)).collect::<Vec<_>>());
            let lease = engine.lookup(&wanted);
            let mut buffers: Vec<_> = wanted.iter().map(|key| vec![0; bytes_of(key)]).collect();
            let mut wants: Vec<_> =
                wanted.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
            let report = engine.load(&lease, &mut wants);
            assert_honest(&report, &wants);
            for (want, promised) in wants.iter().zip(lease.hits()) {
                let slow = engine.stats().tiers.iter().any(|tier| tier.timed_out_reads > 0);
                assert!(want.outcome.is_hit() || !promised || slow, "{:?}", want.outcome);
            }
        }
    });
    assert_nothing_is_held(&engine);
}

#[test]
fn random_aborts_over_failing_tiers_leave_nothing_held() {
    for seed in seeds(3) {
        println!("KVBRAID_SEED={seed}");
        let mut config = tight(2);
        config.engine.host_cache = ByteSize(0);
        config.engine.step_deadline_ms = 40;
        config.engine.read_deadline_ms = 30;
        let Rig { engine, faults } = rig(config);
        for (faults, seed) in faults.iter().zip([seed, !seed]) {
            let plan = FaultPlan::NONE
                .with(FaultKind::ReadFails, When::Probability(0.1))
                .with(FaultKind::WriteFails, When::Probability(0.1))
                .with(FaultKind::ReadFlipsBit, When::Probability(0.05))
                .with(FaultKind::Stalls { ns: 60_000_000 }, When::Probability(0.2));
            faults.set_plan(plan.seeded(seed));
        }
        thread::scope(|scope| {
            for thread in 0..3 {
                let engine = &engine;
                scope.spawn(move || {
                    abort_at_random(engine, &mut fastrand::Rng::with_seed(seed * 3 + thread));
                });
            }
        });
        faults.iter().for_each(|faults| faults.set_plan(FaultPlan::NONE));
        assert!(engine.flush(PATIENCE).drained);
        assert_nothing_is_held(&engine);
        let stats = engine.stats();
        assert_eq!(stats.hits + stats.misses, stats.wanted, "{stats:#?}");
        assert_eq!(stats.pending_writes, 0);
    }
}

/// Looks up, loads some of it, all of it or something else, and lets go in any order.
fn abort_at_random(engine: &kv_connector::Engine, random: &mut fastrand::Rng) {
    let mut leases = Vec::new();
    for _ in 0..60 {
        let some = keys((0..random.usize(0..8)).map(|_| random.u64(0..30)).collect::<Vec<_>>());
        match random.u8(0..5) {
            0 => leases.push(engine.lookup(&some)),
            1 => drop(leases.pop()),
            2 => {
                for key in &some {
                    let _ = engine.store(key, &payload(key));
                }
            }
            _ => {
                load(engine, &some);
            }
        }
        if leases.len() > 4 {
            drop(leases.swap_remove(random.usize(0..leases.len())));
        }
    }
}
