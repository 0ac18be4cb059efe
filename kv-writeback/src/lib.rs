//! Deferred, replicated, bounded writes of KV cache chunks behind the forward pass.
//!
//! A chunk that an engine stores is copied once into a slot and is readable from there at once. Each storage tier
//! takes it from its own queue when the [`Gate`] lets it: while no read is in flight, behind the forward pass where
//! the engine reports it, and in any case before the chunk grows older than `max_age_ns`.
//!
//! Not here: devices (kv-tiers), threads and clocks (the caller's; time is an argument), durability (a crash loses
//! what is staged).
//!
//! ```
//! use kv_chunk::{ChunkKey, Namespace, WriteId};
//! use kv_tiers::{Arena, ArenaConfig};
//! use kv_writeback::{Next, Staged, Writeback, WritebackConfig, Written};
//!
//! let arena = Arena::new(ArenaConfig::new(64 << 10, 4))?;
//! let writeback = Writeback::new(WritebackConfig::new(2, 4), arena)?;
//! # let namespace = Namespace {
//! #     model: "m".into(), weights: "r1".into(), dtype: "bf16".into(), layout: "NHD".into(), chunk_tokens: 256,
//! #     serde: "raw".into(), hash_algorithm: "sha256".into(), hash_seed: "none".into(), tensor_parallel: 1,
//! #     pipeline_parallel: 1, context_parallel: 1, engine: "doc".into(), engine_major: 1, extra: Default::default(),
//! # };
//! let key = ChunkKey::new(&namespace, 0, 0, b"8+ bytes of hash", b"")?;
//!
//! let (wanted, now_ns) = (0b11, 0);
//! let staged = writeback.stage(&key, b"keys and values", WriteId::new(1), wanted, now_ns)?;
//! assert_eq!(staged, Staged::Accepted { replicas: 0b11 });
//! assert_eq!(writeback.get(&key).expect("readable at once").payload(), b"keys and values");
//!
//! for tier in 0..2 {
//!     let Next::Write(record) = writeback.next(tier, now_ns) else { panic!("the gate is open") };
//!     // ... the tier writes record.stored_bytes(), the directory learns that it holds the chunk ...
//!     writeback.finish(tier, record.digest(), record.header().write_id(), Written::Done);
//! }
//! assert!(writeback.is_drained());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod gate;
#[cfg(all(test, loom))]
mod loom_tests;
mod queue;
mod replicate;
mod shared;
mod stage;
mod stats;
mod sync;

pub use crate::{
    config::{Refused, WritebackConfig, WritebackError},
    gate::{Gate, HeldOpen},
    queue::{Finished, Staged, Written},
    shared::Next,
    stage::Writeback,
    stats::{TierBacklog, WritebackStats},
};
