//! The memory of an engine.

use std::sync::Arc;

use kv_tiers::{Arena, ArenaConfig, record_bytes};

use crate::{
    Config, EngineError, MemoryStats,
    config::{memory, windows},
};

/// The memory of an engine. Tiers that register buffers get it before the engine exists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Arenas {
    /// Where storage reads land and the host cache lives.
    pub reads: Arc<Arena>,
    /// Where chunks wait to be written.
    pub staging: Arc<Arena>,
    /// Slots of `reads` that the host cache may keep.
    pub(crate) cache_slots: usize,
}

/// How many slots of what size.
struct Sizes {
    slot_bytes: u64,
    cache_slots: u64,
    read_slots: u64,
    staging_slots: u64,
}

impl Sizes {
    fn of(config: &Config) -> Self {
        let engine = &config.engine;
        let slot_bytes = record_bytes(engine.chunk_bytes_max.0);
        let windows: u64 = windows(config).iter().map(|window| u64::from(window.max)).sum();
        let buffer = engine.read_buffer.map_or(2 * windows * slot_bytes, |buffer| buffer.0);
        let cache_slots = engine.host_cache.0 / slot_bytes;
        let read_slots = cache_slots.saturating_add((buffer / slot_bytes).max(1));
        Self { slot_bytes, cache_slots, read_slots, staging_slots: engine.staging.0 / slot_bytes }
    }

    /// Of reads and staging.
    fn bytes(&self) -> (u64, u64) {
        let bytes = |slots: u64| slots.saturating_mul(self.slot_bytes);
        (bytes(self.read_slots), bytes(self.staging_slots))
    }
}

impl Arenas {
    /// Bytes of both, reads and staging.
    pub(crate) fn bytes(config: &Config) -> (u64, u64) {
        Sizes::of(config).bytes()
    }

    pub(crate) fn new(config: &Config) -> Result<Self, EngineError> {
        let engine = &config.engine;
        let sizes = Sizes::of(config);
        let (reads, staging) = sizes.bytes();
        let Sizes { slot_bytes, cache_slots, read_slots, staging_slots } = sizes;
        let cache = cache_slots.saturating_mul(slot_bytes);
        let parts = [
            ("engine.host_cache", cache),
            ("engine.staging", staging),
            ("engine.read_buffer", reads.saturating_sub(cache)),
        ];
        let all = reads.saturating_add(staging);
        if let Some((field, largest)) = parts.into_iter().max_by_key(|(_, bytes)| *bytes) {
            memory::check(field, largest, all.saturating_sub(largest))?;
        }
        let count = |slots: u64| usize::try_from(slots).unwrap_or(usize::MAX);
        let make = |purpose, slots| {
            let mut arena = ArenaConfig::new(count(slot_bytes), count(slots));
            arena.lock = engine.lock_memory;
            Arena::new(arena).map_err(|source| EngineError::Arena { purpose, source })
        };
        let arenas = Self {
            reads: make("reads", read_slots)?,
            staging: make("staging", staging_slots)?,
            cache_slots: count(cache_slots),
        };
        let unlocked = [&arenas.reads, &arenas.staging].iter().any(|it| !it.stats().locked);
        if engine.lock_memory && unlocked {
            tracing::warn!("memory is not locked: raise RLIMIT_MEMLOCK, or do not ask for it");
        }
        Ok(arenas)
    }
}

impl MemoryStats {
    pub(crate) fn of(arena: &Arena) -> Self {
        let stats = arena.stats();
        Self {
            bytes: stats.bytes,
            slot_bytes: stats.slot_bytes,
            free_slots: stats.free_slots,
            huge_page_bytes: stats.huge_page_bytes,
            locked: stats.locked,
        }
    }
}
