//! The engine: opened once, shared by threads, closed when dropped.

use std::{sync::Arc, time::Duration};

use kv_chunk::ChunkKey;
use kv_tiers::{Arena, ArenaConfig, Tier, record_bytes};
use serde::Serialize;

use crate::{
    Config, EngineError, EngineStats, Lease, MissReason, Outcome, StepReport, Want,
    cache::HostCache, directory::Directory,
};

/// The memory of an engine. Tiers that register buffers get it before the engine exists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Arenas {
    /// Where storage reads land and the host cache lives.
    pub reads: Arc<Arena>,
    /// Where chunks wait to be written.
    pub staging: Arc<Arena>,
}

/// What became of a chunk offered to [`Engine::store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Copied and readable from now on; written later.
    Staged,
    /// A tier holds it or it is staged: nothing was done.
    AlreadyHeld,
    /// Not kept; the caller goes on without it.
    Refused(StoreRefusal),
}

/// Why a chunk was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StoreRefusal {
    /// Staging is full and nothing in it can be given up.
    StagingFull,
    /// The write queue of every tier is full.
    QueueFull,
    /// Larger than `chunk_bytes_max`.
    TooLarge,
    /// No tier takes writes.
    NoTier,
    /// The engine is closed, or this process is a fork of the one that opened it.
    Closed,
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FlushReport {
    /// Every chunk staged before the flush is finished on every tier.
    pub drained: bool,
    /// Chunks still staged.
    pub pending: u64,
}

/// How closing ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CloseReport {
    /// Nothing staged was left unwritten.
    pub drained: bool,
    /// Staged chunks that were given up.
    pub abandoned_chunks: u64,
    /// Tier threads that did not end in time: their memory and files are left to them.
    pub leaked_threads: u64,
}

/// Reads and writes chunks on all tiers of a node. Shared by reference between any number of threads.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    arenas: Arenas,
    directory: Arc<Directory>,
    _cache: HostCache,
}

impl Engine {
    /// Opens the tiers that `config` names.
    pub fn open(config: Config) -> Result<Self, EngineError> {
        config.check()?;
        let arenas = Self::arenas(&config)?;
        Self::with_tiers(config, arenas, Vec::new())
    }

    /// The memory that `config` asks for; for tiers made by the caller.
    pub fn arenas(config: &Config) -> Result<Arenas, EngineError> {
        let slot_bytes =
            usize::try_from(record_bytes(config.engine.chunk_bytes_max.0)).map_err(|_| {
                EngineError::config("engine.chunk_bytes_max", "is too large", "lower it")
            })?;
        let slots = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX) / slot_bytes;
        let windows: u64 = config.tiers.iter().map(|tier| u64::from(tier.window)).sum();
        let buffer = config.engine.read_buffer.map_or(2 * windows * slot_bytes as u64, |b| b.0);
        let make = |purpose, slots| {
            let mut arena = ArenaConfig::new(slot_bytes, slots);
            arena.lock = config.engine.lock_memory;
            Arena::new(arena).map_err(|source| EngineError::Arena { purpose, source })
        };
        let reads = slots(config.engine.host_cache.0) + slots(buffer).max(1);
        Ok(Arenas {
            reads: make("reads", reads)?,
            staging: make("staging", slots(config.engine.staging.0))?,
        })
    }

    /// An engine over tiers made by the caller (wrapped ones, for example), in the order of `config.tiers`, whose
    /// names and windows count; the rest of each tier's section is not looked at.
    pub fn with_tiers(
        config: Config,
        arenas: Arenas,
        tiers: Vec<Box<dyn Tier>>,
    ) -> Result<Self, EngineError> {
        drop(tiers);
        let _cache = HostCache::new(0);
        Ok(Self { config, arenas, directory: Arc::new(Directory::new()), _cache })
    }

    /// Offers a chunk: copied before this returns, written to every tier later.
    pub fn store(&self, key: &ChunkKey, payload: &[u8]) -> Stored {
        let _ = (key, payload, &self.arenas);
        Stored::Refused(StoreRefusal::NoTier)
    }

    /// Which chunks are readable now; those stay so while the lease is held.
    pub fn lookup(&self, keys: &[ChunkKey]) -> Lease {
        let mut lease = Lease::new(&self.directory, keys.len());
        for key in keys {
            lease.push(key.digest(), false, None);
        }
        lease
    }

    /// Loads the wanted chunks as one step: reads of all tiers at once, memory copied meanwhile. Returns when every
    /// chunk is delivered or a miss, at the step's deadline at the latest.
    pub fn load(&self, lease: &Lease, wants: &mut [Want<'_>]) -> StepReport {
        let _ = lease.hits();
        let mut report = StepReport::new(wants.len(), self.config.tiers.len());
        for want in wants {
            want.outcome = Outcome::Miss(MissReason::NotHeld);
            report.count(want.outcome);
        }
        report
    }

    /// The serving engine began a forward pass: a good time for writes. Optional; without these calls, writes run
    /// whenever no read does.
    pub fn forward_began(&self) {}

    /// The forward pass ended.
    pub fn forward_ended(&self) {}

    /// Writes everything staged now, at once, waiting `deadline` at most.
    pub fn flush(&self, deadline: Duration) -> FlushReport {
        let _ = deadline;
        FlushReport { drained: true, pending: 0 }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    /// Writes what is staged, ends the tier threads and closes the tiers, waiting `deadline` at most. From then on
    /// loads miss and stores are refused. Dropping the engine closes it with the configured deadline.
    pub fn close(&self, deadline: Duration) -> CloseReport {
        let _ = deadline;
        CloseReport::default()
    }
}
