//! Storage tiers for KV cache chunks: one small trait, its drivers, wrappers that pace, break or crash any tier, and a
//! conformance suite.
//!
//! *Is*: [`Tier`] and its ops, the [`Arena`] that every transfer lands in, drivers ([`NvmeTier`], [`SharedTier`], [`MemoryTier`]),
//! decorators ([`Throttled`], [`Faulty`], [`Crashing`]), and [`conformance`], which any implementer runs.
//!
//! *Is not*: a cache policy across tiers, a scheduler of reads, or an async runtime: one thread owns a tier and polls
//! it. No clock is read; time is an argument.
//!
//! ```
//! use std::sync::Arc;
//! use kv_tiers::{
//!     Arena, ArenaConfig, Completion, MemoryConfig, MemoryTier, Op, OpId, Piece, Purpose, ReadOp,
//!     Record, Tier, Unguarded, WriteOp,
//! };
//! # use kv_chunk::{ChunkKey, Namespace, WriteId};
//! # let word = || String::from("example");
//! # let namespace = Namespace {
//! #     model: word(), weights: word(), dtype: word(), layout: word(), chunk_tokens: 256,
//! #     serde: word(), hash_algorithm: word(), hash_seed: word(), tensor_parallel: 1,
//! #     pipeline_parallel: 1, context_parallel: 1, engine: word(), engine_major: 1,
//! #     extra: Default::default(),
//! # };
//! let key = ChunkKey::new(&namespace, 0, 0, b"the chunk's hash", b"")?;
//! let arena = Arena::new(ArenaConfig::new(1 << 20, 2))?;
//! let mut tier = MemoryTier::new(MemoryConfig::new("host", 64 << 20));
//!
//! let slot = arena.try_take().ok_or("no free slot")?;
//! let record = Record::encode(slot, &key, WriteId::new(1), b"keys and values").map_err(|_| "too large")?;
//! let write = WriteOp { id: OpId(1), record: Arc::new(record) };
//! tier.submit(Op::Write(write), 0).map_err(|rejected| format!("{:?}", rejected.reason))?;
//! let mut completions = Vec::new();
//! tier.poll(0, &Unguarded, &mut completions);
//!
//! let (digest, slot) = (key.digest(), arena.try_take().ok_or("no free slot")?);
//! let read = ReadOp { id: OpId(2), digest, blocks: 0..1, slot, purpose: Purpose::Use };
//! tier.submit(Op::Read(read), 0).map_err(|rejected| format!("{:?}", rejected.reason))?;
//! tier.poll(0, &Unguarded, &mut completions);
//! let Some(Completion::Read { slot, result, .. }) = completions.pop() else { panic!() };
//! let piece = Piece::verify(slot, result?, &key, &(0..1))?;
//! assert_eq!(piece.bytes(), b"keys and values");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

// Unit tests and integration tests share their helpers.
#[cfg(test)]
extern crate self as kv_tiers;

#[expect(unsafe_code, reason = "hands out disjoint mutable slots of one mapping")]
mod arena;
pub mod conformance;
mod error;
mod memory;
mod nvme;
mod op;
mod probe;
mod record;
mod shared;
mod tier;
mod wrap;

pub use crate::{
    arena::{Arena, ArenaConfig, ArenaError, ArenaStats, Slot},
    error::{ErrorKind, IoContext, TierError},
    memory::{MemoryConfig, MemoryTier},
    nvme::{Finding, FindingKind, IoEngine, NvmeConfig, NvmeDetail, NvmeTier, synthetic},
    op::{Completion, Op, OpId, Purpose, ReadDone, ReadOp, RejectReason, Rejected, WriteOp},
    record::{Corruption, Piece, Record, piece_range, record_bytes},
    shared::{Modes, OpenAs, PublishBy, SharedConfig, SharedDetail, SharedTier},
    tier::{
        Capabilities, EvictionGuard, Held, IoMode, ListCursor, Located, Tier, TierStats, Unguarded,
    },
    wrap::{
        Crash, CrashImage, Crashing, Dead, Drift, Fault, FaultHandle, FaultKind, FaultPlan, Faulty,
        FlushPolicy, FlushViolation, Latency, Stalls, ThrottleConfig, ThrottleHandle, Throttled,
        When,
    },
};
