//! Reads that come in after their step has given them up.

use kv_connector::{ByteSize, MissReason, Outcome, TailPolicy, Want};
use kv_tiers::{FaultKind, FaultPlan, When};

use crate::common::*;

const PATTERN: u8 = 0x5a;

fn stalling(ns: u64) -> FaultPlan {
    FaultPlan::NONE.with(FaultKind::Stalls { ns }, When::Every(1))
}

#[test]
fn a_late_completion_touches_neither_the_callers_buffer_nor_another_chunks_slot() {
    let mut config = config(1);
    config.engine.read_deadline_ms = 100;
    // Nothing is read twice: what stalls stays missing.
    config.engine.tail = TailPolicy::Whole;
    // As few slots as may be: whatever is read next lands where the late reads will.
    config.engine.read_buffer = Some(ByteSize(8 * ((5 << 19) + 4096)));
    let Rig { engine, faults } = rig(config);
    let (slow, others) = (keys(0..2), keys(100..108));
    fill_tiers(&engine, &slow);
    fill_tiers(&engine, &others);
    // The first two reads only: the rest of the window goes on.
    let stall = FaultKind::Stalls { ns: 1_500_000_000 };
    faults[0].set_plan(FaultPlan::NONE.with(stall, When::Nth(1)).with(stall, When::Nth(2)));
    let mut buffers: Vec<Vec<u8>> = slow.iter().map(|key| vec![PATTERN; bytes_of(key)]).collect();
    let lease = engine.lookup(&slow);
    let mut wants: Vec<_> =
        slow.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    let timed_out = Outcome::Miss(MissReason::TimedOut);
    assert!(wants.iter().all(|want| want.outcome == timed_out), "{report:?}");
    drop(lease);
    // The caller's memory is its own again, and other loads go on while the late reads are under way.
    let mut loads = 0;
    let late = wait_for(|| {
        loads += usize::from(all_hit(&load(&engine, &others).1));
        engine.stats().tiers[0].late_bytes > 0
    });
    assert!(late && loads > 0, "{loads} loads, {:#?}", engine.stats());
    assert_nothing_is_held(&engine);
    let untouched = |buffer: &Vec<u8>| buffer.iter().all(|byte| *byte == PATTERN);
    assert!(buffers.iter().all(untouched), "a late read was copied out");
    assert!(engine.stats().tiers[0].timed_out_reads >= 2);
    assert!(wait_for(|| all_hit(&load(&engine, &slow).1)), "the tier never came back");
}

#[test]
fn a_stalled_tier_delays_a_step_no_longer_than_the_other_tier_needs() {
    let mut config = config(2);
    config.engine.read_deadline_ms = 30_000;
    let Rig { engine, faults } = rig(config);
    let known = keys(0..30);
    fill_tiers(&engine, &known);
    faults[0].set_plan(stalling(4_000_000_000));
    let (report, outcomes) = load(&engine, &known);
    assert!(all_hit(&outcomes), "{outcomes:?}");
    assert_eq!(report.tiers[0].hits, 0, "its reads are still stalled: {report:?}");
    faults[0].set_plan(FaultPlan::NONE);
    assert_nothing_is_held(&engine);
}

#[test]
fn reads_that_never_end_end_the_step_at_its_deadline_and_the_engine_at_its_own() {
    let mut config = config(2);
    config.engine.read_deadline_ms = 60_000;
    config.engine.step_deadline_ms = 500;
    let Rig { engine, faults } = rig(config);
    let known = keys(0..10);
    fill_tiers(&engine, &known);
    faults.iter().for_each(|faults| faults.set_plan(stalling(u64::MAX)));
    let (_, outcomes) = load(&engine, &known);
    let deadline = Outcome::Miss(MissReason::StepDeadline);
    assert!(outcomes.iter().all(|outcome| *outcome == deadline), "{outcomes:?}");
    // The windows are full of them, so a second step gets nothing, but in time.
    let (_, outcomes) = load(&engine, &known);
    assert!(none_hit(&outcomes), "{outcomes:?}");
    let closed = engine.close(SHORT);
    assert!(closed.drained, "{closed:?}");
}

#[test]
fn a_late_write_of_a_chunk_is_not_taken_for_a_new_one() {
    let mut config = config(1);
    config.engine.write_max_age_ms = 1;
    let Rig { engine, faults } = rig(config);
    faults[0].set_plan(stalling(300_000_000));
    let known = keys(0..3);
    known.iter().for_each(|key| store(&engine, key));
    // While it is being written, a chunk is read from staging, whole.
    let (report, outcomes) = load(&engine, &known);
    assert!(all_hit(&outcomes) && report.hits_staged + report.storage_hits() == 3, "{report:?}");
    assert!(engine.flush(PATIENCE).drained);
    faults[0].set_plan(FaultPlan::NONE);
    let (report, outcomes) = load(&engine, &known);
    assert!(all_hit(&outcomes) && report.storage_hits() == 3, "{report:?}");
    let stats = engine.stats();
    assert_eq!((stats.stored, stats.replicas_written, stats.tiers[0].chunks), (3, 3, 3));
}
