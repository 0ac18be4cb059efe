//! Nothing that is merely asked waits for a device, and everything that waits has a deadline.

use std::thread;

use kv_connector::{ByteSize, Engine, Stored};
use kv_tiers::{FaultKind, FaultPlan, When};

use crate::common::*;

fn never() -> FaultPlan {
    FaultPlan::NONE.with(FaultKind::Stalls { ns: u64::MAX }, When::Every(1))
}

#[test]
fn statistics_look_ups_and_stores_are_answered_while_every_device_hangs() {
    let mut config = config(2);
    config.engine.read_deadline_ms = 60_000;
    config.engine.step_deadline_ms = 6_000;
    let Rig { engine, faults } = rig(config);
    let known = keys(0..10);
    fill_tiers(&engine, &known);
    faults.iter().for_each(|faults| faults.set_plan(never()));
    thread::scope(|scope| {
        let load = scope.spawn(|| load(&engine, &known).1);
        assert!(wait_for(|| engine.stats().tiers.iter().any(|tier| tier.in_flight_max > 0)));
        assert_eq!(engine.lookup(&known).prefix_hits(), 10);
        assert_eq!(engine.store(&key(50), &payload(&key(50))), Stored::Staged);
        assert_eq!(engine.lookup(&keys([50])).prefix_hits(), 1);
        engine.forward_began();
        engine.forward_ended();
        assert!(!load.is_finished(), "the control plane waited for the devices");
        assert!(none_hit(&load.join().unwrap()));
    });
    engine.close(SHORT);
}

#[test]
fn a_write_that_never_ends_blocks_neither_the_other_tier_nor_the_close() {
    let Rig { engine, faults } = rig(config(2));
    faults[0].set_plan(never());
    let known = keys(0..12);
    known.iter().for_each(|key| store(&engine, key));
    let written = wait_for(|| engine.stats().tiers[1].chunks == 12);
    assert!(written, "{:#?}", engine.stats());
    assert!(all_hit(&load(&engine, &known).1));
    let flushed = engine.flush(SHORT);
    assert!(!flushed.drained && flushed.pending > 0, "{flushed:?}");
    let closed = engine.close(SHORT);
    assert!(!closed.drained && closed.abandoned_chunks > 0, "{closed:?}");
}

#[test]
fn a_slow_tier_gives_up_replicas_before_stores_are_refused() {
    let mut config = config(2);
    config.engine.staging = ByteSize(8 * ((5 << 19) + 4096));
    let Rig { engine, faults } = rig(config);
    let slow = FaultPlan::NONE.with(FaultKind::Stalls { ns: 20_000_000_000 }, When::Every(1));
    faults[1].set_plan(slow);
    let known = keys(0..40);
    known.iter().for_each(|key| store(&engine, key));
    let written = wait_for(|| engine.stats().tiers[0].chunks == 40);
    let stats = engine.stats();
    assert!(written && stats.replicas_dropped > 0, "{stats:#?}");
    assert_eq!(stats.lost_writes, 0);
    assert!(all_hit(&load(&engine, &known).1));
    faults[1].set_plan(FaultPlan::NONE);
    engine.close(SHORT);
}

#[test]
fn an_engine_that_is_dropped_writes_what_was_staged() {
    let root = tempfile::tempdir().unwrap();
    let config = || {
        let mut config = file_config(root.path(), 2, ByteSize::mib(64));
        config.engine.write_max_age_ms = 3_600_000;
        config
    };
    let engine = Engine::open(config()).unwrap();
    engine.forward_began();
    engine.forward_ended();
    keys(0..6).iter().for_each(|key| store(&engine, key));
    assert!(engine.stats().pending_writes > 0, "the gate did not hold");
    drop(engine);
    let engine = Engine::open(config()).unwrap();
    assert!(all_hit(&load(&engine, &keys(0..6)).1));
}

#[test]
fn a_forward_pass_that_never_ends_or_never_begins_delays_writes_by_their_age_only() {
    for began in [true, false] {
        let Rig { engine, .. } = rig(config(2));
        if began {
            engine.forward_began();
        } else {
            engine.forward_began();
            engine.forward_ended();
        }
        keys(0..4).iter().for_each(|key| store(&engine, key));
        let written = wait_for(|| engine.stats().pending_writes == 0);
        assert!(written, "{:#?}", engine.stats());
    }
}

#[test]
fn steps_of_many_threads_all_end() {
    let Rig { engine, faults } = rig(config(2));
    fill_tiers(&engine, &keys(0..24));
    let stall = FaultPlan::NONE.with(FaultKind::Stalls { ns: 20_000_000 }, When::Every(7));
    faults.iter().for_each(|faults| faults.set_plan(stall.clone()));
    thread::scope(|scope| {
        for thread in 0..8 {
            let engine = &engine;
            scope.spawn(move || {
                for round in 0..5 {
                    let first = (thread * 3 + round) % 16;
                    load(engine, &keys(first..first + 8));
                }
            });
        }
    });
    assert_eq!(engine.stats().steps, 40);
    assert_nothing_is_held(&engine);
}

#[test]
fn a_tier_that_hangs_leaves_the_others_memory_to_read_into() {
    for window in [Some(8), None] {
        let mut config = config(2);
        // As few slots as may be.
        config.engine.read_buffer = Some(ByteSize(8 * ((5 << 19) + 4096)));
        config.tiers.iter_mut().for_each(|tier| tier.window = window);
        config.engine.step_deadline_ms = 5_000;
        let Rig { engine, faults } = rig(config);
        let known = keys(0..30);
        fill_tiers(&engine, &known);
        faults[0].set_plan(never());
        for _ in 0..3 {
            let (report, outcomes) = load(&engine, &known);
            assert!(all_hit(&outcomes), "window {window:?}: {report:?}");
        }
        engine.close(SHORT);
    }
}
