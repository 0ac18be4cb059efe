//! Slots: exclusive, aligned, bounded, returned; and absent in a forked child.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

use std::{collections::BTreeSet, sync::Arc, thread};

use kv_tiers::{Arena, ArenaConfig, ArenaError, Slot};
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

fn arena(slot_bytes: usize, slots: usize) -> Arc<Arena> {
    Arena::new(ArenaConfig::new(slot_bytes, slots)).unwrap()
}

#[test]
fn slots_are_aligned_zeroed_apart_and_inside_the_region() {
    // Not a multiple of 4 KiB: it is rounded up.
    let arena = arena(10_000, 5);
    assert_eq!(arena.slot_bytes(), 12_288);
    let (start, bytes) = arena.region();
    assert_eq!(start.addr() % (2 << 20), 0);
    assert_eq!(bytes, 5 * 12_288);
    let slots: Vec<Slot> = (0..5).map(|_| arena.try_take().unwrap()).collect();
    let mut offsets = BTreeSet::new();
    for slot in &slots {
        assert_eq!(slot.as_ptr().addr(), start.addr() + slot.offset());
        assert!(slot.as_ptr().addr().is_multiple_of(4096) && slot.len() == 12_288);
        assert!(slot.iter().all(|&byte| byte == 0));
        assert!(slot.offset() + slot.len() <= bytes);
        offsets.insert(slot.offset());
    }
    assert_eq!(offsets.len(), 5);
}

#[test]
fn an_exhausted_arena_gives_none_until_a_slot_is_dropped() {
    let arena = arena(4096, 2);
    let first = arena.try_take().unwrap();
    let second = arena.try_take().unwrap();
    assert!(arena.try_take().is_none());
    assert_eq!(arena.free_slots(), 0);
    let index = first.index();
    drop(first);
    assert_eq!(arena.try_take().unwrap().index(), index);
    drop(second);
    assert_eq!((arena.free_slots(), arena.slots()), (2, 2));
}

#[test]
fn a_leaked_slot_is_never_given_out_again_and_keeps_the_memory() {
    let arena = arena(4096, 3);
    let mut slot = arena.try_take().unwrap();
    slot.fill(7);
    let leaked = slot.index();
    slot.leak();
    let left: Vec<Slot> = std::iter::from_fn(|| arena.try_take()).collect();
    assert_eq!(left.len(), 2);
    assert!(left.iter().all(|slot| slot.index() != leaked));
    let stats = arena.stats();
    assert_eq!((stats.leaked_slots, stats.free_slots), (1, 0));
    drop(left);
    assert_eq!(Arc::strong_count(&arena), 2, "the device may still write: the arena stays mapped");
}

#[test]
fn an_impossible_arena_is_an_error() {
    for (slot_bytes, slots) in [(0, 4), (4096, 0), (usize::MAX - 4096, 3), (1 << 40, 1 << 40)] {
        let error = Arena::new(ArenaConfig::new(slot_bytes, slots)).unwrap_err();
        assert!(matches!(error, ArenaError::Size { .. }), "{slot_bytes} x {slots}: {error}");
    }
    // Possible in an address space, but not here.
    let error = Arena::new(ArenaConfig::new(1 << 50, 8)).unwrap_err();
    assert!(matches!(error, ArenaError::Map { .. }), "{error}");
}

#[test]
fn threads_never_hold_one_slot_together() {
    let arena = arena(4096, 3);
    thread::scope(|scope| {
        for mark in 1..=4_u8 {
            let arena = &arena;
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let Some(mut slot) = arena.try_take() else {
                        thread::yield_now();
                        continue;
                    };
                    slot.fill(mark);
                    thread::yield_now();
                    assert!(slot.iter().all(|&byte| byte == mark), "somebody else wrote here");
                }
            });
        }
    });
    assert_eq!(arena.free_slots(), 3);
}

/// Runs `child` in a forked child; true if it returned true.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only calls `child`, which allocates little and takes no lock that another thread may hold at
    // the fork, and leaves through `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let status = i32::from(!child());
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => {
            matches!(waitpid(child, None).unwrap(), WaitStatus::Exited(_, 0))
        }
    }
}

#[test]
fn a_forked_child_gets_no_slot_returns_none_and_touches_nothing() {
    let arena = arena(4096, 2);
    let mut held = arena.try_take().unwrap();
    held.fill(9);
    let in_parent = Arc::clone(&arena);
    let kept = move || {
        let absent = held.is_empty();
        drop(held);
        absent && in_parent.try_take().is_none() && in_parent.free_slots() == 0
    };
    // In the child, dropping a slot does not return it, and dropping the arena does not unmap what is not there.
    assert!(in_child(kept));
    assert_eq!(arena.free_slots(), 2, "the parent's copy of the closure is dropped by now");
}

#[test]
fn a_forked_child_can_drop_the_arena_after_others_took_its_address() {
    let arena = arena(1 << 20, 4);
    let (start, bytes) = arena.region();
    let child = move || {
        // What the child maps next may well be placed where the arena is absent.
        let others: Vec<Vec<u8>> = (0..64).map(|_| vec![5; 1 << 20]).collect();
        let reused = others
            .iter()
            .any(|other| (start.addr()..start.addr() + bytes).contains(&other.as_ptr().addr()));
        drop(arena);
        let whole = others.iter().all(|other| other.iter().all(|&byte| byte == 5));
        if !reused {
            println!(
                "SKIP reuse of the arena's addresses: the child's memory was placed elsewhere"
            );
        }
        whole
    };
    assert!(in_child(child));
}

#[test]
fn stats_say_what_the_memory_really_is() {
    let arena = arena(2 << 20, 4);
    let held = arena.try_take().unwrap();
    let stats = arena.stats();
    assert_eq!((stats.bytes, stats.slot_bytes, stats.free_slots), (8 << 20, 2 << 20, 3));
    assert!(!stats.locked);
    assert!(stats.huge_page_bytes <= stats.bytes);
    if stats.huge_page_bytes < stats.bytes {
        println!("SKIP huge pages: {} of {} bytes are on them", stats.huge_page_bytes, stats.bytes);
    }
    drop(held);
    let mut config = ArenaConfig::new(4096, 1);
    config.lock = true;
    if !Arena::new(config).unwrap().stats().locked {
        println!("SKIP locked pages: the system refused to lock them");
    }
}
