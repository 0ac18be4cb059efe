//! Storage tiers for KV cache chunks: one small trait, its drivers, wrappers that pace or break any tier, and a
//! conformance suite.

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "hands out disjoint mutable slots of one mapping")]
mod arena;
pub mod conformance;
mod error;
mod memory;
mod nvme;
mod op;
mod probe;
mod record;
mod tier;
mod wrap;

pub use crate::{
    arena::{Arena, ArenaConfig, ArenaError, ArenaStats, Slot},
    error::{ErrorKind, IoContext, TierError},
    memory::{MemoryConfig, MemoryTier},
    nvme::{NvmeConfig, NvmeDetail, NvmeTier},
    op::{Completion, Op, OpId, ReadDone, ReadOp, RejectReason, Rejected, WriteOp},
    record::{Corruption, Piece, Record, piece_range, record_bytes},
    tier::{Capabilities, EvictionGuard, Held, IoMode, Tier, TierStats, Unguarded},
    wrap::{
        Crash, CrashImage, Crashing, Dead, Drift, Fault, FaultHandle, FaultKind, FaultPlan, Faulty,
        FlushPolicy, FlushViolation, Latency, Stalls, ThrottleConfig, ThrottleHandle, Throttled,
        When,
    },
};
