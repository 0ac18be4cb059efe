//! The KVBraid engine: reusable KV cache on every storage tier of a node, read back at the sum of their bandwidths.

#![forbid(unsafe_code)]

mod arenas;
mod cache;
mod clock;
mod close;
mod config;
mod directory;
mod engine;
mod error;
mod event;
mod lease;
mod load;
mod metrics;
mod open;
mod outcome;
pub mod replay;
mod report;
mod shared;
mod size;
mod socket;
mod stats;
mod step;
mod sync;
#[cfg(test)]
mod testing;
mod tier_handle;
mod tier_thread;
mod totals;
mod want;

pub use kv_router::{TierId, TierMask};

pub use crate::{
    arenas::Arenas,
    clock::now_ns,
    config::{Config, EngineConfig, TailPolicy, ThrottleSection, TierConfig, TierKind},
    engine::Engine,
    error::EngineError,
    event::{Event, Observer},
    lease::Lease,
    outcome::{CloseReport, FlushReport, StoreRefusal, Stored},
    report::{MissReason, StepReport, TierShare},
    size::ByteSize,
    stats::{CacheStats, EngineStats, MemoryStats, TierStatus},
    want::{Outcome, Source, Want},
};
