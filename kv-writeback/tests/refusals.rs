//! What back-pressure gives up and what it refuses, one case at a time.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{key, payload};
use kv_chunk::WriteId;
use kv_tiers::{Arena, ArenaConfig, Record};
use kv_writeback::{Next, Refused, Staged, Writeback, WritebackConfig, WritebackError, Written};

fn writeback(staged: usize, queued: usize) -> (Writeback, Arc<Arena>) {
    let arena = Arena::new(ArenaConfig::new(8 << 10, 8)).unwrap();
    let mut config = WritebackConfig::new(2, staged);
    config.queue_chunks_max = queued;
    (Writeback::new(config, Arc::clone(&arena)).unwrap(), arena)
}

fn stage(writeback: &Writeback, chunk: u32, wanted: u8) -> Result<Staged, Refused> {
    let id = u128::from(chunk);
    writeback.stage(&key(chunk), &payload(chunk, id), WriteId::new(id), wanted, 0)
}

fn take(writeback: &Writeback, tier: u8) -> Arc<Record> {
    match writeback.next(tier, 0) {
        Next::Write(record) => record,
        other => panic!("{other:?}"),
    }
}

fn write(writeback: &Writeback, tier: u8) -> Arc<Record> {
    let record = take(writeback, tier);
    writeback.finish(tier, record.digest(), record.header().write_id(), Written::Done);
    record
}

#[test]
fn full_staging_gives_up_a_second_replica_before_it_refuses() {
    let (writeback, _arena) = writeback(2, 2);
    stage(&writeback, 1, 0b11).unwrap();
    stage(&writeback, 2, 0b11).unwrap();
    assert_eq!(stage(&writeback, 3, 0b11), Err(Refused::StagingFull), "neither is held anywhere");
    write(&writeback, 0);
    assert_eq!(stage(&writeback, 3, 0b11), Ok(Staged::Accepted { replicas: 0b11 }));
    assert!(writeback.get(&key(1)).is_none(), "tier 0 holds it");
    assert!(writeback.get(&key(2)).is_some(), "only staging holds it");
    let stats = writeback.stats();
    assert_eq!((stats.replicas_given_up, stats.refused_for(Refused::StagingFull)), (1, 1));
    assert_eq!(stats.lost_writes, 0);
}

#[test]
fn a_chunk_that_a_tier_is_writing_keeps_its_slot() {
    let (writeback, _arena) = writeback(1, 1);
    stage(&writeback, 1, 0b11).unwrap();
    write(&writeback, 0);
    let record = take(&writeback, 1);
    assert_eq!(stage(&writeback, 2, 0b11), Err(Refused::StagingFull));
    assert_eq!(record.payload(), payload(1, 1));
}

#[test]
fn a_full_queue_costs_the_newcomer_its_second_replica() {
    let (writeback, _arena) = writeback(4, 1);
    stage(&writeback, 1, 0b10).unwrap();
    assert_eq!(stage(&writeback, 2, 0b11), Ok(Staged::Accepted { replicas: 0b01 }));
    assert_eq!(writeback.stats().replicas_given_up, 1);
}

#[test]
fn a_full_queue_gives_up_a_chunk_that_another_tier_is_still_to_write() {
    let (writeback, _arena) = writeback(4, 1);
    stage(&writeback, 1, 0b11).unwrap();
    assert_eq!(stage(&writeback, 2, 0b10), Ok(Staged::Accepted { replicas: 0b10 }));
    assert_eq!(take(&writeback, 1).digest(), key(2).digest());
    assert_eq!(take(&writeback, 0).digest(), key(1).digest());
}

#[test]
fn only_replicas_are_never_given_up() {
    let (writeback, _arena) = writeback(4, 1);
    stage(&writeback, 1, 0b10).unwrap();
    assert_eq!(stage(&writeback, 2, 0b10), Err(Refused::QueueFull));
    assert_eq!(writeback.stats().refused_for(Refused::QueueFull), 1);
    assert_eq!(take(&writeback, 1).digest(), key(1).digest());
}

#[test]
fn a_failed_write_on_every_tier_loses_the_chunk_and_says_so() {
    let (writeback, arena) = writeback(4, 4);
    stage(&writeback, 1, 0b11).unwrap();
    for tier in 0..2 {
        let record = take(&writeback, tier);
        assert!(writeback.get(&key(1)).is_some());
        let id = record.header().write_id();
        let finished = writeback.finish(tier, record.digest(), id, Written::Failed);
        assert_eq!(finished.is_lost(), tier == 1);
    }
    assert!(writeback.get(&key(1)).is_none());
    assert_eq!(writeback.stats().lost_writes, 1);
    assert_eq!(arena.free_slots(), arena.slots());
    assert!(stage(&writeback, 1, 0b11).is_ok(), "the chunk may come again");
}

#[test]
fn an_empty_arena_is_a_refusal_and_leaves_nothing_behind() {
    let (writeback, arena) = writeback(1, 1);
    let held: Vec<_> = std::iter::from_fn(|| arena.try_take()).collect();
    assert_eq!(stage(&writeback, 1, 0b11), Err(Refused::NoSlot));
    assert!(writeback.is_drained() && writeback.get(&key(1)).is_none());
    drop(held);
    assert!(stage(&writeback, 1, 0b11).is_ok());
}

#[test]
fn a_missing_slot_is_taken_from_a_chunk_that_a_tier_holds() {
    let (writeback, arena) = writeback(4, 4);
    stage(&writeback, 1, 0b11).unwrap();
    write(&writeback, 0);
    let _held: Vec<_> = std::iter::from_fn(|| arena.try_take()).collect();
    assert!(stage(&writeback, 2, 0b11).is_ok());
    assert!(writeback.get(&key(1)).is_none());
}

#[test]
fn payloads_that_fit_no_slot_are_refused_and_empty_ones_are_not() {
    let (writeback, arena) = writeback(4, 4);
    let id = WriteId::new(1);
    let most = arena.slot_bytes() - 4096;
    assert_eq!(writeback.stage(&key(1), &vec![1; most + 1], id, 1, 0), Err(Refused::TooLarge));
    assert!(writeback.stage(&key(1), &vec![1; most], id, 1, 0).is_ok());
    assert!(writeback.stage(&key(2), b"", id, 1, 0).is_ok());
    assert_eq!(writeback.get(&key(2)).unwrap().payload(), b"");
}

#[test]
fn tiers_that_take_no_writes_are_left_out() {
    let (writeback, _arena) = writeback(4, 4);
    assert_eq!(stage(&writeback, 1, 0), Err(Refused::NoTier));
    assert_eq!(stage(&writeback, 1, 0b100), Err(Refused::NoTier), "there is no tier 2");
    writeback.stop_writes(1);
    assert_eq!(stage(&writeback, 1, 0b10), Err(Refused::NoTier));
    assert_eq!(stage(&writeback, 1, 0b11), Ok(Staged::Accepted { replicas: 0b01 }));
    writeback.tier_back(1);
    assert_eq!(stage(&writeback, 2, 0b11), Ok(Staged::Accepted { replicas: 0b11 }));
    assert_eq!(writeback.tier_gone(200), [], "an unknown tier is nobody");
    assert!(matches!(writeback.next(200, 0), Next::Idle));
}

#[test]
fn a_tier_that_vanishes_takes_along_only_what_no_other_tier_gets() {
    let (writeback, arena) = writeback(4, 4);
    stage(&writeback, 1, 0b10).unwrap();
    stage(&writeback, 2, 0b11).unwrap();
    let stuck = take(&writeback, 1);
    assert_eq!(writeback.tier_gone(1), [key(1).digest()]);
    assert!(writeback.get(&key(2)).is_some());
    let late = writeback.finish(1, stuck.digest(), stuck.header().write_id(), Written::Done);
    assert!(!late.last && late.replicas == 0);
    write(&writeback, 0);
    assert!(writeback.is_drained());
    assert_eq!(arena.slots() - arena.free_slots(), 1, "the vanished tier still holds one");
    drop(stuck);
    assert_eq!(arena.free_slots(), arena.slots());
}

#[test]
fn a_copy_on_a_vanished_tier_does_not_make_the_other_replica_second() {
    let (writeback, _arena) = writeback(1, 1);
    stage(&writeback, 1, 0b11).unwrap();
    write(&writeback, 0);
    writeback.tier_gone(0);
    assert_eq!(stage(&writeback, 2, 0b10), Err(Refused::StagingFull));
    assert_eq!(write(&writeback, 1).digest(), key(1).digest());
}

#[test]
fn writes_of_a_held_tier_may_go_on_once_the_oldest_is_too_old() {
    let (writeback, _arena) = writeback(4, 4);
    stage(&writeback, 1, 0b01).unwrap();
    let record = take(&writeback, 0);
    writeback.gate().read_started();
    assert!(!writeback.may_write(0, 1_999_999_999));
    assert!(writeback.may_write(0, 2_000_000_000), "a write in progress grows old, too");
    assert!(!writeback.may_write(1, 2_000_000_000), "the other tier has nothing to write");
    writeback.finish(0, record.digest(), record.header().write_id(), Written::Done);
    assert!(!writeback.may_write(0, 2_000_000_000));
}

#[test]
fn limits_that_nothing_can_work_under_name_the_field() {
    let arena = Arena::new(ArenaConfig::new(8 << 10, 1)).unwrap();
    for (tiers, staged, name) in [(0, 1, "tiers"), (9, 1, "tiers"), (1, 0, "staged_chunks_max")] {
        let config = WritebackConfig::new(tiers, staged);
        match Writeback::new(config, Arc::clone(&arena)) {
            Err(WritebackError::Config { field, .. }) => assert_eq!(field, name),
            other => panic!("{other:?}"),
        }
    }
}
