//! The KVBraid engine: reusable KV cache on every storage tier of a node, read back at the sum of their bandwidths.

#![forbid(unsafe_code)]

mod cache;
mod config;
mod directory;
mod engine;
mod error;
mod event;
mod lease;
mod report;
mod size;
mod stats;
mod sync;
#[cfg(test)]
mod testing;
mod want;

pub use kv_router::{TierId, TierMask};

pub use crate::{
    config::{Config, EngineConfig, ThrottleSection, TierConfig, TierKind},
    engine::{Arenas, CloseReport, Engine, FlushReport, StoreRefusal, Stored},
    error::EngineError,
    event::{Event, Observer},
    lease::Lease,
    report::{MissReason, StepReport, TierShare},
    size::ByteSize,
    stats::{CacheStats, EngineStats, MemoryStats, TierStatus},
    want::{Outcome, Source, Want},
};
