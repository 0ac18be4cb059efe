//! Any tier with faults.

use std::{collections::HashMap, io, os::fd::BorrowedFd, path::PathBuf, sync::Arc};

use kv_chunk::{BLOCK_BYTES, Digest, HEADER_BYTES};

use super::{
    Due, earlier,
    plan::{FaultHandle, FaultKind, FaultPlan, Strike},
};
use crate::{
    Capabilities, Completion, EvictionGuard, Held, IoContext, ListCursor, Located, Op, OpId,
    ReadDone, ReadOp, Record, RejectReason, Rejected, Slot, Tier, TierError, TierStats, WriteOp,
    record_bytes,
};

/// Strikes a tier's ops with the faults of a [`FaultPlan`].
///
/// Stored faults (`WriteTearsUnseen`, `WriteFlipsBit`) write a damaged copy of the record into the inner tier; the copy
/// needs a free slot of the record's arena, and without one the fault does not strike. A fault that cannot show (a
/// truncated empty payload) does not strike either, and only what struck is counted.
#[derive(Debug)]
pub struct Faulty {
    inner: Box<dyn Tier>,
    handle: FaultHandle,
    /// Accepted and not completed.
    pending: HashMap<OpId, Pending>,
    /// Completions that a stall holds back, or that need no inner tier.
    done: Due<Completion>,
    /// Writes that a stall holds back: they go to the inner tier when due, so that they cannot be seen earlier.
    writes: Due<WriteOp>,
    /// The medium's absence was reported.
    gone: bool,
    closed: bool,
    lost: Vec<Digest>,
    /// Failures that the inner tier knows nothing of.
    failures: TierStats,
    scratch: Vec<Completion>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    kind: Option<FaultKind>,
    due_ns: u64,
}

impl Faulty {
    /// `inner` with the faults of `plan`.
    pub fn new(inner: Box<dyn Tier>, plan: FaultPlan) -> Self {
        Self {
            inner,
            handle: FaultHandle::new(plan),
            pending: HashMap::new(),
            done: Due::default(),
            writes: Due::default(),
            gone: false,
            closed: false,
            lost: Vec::new(),
            failures: TierStats::default(),
            scratch: Vec::new(),
        }
    }

    /// Steers and counts.
    pub fn handle(&self) -> FaultHandle {
        self.handle.clone()
    }

    fn vanished(&self) -> bool {
        self.handle.control().vanished
    }

    fn count(&self, kind: FaultKind) {
        self.handle.control().count(kind);
    }

    fn strike(&mut self, write: bool) -> Strike {
        let mut control = self.handle.control();
        let strike = control.strike(write);
        if strike.stall_ns > 0 {
            control.count(FaultKind::Stalls { ns: strike.stall_ns });
        }
        if strike.kind == Some(FaultKind::Vanishes) && !control.vanished {
            control.vanished = true;
            control.count(FaultKind::Vanishes);
        }
        strike
    }

    fn io_error(&self, call: &'static str, length: u64, errno: i32) -> TierError {
        let context = IoContext { call, path: PathBuf::from(self.name()), offset: 0, length };
        TierError::io(context, io::Error::from_raw_os_error(errno))
    }

    /// A failure of our making, counted as a tier counts its own.
    fn failure(&mut self, error: TierError) -> TierError {
        self.failures.count_error(error.kind());
        error
    }

    fn accept_read(&mut self, op: ReadOp, strike: Strike, now_ns: u64) -> Result<(), Rejected> {
        let ReadOp { id, digest, .. } = op;
        let due_ns = now_ns.saturating_add(strike.stall_ns);
        self.delete_if_planned(digest, strike.kind, now_ns);
        if self.vanished() || strike.kind == Some(FaultKind::ReadFails) {
            if !self.vanished() {
                self.count(FaultKind::ReadFails);
            }
            let error = self.io_error("read", op.slot.len() as u64, libc::EIO);
            let result = Err(self.failure(error));
            self.done.push(due_ns, Completion::Read { id, digest, slot: op.slot, result });
        } else {
            self.inner.submit(Op::Read(op), now_ns)?;
        }
        self.pending.insert(id, Pending { kind: strike.kind, due_ns });
        Ok(())
    }

    fn delete_if_planned(&mut self, digest: Digest, kind: Option<FaultKind>, now_ns: u64) {
        let asked = self.handle.control().deleted.remove(&digest);
        if (asked || kind == Some(FaultKind::ReadFindsItDeleted))
            && !self.vanished()
            && self.inner.remove(digest, now_ns)
        {
            self.count(FaultKind::ReadFindsItDeleted);
            self.lost.push(digest);
        }
    }

    fn accept_write(&mut self, op: WriteOp, strike: Strike, now_ns: u64) -> Result<(), Rejected> {
        let payload_bytes = op.record.header().payload_bytes();
        if payload_bytes > self.inner.capabilities().payload_bytes_max
            || record_bytes(payload_bytes) > self.inner.stats().capacity_bytes
        {
            return Err(Rejected { op: Op::Write(op), reason: RejectReason::TooLarge });
        }
        let (id, digest) = (op.id, op.record.digest());
        let due_ns = now_ns.saturating_add(strike.stall_ns);
        let mut pending = Pending { kind: strike.kind, due_ns };
        let errno = match strike.kind {
            _ if self.vanished() => Some(libc::EIO),
            Some(FaultKind::WriteFails) => Some(libc::EIO),
            Some(FaultKind::WriteFindsNoSpace) => Some(libc::ENOSPC),
            _ => None,
        };
        if let Some(errno) = errno {
            if let Some(kind) = strike.kind.filter(|_| !self.vanished()) {
                self.count(kind);
            }
            let error = self.io_error("write", payload_bytes, errno);
            let result = Err(self.failure(error));
            self.done.push(due_ns, Completion::Write { id, digest, result });
        } else {
            let record = self.stored_form(&op.record, &mut pending.kind);
            let op = WriteOp { id, record };
            if strike.stall_ns > 0 {
                self.writes.push(due_ns, op);
            } else {
                self.inner.submit(Op::Write(op), now_ns)?;
            }
        }
        self.pending.insert(id, pending);
        Ok(())
    }

    /// The record as it shall be stored: damaged if `kind` says so and can.
    fn stored_form(&self, record: &Arc<Record>, kind: &mut Option<FaultKind>) -> Arc<Record> {
        let damaged = match *kind {
            Some(FaultKind::WriteTears | FaultKind::WriteTearsUnseen) => {
                copy_of(record).map(|mut slot| {
                    let payload = record.payload().len();
                    slot[HEADER_BYTES + payload / 2..HEADER_BYTES + payload].fill(0);
                    slot
                })
            }
            Some(FaultKind::WriteFlipsBit) => copy_of(record).map(|mut slot| {
                let payload = HEADER_BYTES..HEADER_BYTES + record.payload().len();
                self.flip_bit(&mut slot[payload]);
                slot
            }),
            _ => return Arc::clone(record),
        };
        match damaged {
            Some(slot) => Arc::new(Record::padded(slot, record.header().clone())),
            None => {
                *kind = None;
                Arc::clone(record)
            }
        }
    }

    fn flip_bit(&self, bytes: &mut [u8]) {
        let bit = self.handle.control().random.usize(0..bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }

    fn forward_writes(&mut self, now_ns: u64) {
        while let Some(op) = self.writes.pop(now_ns) {
            let (id, digest) = (op.id, op.record.digest());
            if let Err(rejected) = self.inner.submit(Op::Write(op), now_ns) {
                let tier = format!("{} ({:?})", self.inner.name(), rejected.reason);
                let result = Err(self.failure(TierError::Closed { tier }));
                self.done.push(now_ns, Completion::Write { id, digest, result });
            }
        }
        if self.closed && self.writes.is_empty() {
            self.inner.close();
        }
    }

    /// Does to what the inner tier completed what was planned for it.
    fn collect(&mut self, now_ns: u64, completions: &mut Vec<Completion>) {
        for completion in std::mem::take(&mut self.scratch) {
            let pending = completion.id().and_then(|id| self.pending.get(&id).copied());
            let due_ns = pending.map_or(now_ns, |pending| pending.due_ns);
            let kind = pending.and_then(|pending| pending.kind);
            match completion {
                Completion::Read { id, digest, mut slot, result } => {
                    let result = match result {
                        Ok(done) => self.read_result(done, kind, &mut slot),
                        Err(error) => Err(error),
                    };
                    self.done.push(due_ns, Completion::Read { id, digest, slot, result });
                }
                Completion::Write { id, digest, result } => {
                    let result = result.and_then(|()| self.write_result(digest, kind, now_ns));
                    self.done.push(now_ns, Completion::Write { id, digest, result });
                }
                // A medium that is gone loses all its chunks: they are reported together.
                Completion::Evicted { .. } | Completion::Lost { .. } if self.gone => {}
                Completion::Evicted { .. } | Completion::Lost { .. } => {
                    completions.push(completion);
                }
            }
        }
    }

    fn read_result(
        &mut self,
        done: ReadDone,
        kind: Option<FaultKind>,
        slot: &mut Slot,
    ) -> Result<ReadDone, TierError> {
        let length = done.payload_bytes as u64;
        if self.vanished() {
            let error = self.io_error("read", length, libc::EIO);
            return Err(self.failure(error));
        }
        match kind {
            Some(kind @ FaultKind::ReadIsTruncated) if length > 0 => {
                self.count(kind);
                let half = done.payload_bytes / 2;
                // Whole blocks where there are several: their checksums are right, only the length tells.
                let whole = half - half % BLOCK_BYTES;
                Ok(ReadDone { payload_bytes: if whole > 0 { whole } else { half }, ..done })
            }
            Some(kind @ FaultKind::ReadStopsShort) => {
                self.count(kind);
                let path = PathBuf::from(self.name());
                let context = IoContext { call: "read", path, offset: 0, length };
                Err(self.failure(TierError::Short { context, done: length / 2 }))
            }
            Some(kind @ FaultKind::ReadFlipsBit) => {
                self.count(kind);
                self.flip_bit(&mut slot[..HEADER_BYTES + done.payload_bytes]);
                Ok(done)
            }
            _ => Ok(done),
        }
    }

    fn write_result(
        &mut self,
        digest: Digest,
        kind: Option<FaultKind>,
        now_ns: u64,
    ) -> Result<(), TierError> {
        if self.vanished() {
            self.inner.remove(digest, now_ns);
            let error = self.io_error("write", 0, libc::EIO);
            return Err(self.failure(error));
        }
        // A new file under an old name is not the one that was deleted.
        self.handle.control().deleted.remove(&digest);
        match kind {
            Some(kind @ FaultKind::WriteTears) => {
                self.count(kind);
                self.inner.remove(digest, now_ns);
                let error = self.io_error("write", 0, libc::EIO);
                Err(self.failure(error))
            }
            Some(kind @ (FaultKind::WriteTearsUnseen | FaultKind::WriteFlipsBit)) => {
                self.count(kind);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Says once what a vanished medium took with it.
    fn report_lost(&mut self, completions: &mut Vec<Completion>) {
        let vanished = self.vanished();
        let mut lost = std::mem::take(&mut self.lost);
        if vanished && !self.gone {
            self.inner.list(&mut |digest, _| lost.push(digest));
        }
        self.gone = vanished;
        for digest in lost {
            let error = if vanished {
                self.io_error("read", 0, libc::ENODEV)
            } else {
                self.io_error("open", 0, libc::ENOENT)
            };
            completions.push(Completion::Lost { digest, error });
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Faulty {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        if self.closed {
            return Err(Rejected { op, reason: RejectReason::Closed });
        }
        if self.in_flight() >= self.inner.capabilities().queue_ops_max as usize {
            return Err(Rejected { op, reason: RejectReason::QueueFull });
        }
        match op {
            Op::Read(read) => {
                let strike = self.strike(false);
                self.accept_read(read, strike, now_ns)
            }
            Op::Write(write) => {
                let strike = self.strike(true);
                self.accept_write(write, strike, now_ns)
            }
        }
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        self.report_lost(completions);
        self.forward_writes(now_ns);
        let inner_ns = self.inner.poll(now_ns, guard, &mut self.scratch);
        self.collect(now_ns, completions);
        while let Some(completion) = self.done.pop(now_ns) {
            if let Some(id) = completion.id() {
                self.pending.remove(&id);
            }
            completions.push(completion);
        }
        earlier(earlier(self.done.next_ns(), self.writes.next_ns()), inner_ns)
    }

    fn hold_writes(&mut self, hold: bool) {
        self.inner.hold_writes(hold);
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.inner.contains(digest).filter(|_| !self.vanished())
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        if self.vanished() { Located::Absent } else { self.inner.locate(digest, now_ns) }
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        !self.vanished() && self.inner.remove(digest, now_ns)
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        if !self.vanished() {
            self.inner.list(visit);
        }
    }

    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        if self.vanished() { None } else { self.inner.list_from(from, max, visit) }
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn stats(&self) -> TierStats {
        let mut stats = self.inner.stats();
        for (kind, count) in &self.failures.errors {
            stats.count_errors(*kind, *count);
        }
        if self.vanished() {
            (stats.chunks, stats.used_bytes) = (0, 0);
        }
        stats
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn close(&mut self) {
        self.closed = true;
        if self.writes.is_empty() {
            self.inner.close();
        }
    }
}

/// A copy of the record in a free slot of its arena. A damage needs a payload to be in.
fn copy_of(record: &Record) -> Option<Slot> {
    if record.payload().is_empty() {
        return None;
    }
    let mut slot = record.slot().arena().try_take()?;
    let stored = record.stored_bytes();
    slot[..stored.len()].copy_from_slice(stored);
    Some(slot)
}
