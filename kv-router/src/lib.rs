//! Which storage tier reads which KV cache chunk next.
//!
//! *Is*: a lock-free [`StepPool`] per scheduler step, from which every tier claims its next read
//! each time it completes one, so that the tiers finish together; a [`TierQueue`] of steps in
//! order of arrival; a [`Window`] and a [`Breaker`] for each tier; a [`StepReport`].
//!
//! *Is not*: I/O, a clock, threads, or memory for the bytes. It needs no measurement and no
//! prediction of the tiers: the one that is faster comes back sooner.
//!
//! ```
//! use kv_router::{ChunkSpec, Delivery, Failure, PoolConfig, StepPool, TierId, TierMask};
//!
//! let (nvme, shared) = (TierId(0), TierId(1));
//! let chunk = ChunkSpec { tiers: TierMask::all(2), blocks: 20, bytes: 20 << 20, rank: 0 };
//! let pool = StepPool::new(&[chunk; 100], &PoolConfig::new(2))?;
//!
//! // The fastest tier reads from the head of the step, the other one from its tail.
//! let first = pool.claim(nvme).expect("100 chunks are unclaimed");
//! let last = pool.claim(shared).expect("99 chunks are unclaimed");
//! assert_eq!((first.chunk, last.chunk), (0, 99));
//!
//! // A failed read goes to a tier that has not failed.
//! let _ = pool.fail(last, Failure::Io);
//! let again = pool.claim(nvme).expect("chunk 99 came back");
//! assert_eq!(again.chunk, 99);
//!
//! let new = Delivery::First { new_bytes: 20 << 20, chunk_done: true, step_done: false };
//! assert_eq!(pool.complete(first), new);
//! # Ok::<(), kv_router::PoolError>(())
//! ```

#![forbid(unsafe_code)]

mod tier;

mod config;
mod error;
mod outcome;

mod claim;
mod lane;
mod open_set;
mod pool;
mod settle;
mod slot;
mod sync;
mod tail;
#[cfg(test)]
mod testing;

mod breaker;
mod knee;
mod queue;
mod report;
mod window;

pub use crate::{
    breaker::{Breaker, BreakerConfig, BreakerState},
    claim::Split,
    config::{ChunkSpec, PoolConfig, Tail},
    error::PoolError,
    knee::{Knee, KneeConfig, KneeProbe},
    outcome::{ChunkStatus, Claim, Delivery, Failure, MissReason, Outcome, Withdrawn},
    pool::StepPool,
    queue::{Duplicates, TierQueue},
    report::{StepReport, TierReport, bound_ns},
    tier::{MAX_TIERS, TierId, TierMask},
    window::Window,
};

const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<StepPool>();
};
