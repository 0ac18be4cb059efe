//! A schedule in tokens says when claims are used, and how likely.

use std::time::Duration;

use kv_chunk::ChunkKey;
use kv_connector::{Engine, FlashPolicy, FlashSection, RequestWork, Schedule};

use crate::{
    claims::{claims, opened, until},
    common::{fill, load},
};

const HOUR: Duration = Duration::from_secs(3600);
/// Some looks of the staging thread.
const LOOKS: Duration = Duration::from_millis(100);

/// One slot, whose request has written `written`, in iterations of a second; `waiting` behind it.
fn schedule(written: u64, waiting: &[&str], ended: &[u64]) -> Schedule {
    let mut running = RequestWork::new("running", 0);
    running.output_tokens = written;
    let mut schedule = Schedule::default();
    (schedule.slots, schedule.iteration) = (1, Duration::from_secs(1));
    schedule.running.push(running);
    schedule.waiting = waiting.iter().map(|name| RequestWork::new(*name, 0)).collect();
    schedule.ended = ended.to_vec();
    schedule
}

fn engine(change: impl FnOnce(&mut FlashSection)) -> (tempfile::TempDir, Engine, Vec<ChunkKey>) {
    opened(|section| {
        section.margin_ms = Some(0);
        change(section);
    })
}

#[test]
fn a_claim_is_staged_when_the_tokens_before_it_are_written() {
    for policy in [FlashPolicy::TempoQ, FlashPolicy::Tempo, FlashPolicy::Static] {
        let (_directory, engine, keys) = engine(|section| {
            section.policy = policy;
            section.margin_ms = Some(3_000);
        });
        assert_eq!(claims(&engine).use_by, "times");
        assert_eq!(engine.schedule(schedule(0, &[], &[500, 500])), 0);
        engine.claim("r", &keys[..4], None);
        assert_eq!(engine.schedule(schedule(100, &["r", "other"], &[])), 1);
        let status = until(&engine, |status| status.use_by == "tokens");
        std::thread::sleep(LOOKS);
        assert_eq!(claims(&engine).states["recorded"], 1, "{policy:?}");
        assert_eq!((status.schedules, status.revised, status.staged_chunks), (2, 1, 0));
        // A second is left.
        engine.schedule(schedule(499, &["r"], &[]));
        let status = until(&engine, |status| status.states["ready"] == 1);
        assert_eq!(status.staged_chunks, 4, "{policy:?}");
        assert_eq!(load(&engine, &keys[..4]).0.hits(), 4);
        assert_eq!(until(&engine, |status| status.released == 1).protected_chunks, 4);
    }
}

/// One of ten outputs ends at once: use is unlikely, and so the claim waits; with a queue behind it more would be
/// late. A quantile says the same in both cases.
#[test]
fn what_lateness_costs_is_weighed_by_its_chance_and_by_those_who_wait_behind() {
    let ended: Vec<u64> = (0..20).map(|n| if n < 2 { 11 } else { 3600 }).collect();
    let (_directory, engine, keys) = engine(|_| {});
    let others = crate::common::keys(16..28);
    fill(&engine, &others);
    engine.claim("r", &keys[..1], Some(HOUR));
    // In a second the two short ones would have ended.
    engine.schedule(schedule(10, &["r"], &ended));
    until(&engine, |status| status.use_by == "tokens");
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(claims(&engine).states["recorded"], 1, "a tenth of 700 % is less than its bytes");
    let names: Vec<String> = (0..others.len()).map(|n| format!("behind{n}")).collect();
    for (name, key) in names.iter().zip(others) {
        engine.claim(name, &[key], Some(HOUR));
    }
    let waiting: Vec<&str> = ["r"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let mut all = schedule(10, &waiting, &[]);
    all.read_ahead = waiting.len();
    engine.schedule(all);
    // Each is begun for the sake of those behind it, but for the last.
    until(&engine, |status| status.states["ready"] == 12 && status.states["recorded"] == 1);
}

#[test]
fn numbers_without_a_sense_end_neither_the_process_nor_the_claims() {
    let ended: Vec<u64> = (0..20).map(|n| if n < 2 { 11 } else { 3600 }).collect();
    let (_directory, engine, keys) = engine(|section| section.late_price_percent = 2000);
    engine.claim("r", &keys[..1], Some(HOUR));
    for huge in [u64::MAX, 1 << 53, 0] {
        let mut odd = schedule(huge, &["r"], &[huge, huge]);
        odd.slots = usize::try_from(huge).unwrap();
        odd.read_ahead = odd.slots;
        (odd.iteration, odd.prompt_token) = (Duration::from_secs(huge), Duration::from_secs(huge));
        odd.waiting[0].prompt_tokens = huge;
        odd.running[0].output_tokens_max = Some(huge);
        let before = claims(&engine).schedules;
        engine.schedule(odd);
        until(&engine, |status| status.schedules > before);
        std::thread::sleep(Duration::from_millis(50));
    }
    engine.schedule(schedule(10, &["r"], &ended));
    until(&engine, |status| status.states["ready"] == 1);
}

#[test]
fn a_dearer_lateness_stages_sooner() {
    let ended: Vec<u64> = (0..20).map(|n| if n < 2 { 11 } else { 3600 }).collect();
    let (_directory, engine, keys) = engine(|section| section.late_price_percent = 2000);
    engine.claim("r", &keys[..1], Some(HOUR));
    engine.schedule(schedule(10, &["r"], &ended));
    until(&engine, |status| status.states["ready"] == 1);
}

#[test]
fn without_a_schedule_tempo_q_goes_by_a_quantile_and_says_so() {
    let (_directory, engine, keys) = engine(|section| section.margin_ms = Some(60_000));
    engine.claim("far", &keys[..1], Some(HOUR));
    engine.claim("near", &keys[1..2], Some(Duration::from_secs(50)));
    let status = until(&engine, |status| status.states["ready"] == 1);
    assert_eq!((status.use_by, status.schedules, status.states["recorded"]), ("times", 0, 1));
}

#[test]
fn a_claim_that_the_schedule_does_not_name_waits_for_the_next_or_goes_by_its_own_time() {
    let (_directory, engine, keys) = engine(|section| section.margin_ms = Some(3_000));
    engine.schedule(schedule(0, &[], &[500]));
    until(&engine, |status| status.use_by == "tokens");
    engine.claim("unnamed", &keys[..1], None);
    engine.claim("timed", &keys[1..2], Some(Duration::ZERO));
    until(&engine, |status| status.states["ready"] == 1);
    std::thread::sleep(LOOKS);
    assert_eq!(claims(&engine).states["recorded"], 1);
    engine.schedule(schedule(499, &["unnamed"], &[]));
    until(&engine, |status| status.states["ready"] == 2);
}

#[test]
fn a_claim_that_a_schedule_names_does_not_expire() {
    let (_directory, engine, keys) = engine(|section| section.claim_deadline_ms = 1_000);
    engine.claim("named", &keys[..1], Some(HOUR));
    engine.claim("forgotten", &keys[1..2], Some(HOUR));
    for _ in 0..30 {
        engine.schedule(schedule(0, &["named"], &[500]));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(claims(&engine).expired, 1);
    assert!(engine.cancel("named") && !engine.cancel("forgotten"));
    engine.close(Duration::from_secs(20));
    assert_eq!(engine.schedule(schedule(0, &["named"], &[])), 0);
}
