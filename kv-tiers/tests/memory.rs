//! The memory tier's own choices; the contract that all tiers share is tested by the conformance suite.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod common;

use std::{cell::RefCell, sync::Arc};

use kv_chunk::{BLOCK_BYTES, Digest, WriteId};
use kv_tiers::{
    Arena, ArenaConfig, Completion, ErrorKind, EvictionGuard, MemoryConfig, MemoryTier, Op, OpId,
    Piece, Purpose, ReadOp, Record, Tier, Unguarded, WriteOp, piece_range, record_bytes,
};

use crate::common::key;

const PAYLOAD_BYTES: usize = 10_000;

fn arena() -> Arc<Arena> {
    Arena::new(ArenaConfig::new(3 * BLOCK_BYTES, 8)).unwrap()
}

fn write(tier: &mut MemoryTier, arena: &Arc<Arena>, number: u64, payload: &[u8]) {
    let slot = arena.try_take().unwrap();
    let record = Record::encode(slot, &key(number), WriteId::new(number.into()), payload).unwrap();
    tier.submit(Op::Write(WriteOp { id: OpId(number), record: Arc::new(record) }), 0).unwrap();
}

fn poll(tier: &mut MemoryTier, guard: &dyn EvictionGuard) -> Vec<Completion> {
    let mut completions = Vec::new();
    assert_eq!(tier.poll(0, guard, &mut completions), None);
    completions
}

fn touch(tier: &mut MemoryTier, arena: &Arc<Arena>, number: u64) {
    let (digest, slot) = (key(number).digest(), arena.try_take().unwrap());
    tier.submit(
        Op::Read(ReadOp { id: OpId(99), digest, blocks: 0..1, slot, purpose: Purpose::Use }),
        0,
    )
    .unwrap();
    poll(tier, &Unguarded);
}

fn evicted(completions: &[Completion]) -> Vec<Digest> {
    let digest = |completion: &Completion| match completion {
        Completion::Evicted { digest } => Some(*digest),
        _ => None,
    };
    completions.iter().filter_map(digest).collect()
}

/// Three chunks of `PAYLOAD_BYTES` fill it.
fn full_tier(arena: &Arc<Arena>) -> MemoryTier {
    let config = MemoryConfig::new("host", 3 * record_bytes(PAYLOAD_BYTES as u64));
    let mut tier = MemoryTier::new(config);
    for number in 0..3 {
        write(&mut tier, arena, number, &[7; PAYLOAD_BYTES]);
    }
    assert!(evicted(&poll(&mut tier, &Unguarded)).is_empty());
    tier
}

#[test]
fn the_least_recently_read_chunk_is_evicted_first() {
    let arena = arena();
    let mut tier = full_tier(&arena);
    touch(&mut tier, &arena, 0);
    write(&mut tier, &arena, 3, &[7; PAYLOAD_BYTES]);
    assert_eq!(evicted(&poll(&mut tier, &Unguarded)), [key(1).digest()]);
    assert!(tier.contains(key(0).digest()).is_some());
}

#[test]
fn a_refused_victim_stays_and_the_next_one_goes() {
    struct Leased(Digest, RefCell<Vec<Digest>>);
    impl EvictionGuard for Leased {
        fn try_evict(&self, digest: Digest) -> bool {
            self.1.borrow_mut().push(digest);
            digest != self.0
        }
    }
    let arena = arena();
    let mut tier = full_tier(&arena);
    write(&mut tier, &arena, 3, &[7; PAYLOAD_BYTES]);
    let guard = Leased(key(0).digest(), RefCell::default());
    assert_eq!(evicted(&poll(&mut tier, &guard)), [key(1).digest()]);
    assert_eq!(*guard.1.borrow(), [key(0).digest(), key(1).digest()]);
    assert!(tier.contains(key(0).digest()).is_some());
}

#[test]
fn when_every_victim_is_refused_the_write_finds_no_space() {
    struct AllLeased;
    impl EvictionGuard for AllLeased {
        fn try_evict(&self, _digest: Digest) -> bool {
            false
        }
    }
    let arena = arena();
    let mut tier = full_tier(&arena);
    write(&mut tier, &arena, 3, &[7; PAYLOAD_BYTES]);
    let completions = poll(&mut tier, &AllLeased);
    let [Completion::Write { result: Err(error), .. }] = &*completions else {
        panic!("{completions:?}")
    };
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(tier.stats().chunks, 3);
}

#[test]
fn a_chunk_that_is_only_looked_at_is_still_the_first_to_go() {
    for (purpose, first_to_go) in [(Purpose::Look, 0), (Purpose::Use, 1)] {
        let arena = arena();
        let mut tier = full_tier(&arena);
        let (digest, slot) = (key(0).digest(), arena.try_take().unwrap());
        let read = ReadOp { id: OpId(9), digest, blocks: 0..1, slot, purpose };
        tier.submit(Op::Read(read), 0).unwrap();
        poll(&mut tier, &Unguarded);
        write(&mut tier, &arena, 3, &[7; PAYLOAD_BYTES]);
        poll(&mut tier, &Unguarded);
        assert!(tier.contains(key(first_to_go).digest()).is_none(), "{purpose:?}");
    }
}

#[test]
fn a_chunk_removed_under_a_queued_read_is_still_read_and_counted_until_then() {
    let arena = arena();
    let mut tier = full_tier(&arena);
    let (digest, slot) = (key(1).digest(), arena.try_take().unwrap());
    tier.submit(
        Op::Read(ReadOp { id: OpId(9), digest, blocks: 0..1, slot, purpose: Purpose::Use }),
        0,
    )
    .unwrap();
    assert!(tier.remove(digest, 0));
    assert!(tier.contains(digest).is_none());
    assert_eq!(tier.stats().used_bytes, tier.stats().capacity_bytes);
    let completion = poll(&mut tier, &Unguarded).pop().unwrap();
    let Completion::Read { slot, result: Ok(done), .. } = completion else {
        panic!("{completion:?}")
    };
    let piece = Piece::verify(slot, done, &key(1), &(0..1)).unwrap();
    assert_eq!(piece.bytes(), [7; PAYLOAD_BYTES]);
    assert_eq!(tier.stats().used_bytes, 2 * record_bytes(PAYLOAD_BYTES as u64));
}

#[test]
fn a_read_that_brings_fewer_blocks_than_asked_for_fails_verification() {
    let arena = arena();
    let mut tier = MemoryTier::new(MemoryConfig::new("host", 8 << 20));
    write(&mut tier, &arena, 5, &vec![3; BLOCK_BYTES + 1]);
    poll(&mut tier, &Unguarded);
    let (digest, slot) = (key(5).digest(), arena.try_take().unwrap());
    tier.submit(
        Op::Read(ReadOp { id: OpId(9), digest, blocks: 0..1, slot, purpose: Purpose::Use }),
        0,
    )
    .unwrap();
    let completion = poll(&mut tier, &Unguarded).pop().unwrap();
    let Completion::Read { slot, result: Ok(done), .. } = completion else {
        panic!("{completion:?}")
    };
    // The first block alone is right by its checksum, but two were wanted.
    assert!(Piece::verify(slot, done, &key(5), &(0..2)).is_err());
}

#[test]
fn block_ranges_name_the_bytes_they_overlap() {
    let mib = BLOCK_BYTES as u64;
    assert_eq!(piece_range(2 * mib + 5, &(0..3)), 0..2 * mib + 5);
    assert_eq!(piece_range(2 * mib + 5, &(1..2)), mib..2 * mib);
    assert_eq!(piece_range(2 * mib + 5, &(2..u32::MAX)), 2 * mib..2 * mib + 5);
    assert_eq!(piece_range(2 * mib + 5, &(7..9)), 2 * mib + 5..2 * mib + 5);
    #[expect(clippy::reversed_empty_ranges, reason = "callers can make one")]
    let reversed = 2..1;
    assert!(piece_range(2 * mib + 5, &reversed).is_empty());
    assert!(piece_range(0, &(0..1)).is_empty());
}
