//! What the engine's callers and its tier threads share.

use std::{
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use kv_chunk::{ChunkKey, Digest, WriteId};
use kv_router::TierId;
use kv_tiers::{Record, Slot};
use kv_writeback::Writeback;

use crate::{
    EngineConfig, Event, Observer, Source,
    arenas::Arenas,
    cache::HostCache,
    directory::Directory,
    flash::{Desk, Retrieving},
    step::StepHandle,
    sync::lock_plain,
    tier_handle::TierHandle,
    totals::Totals,
};

mod seek;

pub(crate) use self::seek::Inquiry;
pub use self::seek::Seek;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) arenas: Arenas,
    pub(crate) directory: Arc<Directory>,
    pub(crate) writeback: Writeback,
    pub(crate) cache: HostCache,
    pub(crate) tiers: Vec<TierHandle>,
    /// By tier: the books of claims on it, if it takes any.
    pub(crate) desks: Vec<Option<Arc<Desk>>>,
    pub(crate) observer: Option<Observer>,
    pub(crate) totals: Mutex<Totals>,
    /// Held by the one purge that runs.
    pub(crate) purging: Mutex<()>,
    pub(crate) owner_pid: u32,
    /// Set once by `close` (Release), read at every entry (Acquire).
    pub(crate) closed: AtomicBool,
    /// Held while a step is put into the inboxes: all tiers see steps in one order.
    pub(crate) arrivals: Mutex<()>,
    /// Random high half of this engine's write ids.
    pub(crate) write_id_base: u128,
    /// Low half. Relaxed: only that each is given once counts.
    pub(crate) write_ids: AtomicU64,
}

impl Shared {
    /// Whether this process opened the engine and has not closed it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_forked() && !self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn is_forked(&self) -> bool {
        process::id() != self.owner_pid
    }

    pub(crate) fn next_write_id(&self) -> WriteId {
        let low = self.write_ids.fetch_add(1, Ordering::Relaxed);
        WriteId::new(self.write_id_base | u128::from(low))
    }

    /// The tiers that reads may be planned for, as a mask.
    pub(crate) fn readable(&self) -> u8 {
        let bit = |tier: &TierHandle| u8::from(tier.is_readable()) << tier.id.0;
        self.tiers.iter().map(bit).fold(0, |mask, bit| mask | bit)
    }

    /// The chunk, if memory holds it. Staged chunks first: a chunk leaves staging only after the directory names it,
    /// so whoever asks the directory after this misses nothing.
    pub(crate) fn in_memory(&self, key: &ChunkKey) -> Option<(Source, Arc<Record>)> {
        if let Some(record) = self.cache.get(key) {
            return Some((Source::HostCache, record));
        }
        self.writeback.get(key).map(|record| (Source::Staged, record))
    }

    /// Keeps a chunk that was read from a tier, unless all tiers have dropped it by now: a purge looks at the tiers, then
    /// here.
    pub(crate) fn keep_read(&self, record: Arc<Record>) {
        let digest = record.digest();
        self.cache.insert(record);
        if self.directory.tiers(digest) == 0 {
            self.cache.remove(digest);
        }
    }

    /// Chunks are about to be read: claims on them are used until what this gives is dropped.
    pub(crate) fn retrieving(&self, wanted: impl Iterator<Item = Digest>) -> Option<Retrieving> {
        Retrieving::begin(&self.desks, wanted)
    }

    /// Whether memory holds two windows of every tier.
    pub(crate) fn holds_two_windows(&self) -> bool {
        let places: u64 = self.tiers.iter().map(|tier| u64::from(tier.windows.max)).sum();
        let slots = self.arenas.reads.slots().saturating_sub(self.arenas.cache_slots);
        2 * places <= slots as u64
    }

    /// A slot for a read; the host cache gives one up if none is free.
    pub(crate) fn read_slot(&self) -> Option<Slot> {
        let arena = &self.arenas.reads;
        arena.try_take().or_else(|| if self.cache.give_up_one() { arena.try_take() } else { None })
    }

    /// Queues a step with every tier.
    pub(crate) fn start_step(&self, step: &StepHandle) {
        let _order = lock_plain(&self.arrivals);
        for tier in &self.tiers {
            tier.push_step(step);
        }
    }

    pub(crate) fn ring_all(&self) {
        self.tiers.iter().for_each(TierHandle::ring);
    }

    pub(crate) fn ring_others(&self, me: TierId) {
        self.tiers.iter().filter(|tier| tier.id != me).for_each(TierHandle::ring);
    }

    pub(crate) fn tell(&self, event: Event) {
        if let Some(observer) = &self.observer {
            observer.tell(event);
        }
    }
}

/// Counts a load as reading while it lives: writes wait, unless they are overdue.
#[derive(Debug)]
pub(crate) struct Reading<'a>(&'a Shared);

impl<'a> Reading<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        shared.writeback.gate().read_started();
        Self(shared)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let gate = self.0.writeback.gate();
        gate.read_finished();
        if gate.reads_in_flight() == 0 && !self.0.writeback.is_drained() {
            self.0.ring_all();
        }
    }
}
