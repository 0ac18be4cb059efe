//! The engine: opened once, shared by threads, closed when dropped.

use std::{
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
    thread::JoinHandle,
    time::Duration,
};

use kv_chunk::ChunkKey;
use kv_router::TierId;
use kv_tiers::{Record, Tier};
use kv_writeback::{Refused, Staged, Writeback, WritebackConfig};

use crate::{
    Arenas, CloseReport, Config, EngineError, EngineStats, FlushReport, Lease, StepReport,
    StoreRefusal, Stored, Want,
    cache::HostCache,
    clock::{now_ns, ns_from_ms},
    config::windows,
    directory::Directory,
    flash::Desk,
    inspect::{KeptChunk, PurgeRefusal, PurgeReport, PurgeRequest, Selector},
    load::{Arrived, load},
    open::open_tiers,
    shared::Shared,
    socket::StatsSocket,
    sync::lock_plain,
    tier_handle::TierHandle,
    tier_thread::{self, Sample},
    totals::Totals,
};

mod claims;
mod delete;
mod find;

pub use crate::shared::Seek;

pub use self::claims::Claimed;
pub use crate::flash::{ClaimStatus, FlashParts, RequestWork, Schedule, TierParts};

/// Reads and writes chunks on all tiers of a node. Shared by reference between any number of threads.
///
/// In a forked child every call is a miss or a refusal, and dropping the engine there touches nothing.
#[derive(Debug)]
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    /// Empty once closed.
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(crate) socket: Option<StatsSocket>,
}

impl Engine {
    /// Opens the tiers that `config` names.
    pub fn open(config: Config) -> Result<Self, EngineError> {
        config.check()?;
        let arenas = Arenas::new(&config)?;
        let parts = open_tiers(&config, &arenas)?;
        Self::start(config, arenas, parts)
    }

    /// The memory that `config` asks for; for tiers made by the caller.
    pub fn arenas(config: &Config) -> Result<Arenas, EngineError> {
        config.check()?;
        Arenas::new(config)
    }

    /// An engine over tiers made by the caller (wrapped ones, for example), in the order of `config.tiers`: names,
    /// windows and rates are taken from there, the rest of each tier's section is not looked at. `arenas` is what
    /// [`arenas`](Self::arenas) made of the same configuration.
    pub fn with_tiers(
        config: Config,
        arenas: Arenas,
        tiers: Vec<Box<dyn Tier>>,
    ) -> Result<Self, EngineError> {
        Self::with_parts(config, arenas, tiers.into_iter().map(TierParts::from).collect())
    }

    /// As [`with_tiers`](Self::with_tiers), where some tiers come with the memory that claims on them are staged in.
    pub fn with_parts(
        config: Config,
        arenas: Arenas,
        parts: Vec<TierParts>,
    ) -> Result<Self, EngineError> {
        config.check()?;
        if parts.len() != config.tiers.len() {
            let problem = format!("{} sections for {} tiers", config.tiers.len(), parts.len());
            return Err(EngineError::config("tier", problem, "describe each tier once, in order"));
        }
        Self::start(config, arenas, parts)
    }

    fn start(config: Config, arenas: Arenas, parts: Vec<TierParts>) -> Result<Self, EngineError> {
        let (tiers, flash): (Vec<_>, Vec<_>) =
            parts.into_iter().map(|parts| (parts.tier, parts.flash)).unzip();
        let sections = config.tiers.iter();
        let desks = flash.iter().zip(sections).map(|(it, section)| it.as_ref()?.desk(section));
        let desks: Vec<_> = desks.collect();
        let span = tracing::info_span!("open", tiers = tiers.len()).entered();
        let shared = Arc::new(share(config, arenas, &tiers, desks)?);
        let ids = (0..).map(TierId);
        let samples: Vec<Sample> =
            ids.clone().zip(&tiers).map(|(id, tier)| register(&shared, id, &**tier)).collect();
        let mut engine = Self { shared, threads: Mutex::default(), socket: None };
        // If one does not start, dropping the engine closes the others.
        for ((id, tier), sample) in ids.zip(tiers).zip(samples) {
            let thread = tier_thread::spawn(&engine.shared, id, tier, sample)?;
            lock_plain(&engine.threads).push(thread);
        }
        for (id, (flash, desk)) in (0..).zip(flash.into_iter().zip(&engine.shared.desks)) {
            if let (Some(flash), Some(desk)) = (flash, desk) {
                let thread = flash.spawn(desk, &engine.shared.directory, id)?;
                lock_plain(&engine.threads).push(thread);
            }
        }
        if let Some(path) = &engine.shared.config.socket {
            engine.socket = Some(StatsSocket::open(&engine.shared, path)?);
        }
        drop(span);
        Ok(engine)
    }

    /// Offers a chunk: copied before this returns, readable from then on, written to every tier later.
    pub fn store(&self, key: &ChunkKey, payload: &[u8]) -> Stored {
        if !self.shared.is_usable() {
            return Stored::Refused(StoreRefusal::Closed);
        }
        let stored = self.stage(key, payload);
        let mut totals = lock_plain(&self.shared.totals);
        match stored {
            Stored::Staged => totals.stored += 1,
            Stored::AlreadyHeld => totals.already_held += 1,
            Stored::Refused(reason) => *totals.refused.entry(reason).or_default() += 1,
        }
        stored
    }

    fn stage(&self, key: &ChunkKey, payload: &[u8]) -> Stored {
        let shared = &self.shared;
        if shared.directory.tiers(key.digest()) & shared.readable() != 0 {
            return Stored::AlreadyHeld;
        }
        if payload.len() as u64 > shared.config.chunk_bytes_max.0 {
            return Stored::Refused(StoreRefusal::TooLarge);
        }
        let write_id = shared.next_write_id();
        let staged = shared.writeback.stage(key, payload, write_id, u8::MAX, now_ns());
        match staged {
            Ok(Staged::Accepted { .. }) => {
                shared.ring_all();
                self.keep(key, payload, write_id);
                Stored::Staged
            }
            Ok(Staged::AlreadyStaged) => Stored::AlreadyHeld,
            Err(refused) => Stored::Refused(StoreRefusal::from(refused)),
        }
    }

    fn keep(&self, key: &ChunkKey, payload: &[u8], write_id: kv_chunk::WriteId) {
        let shared = &self.shared;
        if !shared.config.cache_stores || shared.cache.capacity() == 0 {
            return;
        }
        let record =
            shared.read_slot().and_then(|slot| Record::encode(slot, key, write_id, payload).ok());
        if let Some(record) = record {
            shared.cache.insert(Arc::new(record));
        }
    }

    /// Which chunks are readable now; those stay so while the lease is held. Answers from memory; only chunks that are
    /// unknown here are looked for on tiers that other nodes write into, for [`lookup_wait_ms`](crate::EngineConfig::lookup_wait_ms) at most.
    pub fn lookup(&self, keys: &[ChunkKey]) -> Lease {
        let lease = self.lease(keys);
        if self.shared.is_usable() {
            lock_plain(&self.shared.totals).count_lookup(lease.hits());
        }
        lease
    }

    /// A look-up that nobody counts.
    pub(crate) fn lease(&self, keys: &[ChunkKey]) -> Lease {
        let shared = &self.shared;
        let usable = shared.is_usable();
        if usable {
            shared.seek(keys);
        }
        let readable = if usable { shared.readable() } else { 0 };
        let mut lease = Lease::new(&shared.directory, keys.len());
        for key in keys {
            let digest = key.digest();
            if !usable {
                lease.push(digest, false, None);
            } else if shared.directory.lease_resident(digest, readable) {
                lease.push(digest, true, None);
            } else if let Some((_, record)) = shared.in_memory(key) {
                shared.directory.lease(digest);
                lease.push(digest, true, Some(record));
            } else {
                // It may have left staging for a tier since the first look.
                let hit = shared.directory.lease_resident(digest, readable);
                lease.push(digest, hit, None);
            }
        }
        lease
    }

    /// Loads the wanted chunks as one step: reads of all tiers at once, memory copied meanwhile. Returns when every
    /// chunk is delivered or a miss, at the step's deadline at the latest. Each want's `outcome` is set.
    ///
    /// Chunks that `lease` does not cover are loaded as well, if they are still there. Of wants with the same key the
    /// first decides the rank, and any tier that one of them allows serves all of them.
    pub fn load(&self, lease: &Lease, wants: &mut [Want<'_>]) -> StepReport {
        load(&self.shared, lease, wants, &mut |_, _| {})
    }

    /// As [`Engine::load`], but what wants made by [`Want::handed`] wait for is not copied: `take` is called, on this
    /// thread, with verified bytes as they land, and the places in `wants` that they are for.
    ///
    /// A chunk comes whole or in pieces, in any order. Ranges can come twice, where two tiers read them; what comes
    /// later replaces what came before. The bytes are the payload's once the want's outcome is a hit; of a chunk that
    /// became a miss they are to be thrown away.
    pub fn load_handing(
        &self,
        lease: &Lease,
        wants: &mut [Want<'_>],
        mut take: impl FnMut(&[usize], Arrived),
    ) -> StepReport {
        load(&self.shared, lease, wants, &mut take)
    }

    /// The serving engine began a forward pass: a good time for writes. Optional; without these calls, writes run
    /// whenever no read does.
    pub fn forward_began(&self) {
        if self.shared.is_usable() {
            self.shared.writeback.gate().forward_began();
            if !self.shared.writeback.is_drained() {
                self.shared.ring_all();
            }
        }
    }

    /// The forward pass ended.
    pub fn forward_ended(&self) {
        if self.shared.is_usable() {
            self.shared.writeback.gate().forward_ended();
        }
    }

    /// Writes everything staged now, at once, waiting `deadline` at most.
    pub fn flush(&self, deadline: Duration) -> FlushReport {
        self.shared.flush(deadline)
    }

    /// Removes every chunk that the request selects from all tiers, staging and the host cache, while the engine serves.
    /// Leased chunks are removed when they are released within the request's patience, else they are left and counted.
    ///
    /// # Errors
    /// If another purge runs, or the engine is closed.
    pub fn purge(&self, request: &PurgeRequest) -> Result<PurgeReport, PurgeRefusal> {
        self.shared.purge(request)
    }

    /// Chunks of a selection that are on tiers now, of very many some. The header of every chunk is read for it, a few at
    /// a time, behind the reads of steps.
    ///
    /// # Errors
    /// As of [`purge`](Self::purge), of which one runs at a time.
    pub fn list(&self, selector: &Selector) -> Result<Vec<KeptChunk>, PurgeRefusal> {
        self.shared.list(selector)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// Writes what is staged, ends the tier threads and closes the tiers, waiting `deadline` at most. From then on
    /// loads miss and stores are refused. Dropping the engine closes it with the configured deadline.
    pub fn close(&self, deadline: Duration) -> CloseReport {
        crate::close::close(self, deadline)
    }
}

fn share(
    config: Config,
    arenas: Arenas,
    tiers: &[Box<dyn Tier>],
    desks: Vec<Option<Arc<Desk>>>,
) -> Result<Shared, EngineError> {
    let opened = tiers.iter().map(|tier| tier.capabilities().shared);
    let sections = config.tiers.iter().zip(windows(&config)).zip(opened);
    let tiers: Result<Vec<_>, _> = (0..)
        .map(TierId)
        .zip(sections)
        .map(|(id, ((tier, window), is_shared))| TierHandle::new(id, tier, window, is_shared))
        .collect();
    let count = u8::try_from(config.tiers.len()).unwrap_or(u8::MAX);
    let mut writeback = WritebackConfig::new(count, arenas.staging.slots());
    writeback.max_age_ns = ns_from_ms(config.engine.write_max_age_ms);
    let writeback = Writeback::new(writeback, Arc::clone(&arenas.staging)).map_err(|error| {
        EngineError::config("engine.staging", error.to_string(), "correct the configuration")
    })?;
    Ok(Shared {
        cache: HostCache::new(arenas.cache_slots),
        directory: Arc::new(Directory::new()),
        writeback,
        tiers: tiers?,
        desks,
        observer: config.observer,
        totals: Mutex::new(Totals::default()),
        purging: Mutex::new(()),
        owner_pid: process::id(),
        closed: AtomicBool::new(false),
        arrivals: Mutex::default(),
        write_id_base: u128::from(fastrand::u64(..)) << 64,
        write_ids: AtomicU64::new(0),
        config: config.engine,
        arenas,
    })
}

/// Enters what the tier held when it was opened into the directory; some of it.
fn register(shared: &Shared, id: TierId, tier: &dyn Tier) -> Sample {
    let mut sample = Sample::default();
    tier.list(&mut |digest, _| {
        shared.directory.set(digest, id.0);
        sample.offer(digest);
    });
    let stats = tier.stats();
    let name = tier.name();
    tracing::info!(
        tier = name,
        recovered_chunks = stats.recovered_chunks,
        used_bytes = stats.used_bytes,
        "tier opened"
    );
    sample
}

impl From<Refused> for StoreRefusal {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::QueueFull => Self::QueueFull,
            Refused::TooLarge => Self::TooLarge,
            Refused::NoTier => Self::NoTier,
            _ => Self::StagingFull,
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // The memory is not mapped here, the locks may be held for ever: nothing is given back.
            let _leaked = std::mem::ManuallyDrop::new(Arc::clone(&self.shared));
            return;
        }
        let deadline = Duration::from_millis(self.shared.config.close_deadline_ms);
        self.close(deadline);
    }
}
