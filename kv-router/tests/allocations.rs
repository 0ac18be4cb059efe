//! Nothing is allocated for a chunk once its step is built.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kv_router::{
    ChunkSpec, Duplicates, Failure, PoolConfig, StepPool, TierId, TierMask, TierQueue,
};

struct Counting;

thread_local! {
    /// Of this thread alone: the test harness allocates in its own whenever it likes.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `System.alloc` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_built_step_allocates_nothing() {
    let spec = |i: u16| ChunkSpec {
        tiers: if i.is_multiple_of(3) { TierMask::only(TierId(1)) } else { TierMask::all(2) },
        blocks: 20,
        bytes: 20 << 20,
        rank: i % 4,
    };
    let specs: Vec<_> = (0..500).map(spec).collect();
    let pool = StepPool::new(&specs, &PoolConfig::new(2)).expect("a valid step");
    let mut queues = [TierId(0), TierId(1)].map(|tier| TierQueue::new(tier, 4));
    for queue in &mut queues {
        queue.push(&pool).expect("there is room");
    }
    let mut held = Vec::with_capacity(4096);

    let before = ALLOCATIONS.get();
    let mut n = 0_u32;
    while !pool.is_finished() {
        for queue in &mut queues {
            if let Some((_, claim)) = queue.claim(Duplicates::Allowed) {
                held.push(claim);
            }
        }
        n += 1;
        if held.len() > 24 || pool.unclaimed() == 0 {
            let Some(claim) = held.pop() else { break };
            if n.is_multiple_of(17) {
                let _ = pool.fail(claim, Failure::Io);
            } else {
                let _ = pool.complete(claim);
            }
        }
    }
    let _ = pool.mask_tier(TierId(1));
    let _ = pool.cancel();
    let report = pool.report();
    let allocated = ALLOCATIONS.get() - before;

    assert_eq!(allocated, 0);
    assert!(report.delivered > 400 && report.duplicate_bytes() > 0, "{report:?}");
}
