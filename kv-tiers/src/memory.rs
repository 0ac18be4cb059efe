//! Host DRAM as a tier: the simplest complete implementation, and the inner tier of most tests.

use std::{collections::VecDeque, os::fd::BorrowedFd, sync::Arc};

use hashlink::LinkedHashMap;
use kv_chunk::{Digest, HEADER_BYTES, MAX_PAYLOAD_BYTES};

use crate::{
    Capabilities, Completion, EvictionGuard, Held, Op, Purpose, ReadDone, ReadOp, RejectReason,
    Rejected, Tier, TierError, TierStats, WriteOp, piece_range, record_bytes,
};

/// What a memory tier shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// Its name, for reports.
    pub name: String,
    /// The cap: a chunk counts [`record_bytes`] of its payload.
    pub capacity_bytes: u64,
    /// Largest payload accepted.
    pub payload_bytes_max: u64,
    /// Ops that may be in flight; at least 1.
    pub queue_ops_max: u32,
}

impl MemoryConfig {
    /// A tier of `capacity_bytes`, payloads of any size, 64 ops in flight.
    pub fn new(name: impl Into<String>, capacity_bytes: u64) -> Self {
        Self {
            name: name.into(),
            capacity_bytes,
            payload_bytes_max: MAX_PAYLOAD_BYTES,
            queue_ops_max: 64,
        }
    }
}

/// Chunks in host DRAM, evicted least recently used first.
///
/// Bytes are copied at the poll after the submit; nothing here takes time, so [`poll`](Tier::poll) never asks to be
/// called later.
#[derive(Debug)]
pub struct MemoryTier {
    config: MemoryConfig,
    /// Least recently used first.
    chunks: LinkedHashMap<Digest, Chunk>,
    reads: VecDeque<PendingRead>,
    writes: VecDeque<WriteOp>,
    /// Removed while a read of them was queued: their memory still counts.
    doomed: Vec<Chunk>,
    used_bytes: u64,
    hold_writes: bool,
    closed: bool,
    counters: TierStats,
}

#[derive(Clone, Debug)]
struct Chunk {
    held: Held,
    /// Header and payload. Shared with the reads that are queued.
    bytes: Arc<[u8]>,
}

#[derive(Debug)]
struct PendingRead {
    op: ReadOp,
    /// The chunk as it was when the read was accepted.
    chunk: Option<Chunk>,
}

impl MemoryTier {
    /// An empty tier.
    pub fn new(config: MemoryConfig) -> Self {
        Self {
            config: MemoryConfig { queue_ops_max: config.queue_ops_max.max(1), ..config },
            chunks: LinkedHashMap::new(),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            doomed: Vec::new(),
            used_bytes: 0,
            hold_writes: false,
            closed: false,
            counters: TierStats::default(),
        }
    }

    /// Takes over a chunk (header and payload) that an earlier run stored. False: it is held already, or does not fit.
    pub(crate) fn adopt(&mut self, digest: Digest, held: Held, bytes: &[u8]) -> bool {
        let wanted_bytes = record_bytes(held.payload_bytes);
        let fits = self.used_bytes + wanted_bytes <= self.config.capacity_bytes
            && !self.chunks.contains_key(&digest);
        if fits {
            self.chunks.insert(digest, Chunk { held, bytes: bytes.into() });
            self.used_bytes += wanted_bytes;
        }
        fits
    }

    fn accept_read(&mut self, op: ReadOp) -> Result<(), Rejected> {
        let chunk = self.chunks.get(&op.digest).cloned();
        if let Some(Chunk { held, .. }) = &chunk {
            if op.bytes_in_slot(held.payload_bytes) > op.slot.len() as u64 {
                return Err(Rejected { op: Op::Read(op), reason: RejectReason::TooLarge });
            }
            if op.purpose == Purpose::Use {
                self.chunks.to_back(&op.digest);
            }
        }
        self.reads.push_back(PendingRead { op, chunk });
        Ok(())
    }

    fn accept_write(&mut self, op: WriteOp) -> Result<(), Rejected> {
        let payload_bytes = op.record.header().payload_bytes();
        if payload_bytes > self.config.payload_bytes_max
            || record_bytes(payload_bytes) > self.config.capacity_bytes
        {
            return Err(Rejected { op: Op::Write(op), reason: RejectReason::TooLarge });
        }
        self.writes.push_back(op);
        Ok(())
    }

    fn read(&mut self, pending: PendingRead) -> Completion {
        let PendingRead { op: ReadOp { id, digest, blocks, mut slot, .. }, chunk } = pending;
        let result = match chunk {
            Some(chunk) => Ok(copy_piece(&chunk, &blocks, &mut slot)),
            None => Err(TierError::NotFound { digest }),
        };
        self.counters.count_read(&result);
        Completion::Read { id, digest, slot, result }
    }

    fn write(
        &mut self,
        op: WriteOp,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Completion {
        let WriteOp { id, record } = op;
        let digest = record.digest();
        let payload_bytes = record.header().payload_bytes();
        let wanted_bytes = record_bytes(payload_bytes);
        let result = if self.chunks.contains_key(&digest) {
            Err(TierError::AlreadyHeld { digest })
        } else if !self.make_room(wanted_bytes, guard, completions) {
            let capacity_bytes = self.config.capacity_bytes;
            Err(TierError::NoSpace { wanted_bytes, capacity_bytes })
        } else {
            let unpadded = HEADER_BYTES + record.payload().len();
            let bytes = record.stored_bytes()[..unpadded].into();
            let held = Held { payload_bytes, write_id: record.header().write_id() };
            self.chunks.insert(digest, Chunk { held, bytes });
            self.used_bytes += wanted_bytes;
            Ok(())
        };
        self.counters.count_write(payload_bytes, &result);
        Completion::Write { id, digest, result }
    }

    /// Evicts until `wanted_bytes` fit; each resident chunk is proposed once at most.
    fn make_room(
        &mut self,
        wanted_bytes: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> bool {
        let mut proposals_left = self.chunks.len();
        while self.used_bytes + wanted_bytes > self.config.capacity_bytes {
            let Some((&digest, _)) = self.chunks.front().filter(|_| proposals_left > 0) else {
                return false;
            };
            proposals_left -= 1;
            if guard.try_evict(digest) {
                let chunk = self.chunks.remove(&digest).expect("the front is there");
                self.used_bytes -= record_bytes(chunk.held.payload_bytes);
                self.counters.evictions += 1;
                completions.push(Completion::Evicted { digest });
            } else {
                // Somebody uses it: it is not the least recently used any more.
                self.chunks.to_back(&digest);
            }
        }
        true
    }

    /// Frees removed chunks that no queued read needs.
    fn reap_doomed(&mut self) {
        let used_bytes = &mut self.used_bytes;
        self.doomed.retain(|chunk| {
            let needed = Arc::strong_count(&chunk.bytes) > 1;
            if !needed {
                *used_bytes -= record_bytes(chunk.held.payload_bytes);
            }
            needed
        });
    }
}

impl Tier for MemoryTier {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.config.payload_bytes_max, self.config.queue_ops_max)
    }

    fn submit(&mut self, op: Op, _now_ns: u64) -> Result<(), Rejected> {
        if self.closed {
            return Err(Rejected { op, reason: RejectReason::Closed });
        }
        if self.in_flight() >= self.config.queue_ops_max as usize {
            return Err(Rejected { op, reason: RejectReason::QueueFull });
        }
        match op {
            Op::Read(read) => self.accept_read(read)?,
            Op::Write(write) => self.accept_write(write)?,
        }
        let in_flight = u32::try_from(self.in_flight()).unwrap_or(u32::MAX);
        self.counters.in_flight_max = self.counters.in_flight_max.max(in_flight);
        Ok(())
    }

    fn poll(
        &mut self,
        _now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        while let Some(pending) = self.reads.pop_front() {
            let completion = self.read(pending);
            completions.push(completion);
        }
        self.reap_doomed();
        while !self.hold_writes
            && let Some(op) = self.writes.pop_front()
        {
            let completion = self.write(op, guard, completions);
            completions.push(completion);
        }
        None
    }

    fn hold_writes(&mut self, hold: bool) {
        self.hold_writes = hold;
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.chunks.get(&digest).map(|chunk| chunk.held)
    }

    fn remove(&mut self, digest: Digest, _now_ns: u64) -> bool {
        let Some(chunk) = self.chunks.remove(&digest) else { return false };
        self.doomed.push(chunk);
        self.reap_doomed();
        true
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        for (digest, chunk) in &self.chunks {
            visit(*digest, chunk.held);
        }
    }

    fn in_flight(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    fn stats(&self) -> TierStats {
        TierStats {
            used_bytes: self.used_bytes,
            capacity_bytes: self.config.capacity_bytes,
            chunks: self.chunks.len() as u64,
            ..self.counters.clone()
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn close(&mut self) {
        self.closed = true;
    }
}

fn copy_piece(chunk: &Chunk, blocks: &std::ops::Range<u32>, slot: &mut [u8]) -> ReadDone {
    let range = piece_range(chunk.held.payload_bytes, blocks);
    let offset = |at: u64| HEADER_BYTES + usize::try_from(at).expect("it is in memory");
    let piece = &chunk.bytes[offset(range.start)..offset(range.end)];
    slot[..HEADER_BYTES].copy_from_slice(&chunk.bytes[..HEADER_BYTES]);
    slot[HEADER_BYTES..HEADER_BYTES + piece.len()].copy_from_slice(piece);
    ReadDone { first_block: blocks.start, payload_bytes: piece.len() }
}
