//! A tier that fails in every way beside one that does not.

use std::thread;

use kv_connector::{Engine, MissReason, Outcome, Source};
use kv_tiers::{FaultHandle, FaultKind, FaultPlan, When};

use crate::common::*;

const STALL_NS: u64 = 1_500_000_000;

fn bad_reads(seed: u64) -> FaultPlan {
    FaultPlan::NONE
        .with(FaultKind::ReadFails, When::Probability(0.10))
        .with(FaultKind::ReadStopsShort, When::Probability(0.03))
        .with(FaultKind::ReadIsTruncated, When::Probability(0.03))
        .with(FaultKind::ReadFlipsBit, When::Probability(0.03))
        .with(FaultKind::ReadFindsItDeleted, When::Probability(0.01))
        .with(FaultKind::Stalls { ns: STALL_NS }, When::Probability(0.01))
        .with(FaultKind::WriteFails, When::Probability(0.05))
        .with(FaultKind::WriteTears, When::Probability(0.05))
        .with(FaultKind::WriteTearsUnseen, When::Probability(0.03))
        .with(FaultKind::WriteFlipsBit, When::Probability(0.03))
        .seeded(seed)
}

/// Stores new chunks and loads recent ones, `rounds` times.
fn run(engine: &Engine, first: u64, rounds: u64, random: &mut fastrand::Rng) -> u64 {
    for round in 0..rounds {
        let known = first + (round + 1) * 6;
        fill_tiers(engine, &keys(known - 6..known));
        let mut recent: Vec<u64> = (known.saturating_sub(40)..known).collect();
        random.shuffle(&mut recent);
        recent.truncate(16);
        let (_, outcomes) = load(engine, &keys(recent));
        // A clean tier can only be slow, and only as slow as this machine.
        let slow = engine.stats().tiers[1].timed_out_reads > 0;
        assert!(slow || all_hit(&outcomes), "{outcomes:?}");
    }
    first + rounds * 6
}

fn assert_every_fault_is_counted(engine: &Engine, faults: &FaultHandle) {
    let stats = engine.stats();
    let tier = &stats.tiers[0];
    let struck = |kinds: &[FaultKind]| kinds.iter().map(|kind| faults.count(*kind)).sum::<u64>();
    let counted = |kind: &str| tier.errors.get(kind).copied().unwrap_or(0);
    let why = format!("{tier:#?}\nstruck: {:?}", faults.counts());
    assert_eq!(counted("read_io"), struck(&[FaultKind::ReadFails]), "{why}");
    assert_eq!(counted("read_short"), struck(&[FaultKind::ReadStopsShort]), "{why}");
    let failed = struck(&[FaultKind::WriteFails, FaultKind::WriteTears]);
    assert_eq!(counted("write_io"), failed, "{why}");
    assert_eq!(stats.replicas_failed, failed, "{stats:#?}");
    let damaged = [FaultKind::ReadIsTruncated, FaultKind::ReadFlipsBit];
    assert!(tier.corrupt_reads >= struck(&damaged), "{why}");
    let lost = struck(&[FaultKind::ReadFindsItDeleted]);
    assert!(tier.lost_chunks >= lost, "{why}");
}

#[test]
fn a_long_run_over_a_failing_tier_serves_no_wrong_byte_and_no_error() {
    for seed in seeds(2) {
        println!("KVBRAID_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let Rig { engine, faults } = rig(config(2));
        faults[0].set_plan(bad_reads(seed));
        let known = run(&engine, 0, 25, &mut random);
        faults[0].set_plan(FaultPlan::NONE);
        assert_nothing_is_held(&engine);
        assert_every_fault_is_counted(&engine, &faults[0]);
        let stall = FaultKind::Stalls { ns: STALL_NS };
        // Of what was stored before, its breaker may have kept all from the failing tier.
        assert!(wait_for(|| engine.stats().tiers[0].breaker == "closed"));
        let fresh = known..known + 20;
        fill_tiers(&engine, &keys(fresh.clone()));
        let timed_out = engine.stats().tiers[0].timed_out_reads;
        // Which tier gets a chunk is up to their threads, and a busy machine may see a stall's end first.
        assert!(wait_for(|| {
            faults[0].set_plan(FaultPlan::NONE);
            if engine.stats().tiers[0].breaker != "closed" {
                // Its probe would stall, again and again, and is no read of a step.
                return false;
            }
            faults[0].set_plan(FaultPlan::NONE.with(stall, When::Nth(1)));
            load(&engine, &keys(fresh.clone()));
            engine.stats().tiers[0].timed_out_reads > timed_out
        }));
        assert_nothing_is_held(&engine);
        let from_bad = engine.stats().tiers[0].hits;
        assert!(from_bad > 0, "the failing tier was never of use");

        faults[0].vanish();
        let known = run(&engine, fresh.end, 10, &mut random);
        let (report, outcomes) = load(&engine, &keys(known - 20..known));
        assert!(all_hit(&outcomes), "{outcomes:?}");
        assert_eq!((report.tiers[0].hits, report.tiers[1].hits), (0, 20));
        assert_nothing_is_held(&engine);
        assert_eq!(engine.stats().lost_writes, 0);
    }
}

#[test]
fn with_every_tier_gone_loads_are_misses_and_stores_do_not_hang() {
    let Rig { engine, faults } = rig(config(2));
    let known = keys(0..20);
    fill_tiers(&engine, &known);
    faults.iter().for_each(FaultHandle::vanish);
    for _ in 0..3 {
        let (_, outcomes) = load(&engine, &known);
        assert!(none_hit(&outcomes), "{outcomes:?}");
    }
    assert!(wait_for(|| engine.lookup(&known).prefix_hits() == 0), "lost chunks are still named");
    for key in keys(20..60) {
        let _ = engine.store(&key, &payload(&key));
    }
    let flushed = engine.flush(PATIENCE);
    let stats = engine.stats();
    assert!(flushed.drained, "{stats:#?}");
    assert_eq!(stats.lost_writes, stats.stored - 20, "{stats:#?}");
    assert!(none_hit(&load(&engine, &keys(0..60)).1));
    assert_nothing_is_held(&engine);
    assert_eq!(engine.close(PATIENCE).leaked_threads, 0);
}

#[test]
fn a_tier_that_vanishes_in_the_middle_of_a_step_costs_no_chunk() {
    for seed in seeds(5) {
        println!("KVBRAID_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let Rig { engine, faults } = rig(config(2));
        let known = keys(0..60);
        fill_tiers(&engine, &known);
        let gone = usize::from(random.bool());
        let after = random.u64(1..40);
        faults[gone].set_plan(FaultPlan::NONE.with(FaultKind::Vanishes, When::Nth(after)));
        let (_, outcomes) = load(&engine, &known);
        assert!(all_hit(&outcomes), "{outcomes:?}");
        assert_nothing_is_held(&engine);
    }
}

#[test]
fn a_tier_that_comes_back_is_used_again() {
    let Rig { engine, faults } = rig(config(2));
    fill_tiers(&engine, &keys(0..8));
    faults[0].vanish();
    assert!(all_hit(&load(&engine, &keys(0..8)).1));
    fill_tiers(&engine, &keys(8..12));
    faults[0].come_back();
    let mut next = 12;
    let back = wait_for(|| {
        fill_tiers(&engine, &keys(next..next + 1));
        next += 1;
        load_from(&engine, &keys(next - 1..next), only(0)).1[0].is_hit()
    });
    assert!(back, "{:#?}", engine.stats());
}

#[test]
fn only_the_chunks_that_failed_are_misses_and_each_has_its_reason() {
    let Rig { engine, faults } = rig(config(1));
    let known = keys(0..12);
    fill_tiers(&engine, &known);
    let one_in_three = FaultPlan::NONE.with(FaultKind::ReadFails, When::Every(3));
    faults[0].set_plan(one_in_three);
    let (report, outcomes) = load(&engine, &known);
    let missed = outcomes.iter().filter(|outcome| !outcome.is_hit());
    assert!(missed.clone().all(|outcome| *outcome == Outcome::Miss(MissReason::Io)));
    assert!((1..12).contains(&missed.count()), "{outcomes:?}");
    assert_eq!(report.misses[&MissReason::Io], report.misses());
    let stats = engine.stats();
    assert_eq!((stats.hits, stats.misses), (report.hits(), report.misses()));
}

#[test]
fn damaged_bytes_are_read_from_the_other_tier_and_leave_the_damaged_one() {
    for kind in [FaultKind::WriteFlipsBit, FaultKind::WriteTearsUnseen] {
        for bad in [0, 1] {
            let Rig { engine, faults } = rig(config(2));
            faults[usize::from(bad)].set_plan(FaultPlan::NONE.with(kind, When::Every(1)));
            let known = keys(0..8);
            fill_tiers(&engine, &known);
            let (_, outcomes) = load_from(&engine, &known, only(bad));
            assert!(none_hit(&outcomes), "{kind:?} in tier {bad}: {outcomes:?}");
            let (_, outcomes) = load(&engine, &known);
            let other = Outcome::Hit(Source::Tier(1 - bad));
            assert!(outcomes.iter().all(|outcome| *outcome == other), "{outcomes:?}");
            let stats = engine.stats();
            assert_eq!(stats.tiers[usize::from(bad)].chunks, 0, "damaged chunks are kept");
            assert!(stats.tiers[usize::from(bad)].corrupt_reads >= 8);
        }
    }
}

#[test]
fn bytes_damaged_in_every_tier_are_a_miss_and_may_be_stored_again() {
    let Rig { engine, faults } = rig(config(2));
    let known = keys(0..4);
    let damage = FaultPlan::NONE.with(FaultKind::WriteFlipsBit, When::Every(1));
    faults.iter().for_each(|faults| faults.set_plan(damage.clone()));
    fill_tiers(&engine, &known);
    let (_, outcomes) = load(&engine, &known);
    assert!(none_hit(&outcomes), "{outcomes:?}");
    assert_eq!(engine.lookup(&known).prefix_hits(), 0, "a damaged chunk is still named");
    faults.iter().for_each(|faults| faults.set_plan(FaultPlan::NONE));
    fill_tiers(&engine, &known);
    let (_, outcomes) = load(&engine, &known);
    assert!(all_hit(&outcomes), "{outcomes:?} {:#?}", engine.stats());
}

#[test]
fn loads_of_several_threads_over_failing_tiers_never_mix_their_bytes() {
    let Rig { engine, faults } = rig(config(2));
    let known = 48;
    fill_tiers(&engine, &keys(0..known));
    for (seed, faults) in (0..).zip(&faults) {
        let plan = FaultPlan::NONE
            .with(FaultKind::ReadFails, When::Probability(0.05))
            .with(FaultKind::ReadFlipsBit, When::Probability(0.01))
            .with(FaultKind::Stalls { ns: 30_000_000 }, When::Probability(0.05));
        faults.set_plan(plan.seeded(seed));
    }
    thread::scope(|scope| {
        for thread in 0..4 {
            let engine = &engine;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..20 {
                    let wanted = (0..random.usize(1..12)).map(|_| random.u64(0..known));
                    load(engine, &keys(wanted.collect::<Vec<_>>()));
                }
            });
        }
    });
    assert_nothing_is_held(&engine);
}
