//! Reads of one tier: claims become ops, completions become verified pieces.

use std::{ops::Range, sync::atomic::Ordering};

use kv_chunk::{Digest, HeaderError};
use kv_router::{BreakerState, Claim, Duplicates, Failure};
use kv_tiers::{
    Corruption, ErrorKind, Held, ListCursor, Op, OpId, Piece, Purpose, ReadDone, ReadOp,
    RejectReason, Rejected, Slot, TierError,
};

use super::Worker;
use crate::{
    Event,
    step::{StepHandle, Worth},
    tier_handle::TierCounters,
};

/// A read in flight.
pub(super) struct Read {
    step: StepHandle,
    claim: Claim,
    blocks: Range<u32>,
    deadline_ns: u64,
    /// The deadline passed and the step was told.
    expired: bool,
}

/// A read that brought bytes, not verified yet.
pub(super) struct Landed {
    read: Read,
    slot: Slot,
    done: ReadDone,
}

/// Bytes per second while any read is in flight, over the last seconds of such time.
#[derive(Debug, Default)]
pub(super) struct Rate {
    in_flight: u32,
    since_ns: u64,
    bytes: u64,
    busy_ns: u64,
}

impl Rate {
    const KNOWN_AFTER_NS: u64 = 20_000_000;
    const MEMORY_NS: u64 = 2_000_000_000;

    fn starts(&mut self, now_ns: u64) {
        if self.in_flight == 0 {
            self.since_ns = now_ns;
        }
        self.in_flight += 1;
    }

    /// Busy time that is new since the last call.
    fn ends(&mut self, bytes: u64, now_ns: u64) -> u64 {
        let new_ns = now_ns.saturating_sub(self.since_ns);
        self.since_ns = now_ns;
        self.in_flight = self.in_flight.saturating_sub(1);
        self.bytes += bytes;
        self.busy_ns += new_ns;
        if self.busy_ns > Self::MEMORY_NS {
            self.bytes /= 2;
            self.busy_ns /= 2;
        }
        new_ns
    }

    fn bytes_per_s(&self) -> Option<u64> {
        let known = self.busy_ns >= Self::KNOWN_AFTER_NS;
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.busy_ns.max(1));
        known.then(|| u64::try_from(rate).unwrap_or(u64::MAX))
    }
}

impl Worker {
    /// Fills the window, one chunk for each op that ended. True if anything was submitted.
    pub(super) fn refill(&mut self, now_ns: u64) -> bool {
        self.starved = false;
        let mut submitted = false;
        while !self.gone && self.window.room() > 0 && !self.queue.is_idle() {
            let Some(slot) = self.shared.read_slot() else {
                self.starved = true;
                break;
            };
            // No duplicates beside a write in flight: the write would make them late anyway.
            let writing = !self.writes.is_empty() && !self.holding_writes;
            let duplicates = if writing { Duplicates::Forbidden } else { Duplicates::Allowed };
            let Some((step, claim)) = self.queue.claim(duplicates) else { break };
            let step = step.clone();
            if !self.submit_read(step, claim, slot, now_ns) {
                break;
            }
            submitted = true;
        }
        self.window_refilled();
        submitted
    }

    fn submit_read(&mut self, step: StepHandle, claim: Claim, slot: Slot, now_ns: u64) -> bool {
        let blocks = if claim.is_piece() {
            claim.first_block..claim.first_block + claim.blocks
        } else {
            0..u32::MAX
        };
        let id = self.next_id();
        let digest = step.0.key(claim.chunk).digest();
        let op =
            ReadOp { id: OpId(id), digest, blocks: blocks.clone(), slot, purpose: Purpose::Use };
        match self.tier.submit(Op::Read(op), now_ns) {
            Ok(()) => {
                let started = self.window.start();
                debug_assert!(started, "there was room");
                self.depth.read_started(claim.is_piece());
                step.0.read_starts(self.id, now_ns);
                self.rate.starts(now_ns);
                let deadline_ns = self.read_deadline_ns(now_ns);
                self.reads.insert(id, Read { step, claim, blocks, deadline_ns, expired: false });
                true
            }
            Err(Rejected { reason, op }) => {
                drop(op);
                self.read_rejected(&step, claim, reason);
                // A chunk that can never be read here is no reason to stop.
                reason == RejectReason::TooLarge
            }
        }
    }

    fn read_rejected(&mut self, step: &StepHandle, claim: Claim, reason: RejectReason) {
        match reason {
            RejectReason::QueueFull => {
                let _ = step.0.pool.put_back(claim);
            }
            RejectReason::TooLarge => self.look_again_if(step.0.fail(claim, Failure::NotFound)),
            _ => {
                self.look_again_if(step.0.fail(claim, Failure::Unavailable));
                self.lose_tier();
            }
        }
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.next_op += 1;
        self.next_op
    }

    fn look_again_if(&self, returned: bool) {
        if returned {
            self.shared.ring_others(self.id);
        }
    }

    pub(super) fn read_completed(
        &mut self,
        id: OpId,
        slot: Slot,
        result: Result<ReadDone, TierError>,
        now_ns: u64,
    ) {
        if self.probe.is_some_and(|(probe, _)| probe == id.0) {
            self.probe = None;
            match result {
                Ok(done) => {
                    self.read_succeeded();
                    self.chore_completed(id, slot, Ok(done), now_ns);
                }
                Err(error) => {
                    let failure = failure_of(&error);
                    self.chore_completed(id, slot, Err(error), now_ns);
                    self.read_failed(failure, now_ns);
                }
            }
            return;
        }
        if self.sounding_read_completed(id, &result, now_ns) {
            return;
        }
        let Some(read) = self.reads.remove(&id.0) else {
            return self.chore_completed(id, slot, result, now_ns);
        };
        self.place_freed(read.claim.is_piece(), &result, now_ns);
        read.step.0.read_ends(self.id, now_ns);
        let bytes = result.as_ref().map_or(0, |done| done.payload_bytes as u64);
        let busy_ns = self.rate.ends(bytes, now_ns);
        let counters = &self.handle().counters;
        TierCounters::add(&counters.busy_ns, busy_ns);
        if let Some(rate) = self.rate.bytes_per_s() {
            counters.bytes_per_s.store(rate, Ordering::Relaxed);
        }
        match result {
            Ok(done) => {
                if !read.expired {
                    self.read_succeeded();
                }
                self.landed.push_back(Landed { read, slot, done });
            }
            Err(error) => {
                drop(slot);
                self.read_errored(read, &error, now_ns);
            }
        }
    }

    fn read_errored(&mut self, read: Read, error: &TierError, now_ns: u64) {
        let digest = read.step.0.key(read.claim.chunk).digest();
        tracing::debug!(tier = self.handle().name, %digest, %error, "read failed");
        self.handle().counters.count_error("read", error);
        let failure = failure_of(error);
        if failure == Failure::NotFound {
            self.lose(digest);
        }
        self.look_again_if(read.step.0.fail(read.claim, failure));
        if !read.expired {
            self.read_failed(failure, now_ns);
        }
    }

    /// Verifies the first that landed and hands it to its step. One a turn: the device is given its next reads before
    /// the next is verified.
    pub(super) fn deliver_landed(&mut self, now_ns: u64) {
        while let Some(landed) = self.landed.pop_front() {
            self.deliver(landed, now_ns);
            if !self.gone {
                break;
            }
        }
    }

    fn deliver(&mut self, landed: Landed, now_ns: u64) {
        let Landed { read: Read { step, claim, blocks, .. }, slot, done } = landed;
        match Piece::verify(slot, done, step.0.key(claim.chunk), &blocks) {
            Ok(piece) => {
                let (worth, look) = step.0.deliver(claim, piece);
                let counters = &self.handle().counters;
                let (new_bytes, late_bytes) = match worth {
                    Worth::Delivered { new_bytes, late_bytes } => (new_bytes, late_bytes),
                    Worth::Late(bytes) | Worth::Mixed(bytes) => (0, bytes),
                };
                TierCounters::add(&counters.payload_bytes, new_bytes);
                TierCounters::add(&counters.late_bytes, late_bytes);
                self.look_again_if(look);
            }
            Err(corruption) => {
                // First, so that whoever is told of the miss no longer finds the chunk here.
                self.drop_corrupt(&corruption, now_ns);
                self.look_again_if(step.0.fail(claim, Failure::Corrupt));
            }
        }
    }

    /// Damaged bytes leave the tier; another chunk's or a later version's are left alone.
    fn drop_corrupt(&mut self, corruption: &Corruption, now_ns: u64) {
        TierCounters::add(&self.handle().counters.corrupt_reads, 1);
        let Corruption { digest, source } = corruption;
        tracing::warn!(tier = self.handle().name, %digest, cause = %source, "chunk is damaged");
        if !matches!(source, HeaderError::Key | HeaderError::Version { .. })
            && self.tier.remove(*digest, now_ns)
        {
            self.lose(*digest);
        }
    }

    /// Overdue reads fail for their step; their slots stay with the driver until they come in.
    pub(super) fn expire_reads(&mut self, now_ns: u64) {
        let overdue = |read: &&mut Read| !read.expired && now_ns >= read.deadline_ns;
        let (mut count, mut look) = (0, false);
        let counters = &self.shared.tiers[self.id.index()].counters;
        for read in self.reads.values_mut().filter(overdue) {
            read.expired = true;
            // First: whoever learns that the step ended finds it counted.
            TierCounters::add(&counters.timed_out_reads, 1);
            look |= read.step.0.expire(&read.claim);
            count += 1;
        }
        self.look_again_if(look);
        for _ in 0..count {
            self.read_failed(Failure::TimedOut, now_ns);
        }
        if self.probe.is_some_and(|(_, deadline_ns)| now_ns >= deadline_ns) {
            self.probe = None;
            self.read_failed(Failure::TimedOut, now_ns);
        }
    }

    pub(super) fn next_read_deadline_ns(&self) -> Option<u64> {
        let live = self.reads.values().filter(|read| !read.expired);
        live.map(|read| read.deadline_ns).chain(self.probe.map(|(_, at_ns)| at_ns)).min()
    }

    pub(super) fn fail_all_reads(&mut self) {
        let landed = self.landed.drain(..).map(|landed| landed.read);
        for read in self.reads.drain().map(|(_, read)| read).chain(landed) {
            read.step.0.fail(read.claim, Failure::Unavailable);
        }
    }

    fn read_succeeded(&mut self) {
        let was_open = !self.handle().is_readable();
        self.breaker.on_success();
        if was_open && !self.gone {
            tracing::warn!(tier = self.handle().name, "breaker closed: tier is read again");
            self.enter_held();
            self.handle().set_readable(true);
            self.shared.writeback.tier_back(self.id.0);
        }
    }

    /// A medium that came back has chunks that were thought lost.
    fn enter_held(&self) {
        self.tier.list(&mut |digest, _| {
            if self.shared.directory.set(digest, self.id.0) {
                self.shared.tell(Event::Published { digest, tier: self.id.0 });
            }
        });
    }

    fn read_failed(&mut self, failure: Failure, now_ns: u64) {
        if !self.breaker.on_failure(failure, now_ns) || self.gone {
            return;
        }
        tracing::warn!(tier = self.handle().name, ?failure, "breaker opened: tier is not read");
        self.handle().set_readable(false);
        self.shared.writeback.stop_writes(self.id.0);
        for step in self.queue.steps() {
            step.0.mask_tier(self.id);
        }
        self.shared.ring_others(self.id);
    }

    /// Reads the first chunk at hand to learn whether a tier whose breaker is open works again.
    pub(super) fn probe_if_due(&mut self, now_ns: u64) {
        let open = self.breaker.state(now_ns) == BreakerState::HalfOpen;
        if self.gone || !open || self.probe.is_some() || !self.breaker.allow(now_ns) {
            return;
        }
        let mut any: Option<(Digest, Held)> = None;
        self.tier.list_from(ListCursor::START, 1, &mut |digest, held| any = Some((digest, held)));
        let Some((digest, held)) = any else {
            // It holds nothing that could be read wrongly.
            self.read_succeeded();
            return;
        };
        let Some(slot) = self.shared.read_slot() else { return };
        let id = self.next_id();
        let op = ReadOp { id: OpId(id), digest, blocks: 0..1, slot, purpose: Purpose::Look };
        match self.tier.submit(Op::Read(op), now_ns) {
            Ok(()) => {
                self.probe = Some((id, self.read_deadline_ns(now_ns)));
                self.note_probe(id, digest, held, 0..1);
            }
            Err(Rejected { reason: RejectReason::Closed, .. }) => self.lose_tier(),
            Err(_) => {}
        }
    }
}

fn failure_of(error: &TierError) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::NotFound,
        ErrorKind::NoSpace => Failure::NoSpace,
        ErrorKind::Closed => Failure::Unavailable,
        _ => Failure::Io,
    }
}
