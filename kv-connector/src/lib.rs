//! The KVBraid engine: reusable KV cache on every storage tier of a node, read back at the sum of their bandwidths.
//!
//! *Is*: [`Engine`], one thread per tier, a directory with [`Lease`]s, steps that all tiers read together, statistics.
//! *Is not*: the format (kv-chunk), the drivers (kv-tiers), the rules of reads (kv-router) and writes (kv-writeback).
//!
//! ```
//! use kv_chunk::{KeySpace, Namespace};
//! use kv_connector::{ByteSize, Config, Engine, TierConfig, Want};
//!
//! let mut config = Config::new(["a", "b"].map(|name| TierConfig::memory(name, ByteSize::mib(64))).into());
//! config.engine.chunk_bytes_max = ByteSize::mib(1);
//! (config.engine.host_cache, config.engine.staging) = (ByteSize::mib(8), ByteSize::mib(8));
//! let engine = Engine::open(config)?;
//! # let names = Namespace { model: "m".into(), weights: "r1".into(), dtype: "bf16".into(), layout: "NHD".into(),
//! # chunk_tokens: 256, serde: "raw".into(), hash_algorithm: "sha2".into(), hash_seed: "0".into(), tensor_parallel: 1,
//! # pipeline_parallel: 1, context_parallel: 1, engine: "doc".into(), engine_major: 1, extra: Default::default() };
//! let keys = [KeySpace::new(&names)?.key(0, 0, b"8+ bytes of hash", b"tenant")?];
//! engine.store(&keys[0], b"keys and values");      // copied now, written behind the forward pass
//! engine.flush(std::time::Duration::from_secs(5));
//! let (lease, mut dest) = (engine.lookup(&keys), [0; 15]); // what is there stays until the lease is dropped
//! let report = engine.load(&lease, &mut [Want::new(&keys[0], &mut dest)]);
//! assert_eq!((report.hits(), &dest), (1, b"keys and values"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
mod arenas;
mod cache;
mod clock;
mod close;
mod config;
mod directory;
pub mod doctor;
mod engine;
mod error;
mod event;
mod flash;
pub mod inspect;
mod lease;
mod load;
mod metrics;
mod open;
mod outcome;
#[cfg(feature = "python")]
mod python;
mod queue;
pub mod replay;
mod report;
mod shared;
pub mod sim;
mod size;
#[cfg_attr(loom, path = "socket_absent.rs")]
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

pub use crate::{
    arenas::Arenas,
    clock::{jump_clock, now_ns},
    config::{Config, EngineConfig, QueueSection, SharedSection, TierConfig, TierKind},
    config::{FlashPolicy, FlashReservation, FlashSection, TailPolicy, ThrottleSection},
    engine::{ClaimStatus, Claimed, Engine, FlashParts, RequestWork, Schedule, Seek, TierParts},
    error::EngineError,
    event::{Event, Observer},
    lease::{Lease, LockTable},
    outcome::{CloseReport, FlushReport, StoreRefusal, Stored},
    queue::{Load, LoadQueue, Wanted},
    report::{MissReason, StepReport, TierShare},
    size::ByteSize,
    stats::{CacheStats, EngineStats, MemoryStats, TierStatus},
    stats::{WindowProbe, WindowSearch, WindowState},
    want::{Arrived, Outcome, Source, Want},
};
pub use kv_router::{TierId, TierMask};
