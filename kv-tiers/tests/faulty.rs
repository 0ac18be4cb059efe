//! Faults: each kind shows as what it is, is counted, and never as wrong bytes that verify.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod common;

use std::sync::Arc;

use kv_tiers::{
    Arena, Completion, ErrorKind, FaultKind, FaultPlan, Faulty, MemoryConfig, MemoryTier, Tier,
    TierError, When,
};

use crate::common::{arena, digest, payload, poll, read, read_op, settle, verify, write, write_op};

const PAYLOAD_BYTES: usize = (2 << 20) + 77;

fn faulty(plan: FaultPlan) -> Faulty {
    Faulty::new(Box::new(MemoryTier::new(MemoryConfig::new("host", 64 << 20))), plan)
}

fn nth(kind: FaultKind, n: u64) -> FaultPlan {
    FaultPlan::default().with(kind, When::Nth(n))
}

/// A tier that holds chunks 1 and 2, under `plan` from then on.
fn filled(arena: &Arc<Arena>, plan: FaultPlan) -> Faulty {
    let mut tier = faulty(FaultPlan::NONE);
    for number in [1, 2] {
        write(&mut tier, arena, number, &payload(number, PAYLOAD_BYTES)).unwrap();
    }
    tier.handle().set_plan(plan);
    tier
}

#[track_caller]
fn assert_reads_right(tier: &mut Faulty, arena: &Arc<Arena>, number: u64) {
    let piece = verify(read(tier, arena, number).unwrap(), number).unwrap();
    assert!(piece.bytes() == payload(number, PAYLOAD_BYTES));
}

#[track_caller]
fn errno(error: &TierError) -> i32 {
    let TierError::Io { errno, .. } = error else { panic!("{error}") };
    *errno
}

#[test]
fn the_nth_read_fails_and_the_others_do_not() {
    let arena = arena(4);
    let mut tier = filled(&arena, nth(FaultKind::ReadFails, 2));
    assert_reads_right(&mut tier, &arena, 1);
    assert_eq!(errno(&read(&mut tier, &arena, 1).unwrap_err()), libc::EIO);
    assert_reads_right(&mut tier, &arena, 1);
    assert_eq!(tier.handle().count(FaultKind::ReadFails), 1);
    assert_eq!(arena.free_slots(), 4);
}

#[test]
fn a_failed_write_leaves_nothing_and_can_be_repeated() {
    for (kind, errno_wanted, kind_wanted) in [
        (FaultKind::WriteFails, libc::EIO, ErrorKind::Io),
        (FaultKind::WriteFindsNoSpace, libc::ENOSPC, ErrorKind::NoSpace),
        (FaultKind::WriteTears, libc::EIO, ErrorKind::Io),
    ] {
        let arena = arena(4);
        let mut tier = faulty(nth(kind, 1));
        let bytes = payload(1, PAYLOAD_BYTES);
        let error = write(&mut tier, &arena, 1, &bytes).unwrap_err();
        assert_eq!((errno(&error), error.kind()), (errno_wanted, kind_wanted));
        assert!(tier.contains(digest(1)).is_none());
        assert_eq!(tier.stats().used_bytes, 0);
        assert_eq!(tier.stats().errors, [(kind_wanted, 1)]);
        write(&mut tier, &arena, 1, &bytes).unwrap();
        assert_reads_right(&mut tier, &arena, 1);
        assert_eq!(tier.handle().count(kind), 1);
    }
}

#[test]
fn short_reads_are_an_error_or_fail_verification() {
    let arena = arena(4);
    let mut tier = filled(&arena, nth(FaultKind::ReadStopsShort, 1));
    let error = read(&mut tier, &arena, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Short);
    assert_eq!(tier.stats().errors, [(ErrorKind::Short, 1)]);
    tier.handle().set_plan(nth(FaultKind::ReadIsTruncated, 1));
    let (slot, done) = read(&mut tier, &arena, 1).unwrap();
    // One whole block of three: only the length tells.
    assert_eq!(done.payload_bytes, 1 << 20);
    assert!(verify((slot, done), 1).is_err());
    assert_reads_right(&mut tier, &arena, 1);
}

#[test]
fn a_bit_flipped_in_a_read_fails_verification_once() {
    let arena = arena(4);
    for seed in 0..20 {
        let mut tier = filled(&arena, nth(FaultKind::ReadFlipsBit, 1).seeded(seed));
        assert!(verify(read(&mut tier, &arena, 1).unwrap(), 1).is_err(), "seed {seed}");
        assert_reads_right(&mut tier, &arena, 1);
    }
}

#[test]
fn stored_damage_fails_verification_every_time_and_leaves_the_callers_record_alone() {
    for kind in [FaultKind::WriteFlipsBit, FaultKind::WriteTearsUnseen] {
        let arena = arena(4);
        let mut tier = faulty(nth(kind, 1));
        let kv_tiers::Op::Write(op) = write_op(&arena, 1, &payload(1, PAYLOAD_BYTES)) else {
            unreachable!()
        };
        let record = Arc::clone(&op.record);
        tier.submit(kv_tiers::Op::Write(op), 0).unwrap();
        let completions = settle(&mut tier, &mut 0);
        assert!(matches!(&*completions, [Completion::Write { result: Ok(()), .. }]));
        assert!(record.payload() == payload(1, PAYLOAD_BYTES));
        for _ in 0..2 {
            assert!(verify(read(&mut tier, &arena, 1).unwrap(), 1).is_err());
        }
        assert_eq!(tier.handle().count(kind), 1);
    }
}

#[test]
fn damage_that_finds_no_slot_does_not_strike_and_is_not_counted() {
    let arena = arena(1);
    let mut tier = faulty(nth(FaultKind::WriteFlipsBit, 1));
    write(&mut tier, &arena, 1, &payload(1, PAYLOAD_BYTES)).unwrap();
    assert_reads_right(&mut tier, &arena, 1);
    assert!(tier.handle().counts().is_empty());
}

#[test]
fn a_stalled_op_completes_late_and_shows_late() {
    let arena = arena(4);
    let stall = FaultKind::Stalls { ns: 700 };
    let mut tier = filled(&arena, FaultPlan::default().with(stall, When::Every(1)));
    tier.submit(read_op(&arena, 1, 0..1), 100).unwrap();
    tier.submit(write_op(&arena, 3, &payload(3, 10)), 100).unwrap();
    let (completions, next_ns) = poll(&mut tier, 100);
    assert!(completions.is_empty());
    assert_eq!(next_ns, Some(800));
    assert!(poll(&mut tier, 799).0.is_empty());
    assert!(tier.contains(digest(3)).is_none());
    assert_eq!(poll(&mut tier, 800).0.len(), 2);
    assert_eq!(tier.handle().count(stall), 2);
}

#[test]
fn a_vanished_medium_fails_everything_loses_every_chunk_and_returns_with_them() {
    let arena = arena(6);
    let mut tier = filled(&arena, nth(FaultKind::Vanishes, 2));
    tier.submit(read_op(&arena, 1, 0..1), 0).unwrap();
    tier.submit(read_op(&arena, 2, 0..1), 0).unwrap();
    assert!(tier.contains(digest(1)).is_none());
    let completions = settle(&mut tier, &mut 0);
    let failed =
        completions.iter().filter(|it| matches!(it, Completion::Read { result: Err(_), .. }));
    let lost = completions.iter().filter(|it| matches!(it, Completion::Lost { .. }));
    assert_eq!((failed.count(), lost.count()), (2, 2));
    drop(completions);
    assert_eq!(errno(&write(&mut tier, &arena, 3, b"x").unwrap_err()), libc::EIO);
    let mut listed = 0;
    tier.list(&mut |_, _| listed += 1);
    assert_eq!(listed, 0);
    assert!(!tier.remove(digest(1), 0));
    tier.handle().come_back();
    assert_reads_right(&mut tier, &arena, 1);
    assert!(tier.contains(digest(3)).is_none());
    assert_eq!(arena.free_slots(), 6);
}

#[test]
fn a_write_in_flight_when_the_medium_vanishes_is_not_there_when_it_returns() {
    let arena = arena(4);
    let mut tier = faulty(FaultPlan::NONE);
    tier.submit(write_op(&arena, 1, b"bytes"), 0).unwrap();
    tier.handle().vanish();
    let completions = settle(&mut tier, &mut 0);
    assert!(matches!(&*completions, [Completion::Write { result: Err(_), .. }]));
    tier.handle().come_back();
    assert!(tier.contains(digest(1)).is_none());
}

#[test]
fn a_chunk_deleted_behind_the_tiers_back_is_found_missing_by_the_next_read() {
    let arena = arena(4);
    let mut tier = filled(&arena, FaultPlan::NONE);
    tier.handle().delete(digest(1));
    assert!(tier.contains(digest(1)).is_some(), "nobody has looked yet");
    tier.submit(read_op(&arena, 1, 0..1), 0).unwrap();
    let completions = settle(&mut tier, &mut 0);
    let lost = completions
        .iter()
        .any(|it| matches!(it, Completion::Lost { digest: lost, .. } if *lost == digest(1)));
    let missing = completions.iter().any(
        |it| matches!(it, Completion::Read { result: Err(error), .. } if error.kind() == ErrorKind::NotFound),
    );
    assert!(lost && missing, "{completions:?}");
    assert!(tier.contains(digest(1)).is_none());
    assert_reads_right(&mut tier, &arena, 2);
}

#[test]
fn probabilities_are_seeded_and_can_be_switched_off() {
    let arena = arena(4);
    let plan = FaultPlan::default().with(FaultKind::ReadFails, When::Probability(0.3)).seeded(5);
    let run = || -> Vec<bool> {
        let mut tier = filled(&arena, plan.clone());
        (0..200).map(|_| read(&mut tier, &arena, 1).is_err()).collect()
    };
    let failures = run();
    assert_eq!(failures, run());
    let count = failures.iter().filter(|failed| **failed).count();
    assert!((35..=85).contains(&count), "{count} of 200 at 30 %");
    let mut tier = filled(&arena, plan);
    tier.handle().set_plan(FaultPlan::NONE);
    assert!((0..50).all(|_| read(&mut tier, &arena, 1).is_ok()));
}
