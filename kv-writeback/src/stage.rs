//! Staging: the bytes of a chunk in a slot of ours, readable at once, until every tier is through with it.

use std::sync::Arc;

use kv_chunk::{ChunkKey, Digest, WriteId};
use kv_tiers::{Arena, Record, Slot, record_bytes};

use crate::{
    Finished, Gate, HeldOpen, Next, Refused, Staged, WritebackConfig, WritebackError,
    WritebackStats, Written, shared::Shared,
};

/// Staged chunks and the queues of the tiers that will hold them. Shared by the threads that store and the tiers'.
///
/// # Guarantees
///
/// * A chunk is readable from [`stage`](Self::stage) on until the last of its replicas is finished. Whoever looks for
///   it asks here *first* and the tiers' directory second, and whoever finishes a write updates that directory
///   *before* [`finish`](Self::finish): then there is no moment at which neither names it.
/// * At most `staged_chunks_max` chunks are staged. A reader, or a tier that vanished with a write, may hold a
///   record's slot for longer: with an arena of its own, nobody else feels that.
/// * Each tier gets each chunk once, in the order of staging, and finishes on its own: a slow tier delays no other.
/// * Nothing here waits: not for a slot, not for a tier. What does not fit is refused and counted.
///
/// A crash loses what is staged and not yet written, never more: nothing here is durable.
#[derive(Debug)]
pub struct Writeback {
    shared: Shared<Arc<Record>>,
    arena: Arc<Arena>,
}

impl Writeback {
    /// Empty, the gate at rest, every tier taking writes.
    pub fn new(config: WritebackConfig, arena: Arc<Arena>) -> Result<Self, WritebackError> {
        config.check()?;
        Ok(Self { shared: Shared::new(&config), arena })
    }

    /// Copies a chunk into a slot, with header and checksums, and queues it for the `wanted` tiers (a mask).
    ///
    /// The copy runs outside any lock. `write_id` must not repeat. Under back-pressure the chunk, or an older one,
    /// gives up its place with a tier if another tier holds it or will; when nothing can be given up it is refused.
    pub fn stage(
        &self,
        key: &ChunkKey,
        payload: &[u8],
        write_id: WriteId,
        wanted: u8,
        now_ns: u64,
    ) -> Result<Staged, Refused> {
        let staged = self.try_stage(key, payload, write_id, wanted, now_ns);
        if let Err(reason) = staged {
            self.shared.lock().stats.count_refused(reason);
            tracing::debug!(digest = %key.digest(), %reason, "chunk not staged");
        }
        staged
    }

    fn try_stage(
        &self,
        key: &ChunkKey,
        payload: &[u8],
        write_id: WriteId,
        wanted: u8,
        now_ns: u64,
    ) -> Result<Staged, Refused> {
        if record_bytes(payload.len() as u64) > self.arena.slot_bytes() as u64 {
            return Err(Refused::TooLarge);
        }
        let reserved = self.shared.reserve(key.digest(), write_id, wanted, now_ns)?;
        let Some(reservation) = reserved else { return Ok(Staged::AlreadyStaged) };
        let slot = self.take_slot().ok_or(Refused::NoSlot)?;
        let record =
            Record::encode(slot, key, write_id, payload).map_err(|_slot| Refused::TooLarge)?;
        let replicas = reservation.commit(Arc::new(record))?;
        Ok(Staged::Accepted { replicas })
    }

    fn take_slot(&self) -> Option<Slot> {
        self.arena.try_take().or_else(|| {
            let freed = self.shared.lock().free_a_slot();
            freed.then(|| self.arena.try_take()).flatten()
        })
    }

    /// The staged chunk of this key. A chunk of another key with the same digest is not returned.
    pub fn get(&self, key: &ChunkKey) -> Option<Arc<Record>> {
        let record = Arc::clone(self.shared.lock().get(key.digest())?);
        record.header().verify_key(key).is_ok().then_some(record)
    }

    /// What `tier` should write now.
    pub fn next(&self, tier: u8, now_ns: u64) -> Next<Arc<Record>> {
        self.shared.next(tier, now_ns)
    }

    /// A write handed out by [`next`](Self::next) ended, in whatever way. The chunk is known to the directory as held
    /// by that tier before this call. A write that nobody waits for (finished before, its tier gone) changes nothing.
    pub fn finish(
        &self,
        tier: u8,
        digest: Digest,
        write_id: WriteId,
        outcome: Written,
    ) -> Finished {
        let finished = self.shared.lock().finish(tier, digest, write_id, outcome);
        if finished.is_lost() {
            tracing::warn!(%digest, tier, ?outcome, "staged chunk lost: no tier holds it");
        }
        finished
    }

    /// Gives a chunk handed out by [`next`](Self::next) back to the head of the queue: the tier had no room for the
    /// op. False: nobody waits for that write any more.
    pub fn requeue(&self, tier: u8, digest: Digest, write_id: WriteId) -> bool {
        self.shared.lock().requeue(tier, digest, write_id)
    }

    /// Whether writes of `tier` may go on now: for [`Tier::hold_writes`](kv_tiers::Tier::hold_writes), which pauses
    /// them between the parts of a write.
    pub fn may_write(&self, tier: u8, now_ns: u64) -> bool {
        let oldest_ns = self.shared.lock().oldest_unfinished_ns(tier);
        self.shared.gate.may_write(now_ns, oldest_ns)
    }

    /// Takes `tier`'s queue away and queues nothing more for it; what it was handed still finishes (a full medium).
    /// Returns the chunks that left staging without a replica by this.
    pub fn stop_writes(&self, tier: u8) -> Vec<Digest> {
        self.shared.lock().stop_writes(tier)
    }

    /// `tier` vanished: its queue and what it was handed are dropped, copies on it no longer count. Returns the chunks
    /// that left staging without a replica by this.
    pub fn tier_gone(&self, tier: u8) -> Vec<Digest> {
        self.shared.lock().tier_gone(tier)
    }

    /// `tier` takes writes again.
    pub fn tier_back(&self, tier: u8) {
        self.shared.lock().tier_back(tier);
    }

    /// When writes may start.
    pub fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    /// Holds the gate open while the guard lives. The caller asks [`is_drained`](Self::is_drained) until its deadline.
    pub fn begin_flush(&self) -> HeldOpen<'_> {
        self.shared.gate.hold_open()
    }

    /// Chunks staged.
    pub fn pending(&self) -> usize {
        self.shared.lock().chunks.len()
    }

    /// Whether nothing is staged: every chunk accepted so far is finished on every tier that it was queued for.
    pub fn is_drained(&self) -> bool {
        self.pending() == 0
    }

    /// Counters and gauges.
    pub fn stats(&self) -> WritebackStats {
        self.shared.lock().stats()
    }
}

const _: () = {
    const fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Writeback>();
};
