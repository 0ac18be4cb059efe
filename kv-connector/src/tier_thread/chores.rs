//! What a tier does in the background: purges and removals on request, and scrubbing while no step runs anywhere.

use std::{collections::HashMap, ops::Range, sync::Arc};

use kv_chunk::{ChunkHeader, Digest};
use kv_tiers::{
    ErrorKind, Held, Op, OpId, Purpose, ReadDone, ReadOp, RejectReason, Rejected, Slot, TierError,
    piece_range,
};

use super::Worker;
use crate::{
    Event,
    inspect::{Damage, Errand, Pages, TierPurge, verify},
    tier_handle::TierCounters,
};

/// Reads in flight besides those of steps.
pub(crate) const CHORE_READS_MAX: u32 = PURGE_READS_MAX + 1;
const PURGE_READS_MAX: u32 = 4;
/// Blocks of 1 MiB that the scrubber reads at a time: what a step that begins meanwhile waits for at most.
const SCRUB_BLOCKS: u32 = 1;
/// How often it looks whether no step runs, and the least time between two passes.
const IDLE_LOOK_NS: u64 = 10_000_000;
/// How often a purge looks whether a leased chunk was released.
const LEASE_LOOK_NS: u64 = 5_000_000;

/// What is to be done, and the reads of it in flight.
#[derive(Default)]
pub(super) struct Chores {
    purge: Option<Purge>,
    scrub: Scrub,
    reads: HashMap<u64, ChoreRead>,
    /// When a purge that waits is looked at again.
    again_ns: Option<u64>,
}

struct ChoreRead {
    digest: Digest,
    held: Held,
    blocks: Range<u32>,
    why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Purge,
    Scrub,
    Probe,
}

/// The scrubber's way through the tier.
#[derive(Default)]
struct Scrub {
    /// Chunks of this pass, and the block that comes next in the first of them.
    todo: Pages,
    block: u32,
    /// The rate allows nothing before.
    next_ns: u64,
    in_flight: bool,
    began: bool,
}

struct Purge {
    errand: Arc<Errand>,
    todo: Pages,
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
        let (todo, found) = (Pages::default(), TierPurge::default());
        self.chores.purge = Some(Purge { errand, todo, leased: Vec::new(), found });
    }

    /// True if anything was done.
    pub(super) fn run_chores(&mut self, now_ns: u64) -> bool {
        self.chores.again_ns = None;
        let Some(purge) = &self.chores.purge else { return self.scrub(now_ns) };
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
        let Some((digest, held)) = purge.todo.peek(self.tier.as_ref()) else { return false };
        let blocks = 0..0;
        let Some(slot) = self.shared.read_slot() else {
            self.chores.again_ns = Some(now_ns.saturating_add(LEASE_LOOK_NS));
            return false;
        };
        let id = self.next_id();
        let op =
            ReadOp { id: OpId(id), digest, blocks: blocks.clone(), slot, purpose: Purpose::Look };
        let rejected =
            self.tier.submit(Op::Read(op), now_ns).map_err(|Rejected { reason, .. }| reason);
        let Some(purge) = &mut self.chores.purge else { return false };
        if rejected != Err(RejectReason::QueueFull) {
            purge.todo.pass();
            purge.found.chunks += 1;
        }
        match rejected {
            Ok(()) => {
                self.chores.reads.insert(id, ChoreRead { digest, held, blocks, why: Why::Purge });
                true
            }
            Err(RejectReason::QueueFull) => {
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
        let Some(read) = self.chores.reads.remove(&id.0) else { return };
        let ChoreRead { digest, held, blocks, why } = read;
        let seen = match result {
            Ok(done) => verify(slot, done, digest, &blocks, held).map_err(Some),
            Err(error) => {
                self.handle().counters.count_error("read", &error);
                if error.kind() == ErrorKind::NotFound {
                    self.lose(digest);
                }
                Err(None)
            }
        };
        if matches!(seen, Err(Some(_))) {
            TierCounters::add(&self.handle().counters.corrupt_reads, 1);
        }
        match why {
            Why::Purge => self.purge_looked(digest, held, seen.ok().as_ref(), now_ns),
            Why::Scrub => {
                self.scrubbed(held, &blocks, seen.is_ok());
                self.drop_damaged(digest, held, seen.err().flatten(), why, now_ns);
            }
            Why::Probe => self.drop_damaged(digest, held, seen.err().flatten(), why, now_ns),
        }
    }

    fn purge_looked(
        &mut self,
        digest: Digest,
        held: Held,
        header: Option<&ChunkHeader>,
        now_ns: u64,
    ) {
        let Some(purge) = &mut self.chores.purge else { return };
        let selector = &purge.errand.selector;
        match header.and_then(|header| selector.matches(header.canonical_key())) {
            // What is gone by now is nobody's.
            None if self.tier.contains(digest).is_some() => purge.found.unknown_chunks += 1,
            None | Some(false) => {}
            Some(true) => {
                purge.found.matched_chunks += 1;
                purge.found.matched_bytes += held.payload_bytes;
                if let Some(header) = header {
                    purge.errand.see(digest, header.canonical_key(), held.payload_bytes);
                }
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
            // What is to be removed is not kept for who might read it.
            if let Some(desk) = self.shared.desks.get(self.id.index()).and_then(Option::as_ref) {
                desk.give_up(digest);
            }
            return;
        }
        purge.found.removed_chunks += 1;
        // Evicted meanwhile is as good.
        if self.tier.remove(digest, now_ns) {
            TierCounters::add(&self.handle().counters.purged_chunks, 1);
            self.shared.tell(Event::Purged { digest, tier: self.id.0 });
        }
    }

    /// Removes chunks that were taken out of the directory. One that it names again was written since.
    pub(super) fn remove_deleted(&mut self, digests: &[Digest], now_ns: u64) {
        let bit = 1 << self.id.0;
        for &digest in digests {
            let is_back = self.shared.directory.tiers(digest) & bit != 0;
            if !self.gone && !is_back && self.tier.remove(digest, now_ns) {
                TierCounters::add(&self.handle().counters.purged_chunks, 1);
                self.shared.tell(Event::Purged { digest, tier: self.id.0 });
            }
        }
    }

    /// Everything was looked at: waits for leases, then for the medium. True if anything was done.
    fn finish_purge(&mut self, now_ns: u64) -> bool {
        let looked = !self.chores.reads.values().any(|read| read.why == Why::Purge);
        let Some(purge) = &mut self.chores.purge else { return false };
        if !looked || !purge.todo.is_at_end() {
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
        // Out of service it may hold more than it says.
        let in_service = self.handle().is_readable();
        purge.found.complete = complete && in_service && purge.found.unknown_chunks == 0;
        purge.errand.answer(self.id.index(), purge.found);
    }

    pub(super) fn chores_wake_ns(&self, now_ns: u64) -> Option<u64> {
        let rate = self.shared.config.scrub_bytes_per_s.0;
        let scrubs = rate > 0 && !self.gone && !self.chores.scrub.in_flight;
        let scrub_ns =
            scrubs.then(|| self.chores.scrub.next_ns.max(now_ns.saturating_add(IDLE_LOOK_NS)));
        [self.chores.again_ns, scrub_ns].into_iter().flatten().min()
    }

    /// No step waits for anything, here or elsewhere, and nothing is written.
    pub(super) fn is_idle(&mut self) -> bool {
        self.queue.is_idle()
            && self.reads.is_empty()
            && self.landed.is_empty()
            && self.writes.is_empty()
            && self.handle().is_readable()
            && self.shared.writeback.gate().reads_in_flight() == 0
    }

    /// Reads the next piece, if it is time. True if it did.
    fn scrub(&mut self, now_ns: u64) -> bool {
        let rate = self.shared.config.scrub_bytes_per_s.0;
        let scrub = &self.chores.scrub;
        if rate == 0 || self.gone || scrub.in_flight || now_ns < scrub.next_ns || !self.is_idle() {
            return false;
        }
        let Some((digest, held)) = self.chores.scrub.todo.peek(self.tier.as_ref()) else {
            self.begin_pass(now_ns);
            return false;
        };
        self.chores.scrub.began = true;
        // Of its own accord it takes nothing from the host cache.
        let Some(slot) = self.shared.arenas.reads.try_take() else { return false };
        let (id, first) = (self.next_id(), self.chores.scrub.block);
        let blocks = first..first + SCRUB_BLOCKS;
        let (op_id, purpose) = (OpId(id), Purpose::Look);
        let op = ReadOp { id: op_id, digest, blocks: blocks.clone(), slot, purpose };
        let submitted = self.tier.submit(Op::Read(op), now_ns);
        let scrub = &mut self.chores.scrub;
        let bytes = held.payload_bytes.min(u64::from(SCRUB_BLOCKS) << 20) + 4096;
        let cost_ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
        scrub.next_ns = now_ns.saturating_add(cost_ns);
        match submitted {
            Ok(()) => {
                scrub.in_flight = true;
                self.chores.reads.insert(id, ChoreRead { digest, held, blocks, why: Why::Scrub });
                true
            }
            Err(_) => {
                self.scrub_next_chunk();
                false
            }
        }
    }

    fn begin_pass(&mut self, now_ns: u64) {
        if self.chores.scrub.began {
            TierCounters::add(&self.handle().counters.scrub_passes, 1);
        }
        let next_ns = now_ns.saturating_add(IDLE_LOOK_NS);
        self.chores.scrub = Scrub { next_ns, ..Scrub::default() };
    }

    fn scrub_next_chunk(&mut self) {
        self.chores.scrub.todo.pass();
        self.chores.scrub.block = 0;
    }

    /// A piece was read: of a damaged chunk no more is read.
    fn scrubbed(&mut self, held: Held, blocks: &Range<u32>, is_whole: bool) {
        self.chores.scrub.in_flight = false;
        let counters = &self.handle().counters;
        if is_whole {
            let piece = piece_range(held.payload_bytes, blocks);
            TierCounters::add(&counters.scrubbed_bytes, piece.end - piece.start);
            if piece.end < held.payload_bytes {
                self.chores.scrub.block = blocks.end;
                return;
            }
            TierCounters::add(&counters.scrubbed_chunks, 1);
        }
        self.scrub_next_chunk();
    }

    fn drop_damaged(
        &mut self,
        digest: Digest,
        held: Held,
        damage: Option<Damage>,
        why: Why,
        now_ns: u64,
    ) {
        let Some(damage) = damage.filter(|damage| damage.is_repairable()) else { return };
        // What was evicted and stored anew meanwhile is another chunk.
        if self.tier.contains(digest) == Some(held) && self.tier.remove(digest, now_ns) {
            tracing::warn!(tier = self.handle().name, %digest, ?damage, ?why, "chunk is damaged");
            if why == Why::Scrub {
                TierCounters::add(&self.handle().counters.scrub_damaged, 1);
            }
            self.lose(digest);
        }
    }

    /// What the read brings that probes the tier is looked at, too.
    pub(super) fn note_probe(&mut self, id: u64, digest: Digest, held: Held, blocks: Range<u32>) {
        self.chores.reads.insert(id, ChoreRead { digest, held, blocks, why: Why::Probe });
    }

    pub(super) fn give_up_chores(&mut self) {
        self.chores.reads.clear();
        self.end_purge(false);
    }
}
