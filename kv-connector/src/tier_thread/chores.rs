//! What a tier does in the background: purges on request, and scrubbing while no step runs anywhere.

use std::{collections::HashMap, ops::Range, sync::Arc};

use kv_chunk::Digest;
use kv_tiers::{
    Held, Op, OpId, Purpose, ReadDone, ReadOp, RejectReason, Rejected, Slot, TierError,
};

use super::Worker;
use crate::{
    Event,
    inspect::{Errand, TierPurge, verify},
    tier_handle::TierCounters,
};

/// Reads in flight besides those of steps.
pub(crate) const CHORE_READS_MAX: u32 = PURGE_READS_MAX + 1;
const PURGE_READS_MAX: u32 = 4;
/// How often a purge looks whether a leased chunk was released.
const LEASE_LOOK_NS: u64 = 5_000_000;

/// What is to be done, and the reads of it in flight.
#[derive(Default)]
pub(super) struct Chores {
    purge: Option<Purge>,
    reads: HashMap<u64, ChoreRead>,
    /// When a purge that waits is looked at again.
    again_ns: Option<u64>,
}

struct ChoreRead {
    digest: Digest,
    held: Held,
    blocks: Range<u32>,
}

struct Purge {
    errand: Arc<Errand>,
    todo: Vec<(Digest, Held)>,
    /// Selected, and leased when it was to be removed.
    leased: Vec<Digest>,
    found: TierPurge,
}

impl Chores {
    pub(super) fn is_idle(&self) -> bool {
        self.purge.is_none() && self.reads.is_empty()
    }
}

impl Worker {
    pub(super) fn begin_purge(&mut self, errand: Arc<Errand>) {
        self.end_purge(false);
        let mut todo = Vec::new();
        self.tier.list(&mut |digest, held| todo.push((digest, held)));
        let found = TierPurge { chunks: todo.len() as u64, ..TierPurge::default() };
        self.chores.purge = Some(Purge { errand, todo, leased: Vec::new(), found });
    }

    /// True if anything was done.
    pub(super) fn run_chores(&mut self, now_ns: u64) -> bool {
        self.chores.again_ns = None;
        let Some(purge) = &self.chores.purge else { return false };
        if self.gone || now_ns >= purge.errand.end_ns {
            self.end_purge(false);
            return true;
        }
        let mut busy = false;
        while self.chores.reads.len() < PURGE_READS_MAX as usize && self.look_at_next(now_ns) {
            busy = true;
        }
        busy | self.finish_purge(now_ns)
    }

    /// Submits the read of one header.
    fn look_at_next(&mut self, now_ns: u64) -> bool {
        let Some(purge) = &mut self.chores.purge else { return false };
        let Some((digest, held)) = purge.todo.pop() else { return false };
        let blocks = 0..0;
        let Some(slot) = self.shared.read_slot() else {
            purge.todo.push((digest, held));
            self.chores.again_ns = Some(now_ns.saturating_add(LEASE_LOOK_NS));
            return false;
        };
        let id = self.next_id();
        let op =
            ReadOp { id: OpId(id), digest, blocks: blocks.clone(), slot, purpose: Purpose::Look };
        let rejected =
            self.tier.submit(Op::Read(op), now_ns).map_err(|Rejected { reason, .. }| reason);
        let Some(purge) = &mut self.chores.purge else { return false };
        match rejected {
            Ok(()) => {
                self.chores.reads.insert(id, ChoreRead { digest, held, blocks });
                true
            }
            Err(RejectReason::QueueFull) => {
                purge.todo.push((digest, held));
                self.chores.again_ns = Some(now_ns.saturating_add(LEASE_LOOK_NS));
                false
            }
            Err(_) => {
                purge.found.unknown_chunks += 1;
                true
            }
        }
    }

    /// A read that no step asked for.
    pub(super) fn chore_completed(
        &mut self,
        id: OpId,
        slot: Slot,
        result: Result<ReadDone, TierError>,
        now_ns: u64,
    ) {
        let Some(ChoreRead { digest, held, blocks }) = self.chores.reads.remove(&id.0) else {
            return;
        };
        let Some(purge) = &mut self.chores.purge else { return };
        let header = match result {
            Ok(done) => verify(slot, done, digest, &blocks, held).ok(),
            Err(_) => None,
        };
        let selector = &purge.errand.selector;
        match header.and_then(|header| selector.matches(header.canonical_key())) {
            // What is gone by now is nobody's.
            None if self.tier.contains(digest).is_some() => purge.found.unknown_chunks += 1,
            None | Some(false) => {}
            Some(true) => {
                purge.found.matched_chunks += 1;
                purge.found.matched_bytes += held.payload_bytes;
                if !purge.errand.dry_run {
                    self.purge_chunk(digest, now_ns);
                }
            }
        }
    }

    fn purge_chunk(&mut self, digest: Digest, now_ns: u64) {
        let Some(purge) = &mut self.chores.purge else { return };
        if !self.shared.directory.try_evict(digest, self.id.0) {
            purge.leased.push(digest);
            return;
        }
        purge.found.removed_chunks += 1;
        // Evicted meanwhile is as good.
        if self.tier.remove(digest, now_ns) {
            TierCounters::add(&self.handle().counters.purged_chunks, 1);
            self.shared.tell(Event::Purged { digest, tier: self.id.0 });
        }
    }

    /// Everything was looked at: waits for leases, then for the medium. True if anything was done.
    fn finish_purge(&mut self, now_ns: u64) -> bool {
        let looked = self.chores.reads.is_empty();
        let Some(purge) = &mut self.chores.purge else { return false };
        if !looked || !purge.todo.is_empty() {
            return false;
        }
        let leased = std::mem::take(&mut purge.leased);
        let patient = now_ns < purge.errand.patience_ns;
        leased.into_iter().for_each(|digest| self.purge_chunk(digest, now_ns));
        let Some(purge) = &mut self.chores.purge else { return false };
        let pending = self.tier.stats().removals_pending > 0;
        if pending || (patient && !purge.leased.is_empty()) {
            self.chores.again_ns = Some(now_ns.saturating_add(LEASE_LOOK_NS));
            return false;
        }
        self.end_purge(true);
        true
    }

    fn end_purge(&mut self, complete: bool) {
        let Some(mut purge) = self.chores.purge.take() else { return };
        purge.found.leased_chunks = purge.leased.len() as u64;
        purge.found.complete = complete && purge.found.unknown_chunks == 0;
        purge.errand.answer(self.id.index(), purge.found);
    }

    pub(super) fn chores_wake_ns(&self, _now_ns: u64) -> Option<u64> {
        self.chores.again_ns
    }

    pub(super) fn give_up_chores(&mut self) {
        self.chores.reads.clear();
        self.end_purge(false);
    }
}
